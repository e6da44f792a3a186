"""Software engineering: an agent's program changes a repository in a container, and hidden tests of
its patch are the reward.

    train.workflow = @swe()
    swe.command = ("mini", "--task", "{prompt}", …)     # any agent
    train.dataset = @load_dataset()                      # tasks: areal_x.tasks.swe

The program runs beside the run, as with `agent_process`; its commands run in the container of its
episode, which it reaches by a socket (areal_x.agents.container_door). What it left there becomes a
patch, which is applied to a clean copy in a second container, where the tests run.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import ClassVar

import gin

from areal_x.agents.agent import NEVER_CALLED
from areal_x.agents.calling import AgentResult
from areal_x.agents.container_agent import ContainerAgent
from areal_x.agents.container_door import VARIABLE, open_door
from areal_x.agents.gateway.session import GatewaySession
from areal_x.agents.repository import patch_of, prepare, test_patch
from areal_x.errors import UserError
from areal_x.tasks.swe import SweTask, read_swe
from areal_x.types import Failed, Outcome, Scored, Task


@gin.configurable("swe", denylist=["host", "pool", "machines"])
@dataclass(frozen=True, kw_only=True)
class Swe(ContainerAgent):
    """An agent's program that works on a repository in a container, and is rewarded if its patch
    passes hidden tests.

    It finds the address of the container in AREAL_X_CONTAINER, besides what `agent_process` gives
    it. The reward is 1 if all tests pass in a clean copy with the patch, else 0; an empty patch earns
    0 without a test. Details: `applied`, `tests_passed` (a share), `patch_bytes`.
    """

    binding: ClassVar[str] = "swe"

    partial: bool = False
    """The share of tests that pass is the reward."""
    excluded: tuple[str, ...] = ("*.pyc", "*conftest.py")
    """Patterns of files whose changes do not reach the tests, besides the files of the tests
    themselves: files that could decide what a test reports."""

    async def work(self, task: Task, session: GatewaySession) -> AgentResult:
        about = _read(task)
        async with self.container(about.image) as container:
            base = await prepare(container, about)
            async with open_door(container, about.directory) as address:
                await self.run_command(task, session, {VARIABLE: address})
            patch = await patch_of(container, about, base)
        return patch.decode(errors="surrogateescape")

    async def judge(self, task: Task, session: GatewaySession, result: AgentResult) -> Outcome:
        if not session.calls():
            return Failed(NEVER_CALLED)
        patch = str(result).encode(errors="surrogateescape")
        details = {"applied": 0.0, "tests_passed": 0.0, "patch_bytes": float(len(patch))}
        if not patch.strip():
            return Scored(0.0, details)
        about = _read(task)
        async with self.container(about.image) as container:
            results = await test_patch(container, about, patch, self.excluded)
        if self.pool is not None:
            shown = None if results is None else [asdict(test) for test in results]
            return await self.pool.score(task, json.dumps(shown))
        if results is None:
            return Scored(0.0, details)
        share = sum(test.passed for test in results) / len(results)
        details |= {"applied": 1.0, "tests_passed": share}
        return Scored(share if self.partial else float(share == 1.0), details)


def _read(task: Task) -> SweTask:
    try:
        return read_swe(task)
    except ValueError as error:
        raise UserError(str(error)) from None
