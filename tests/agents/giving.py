"""A run over a fake engine that gives its episodes to workers."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from areal_x.agents.remote_agent import RemoteAgent
from areal_x.agents.worker import FunctionAttempt, ProgramAttempt, Worker
from areal_x.rollout.queue import TrajectoryQueue
from areal_x.rollout.runner import Runner
from areal_x.tasks.stream import TaskStream
from areal_x.types import Task
from tests.agents.test_agent import ask
from tests.conftest import environment_with
from tests.rollout.fakes import FakeEngine, until

ROOT = Path(__file__).parents[2]
TASKS = [Task(f"sum-{i}", f"{i}+1=", str(i + 1), {"wanted": str(i + 1), "hints": ("a", "b")}) for i in range(64)]


class Giving:
    """A runner over a fake engine whose episodes wait for workers."""

    def __init__(self, tokenizer, folder, groups=2, group_size=1, failed_groups=1, **settings):
        self.engine = FakeEngine(context=512)
        self.address = folder / "gateway.json"
        self.workflow = RemoteAgent(address_file=str(self.address), **settings).setup(tokenizer)
        self.runner = Runner(
            self.engine,
            self.workflow,
            TaskStream(TASKS, 0),
            TrajectoryQueue(groups, 0),
            group_size=group_size,
            episode_seconds=0.05,
            failed_groups=failed_groups,
        )

    async def __aenter__(self):
        self.engine.version = 1
        self.runner.begin(1)
        self.running = asyncio.create_task(self.runner.run())
        await until(self.address.exists)
        return self

    async def __aexit__(self, *_):
        self.running.cancel()
        await asyncio.wait([self.running])
        await self.workflow.close()

    @property
    def url(self):
        return json.loads(self.address.read_text())["url"]

    @property
    def key(self):
        return json.loads(self.address.read_text())["key"]

    def worker(self, attempt, **settings):
        settings = {"episodes": 4, "name": "a test's", "patience_seconds": 20.0, "message": lambda _: None, **settings}
        attempt = attempt if isinstance(attempt, ProgramAttempt) else FunctionAttempt(attempt)
        return Worker(self.url, self.key, attempt, **settings)

    @asynccontextmanager
    async def working(self, attempt, **settings):
        worker = self.worker(attempt, **settings)
        task = asyncio.create_task(worker.run())
        try:
            yield worker
        finally:
            task.cancel()
            await asyncio.wait([task])

    def post(self, path, body=None):
        """Speaks to the gateway as a worker does, on a thread."""
        headers = {"authorization": f"Bearer {self.key}"}
        return asyncio.to_thread(lambda: httpx.post(f"{self.url}/{path}", json=body or {}, headers=headers, timeout=60).json())


def far(giving, agent, tmp_path, *more, inside=(), **variables):
    """Starts the command in a process of its own."""
    command = [sys.executable, "-m", "areal_x", "agents", "work", giving.url, "--agent", f"tests.agents.far_agents.{agent}"]
    environment = environment_with(1, PYTHONUNBUFFERED="1", **variables)
    with (tmp_path / "worker.log").open("ab") as log:
        return subprocess.Popen(
            [*inside, *command, "--key-file", str(giving.address), *more], cwd=ROOT, env=environment, stdout=log, stderr=log
        )


async def taken(giving):
    """Waits for a step as long as it takes, without blocking the loop."""
    return await asyncio.wait_for(giving.runner.take(), 60)


def adding(reward=1.0, calls=1):
    def solve(task, base_url, api_key):
        for _ in range(calls):
            ask(base_url, api_key, task.prompt)
        return reward

    return solve


async def until_soon(condition):
    """As `until`, for what threads and other processes do: it leaves them the processor."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)
