"""Servers that sleep and wake, and trainers in turns with them: what is checked on each program that serves."""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import mmap
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from areal_x.algorithms.recipes import grpo
from areal_x.batching.batch import Models, make_batches
from areal_x.engines.fleet import supervisor
from areal_x.engines.fleet.engine import FleetEngine
from areal_x.engines.fleet.fleet import State
from areal_x.hf.model_dir import write_model
from areal_x.hf.tokenizer import load_tokenizer
from areal_x.protocols.backends import create_trainer
from areal_x.protocols.engine import Request, SamplingParams
from areal_x.protocols.trainer_config import ModelConfig, OptimizerConfig, TrainerConfig
from areal_x.protocols.workflow import EpisodeResult, Generator
from areal_x.rollout.queue import TrajectoryQueue
from areal_x.rollout.rollout import Rollout
from areal_x.rollout.runner import Runner
from areal_x.tasks.stream import TaskStream
from areal_x.types import Group, Task
from areal_x.workflows.single_turn import SingleTurn
from tests.engines import conformance
from tests.experiments import TASKS
from tests.ones import counts_ones
from tests.servers import Run, Weights

GROUP = 4
PROMPT = np.arange(2, 14, dtype=np.int32)
MEBIBYTE = 1 << 20
Engine = FleetEngine[Any]


def check_requests_go_on_after_a_sleep_that_drops_the_weights(
    engine: Engine, checksums: Callable[[], Awaitable[Any]], model: Path, other: Path, run: Run
) -> None:
    """With and without new weights. checksums: the server's own digests of the weights that it has, which are `model`'s."""
    trainer = Weights(other, engine.version + 1)
    late: list[asyncio.Future[Any]] = []

    async def sleep_twice() -> None:
        own = await checksums()
        await engine.sleep()
        await engine.sleep()  # changes nothing
        assert await checksums() != own
        assert engine.fleet.due(float("inf")) == []
        sent = Request(PROMPT, SamplingParams(max_tokens=60))
        late.extend(asyncio.ensure_future(engine.generate(sent)) for _ in range(4))
        await engine.supervisor._heartbeat(*engine.fleet.members)  # it is alive while it sleeps
        await engine.wake()
        assert await checksums() == own
        await engine.sleep()

    run(conformance.check_weights_swapped_in_flight(engine, model, trainer, other, through=sleep_twice))
    assert not engine.fleet.asleep

    async def ended() -> list[Any]:
        return await asyncio.gather(*late)

    for completion in run(ended()):
        assert len(completion.tokens) == 60
        assert set(completion.versions) <= {trainer.version - 1, trainer.version}


@dataclass(frozen=True)
class ShortThenLong(SingleTurn):
    """Answers of 8 tokens in one group, of 160 in the next, and so on."""

    calls: Any = field(default_factory=itertools.count)

    async def run(self, task: Task, engine: Generator) -> EpisodeResult:
        length = (8, 160)[next(self.calls) // GROUP % 2]
        return await SingleTurn.run(replace(self, sampling=SamplingParams(max_tokens=length)), task, engine)


def crosses(group: Group) -> bool:
    """True if a sequence has tokens of several versions."""
    versions = (t.versions[t.mask] for episode in group.scored for t in episode.trajectories)
    return any(own.min() < own.max() for own in versions)


def check_each_token_has_its_true_version_and_logprob_in_turns(
    engine: Engine, backend: str, max_staleness: int, model: Path, folder: Path
) -> None:
    """Trains with an engine that is not started yet, whose servers sleep in the trainer's turns."""
    config = TrainerConfig(ModelConfig(str(model)), OptimizerConfig(learning_rate=1e-3), micro_batch_rows=2)
    models = Models(policy=create_trainer(backend, config))
    workflow = ShortThenLong(reward=counts_ones, reward_workers=1).setup(load_tokenizer(model))
    runner = Runner(engine, workflow, TaskStream(TASKS, 0), TrajectoryQueue(1, max_staleness), group_size=GROUP, row_length=256)
    taken: list[Group] = []
    with Rollout(runner, models=models) as rollout:
        rollout.start()
        for version in range(40):  # until a request was in flight in a turn, which a busy machine may miss at first
            if version:
                groups = rollout.take()
                assert engine.fleet.asleep
                for batch in make_batches(groups, grpo(), 256, models, version=version - 1):
                    models.policy.update(batch, grpo().step_loss())
                taken += groups
                if len(taken) >= 4 and (not max_staleness or any(map(crosses, taken))):
                    break
            write_model(folder / str(version), model, models.policy.weights())
            rollout.publish(models.policy, version, wait=False)
        rollout.publish(models.policy, version)
        assert not engine.fleet.asleep
        assert rollout.stats().failed == rollout.stats().timed_out == 0
    assert [group.ticket for group in taken] == list(range(len(taken)))
    crossing = 0
    for group in taken:
        for episode in group.episodes:
            (trajectory,) = episode.trajectories
            versions = trajectory.versions[trajectory.mask]
            assert group.ticket - max_staleness <= versions.min() <= versions.max() <= group.ticket
            crossing += versions.min() < versions.max()
            for version in set(versions.tolist()):
                own = np.flatnonzero(trajectory.mask & (trajectory.versions == version))
                expected = conformance.full_forward(folder / str(version), trajectory.tokens)
                found = trajectory.logprobs[own]
                np.testing.assert_allclose(found, expected[own - 1, trajectory.tokens[own]], atol=1e-4)
    assert bool(crossing) == bool(max_staleness)


def check_a_server_that_dies_asleep_comes_back_in_the_servers_turn(engine: Engine, model: Path, other: Path, run: Run) -> None:
    """And answers what it had. The engine, whose heartbeats are frequent, is not started yet."""

    async def die_asleep() -> Any:
        await engine.start()
        await engine.swap(await asyncio.to_thread(engine.stage, Weights(model, 1)))
        running = asyncio.ensure_future(engine.generate(Request(PROMPT, SamplingParams(max_tokens=200))))
        await engine.generate(Request(PROMPT, SamplingParams(max_tokens=2)))
        await engine.sleep()
        for process in psutil.Process(engine._servers[0].pid).children():
            process.kill()
        while engine.fleet.serving():
            await asyncio.sleep(0.05)
        (member,) = engine.fleet.members.values()
        while member.retry_at > supervisor.now() - 2:  # it is due, and the watch has looked again since
            await asyncio.sleep(0.05)
        assert member.state is State.DOWN
        await engine.swap(await asyncio.to_thread(engine.stage, Weights(other, 2)))
        return await running

    try:
        completion = run(die_asleep())
    finally:
        run(engine.close())
    assert set(completion.versions) == {2}
    request = Request(PROMPT, SamplingParams())
    expected = conformance.expected_logprobs(other, request, completion)
    np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


def resident(tensor: Any) -> float:
    """The MiB of a tensor's pages that are in memory."""
    first = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    length = tensor.data_ptr() + tensor.nbytes - first
    pages = (ctypes.c_ubyte * (-(-length // mmap.PAGESIZE)))()
    assert ctypes.CDLL(None, use_errno=True).mincore(ctypes.c_void_p(first), ctypes.c_size_t(length), pages) == 0
    return sum(page & 1 for page in pages) * mmap.PAGESIZE / MEBIBYTE
