"""A mixture of experts against a loop over tokens, and how unevenly it chooses against transformers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_x.algorithms import losses
from areal_x.algorithms.weighting import sequence_mean
from areal_x.batching.packing import pack
from areal_x.errors import ConfigError, UserError
from areal_x.hf import model_dir
from areal_x.protocols.trainer_config import LoRAConfig, ModelConfig, OptimizerConfig, TrainerConfig
from areal_x_jax.experts import Routing, imbalance, mixture, route
from areal_x_jax.mixtures import Experts
from areal_x_jax.sharding import ONE_DEVICE
from areal_x_jax.trainer import Trainer
from tests.experts import REFUSED, assert_replays, batch_of_others, recorded, replayed_logprobs
from tests.models import trajectories
from tests.thorough import thorough

EXPERTS = Experts(count=6, per_token=2, intermediate=5, normalised=True)
HIDDEN = 8
RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, 7, HIDDEN)).astype(np.float32)
ROUTER = RNG.normal(size=(HIDDEN, EXPERTS.count)).astype(np.float32)
SHAPES = {"gate": (HIDDEN, EXPERTS.intermediate), "up": (HIDDEN, EXPERTS.intermediate), "down": (EXPERTS.intermediate, HIDDEN)}
LAYER = {f"experts_{name}": RNG.normal(size=(EXPERTS.count, *size)).astype(np.float32) for name, size in SHAPES.items()}


def by_hand(chosen: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The weighed sum of what each chosen expert says, token by token, without the activation's formula."""
    out = np.zeros_like(X, np.float64)
    for at in np.ndindex(*X.shape[:2]):
        for expert, weight in zip(chosen[at], weights[at], strict=True):
            gate, up, down = (LAYER[f"experts_{name}"][expert].astype(np.float64) for name in SHAPES)
            out[at] += weight * (((X[at] @ gate) ** 2 * (X[at] @ up)) @ down)
    return out


@pytest.mark.parametrize("normalised", [True, False])
def test_each_token_is_computed_by_the_experts_of_the_largest_probability(normalised: bool) -> None:
    routing = route(Experts(6, 2, 5, normalised), jnp.asarray(ROUTER), jnp.asarray(X))
    logits = X @ ROUTER
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    np.testing.assert_allclose(routing.probabilities, probabilities, rtol=1e-5)
    best = np.argsort(-probabilities, -1)[..., :2]
    np.testing.assert_array_equal(routing.chosen, best)
    weights = np.take_along_axis(probabilities, best, -1)
    weights = weights / weights.sum(-1, keepdims=True) if normalised else weights
    np.testing.assert_allclose(routing.weights, weights, rtol=1e-5)
    said = mixture(jax.tree.map(jnp.asarray, LAYER), jnp.asarray(X), routing, jnp.square, ONE_DEVICE)
    np.testing.assert_allclose(said, by_hand(best, weights), rtol=1e-4, atol=1e-4)


def test_recorded_experts_take_the_place_of_the_routers_where_there_are_any() -> None:
    recorded = np.full((2, 7, 2), -1)
    recorded[0, 3] = 5, 0
    free, replayed = (route(EXPERTS, jnp.asarray(ROUTER), jnp.asarray(X), r) for r in (None, jnp.asarray(recorded)))
    assert replayed.chosen[0, 3].tolist() == [5, 0]
    own = np.asarray(free.probabilities)[0, 3, [5, 0]]
    np.testing.assert_allclose(replayed.weights[0, 3], own / own.sum(), rtol=1e-6)
    others = (recorded < 0).all(-1)
    np.testing.assert_array_equal(np.asarray(replayed.chosen)[others], np.asarray(free.chosen)[others])


def test_imbalance_is_that_of_transformers_and_least_where_all_are_used_alike() -> None:
    torch = pytest.importorskip("torch")
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    counted = np.arange(14).reshape(2, 7) % 5 > 0
    routing = route(EXPERTS, jnp.asarray(ROUTER), jnp.asarray(X))
    logits = torch.tensor((X @ ROUTER).reshape(-1, EXPERTS.count))
    theirs = load_balancing_loss_func((logits,), EXPERTS.count, 2, torch.tensor(counted))
    assert float(imbalance(routing, jnp.asarray(counted))) == pytest.approx(float(theirs), rel=1e-5)
    even = Routing(jnp.arange(6).reshape(3, 2), jnp.ones((3, 2)), jnp.full((3, 6), 1 / 6))
    assert float(imbalance(even, jnp.ones(3, bool))) == pytest.approx(2)


