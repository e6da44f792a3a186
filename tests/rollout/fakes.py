"""An engine and workflows whose every step a test decides. (Those of areal_x.simulation take simulated time.)"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

import numpy as np

from areal_x.protocols.engine import Completion, Engine, Request, SamplingParams, Staged
from areal_x.protocols.workflow import Workflow
from areal_x.types import Task, Trajectory

TASKS = [Task(f"task {i}", f"{i}+{i}=") for i in range(50)]


async def until(condition):
    """Runs the loop until a condition holds; the test's own time limit is the only clock."""
    while not condition():
        await asyncio.sleep(0)


class FakeEngine(Engine):
    """Answers at once, or (held) when the test opens its gate. The answer depends on the request's seed alone."""

    def __init__(self, concurrency=8, context=64, held=False):
        self.concurrency, self.context, self.version = concurrency, context, -1
        self.requests, self.calls = [], []
        self.waiting = 0
        self.gate = asyncio.Event()
        if not held:
            self.gate.set()
        self.error = None

    async def start(self):
        self.calls.append("start")

    async def generate(self, request):
        if len(request.tokens) >= self.context:
            raise ValueError(f"a prompt of {len(request.tokens)} tokens leaves no room in a context of {self.context}")
        self.requests.append(request)
        self.waiting += 1
        try:
            await asyncio.sleep(0)
            await self.gate.wait()
        finally:
            self.waiting -= 1
        if self.error is not None:
            raise self.error
        tokens = np.random.default_rng(request.seed).integers(2, 40, 5).astype(np.int32)
        return Completion(tokens, np.full(5, -0.5, np.float32), np.full(5, self.version, np.int32), "stop")

    def stage(self, trainer, version=None):
        self.calls.append("stage")
        return Staged(trainer.version if version is None else version)

    async def swap(self, staged):
        self.calls.append("swap")
        self.version = staged.version
        return 0.25

    async def sleep(self):
        self.calls.append("sleep")

    async def close(self):
        self.calls.append("close")


@dataclass(frozen=True)
class Plain(Workflow):
    """One call of the engine; the reward is the first new token. Every task of `bad` raises."""

    bad: tuple[str, ...] = ()
    sampling: SamplingParams = field(default_factory=SamplingParams)

    async def run(self, task, engine):
        if task.id in self.bad:
            raise RuntimeError(f"{task.id} is\nbad")
        prompt = np.arange(2, 5, dtype=np.int32)
        c = await engine.generate(Request(prompt, self.sampling))
        return [Trajectory.from_completion(prompt, c.tokens, c.logprobs, c.versions, reward=float(c.tokens[0]))]

    def greedy(self):
        return replace(self, sampling=replace(self.sampling, temperature=0.0))


@dataclass(frozen=True)
class Doing(Workflow):
    """Runs a function (task, engine)."""

    function: object

    async def run(self, task, engine):
        return await self.function(task, engine)
