"""Agents that run on other machines: workers there take this run's episodes and answer them.

    train.workflow = @remote_agent()
    gateway.host = "10.0.0.5"
    gateway.certificate = "run.pem"

and on the other machines

    areal-x agents work https://10.0.0.5:8443 --agent my_agent.solve
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gin

from areal_x.agents.agent import AgentWorkflow
from areal_x.agents.board import LEASE_SECONDS, AgentFailed, Board, Lease, WorkerLost, result_of
from areal_x.agents.calling import AgentResult
from areal_x.agents.client import ADDRESS
from areal_x.agents.gateway.session import GatewaySession
from areal_x.errors import TaskError, at_least
from areal_x.protocols.workflow import EpisodeResult, Generator
from areal_x.runtime.thread import POOL, in_pool
from areal_x.types import Failed, Task

LOG = logging.getLogger(__name__)


@gin.configurable("remote_agent", denylist=["host", "pool", "board"])
@dataclass(frozen=True, kw_only=True)
class RemoteAgent(AgentWorkflow):
    """Episodes that workers on other machines take and answer (`areal-x agents work URL`).

    A worker gets a task and a session of its own, runs the agent that it was started with, and
    answers with the agent's result, as of `agent` and `agent_process`. If it dies, or gives the
    episode back, the episode starts anew at another worker, in another session. An episode waits for
    a worker without limit: train.episode_seconds and train.failed_groups do not apply, the limits of
    its session do.
    """

    open_ended = True  # it may take long until there is a worker

    address_file: str = ADDRESS
    """File to which the gateway's address and key are written, readable by this user alone, once it
    serves."""
    answers: bool = True
    """True if workers receive the tasks' answers, which an agent needs to return a reward. With
    False, `reward` scores the text that it returns, in the run."""
    lease_seconds: float = LEASE_SECONDS
    """Longest silence of a worker, after which its episodes are given to others."""
    attempts: int = 5
    """Workers that may die at one episode, until it has failed."""
    board: Board = field(default_factory=Board)

    def __post_init__(self) -> None:
        at_least("remote_agent.lease_seconds", self.lease_seconds, 1)
        at_least("remote_agent.attempts", self.attempts, 1)

    def setup(self, tokenizer: Any) -> Any:
        ready = replace(super().setup(tokenizer), board=Board(self.lease_seconds))
        ready.gateway.on_work = ready.board
        return ready

    async def run(self, task: Task, engine: Generator) -> EpisodeResult:
        await self.lazy_gateway().start(Path(self.address_file))
        about = await in_pool(POOL, task_json, task, self.answers)
        died = attempt = 0
        while died < self.attempts:
            lease = await self.board.lease_for(about, lambda: self.open(engine), first=attempt > 0)
            attempt += 1
            try:
                return await self.answered(task, lease)
            except WorkerLost as lost:
                LOG.warning("task %s starts anew at another worker: %s", task.id, lost)
                died += lost.died
            finally:
                self.board.end(lease)
        return Failed(f"{died} workers died at it, one after another (remote_agent.attempts)")

    async def answered(self, task: Task, lease: Lease) -> EpisodeResult:
        """Returns the episode of a worker. Raises: WorkerLost."""
        try:
            outcome = await self.outcome(task, lease.session)
        except AgentFailed as error:
            outcome = Failed(str(error))
        return await self.episode(lease.session, outcome)

    async def work(self, task: Task, session: GatewaySession) -> AgentResult:
        return result_of(await self.board.answer_to(session), session)

    async def close(self) -> None:
        self.board.close()
        await super().close()


def task_json(task: Task, answer: bool) -> bytes:
    """Returns a task as workers receive it. Raises: TaskError if JSON cannot hold it."""
    prompt = task.prompt if isinstance(task.prompt, str) else [dict(m) for m in task.prompt]
    about = {"id": task.id, "prompt": prompt, "metadata": dict(task.metadata)}
    try:
        return json.dumps({**about, "answer": task.answer if answer else None}).encode()
    except (TypeError, ValueError) as error:
        raise TaskError(
            f"task {task.id} cannot be sent to a worker, since JSON cannot hold its prompt, metadata"
            f" or answer ({error}); remote_agent.answers = False leaves the answer here"
        ) from None
