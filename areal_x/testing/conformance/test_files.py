"""Names of tensors, saving, restoring and adapters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_x.errors import UserError
from areal_x.hf import model_dir as files
from areal_x.protocols.trainer import RestsOnHost, Trainer
from areal_x.protocols.trainer_config import LoRAConfig, OptimizerConfig
from areal_x.testing.conformance.helpers import (
    assert_equal_weights,
    make_trainer,
    packed_batch,
    policy_gradient,
    squared_error,
    weights_of,
)
from areal_x.testing.models import tensor_shapes

OPTIMIZER = OptimizerConfig(learning_rate=1e-2, weight_decay=0.1, warmup_steps=4)
LORA = LoRAConfig(rank=3, alpha=6.0)
KINDS: dict[str, dict[str, Any]] = {
    "policy": {},
    "adafactor": {"optimizer": replace(OPTIMIZER, name="adafactor")},
    "muon": {"optimizer": replace(OPTIMIZER, name="muon")},
    "bf16 moments": {"optimizer": replace(OPTIMIZER, beta2=0.98, moments="bf16")},
    "value": {"head": "value"},
    "adapters": {"lora": LORA},
    "adapters with muon": {"lora": LORA, "optimizer": replace(OPTIMIZER, name="muon")},
    "adapters with a score": {"lora": LORA, "head": "reward"},
}


def trained(backend: str, directory: Path, kind: str) -> Trainer:
    return make_trainer(backend, directory, **{"optimizer": OPTIMIZER, **KINDS[kind]})


def learn(trainer: Trainer, kind: str) -> dict[str, float]:
    batch, _ = packed_batch()
    if KINDS[kind].get("head", "policy") == "policy":
        return trainer.update(batch, policy_gradient)
    return trainer.update(batch.replace(returns=batch.mask.astype(np.float32)), squared_error)


def test_weights_have_the_names_and_numbers_of_the_files(still: Trainer, model_dir: Path) -> None:
    read, found = dict(files.read_tensors(model_dir)), dict(still.weights())
    assert found.keys() == read.keys()
    assert {name: x.shape for name, x in found.items()} == tensor_shapes(
        files.read_config(model_dir)
    )
    for name, x in found.items():
        np.testing.assert_array_equal(x, read[name])


def test_a_tied_head_is_published_once(backend: str, other_dir: Path) -> None:
    names = [name for name, _ in make_trainer(backend, other_dir).weights()]
    assert len(names) == len(set(names))
    assert "lm_head.weight" not in names


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def pair(kind: str, backend: str, model_dir: Path) -> tuple[Trainer, Trainer]:
    """Two trainers in the same state, for the tests of a kind: each compiles its own programs."""
    first, second = (trained(backend, model_dir, kind) for _ in range(2))
    return first, second


def test_a_trainer_that_rested_on_the_host_continues_bit_by_bit_and_is_saved_from_there(
    kind: str, backend: str, pair: tuple[Trainer, Trainer], tmp_path: Path
) -> None:
    first, second = pair
    if not isinstance(second, RestsOnHost):
        pytest.skip(f"trainers of the backend {backend!r} stay on their devices")
    for step in range(2):
        assert learn(first, kind) == learn(second, kind)
        awake = second.device_bytes()
        second.rest()
        second.rest()
        assert second.device_bytes() == 0
        for name, trainer in (("awake", first), ("at rest", second)):
            trainer.save(tmp_path / f"{name} {step}")
        second.wake()
        second.wake()
        assert second.device_bytes() == awake
    written = sorted(path.name for path in (tmp_path / "awake 1").iterdir())
    assert "trainer.json" in written
    for name in written:
        saved = [(tmp_path / f"{state} 1" / name).read_bytes() for state in ("awake", "at rest")]
        assert saved[0] == saved[1], name
    assert_equal_weights(first, second)


def test_a_restored_trainer_continues_bit_by_bit(
    kind: str, pair: tuple[Trainer, Trainer], tmp_path: Path
) -> None:
    first, second = pair
    learn(first, kind)
    first.save(tmp_path / "saved")
    assert second.version < first.version
    second.restore(tmp_path / "saved")
    assert second.version == first.version
    assert_equal_weights(first, second)
    for _ in range(2):
        assert learn(first, kind) == learn(second, kind)
    assert_equal_weights(first, second)


def test_a_frozen_trainer_rests_too(backend: str, model_dir: Path) -> None:
    trainer = make_trainer(backend, model_dir, frozen=True)
    if not isinstance(trainer, RestsOnHost):
        pytest.skip(f"trainers of the backend {backend!r} stay on their devices")
    batch, _ = packed_batch()
    before = trainer.logprobs(batch)
    trainer.rest()
    assert trainer.device_bytes() == 0
    trainer.wake()
    np.testing.assert_array_equal(trainer.logprobs(batch), before)


@pytest.mark.parametrize("form", ["portable", "sharded"])
def test_a_checkpoint_saved_in_the_background_restores_the_state_at_its_time(
    form: str, backend: str, model_dir: Path, tmp_path: Path
) -> None:
    first, second = (
        make_trainer(backend, model_dir, optimizer=OPTIMIZER, checkpoint=form) for _ in range(2)
    )
    learn(first, "policy")
    wait = first.save_in_background(tmp_path / "saved")
    expected = learn(first, "policy")  # the state may change as soon as the call has returned
    if wait is not None:
        wait()
    second.restore(tmp_path / "saved")
    assert second.version == 1
    assert learn(second, "policy") == expected
    assert_equal_weights(first, second)


@pytest.mark.parametrize("head", ["policy", "reward"])
def test_a_saved_directory_is_a_model_of_its_own(
    head: str, backend: str, model_dir: Path, tmp_path: Path
) -> None:
    trainer = make_trainer(backend, model_dir, optimizer=OPTIMIZER, head=head)
    learn(trainer, "policy" if head == "policy" else "value")
    trainer.save(tmp_path / "saved")
    ours = weights_of(trainer)
    saved = dict(files.read_tensors(tmp_path / "saved"))
    assert saved.keys() == ours.keys()
    for name, x in saved.items():
        np.testing.assert_array_equal(x, ours[name])
    tokenizer = {file.name for file in model_dir.glob("tokenizer*")}
    assert tokenizer <= {file.name for file in (tmp_path / "saved").iterdir()}
    again = make_trainer(backend, tmp_path / "saved", head=head)
    batch, _ = packed_batch()
    compute = "logprobs" if head == "policy" else "values"
    np.testing.assert_array_equal(getattr(again, compute)(batch), getattr(trainer, compute)(batch))


def test_the_moments_of_adamw_are_under_the_names_of_tensors(
    backend: str, model_dir: Path, tmp_path: Path
) -> None:
    trainer = trained(backend, model_dir, "policy")
    learn(trainer, "policy")
    trainer.save(tmp_path)
    shapes = tensor_shapes(files.read_config(model_dir))
    expected = {f"{kind}.{n}": s for n, s in shapes.items() for kind in ("exp_avg", "exp_avg_sq")}
    assert {name: x.shape for name, x in files.read_moments(tmp_path)} == expected
    state = files.read_trainer_state(tmp_path)
    assert (state["version"], state["optimizer"]) == (1, "adamw")
    assert "backend" not in state


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "another optimizer": ("muon", {"optimizer": OPTIMIZER}, r"optimizer\.name = 'muon'"),
    "a policy for a critic": ("policy", {"head": "value"}, "another model|do not fit"),
    "a critic for a policy": ("value", {}, "another model|do not fit"),
    "a whole model for adapters": (
        "policy",
        {"lora": LORA},
        r"cannot be resumed with lora\.rank = 3",
    ),
    "adapters for a whole model": ("adapters", {}, r"cannot be resumed with lora\.rank = 0"),
    "another rank": ("adapters", {"lora": replace(LORA, rank=4)}, r"set lora\.rank = 3"),
    "another alpha": ("adapters", {"lora": replace(LORA, alpha=7.0)}, r"set lora\.alpha = 6\.0"),
    "other targets": (
        "adapters",
        {"lora": replace(LORA, targets=("q_proj",))},
        r"set lora\.targets = \('down_proj', ",
    ),
}


@pytest.fixture(scope="module")
def checkpoints(
    backend: str, model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """A checkpoint of each kind that `REFUSED` reads."""
    found = {}
    for kind in {kind for kind, _, _ in REFUSED.values()}:
        found[kind] = tmp_path_factory.mktemp(kind)
        trained(backend, model_dir, kind).save(found[kind])
    return found


@pytest.mark.parametrize("name", REFUSED)
def test_a_checkpoint_that_does_not_fit_is_refused(
    name: str, backend: str, model_dir: Path, checkpoints: dict[str, Path]
) -> None:
    kind, changes, message = REFUSED[name]
    reader = make_trainer(backend, model_dir, **{"optimizer": OPTIMIZER, **changes})
    with pytest.raises(UserError, match=message):
        reader.restore(checkpoints[kind])


def test_adapters_of_another_model_are_refused(
    backend: str, model_dir: Path, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    tensors = ((name, 1.01 * x) for name, x in files.read_tensors(model_dir))
    files.write_model(tmp_path / "other", model_dir, tensors)
    reader = make_trainer(backend, tmp_path / "other", lora=LORA)
    with pytest.raises(UserError, match=r"adapters of another model than .*set model\.path"):
        reader.restore(checkpoints["adapters"])


def test_adapters_start_without_effect_and_weights_merge_them(
    backend: str, model_dir: Path
) -> None:
    targets = ("q_proj", "down_proj")
    trainer = make_trainer(
        backend, model_dir, optimizer=OPTIMIZER, lora=replace(LORA, targets=targets)
    )
    base, batch = dict(files.read_tensors(model_dir)), packed_batch()[0]
    whole = make_trainer(backend, model_dir)
    np.testing.assert_array_equal(trainer.logprobs(batch), whole.logprobs(batch))
    for name, x in weights_of(trainer).items():
        np.testing.assert_array_equal(x, base[name])
    for _ in range(2):
        trainer.update(batch, policy_gradient)
    adapter = dict(trainer.adapter())
    assert len(adapter) == 2 * 2 * len(targets)
    changed = 0
    for name, x in weights_of(trainer).items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        a, b = (adapter.get(f"{module}.lora_{which}.weight") for which in "AB")
        if a is None or b is None:
            np.testing.assert_array_equal(x, base[name])
        else:
            changed += 1
            assert np.abs(b).max() > 0
            np.testing.assert_allclose(x, base[name] + LORA.scale * (b @ a), atol=1e-6)
    assert changed == 2 * len(targets)
    assert not np.array_equal(trainer.logprobs(batch), whole.logprobs(batch))


def test_a_whole_model_has_no_adapter(still: Trainer) -> None:
    with pytest.raises(ValueError, match=r"lora\.rank = 0 has no adapter"):
        list(still.adapter())
