"""Biases that routers choose experts by move with the load of each step, in both backends, against transformers' routers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_x.algorithms import losses
from areal_x.algorithms.recipes import grpo
from areal_x.algorithms.weighting import sequence_mean
from areal_x.batching.batch import Models, make_batches
from areal_x.batching.packing import Packed, pack
from areal_x.errors import ConfigError
from areal_x.hf.model_dir import read_config, read_tensors, write_tensors
from areal_x.protocols.backends import create_trainer, find_backend
from areal_x.protocols.sampler import Sampler, SlotRequest
from areal_x.protocols.trainer import Trainer
from areal_x.protocols.trainer_config import LoRAConfig, ModelConfig, OptimizerConfig, TrainerConfig
from areal_x.testing.conformance.helpers import sample_to_end, slot_request
from areal_x.types import Batch, Trajectory
from tests.experts import SIGMOIDS, recorded
from tests.model_families import CASES
from tests.models import reference_model, trajectories, write_config
from tests.test_share_prompts import groups_of
from tests.thorough import further

BIAS = "e_score_correction_bias"
STILL = OptimizerConfig(learning_rate=1e-30)
RATE = 0.25
# Behind a dense layer, with groups; and with a softmax and a bias that transformers has as a parameter.
MODELS = {"sigmoids": SIGMOIDS | {"num_hidden_layers": 3}, "ernie": CASES["ernie4_5_moe-0"]}

both_backends = pytest.mark.parametrize("backend", ["jax", "torch"])


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda name: write_config(MODELS[name], tmp_path_factory.mktemp(name), seed=len(name)))


def make_trainer(backend: str, directory: Path, **changes: Any) -> Trainer:
    pytest.importorskip(f"areal_x_{backend}")
    settings = {"optimizer": STILL, "micro_batch_rows": 1, "balance_rate": RATE} | changes
    return create_trainer(backend, TrainerConfig(ModelConfig(str(directory)), **settings))


def learnable(packed: Packed) -> Batch:
    """Several micro-batches of one row."""
    assert len(packed.batch.tokens) > 1
    return packed.batch.replace(weights=np.asarray(sequence_mean(packed.batch.mask, packed.batch.segment_ids), np.float32))


@pytest.fixture(scope="module")
def made() -> list[Trajectory]:
    return trajectories(12, 7, 20, 9)


@pytest.fixture(scope="module")
def batch(made: list[Trajectory]) -> Batch:
    return learnable(pack(made, 24))


def biases(tensors: Iterable[tuple[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.array(x) for name, x in tensors if name.endswith(BIAS)}


def loads(directory: Path, made: Iterable[Trajectory]) -> np.ndarray:
    """How many trained tokens transformers' own routers send to each expert, [layers, experts]."""
    import torch

    model, found = reference_model(directory), []
    for router in (m for m in model.modules() if type(m).__name__.endswith("Router")):
        router.register_forward_hook(lambda _, __, routed: found[-1].append((routed[2].numpy(), routed[0].shape[-1])))
    total: Any = 0
    for one in made:
        found.append([])
        with torch.no_grad():
            model(torch.tensor(one.tokens[None]).long())
        total = total + np.stack([np.bincount(chosen[one.mask].ravel(), minlength=count) for chosen, count in found[-1]])
    return total


def by_hand(before: dict[str, np.ndarray], load: np.ndarray) -> dict[str, np.ndarray]:
    steps = RATE * np.sign(load.mean(-1, keepdims=True) - load)
    return {name: (x + step.reshape(x.shape)).astype(np.float32) for (name, x), step in zip(before.items(), steps, strict=True)}


