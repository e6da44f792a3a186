"""A client's forward_backward and optim_step against the same by hand, on both backends."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from areal_x.errors import UserError
from areal_x.hf import adapters, model_dir
from areal_x.protocols.trainer_config import ModelConfig, OptimizerConfig, TrainerConfig
from areal_x.testing.models import write_model
from areal_x.tinker.data import Datum
from areal_x.tinker.host import TrainerHost
from areal_x.tinker.losses import LOSSES as NAMED
from areal_x.tinker.models import Model, Shape, Source
from tests.tinker.by_hand import LOSSES, ByHand

BACKENDS = ("torch", pytest.param("jax", marks=pytest.mark.thorough))  # which compiles for half a minute
# A large eps, so that a step shows the size of a gradient and not its sign alone.
STEPS = (
    OptimizerConfig(learning_rate=0.05, beta1=0.8, beta2=0.9, eps=1.0, weight_decay=0.0, clip_norm=0.0),
    OptimizerConfig(learning_rate=0.02, beta1=0.9, beta2=0.95, eps=0.5, weight_decay=0.1, clip_norm=3.0),
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), num_hidden_layers=1)


@cache
def host_of(backend: str, base: Path) -> TrainerHost:
    pytest.importorskip(f"areal_x_{backend}")
    return TrainerHost(backend, TrainerConfig(model=ModelConfig(path=str(base)), row_length=64))


@pytest.fixture(params=BACKENDS)
def host(request: pytest.FixtureRequest, base: Path) -> TrainerHost:
    return host_of(request.param, base)


def datums(width: int = 1, seed: int = 0) -> list[Datum]:
    """Two sequences; some targets of the second are not the next token."""
    random = np.random.default_rng(seed)
    found = []
    for count in (5, 7):
        tokens = random.integers(2, 40, count).astype(np.int32)
        targets = np.append(tokens[1:], 5)[:, None].repeat(width, 1).astype(np.int32)
        if count == 7:
            targets[:4, 0] = 0
        targets[:, 1:] = random.integers(2, 40, (count, width - 1))
        inputs = {
            "weights": random.uniform(-1, 2, targets.shape),
            "logprobs": random.uniform(-5, -3, targets.shape),
            "advantages": random.normal(size=targets.shape),
            "sequence_ratio_mask": np.arange(count)[:, None] >= np.full(targets.shape, 2),
        }
        found.append(Datum(tokens, targets, {name: x.astype(np.float32) for name, x in inputs.items()}, width == 1))
    return found


def of_loss(loss: str, some: list[Datum]) -> list[Datum]:
    return [replace(x, inputs={name: x.inputs[name] for name in NAMED[loss].inputs}) for x in some]


def adapter_of(host: TrainerHost, model: Model, directory: Path) -> dict[str, np.ndarray]:
    host.save(model, directory)
    return dict(adapters.read(directory))


@pytest.mark.parametrize("loss, width", [*((loss, 1) for loss in LOSSES), ("cross_entropy", 3), ("ppo", 2)])
def test_two_steps_of_a_loss_are_those_by_hand(host: TrainerHost, tmp_path: Path, loss: str, width: int) -> None:
    model = Model("m", Shape(4), tmp_path / "m", seed=1)
    hand = ByHand(host.base, adapter_of(host, model, tmp_path / "before"), 32 / 4)
    for number, settings in enumerate(STEPS):
        some = of_loss(loss, datums(width, number))
        expected = [hand.logprobs(x).detach().numpy() for x in some]
        logprobs, found = host.forward(model, some, loss, {}, True)
        for ours, theirs in zip(logprobs, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=2e-5)
        total = hand.step(some, loss, settings)
        assert sum(x.sum() for x in found.terms) == pytest.approx(total, rel=1e-5, abs=1e-4)
        host.step(model, settings)
    after = adapter_of(host, model, tmp_path / "after")
    assert after.keys() == hand.trained.keys()
    for name, x in after.items():
        np.testing.assert_allclose(x, hand.trained[name].detach().numpy(), atol=1e-5, err_msg=name)


@pytest.mark.parametrize("turns", [False, True])
def test_gradients_of_several_requests_and_losses_add_up(
    host: TrainerHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turns: bool
) -> None:
    if turns:  # one at a time in a trainer, as with backends without a bank
        monkeypatch.setattr(host, "_has_bank", False)
        monkeypatch.setattr(host, "_bank", None)
    one, other = (Model(name, Shape(4), tmp_path / name, seed=1) for name in "ab")
    some = datums()
    for loss in ("cross_entropy", "ppo"):
        host.forward(one, of_loss(loss, some[:1]), loss, {}, True)
        host.forward(one, of_loss(loss, some[1:]), loss, {}, True)
        host.forward(one, of_loss(loss, some[1:]), loss, {}, False)  # no gradient
        host.forward(other, of_loss(loss, some), loss, {}, True)
    host.step(one, STEPS[0])
    host.step(other, STEPS[0])
    ours, theirs = (adapter_of(host, model, tmp_path / f"of_{model.id}") for model in (one, other))
    for name, x in ours.items():
        np.testing.assert_allclose(x, theirs[name], atol=1e-6, err_msg=name)
    with pytest.raises(UserError, match="there is no gradient"):
        host.step(one, STEPS[0])


def train(host: TrainerHost, model: Model, number: int) -> None:
    host.forward(model, of_loss("ppo", datums(seed=number)), "ppo", {}, True)
    host.step(model, STEPS[number % 2])


@pytest.mark.parametrize("turns", [False, True])
def test_models_that_take_turns_compute_what_each_alone_computes(
    host: TrainerHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turns: bool
) -> None:
    if turns:  # one at a time in a trainer, as with backends without a bank
        monkeypatch.setattr(host, "_has_bank", False)
        monkeypatch.setattr(host, "_bank", None)
    alone = [Model(f"alone{i}", Shape(4), tmp_path / f"alone{i}", seed=i) for i in range(2)]
    turns = [Model(f"turns{i}", Shape(4), tmp_path / f"turns{i}", seed=i) for i in range(2)]
    expected = []
    for model in alone:
        for number in range(3):
            train(host, model, number)
        expected.append(adapter_of(host, model, tmp_path / f"of_{model.id}"))  # it never left the trainer
    for number in range(3):
        for model in turns:
            train(host, model, number)
    for own, model in zip(expected, turns, strict=True):
        found = adapter_of(host, model, tmp_path / f"of_{model.id}")
        assert all((found[name] == x).all() for name, x in own.items())  # bit for bit


@pytest.mark.thorough
def test_a_whole_model_and_adapters_of_other_ranks_take_turns(host: TrainerHost, tmp_path: Path) -> None:
    whole, small = Model("whole", Shape(0), tmp_path / "whole"), Model("small", Shape(2), tmp_path / "small")
    hand = ByHand(host.base, {}, 0.0)
    some = of_loss("cross_entropy", datums())
    settings = replace(STEPS[0], learning_rate=0.01)
    for _ in range(2):
        hand.step(some, "cross_entropy", settings)
        host.forward(whole, some, "cross_entropy", {}, True)
        host.step(whole, settings)
        train(host, small, 0)
    host.save(whole, tmp_path / "saved")
    found = dict(model_dir.read_tensors(tmp_path / "saved"))
    for name, x in found.items():
        np.testing.assert_allclose(x, hand.trained[name].detach().numpy(), atol=1e-5, err_msg=name)


def test_a_loaded_state_continues_with_its_moments_or_without(host: TrainerHost, tmp_path: Path) -> None:
    model = Model("m", Shape(4), tmp_path / "m", seed=1)
    train(host, model, 0)
    host.save(model, tmp_path / "saved")
    train(host, model, 1)
    after = adapter_of(host, model, tmp_path / "after")
    for optimizer in (True, False):
        other = Model("o", Shape(4), tmp_path / f"other{optimizer}")
        host.load(other, tmp_path / "saved", optimizer)
        train(host, other, 1)
        found = adapter_of(host, other, tmp_path / f"after{optimizer}")
        assert all((found[name] == x).all() for name, x in after.items()) == optimizer


def test_prompts_are_scored_under_the_weights_of_their_time(host: TrainerHost, tmp_path: Path) -> None:
    model = Model("m", Shape(4), tmp_path / "m", seed=1)
    tokens = datums()[1].tokens
    plain = ByHand(host.base, {}, 0.0).logprobs(Datum(tokens[:-1], tokens[1:, None])).detach().numpy()[:, 0]
    train(host, model, 0)
    host.save(model, tmp_path / "kept" / "state")
    kept = Source("kept", model.shape, tmp_path / "kept", model, model.steps)
    now = host.logprobs(kept, tokens, tokens[1:, None])[:, 0]
    train(host, model, 1)
    assert (host.logprobs(kept, tokens, tokens[1:, None])[:, 0] == now).all()
    assert not np.allclose(now, plain, atol=1e-2)
    every = np.arange(44, dtype=np.int32)[None].repeat(len(tokens) - 1, 0)
    every[0, 3] = -1
    of_base = host.logprobs(Source("base", None, tmp_path / "base"), tokens, every)
    hand = ByHand(host.base, {}, 0.0).logprobs(Datum(tokens[:-1], np.maximum(every, 0))).detach().numpy()
    np.testing.assert_allclose(of_base[1:], hand[1:], atol=2e-5)
    assert of_base[0, 3] == 0
