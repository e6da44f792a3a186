"""One truth for every token: the trainer computes the log-probabilities that an engine reports for its samples. For all four
pairs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from array_api_compat import array_namespace

from areal_x.batching.packing import pack
from areal_x.engines.embedded import EmbeddedEngine
from areal_x.protocols.backends import create_trainer
from areal_x.protocols.engine import Engine, Request, SamplingParams
from areal_x.protocols.trainer import Trainer
from areal_x.protocols.trainer_config import ModelConfig, OptimizerConfig, TrainerConfig
from areal_x.types import Trajectory
from tests.thorough import further

TEMPERATURE = 0.8
TRUNCATIONS = [{"top_p": 0.9, "top_k": 50}, *further({"top_p": 0.9, "top_k": 20, "min_p": 0.05}, {"top_p": 0.6})]


def trained(backend: str, directory: Path) -> Trainer:
    """A trainer whose policy is no longer the model on disk."""
    optimizer = OptimizerConfig(learning_rate=1e-2)
    config = TrainerConfig(model=ModelConfig(str(directory)), optimizer=optimizer, temperature=TEMPERATURE, micro_batch_rows=4)
    trainer = create_trainer(backend, config)
    rng = np.random.default_rng(0)
    tokens = [rng.integers(2, 40, 20) for _ in range(4)]
    batch = pack([Trajectory.from_completion(t[:4], t[4:], np.zeros(16), np.zeros(16)) for t in tokens], 32).batch
    trainer.update(batch.replace(weights=(batch.mask / batch.mask.sum()).astype(np.float32)), likelihood)
    return trainer


def likelihood(policy, batch):
    return -policy.logp * batch.mask, {}


async def sample(engine: Engine, **truncation: Any) -> list[Trajectory]:
    rng = np.random.default_rng(1)
    sampling = SamplingParams(max_tokens=24, temperature=TEMPERATURE, stop_token_ids=(1,), **truncation)
    requests = [Request(rng.integers(2, 40, rng.integers(1, 12)).astype(np.int32), sampling, seed=i) for i in range(32)]
    completions = await asyncio.gather(*(engine.generate(request) for request in requests))
    return [
        Trajectory.from_completion(request.tokens, c.tokens, c.logprobs, c.versions, kept=c.kept)
        for request, c in zip(requests, completions, strict=True)
    ]


def mean_gap(trainer: Trainer, trajectories: list[Trajectory]) -> float:
    assert all((t.versions[t.mask] == trainer.version).all() for t in trajectories)
    batch = pack(trajectories, 40).batch
    return float(np.abs(trainer.logprobs(batch) - batch.behavior_logp)[batch.mask].mean())


def assert_on_policy(trainer: Trainer, trajectories: list[Trajectory]) -> None:
    """The gap is rounding's and the ratio that a step trains with is 1, though much was left out."""
    batch = pack(trajectories, 40).batch
    assert batch.kept is not None
    assert mean_gap(trainer, trajectories) <= 1e-5
    recomputed = trainer.logprobs(batch)
    whole = trainer.logprobs(batch.replace(kept=None))
    assert np.abs(whole - recomputed)[batch.mask].mean() > 0.05
    weights = (batch.mask / batch.mask.sum()).astype(np.float32)
    metrics = trainer.update(batch.replace(proximal_logp=recomputed, weights=weights), ratio)
    assert metrics["largest_ratio_off"] <= 2.0**-21


def ratio(policy, batch):
    xp = array_namespace(policy.logp)
    off = xp.abs(xp.exp(policy.logp - batch.proximal_logp) - 1)
    return -policy.logp * batch.mask, {"largest_ratio_off": xp.where(batch.mask, off, 0 * off)}


@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=str)
@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_the_embedded_engine_and_the_trainer_truncate_alike(backend, truncation, tiny_model_dir, run):
    pytest.importorskip(backend)
    trainer = trained(backend, tiny_model_dir)
    assert_on_policy(trainer, run(embedded_samples(trainer, **truncation)))


async def embedded_samples(trainer: Trainer, **truncation: Any) -> list[Trajectory]:
    engine = EmbeddedEngine(trainer.sampler(8, 40))
    await engine.start()
    try:
        await engine.swap(engine.stage(trainer))
        return await sample(engine, **truncation)
    finally:
        await engine.close()


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_the_embedded_engine_and_the_trainer_agree(backend, tiny_model_dir, run):
    pytest.importorskip(backend)
    trainer = trained(backend, tiny_model_dir)
    assert mean_gap(trainer, run(embedded_samples(trainer))) <= 1e-4


@pytest.mark.server
@pytest.mark.xdist_group("vllm")
@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_a_vllm_server_and_the_trainer_agree(backend, tiny_model_dir, vllm_server, run):
    trainer = trained(backend, tiny_model_dir)
    trainer.version = vllm_server.version + 1
    run(vllm_server.swap(vllm_server.stage(trainer)))
    assert mean_gap(trainer, run(sample(vllm_server))) <= 1e-4


@pytest.mark.server
@pytest.mark.xdist_group("vllm")
@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=str)
@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_a_vllm_server_and_the_trainer_truncate_alike(backend, truncation, tiny_model_dir, vllm_server, run):
    trainer = trained(backend, tiny_model_dir)
    trainer.version = vllm_server.version + 1
    run(vllm_server.swap(vllm_server.stage(trainer)))
    assert_on_policy(trainer, run(sample(vllm_server, **truncation)))