@both_backends
@pytest.mark.parametrize("name", ["sigmoids", *further("ernie")])
def test_biases_move_by_the_load_of_all_trained_tokens_of_a_step(
    backend: str, name: str, made: list[Trajectory], batch: Batch, directory_of: Callable[[str], Path]
) -> None:
    directory = directory_of(name)
    before, load = dict(sorted(biases(read_tensors(directory)).items())), loads(directory, made)
    trainer = make_trainer(backend, directory)
    found = trainer.update(batch, losses.sft)
    assert found["expert_max_violation"] == pytest.approx(np.mean(load.max(-1) / load.mean(-1) - 1), rel=1e-5)
    after, expected = biases(trainer.weights()), by_hand(before, load)
    assert after.keys() == expected.keys()
    for tensor, x in expected.items():
        np.testing.assert_array_equal(after[tensor], x, err_msg=tensor)
        assert np.any(x != before[tensor])
    still = make_trainer(backend, directory, balance_rate=0.0)
    assert still.update(batch, losses.sft)["expert_max_violation"] == found["expert_max_violation"]
    for tensor, x in biases(still.weights()).items():
        np.testing.assert_array_equal(x, before[tensor])


@both_backends
@pytest.mark.parametrize("name", ["ernie", *further("sigmoids")])
def test_biases_are_published_exactly_in_any_precision(
    backend: str, name: str, batch: Batch, directory_of: Callable[[str], Path]
) -> None:
    trainer, before = make_trainer(backend, directory_of(name), precision="bf16"), biases(read_tensors(directory_of(name)))
    trainer.update(batch, losses.sft)
    after = biases(trainer.weights())
    assert after.keys() == before.keys()
    for tensor, x in before.items():
        assert after[tensor].dtype == np.float32
        steps = np.array([-1, 0, 1], np.float32)[:, None] * np.float32(RATE) + x.ravel()
        assert (after[tensor].ravel() == steps).any(0).all()
        assert np.any(after[tensor] != x)


@both_backends
def test_a_step_that_is_not_finite_leaves_biases_as_they_are(
    backend: str, batch: Batch, directory_of: Callable[[str], Path]
) -> None:
    trainer = make_trainer(backend, directory_of("sigmoids"))
    spoilt = batch.replace(weights=np.full_like(batch.weights, np.nan))
    assert trainer.update(spoilt, losses.sft)["skipped"] == 1
    for tensor, x in biases(read_tensors(directory_of("sigmoids"))).items():
        np.testing.assert_array_equal(biases(trainer.weights())[tensor], x)


@both_backends
def test_of_replayed_tokens_the_recorded_experts_count(
    backend: str, made: list[Trajectory], directory_of: Callable[[str], Path]
) -> None:
    directory = directory_of("sigmoids")
    routed = [replace(one, experts=recorded(len(one), i, layers=3)) for i, one in enumerate(made)]
    trainer = make_trainer(backend, directory, replay_experts=True)
    # Nothing records the experts of a last token, which is left untrained here.
    masks = [one.mask & (np.arange(len(one)) < len(one) - 1) for one in routed]
    routed = [replace(one, mask=mask) for one, mask in zip(routed, masks, strict=True)]
    trainer.update(learnable(pack(routed, 24)), losses.sft)
    load = sum(np.stack([np.bincount(one.experts[one.mask, layer].ravel(), minlength=4) for layer in (1, 2)]) for one in routed)
    before = dict(sorted(biases(read_tensors(directory)).items()))
    for tensor, x in by_hand(before, np.asarray(load)).items():
        np.testing.assert_array_equal(biases(trainer.weights())[tensor], x)


def test_both_backends_move_alike_and_continue_each_others_checkpoints(
    batch: Batch, directory_of: Callable[[str], Path], tmp_path: Path
) -> None:
    optimizer = OptimizerConfig(learning_rate=1e-2, eps=1e-2)
    ours, theirs = (make_trainer(name, directory_of("sigmoids"), optimizer=optimizer) for name in ("jax", "torch"))
    for _ in range(3):
        mine, other = (trainer.update(batch, losses.sft) for trainer in (ours, theirs))
        assert other == pytest.approx(mine, rel=1e-4)
    of_both = [biases(trainer.weights()) for trainer in (ours, theirs)]
    for name, x in of_both[0].items():
        np.testing.assert_array_equal(of_both[1][name], x)
    for writer, reader in ((ours, theirs), (theirs, ours)):
        writer.save(tmp_path / writer.backend)
        writer.update(batch, losses.sft)
        reader.restore(tmp_path / writer.backend)
        for name, x in biases(read_tensors(tmp_path / writer.backend)).items():
            np.testing.assert_array_equal(biases(reader.weights())[name], x)
        reader.update(batch, losses.sft)
        for name, x in biases(writer.weights()).items():
            np.testing.assert_array_equal(biases(reader.weights())[name], x)


