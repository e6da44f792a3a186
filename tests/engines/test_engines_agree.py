"""One truth for every token: the trainer computes the log-probabilities that an engine reports for its samples. For all four
pairs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from areal_x.batching.packing import pack
from areal_x.engines.embedded import EmbeddedEngine
from areal_x.protocols.backends import create_trainer
from areal_x.protocols.engine import Engine, Request, SamplingParams
from areal_x.protocols.trainer import Trainer
from areal_x.protocols.trainer_config import ModelConfig, OptimizerConfig, TrainerConfig
from areal_x.types import Trajectory

TEMPERATURE = 0.8


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


async def sample(engine: Engine) -> list[Trajectory]:
    rng = np.random.default_rng(1)
    sampling = SamplingParams(max_tokens=24, temperature=TEMPERATURE, stop_token_ids=(1,))
    requests = [Request(rng.integers(2, 40, rng.integers(1, 12)).astype(np.int32), sampling, seed=i) for i in range(32)]
    completions = await asyncio.gather(*(engine.generate(request) for request in requests))
    return [
        Trajectory.from_completion(request.tokens, c.tokens, c.logprobs, c.versions)
        for request, c in zip(requests, completions, strict=True)
    ]


def mean_gap(trainer: Trainer, trajectories: list[Trajectory]) -> float:
    assert all((t.versions[t.mask] == trainer.version).all() for t in trajectories)
    batch = pack(trajectories, 40).batch
    return float(np.abs(trainer.logprobs(batch) - batch.behavior_logp)[batch.mask].mean())


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_the_embedded_engine_and_the_trainer_agree(backend, tiny_model_dir, run):
    pytest.importorskip(backend)
    trainer = trained(backend, tiny_model_dir)
    engine = EmbeddedEngine(trainer.sampler(8, 40))

    async def work() -> list[Trajectory]:
        await engine.start()
        try:
            await engine.swap(engine.stage(trainer))
            return await sample(engine)
        finally:
            await engine.close()

    assert mean_gap(trainer, run(work())) <= 1e-4


@pytest.mark.server
@pytest.mark.xdist_group("vllm")
@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_a_vllm_server_and_the_trainer_agree(backend, tiny_model_dir, vllm_server, run):
    trainer = trained(backend, tiny_model_dir)
    trainer.version = vllm_server.version + 1
    run(vllm_server.swap(vllm_server.stage(trainer)))
    assert mean_gap(trainer, run(sample(vllm_server))) <= 1e-4
