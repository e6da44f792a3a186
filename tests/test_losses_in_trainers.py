"""Every loss through both trainers: one number however a batch is packed, split and ordered, whichever backend computes it."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from areal_x.algorithms import losses, preferences
from areal_x.protocols.trainer_config import OptimizerConfig, TrainerConfig
from tests.packing_invariance import (
    ALL,
    LOSSES,
    PACKINGS,
    batch_of,
    chosen,
    deviations,
    make_trainer,
    measure,
    measure_on_four_devices,
    model_directories,
)
from tests.thorough import further, thorough


@pytest.fixture(scope="session")
def directories(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    return model_directories(tmp_path_factory.mktemp("models"))


def too_far(found: dict[str, list[tuple[float, float]]], expected: dict[str, list[tuple[float, float]]]) -> dict[str, object]:
    """The losses whose value is off by more than 1e-6, or gradient norm by more than 1e-5, of that of the first packing."""
    assert found.keys() == expected.keys() == set(ALL)
    off = {name: deviations(pairs, expected[name][0]) for name, pairs in found.items()}
    return {name: (loss, norm) for name, (loss, norm) in off.items() if not (loss <= 1e-6 and norm <= 1e-5)}


def test_no_loss_is_left_out():
    """Whatever begins with (policy, batch), but the metric that is no loss."""
    functions = [f for module in (losses, preferences) for f in vars(module).values() if inspect.isfunction(f)]
    takes = {f.__name__: list(inspect.signature(f).parameters)[:2] for f in functions}
    there = {name.removesuffix("_loss") for name, first in takes.items() if first == ["policy", "batch"]}
    assert there - {"policy_gap"} == set(ALL)


@pytest.mark.parametrize("backend", ["torch", *further("jax")], indirect=True)
def test_packing_order_and_micro_batches_change_nothing(backend, directories):
    found = measure(backend, directories)
    assert too_far(found, found) == {}


@thorough
def test_four_devices_change_nothing(directories):
    pytest.importorskip("areal_x_jax")
    alone = measure("jax", directories, PACKINGS[:1])
    assert too_far(measure_on_four_devices(directories, PACKINGS[-1:]), alone) == {}


@pytest.mark.parametrize("head", LOSSES)
def test_both_backends_give_the_same_steps(directories, tmp_path, head):
    for each in ("areal_x_jax", "areal_x_torch"):
        pytest.importorskip(each)
    optimizer = OptimizerConfig(learning_rate=1e-5)
    both = [make_trainer(each, directories, head, micro_batch_rows=8, optimizer=optimizer) for each in ("jax", "torch")]
    both[0].save(tmp_path / "start")
    for name in LOSSES[head]:
        batch = batch_of(head, name)
        for each in both:
            each.restore(tmp_path / "start")
        for _ in range(3):
            mine, theirs = (each.update(batch, chosen(head)) for each in both)
            assert mine.keys() == theirs.keys()
            for key, x in mine.items():
                assert x == pytest.approx(theirs[key], rel=1e-3, abs=2e-5), (name, key)
        mine, theirs = (dict(each.weights()) for each in both)
        assert max(np.abs(x - theirs[key]).max() for key, x in mine.items()) < 1e-4


def test_a_head_that_says_no_distribution_has_no_entropy():
    from areal_x.errors import ConfigError

    with pytest.raises(ConfigError, match=r"trainer\.entropy = True"):
        replace(TrainerConfig(head="value"), entropy=True)
