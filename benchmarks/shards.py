"""CPU of a rollout in shards, of its driver and of each shard, for each trajectory.

    python -m benchmarks.shards [--shards 0 1 4] [--servers 64] [--requests 8192] [--in-flight 2048]

Claim: four shards carry at least 3.5 times the trajectories of one. Each process has one event loop, which one core serves, so
what a rollout carries is bounded by the process that needs most CPU for a trajectory: the driver, or a shard for its part of
them. With fewer cores than processes the clock would say nothing, so CPU seconds are compared: bottleneck(1 shard) /
bottleneck(4 shards).

The shards are actors of a Ray of this machine's own, with the unmodified VLLMEngine over the stub servers of
benchmarks.dispatch (300 tokens to prompts of 200, in groups of eight, after a second or two). The driver runs runner, queue and
journal, and consumes the groups without training. Its CPU is that of all its threads, Ray's included. 0 shards is one process
without Ray.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from areal_x.protocols.engine import Request, SamplingParams
from areal_x.protocols.workflow import Generator, Workflow
from areal_x.types import Task, Trajectory
from benchmarks.dispatch import GROUP, NEW, PROMPT, serving

if TYPE_CHECKING:
    from areal_x.protocols.engine import Engine
    from areal_x.rollout.runner import MakeEpisodes

STEPS_AHEAD = 3


@dataclass(frozen=True)
class Attempt(Workflow):
    """Asks once for each task, whose id chooses the prompt."""

    prompts: np.ndarray

    async def run(self, task: Task, engine: Generator) -> list[Trajectory]:
        prompt = self.prompts[int(task.id)]
        said = await engine.generate(Request(prompt, SamplingParams(max_tokens=NEW)))
        arrays = said.tokens, said.logprobs, said.versions
        return [Trajectory.from_completion(prompt, *arrays, reward=1.0, finish_reason=said.finish_reason)]


@contextmanager
def rollout_of(
    shards: int, urls: list[str], folder: Path, concurrency: int, workflow: Attempt
) -> Iterator[tuple[Engine, MakeEpisodes | None]]:
    from areal_x.cluster.config import ClusterConfig
    from areal_x.engines.vllm.config import VLLMConfig
    from areal_x.engines.vllm.engine import VLLMEngine
    from areal_x.testing.models import write_model

    model, config = write_model(folder / "model"), VLLMConfig(urls=tuple(urls), concurrency=concurrency, context=4096)
    config = replace(config, heartbeat_seconds=600.0)
    if not shards:
        yield VLLMEngine(config, model, folder, print), None
        return
    from areal_x.cluster.connection import connected
    from areal_x.rollout.episodes import EpisodeSettings
    from areal_x.shards.on_ray import sharded_on_ray
    from areal_x.shards.parts import VLLMParts

    parts = VLLMParts(
        workflow=workflow,
        evaluation=None,
        backend="torch",
        directory=model,
        config=config,
        placement=ClusterConfig(shards=shards),
        logs=folder,
        lora=None,
        experts=False,
        kept=False,
        bindings="",
    )
    with connected(cpus=shards), sharded_on_ray(parts, EpisodeSettings(GROUP), None, print) as sharded:
        yield sharded.engine, sharded.episodes


def shards_there() -> list[psutil.Process]:
    """The processes of the shards: those of Ray's actors."""
    children = psutil.Process(os.getpid()).children(recursive=True)
    return [process for process in children if process.cmdline() and process.cmdline()[0].startswith("ray::Process")]


async def roll_out(runner: Any, steps: int) -> None:
    for _ in range(steps):
        await runner.take()
        runner.published(runner.queue.step)


async def measured(shards: int, urls: list[str], requests: int, in_flight: int) -> dict[str, float]:
    from areal_x.rollout.queue import TrajectoryQueue
    from areal_x.rollout.runner import Runner
    from areal_x.run.journal import Journal
    from areal_x.runtime.loop import short_collections
    from areal_x.tasks.stream import TaskStream

    rng = np.random.default_rng(0)
    prompts = rng.integers(2, 40, (requests // GROUP + 1, PROMPT)).astype(np.int32)
    workflow, step = Attempt(prompts), in_flight // GROUP // 2
    tasks = TaskStream([Task(f"{i}", "") for i in range(len(prompts))])
    with (
        tempfile.TemporaryDirectory() as folder,
        rollout_of(shards, urls, Path(folder), -(-in_flight // len(urls)), workflow) as (engine, episodes),
        Journal(Path(folder)) as journal,
    ):
        queue = TrajectoryQueue(step, STEPS_AHEAD, step)
        runner = Runner(engine, workflow, tasks, queue, group_size=GROUP, recorder=journal, episodes=episodes)
        await engine.start()
        runner.begin(0)
        running = asyncio.create_task(runner.run())
        try:
            await roll_out(runner, 2)  # until all is warm
            processes, steps = shards_there() if shards else [], max(1, requests // GROUP // step)
            with short_collections():
                began, cpu, theirs = time.perf_counter(), time.process_time(), [sum(p.cpu_times()[:2]) for p in processes]
                await roll_out(runner, steps)
                cpu, seconds = time.process_time() - cpu, time.perf_counter() - began
                theirs = [sum(p.cpu_times()[:2]) - before for p, before in zip(processes, theirs, strict=True)]
        finally:
            running.cancel()
            await asyncio.wait([running])
            await engine.close()
    count = steps * step * GROUP
    return {
        "shards": shards,
        "trajectories": count,
        "driver_milliseconds": 1000 * cpu / count,
        "busiest_shard_milliseconds": 1000 * max(theirs, default=0.0) / count,
        "all_shards_milliseconds": 1000 * sum(theirs) / count,
        "bottleneck_milliseconds": 1000 * max(cpu, *theirs, 0.0) / count,
        "trajectories_per_second": count / seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, nargs="+", default=[0, 1, 4])
    parser.add_argument("--servers", type=int, default=64)
    parser.add_argument("--requests", type=int, default=8192)
    parser.add_argument("--in-flight", type=int, default=2048)
    options = parser.parse_args()
    for count in options.shards:
        with serving(options.servers) as (urls, _):
            row = asyncio.run(measured(count, urls, options.requests, options.in_flight))
        print(json.dumps({name: round(x, 4) for name, x in row.items()}), flush=True)


if __name__ == "__main__":
    main()
