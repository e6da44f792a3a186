"""Programs of two steps: right ones pass their tests, typical mistakes do not."""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

import numpy as np
import pytest

from areal_x.errors import ConfigError
from areal_x.rewards.code.reward import code_tests
from examples.code import warm_start as module
from examples.code.task import all_steps, program_of, programs, prompt_of, task_of
from examples.code.warm_start import PIECES, batches, written
from tests.examples.running import ROOT, check_file, gin_files, trained


@pytest.mark.parametrize("file", gin_files("code"), ids=lambda file: file.stem)
def test_an_example_can_be_run(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    check_file(file)


def printed(statement: str, n: int) -> str | None:
    """What a statement makes of a number, as text; None if it fails."""
    names = {"n": n}
    try:
        exec(statement, names)
    except TypeError:
        return None
    return str(names["n"])


@pytest.mark.parametrize("step", all_steps(), ids=lambda step: step.words)
def test_the_code_of_a_step_is_right_and_its_mistake_is_not(step) -> None:
    results = [str(step.compute(n)) for n in range(2, 31)]
    assert [printed(step.code, n) for n in range(2, 31)] == results
    if step.mistake:
        assert sum(printed(step.mistake, n) == result for n, result in zip(range(2, 31), results, strict=True)) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_the_reward_is_for_right_programs_alone() -> None:
    square, halve = all_steps()[:2]
    task = task_of(square, halve, [3, 4, 5])
    assert code_tests(task, program_of(square.code, halve.code))[0] == 1.0
    assert code_tests(task, program_of(square.mistake, halve.code))[0] == 0.0
    assert code_tests(task, program_of(square.code, halve.mistake))[0] == 0.0


def test_problems_are_fixed_by_the_seed_and_none_is_held_out() -> None:
    train, test = programs(), programs("test")
    assert (len(train), len(test)) == (476, 100)
    assert programs() == train != programs(seed=1)
    assert len({task.id for task in (*train, *test)}) == 576
    assert [task.id for task in programs("test", seed=1)] == [task.id for task in test]


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"code\.programs\.split"):
        programs("all")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"code\.warm_start\.mistakes"):
        module.warm_start(mistakes=2)


def test_demonstrations_have_the_mistakes_in_their_share() -> None:
    square, double = all_steps()[0], all_steps()[4]
    random = Random(0)
    shown = [written(square, random, 0.7) for _ in range(1000)]
    assert 0.65 < shown.count(square.mistake) / 1000 < 0.75
    assert written(double, random, 1.0) == double.code


def test_batches_are_of_demonstrations_whose_programs_are_learnt() -> None:
    colon = PIECES.index(":") + 2
    for batch in batches(3, seed=0, mistakes=0.7):
        assert np.mean(batch.segment_ids > 0) > 0.8
        for row, segments, mask in zip(batch.tokens, batch.segment_ids, batch.mask, strict=True):
            for segment in range(1, segments.max() + 1):
                tokens, learnt = row[segments == segment].tolist(), mask[segments == segment].tolist()
                context = tokens.index(colon) + 1
                assert learnt == [False] * context + [True] * (len(tokens) - context)
    assert prompt_of(*all_steps()[:2]) == "square, halve:"


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_two_steps_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"code__warm_start__steps": 2, "code__warm_start__backend": "torch"}
    rows = trained("code/tiny.gin", tmp_path, monkeypatch, **settings)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[-1]["scored"] >= 8
    assert (rows[-1]["failed"], rows[-1]["timed_out"]) == (0, 0)
