"""The warm start: batches of one shape, a directory made once, and a model that leaves something to learn."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import gin
import numpy as np
import pytest
from safetensors.numpy import load_file

from areal_x.errors import ConfigError
from areal_x.protocols.backends import create_trainer
from areal_x.protocols.engine import SamplingParams
from areal_x.protocols.sampler import SlotRequest
from areal_x.protocols.trainer_config import ModelConfig, TrainerConfig
from examples.arithmetic import warm_start as module
from examples.arithmetic.model import END, PAD, VOCABULARY, encode
from examples.arithmetic.task import LONGEST, demonstrations, held_out, problems, verify
from examples.tiny.supervised import ROWS

warm_start = module.warm_start


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("areal_x_jax").keep_compiled_programs()  # before the change: where every test finds them
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "areal_x" / "arithmetic"


def test_batches_have_one_shape_and_full_rows() -> None:
    batches = list(module.batches(40, seed=0, forgetting=0.65))
    assert {batch.shape for batch in batches} == {(ROWS, module.ROW_LENGTH)}
    assert np.mean([batch.segment_ids > 0 for batch in batches]) > 0.95
    assert module.ROW_LENGTH >= LONGEST


def test_each_segment_is_a_demonstration_that_is_taught_from_its_answer_on_and_at_most_once() -> None:
    tasks = problems(module.DEMONSTRATIONS * 3, seed=0)
    left = [[*encode(t.prompt + a), END] for t, a in zip(tasks, demonstrations(tasks, 0.65, seed=0), strict=True)]
    for batch in module.batches(3, seed=0, forgetting=0.65):
        for row, segment_ids, mask in zip(batch.tokens, batch.segment_ids, batch.mask, strict=True):
            for segment in range(1, segment_ids.max() + 1):
                tokens = row[segment_ids == segment].tolist()
                left.remove(tokens)
                prompt = tokens.index(VOCABULARY.index("=")) + 1
                assert mask[segment_ids == segment].tolist() == [False] * prompt + [True] * (len(tokens) - prompt)
    assert len(left) < 0.15 * len(tasks)


def test_it_is_made_once_for_the_same_settings(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = Path(warm_start(steps=2))
    assert capsys.readouterr().out.count("\n") == 1
    weights = {"model.safetensors", "model.safetensors.index.json"}
    assert {f.name for f in made.iterdir()} == {"config.json", "tokenizer.json", "tokenizer_config.json", *weights}
    written = (made / "model.safetensors").stat().st_mtime_ns
    assert warm_start(steps=2) == str(made)
    assert capsys.readouterr().out == ""
    assert (made / "model.safetensors").stat().st_mtime_ns == written
    assert Path(warm_start(steps=2, seed=1)) != made
    assert [f.name for f in cache.iterdir() if f.name.startswith(".")] == []


def test_bindings_of_the_run_do_not_reach_into_it(cache: Path) -> None:
    plain = load_file(Path(warm_start(steps=2)) / "model.safetensors")
    with gin.unlock_config():
        gin.parse_config(["optimizer.learning_rate = 1.0", "optimizer.weight_decay = 0.9", "trainer.temperature = 3.0"])
    (cache / Path(warm_start(steps=2)).name).rename(cache / "before")
    bound = load_file(Path(warm_start(steps=2)) / "model.safetensors")
    for name, x in plain.items():
        np.testing.assert_array_equal(bound[name], x, err_msg=name)


def test_one_that_fails_leaves_nothing_behind(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Iterator[object]:
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(module, "batches", fail)
    with pytest.raises(KeyboardInterrupt):
        warm_start(steps=2)
    assert list(cache.iterdir()) == []


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"arithmetic\.warm_start\.steps"):
        warm_start(steps=1)
    with pytest.raises(ConfigError, match=r"arithmetic\.warm_start\.forgetting"):
        warm_start(forgetting=1.5)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_it_solves_a_fifth_to_two_fifths_of_the_held_out_problems() -> None:
    pytest.importorskip("jax")
    # In a process of its own, as in this one tests may have told JAX to compile quickly, to slow programs.
    command = "from examples.arithmetic.warm_start import warm_start; print(warm_start())"
    made = subprocess.run([sys.executable, "-c", command], check=True, capture_output=True, text=True).stdout.splitlines()[-1]
    trainer = create_trainer("jax", TrainerConfig(model=ModelConfig(path=made), precision="fp32"))
    sampler = trainer.sampler(slots=100, context=64)
    sampler.load(trainer.snapshot())
    sampling, right, tasks = SamplingParams(max_tokens=40, temperature=0.0, stop_token_ids=(END,)), [], held_out()
    for first in range(0, len(tasks), 100):
        part = tasks[first : first + 100]
        sampler.fill([SlotRequest(i, encode(str(t.prompt)), 0, sampling, seed=i) for i, t in enumerate(part)])
        said = [""] * len(part)
        finished = np.zeros(len(part), bool)
        while not finished.all():
            decoded = sampler.decode(40, until_free=len(part))
            for i in np.flatnonzero(~finished):
                ids = decoded.tokens[i, : decoded.counts[i]]
                said[i] += "".join(VOCABULARY[k] for k in ids if k not in (PAD, END))
            finished |= decoded.finished
        right += [verify(task, text) for task, text in zip(part, said, strict=True)]
    assert 0.2 <= np.mean(right) <= 0.4