@both_backends
def test_a_skewed_router_becomes_balanced(
    backend: str, batch: Batch, directory_of: Callable[[str], Path], tmp_path: Path
) -> None:
    directory = directory_of("sigmoids")
    (tmp_path / "config.json").write_text(json.dumps(read_config(directory) | {"n_group": 1, "topk_group": 1}))
    skew = np.array([1.5, 0, 1.5, 0], np.float32)
    skewed = {name: x + skew if name.endswith(BIAS) else x for name, x in read_tensors(directory)}
    write_tensors(tmp_path / "model.safetensors", skewed.items())
    trainer = make_trainer(backend, tmp_path, balance_rate=0.05)
    first, *rest = (trainer.update(batch, losses.sft)["expert_max_violation"] for _ in range(24))
    assert first == pytest.approx(1)  # two experts of four are chosen by all tokens
    assert max(rest[-4:]) < 0.4


@pytest.mark.parametrize("backend", ["torch", *further("jax")])
def test_moved_biases_are_sampled_with(backend: str, batch: Batch, directory_of: Callable[[str], Path]) -> None:
    trainer = make_trainer(backend, directory_of("sigmoids"), balance_rate=1.0)
    sampler = trainer.sampler(1, 32)
    request = slot_request(0, 9, 12)
    before = trainer.logprobs(pack([drawn_by(sampler, trainer, request)], 32).batch)
    trainer.update(batch, losses.sft)
    drawn = drawn_by(sampler, trainer, request)
    packed = pack([drawn], 32)
    (logp,) = packed.gather(after := trainer.logprobs(packed.batch))
    np.testing.assert_allclose(drawn.logprobs[drawn.mask], logp[drawn.mask], atol=1e-4)
    assert np.abs(after - before).max() > 0.01


def drawn_by(sampler: Sampler, trainer: Trainer, request: SlotRequest) -> Trajectory:
    sampler.load(trainer.snapshot())
    tokens, logprobs = sample_to_end(sampler, [request])[0]
    versions = np.zeros(len(tokens), np.int32)
    return Trajectory.from_completion(request.tokens, np.array(tokens, np.int32), np.float32(logprobs), versions)


@both_backends
def test_shared_prompts_are_not_counted_as_nothing_of_them_is_trained(
    backend: str, directory_of: Callable[[str], Path]
) -> None:
    found = []
    for shares in (False, True):
        trainer = make_trainer(backend, directory_of("sigmoids"), share_prompts=shares)
        (batch,) = make_batches(groups_of(), grpo(), 96, Models(trainer), share_prompts=shares)
        violation = trainer.update(batch.replace(kept=None), losses.sft)["expert_max_violation"]
        found.append((violation, biases(trainer.weights())))
    assert found[0][0] == found[1][0]
    for name, x in found[0][1].items():
        np.testing.assert_array_equal(found[1][1][name], x)


@both_backends
@pytest.mark.parametrize(
    ("family", "says"), [("qwen3-moe", "no bias to choose experts by: use trainer.balance"), ("qwen3", "which has no experts")]
)
def test_models_without_such_routers_are_refused_by_check_and_by_the_trainer(
    backend: str, family: str, says: str, model_dir_of: Callable[[str], Path]
) -> None:
    config = TrainerConfig(ModelConfig(str(model_dir_of(family))), balance_rate=RATE)
    for construct in (find_backend(backend).load().check, lambda config: create_trainer(backend, config)):
        with pytest.raises(ConfigError, match=rf"trainer\.balance_rate = 0\.25 .* 0 with .*{says}"):
            construct(config)


def test_adapters_are_refused_with_it() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.balance_rate = 0\.25 .* 0 with lora\.rank"):
        TrainerConfig(lora=LoRAConfig(rank=2), balance_rate=RATE)
    with pytest.raises(ConfigError, match=r"trainer\.balance_rate = -1"):
        TrainerConfig(balance_rate=-1)