def test_a_balance_is_added_to_the_loss_and_shown(model_dir_of: Callable[[str], Path]) -> None:
    batch = pack(trajectories(12, 7, 9, 5), 32).batch
    batch = batch.replace(weights=np.asarray(sequence_mean(batch.mask, batch.segment_ids), np.float32))
    still = OptimizerConfig(learning_rate=1e-30)
    plain, pushed = (
        Trainer(TrainerConfig(ModelConfig(str(model_dir_of("qwen3-moe"))), still, balance=balance)).update(batch, losses.sft)
        for balance in (0.0, 0.5)
    )
    assert plain["expert_imbalance"] > 2
    assert pushed["expert_imbalance"] == pytest.approx(plain["expert_imbalance"])
    assert pushed["loss"] == pytest.approx(plain["loss"] + 0.5 * plain["expert_imbalance"], rel=1e-5)


def make_trainer(directory: Path, **changes: Any) -> Trainer:
    return Trainer(TrainerConfig(ModelConfig(str(directory)), OptimizerConfig(), micro_batch_rows=1, **changes))


def test_a_trainer_replays_the_experts_that_the_engine_recorded(model_dir_of: Callable[[str], Path]) -> None:
    directory = model_dir_of("qwen3-moe")
    made = [replace(t, experts=recorded(len(t), i)) for i, t in enumerate(trajectories(12, 7, 20, 9))]
    made[1] = replace(made[1], experts=None)  # an engine's that recorded none: the router chooses
    packed = pack(made, 32)
    trainer = make_trainer(directory, replay_experts=True)
    assert_replays(trainer, make_trainer(directory), directory, made, packed)
    batch = packed.batch.replace(weights=np.asarray(sequence_mean(packed.batch.mask, packed.batch.segment_ids), np.float32))
    expected = -float((batch.weights * trainer.logprobs(batch)).sum())
    assert trainer.update(batch, losses.sft)["loss"] == pytest.approx(expected, rel=1e-5)


def test_experts_are_replayed_by_the_number_of_their_layer_where_dense_ones_stand_between(
    model_dir_of: Callable[[str], Path],
) -> None:
    directory = model_dir_of("qwen3-moe-between")
    made = [replace(t, experts=recorded(len(t), i, layers=4)) for i, t in enumerate(trajectories(12, 20))]
    packed = pack(made, 32)
    trainer = make_trainer(directory, replay_experts=True)
    for one, said in zip(made, packed.gather(trainer.logprobs(packed.batch)), strict=True):
        np.testing.assert_allclose(said, replayed_logprobs(directory, one.tokens, one.experts), atol=1e-4)


@thorough
def test_a_mixture_with_dense_layers_learns_is_saved_and_goes_on(model_dir_of: Callable[[str], Path], tmp_path: Path) -> None:
    """Adapters stand beside the dense layers' kernels too, and what is published is the merged model."""
    directory = model_dir_of("qwen3-moe-between")
    batch = pack(trajectories(12, 7, 9, 5), 32).batch
    batch = batch.replace(weights=np.asarray(sequence_mean(batch.mask, batch.segment_ids), np.float32))
    for lora in (LoRAConfig(), LoRAConfig(rank=2)):
        trainer = make_trainer(directory, lora=lora)
        trainer.update(batch, losses.sft)
        trainer.save(tmp_path / "saved")
        expected = trainer.update(batch, losses.sft)
        trainer.restore(tmp_path / "saved")
        assert trainer.update(batch, losses.sft)["loss"] == expected["loss"]
        model_dir.write_model(tmp_path / "published", directory, trainer.weights())
        assert dict(model_dir.read_tensors(tmp_path / "published")).keys() == dict(model_dir.read_tensors(directory)).keys()
        published = make_trainer(tmp_path / "published")
        np.testing.assert_allclose(published.logprobs(batch), trainer.logprobs(batch), atol=1e-5)
        if lora.rank:
            names = [name for name, _ in trainer.adapter()]
            assert any("layers.0.mlp.gate_proj" in name for name in names)
            assert not any("layers.1.mlp" in name for name in names)
        shutil.rmtree(tmp_path / "saved")
        shutil.rmtree(tmp_path / "published")


@pytest.mark.parametrize(("shape", "largest", "says"), REFUSED)
def test_experts_of_another_model_are_refused(
    shape: tuple[int, int] | None, largest: int, says: str, model_dir_of: Callable[[str], Path]
) -> None:
    with pytest.raises(UserError, match=says):
        make_trainer(model_dir_of("qwen3-moe"), replay_experts=True).logprobs(batch_of_others(shape, largest))


def test_a_model_without_experts_cannot_replay_any(model_dir_of: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.replay_experts = True .*no experts"):
        make_trainer(model_dir_of("qwen3"), replay_experts=True)
