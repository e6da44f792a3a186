"""Agents that know nothing of this project: they are given an address and a key, and what they say
there is trained on.

    train.workflow = @agent()
    agent.solve = @my_agent.solve          # async def solve(task, base_url, api_key)

    train.workflow = @agent_process()
    agent_process.command = ("node", "agent.mjs")

Each episode is a session of the run's own gateway (areal_x.agents.gateway).
"""

from __future__ import annotations

import asyncio
import inspect
import math
import shutil
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from numbers import Real
from pathlib import Path
from typing import Any, TypeVar

import gin

from areal_x.agents.client import Session
from areal_x.agents.external_program import inherited_environment, run_program
from areal_x.agents.gateway.session import GatewaySession
from areal_x.agents.gateway_workflow import GatewayWorkflow, documented
from areal_x.errors import ConfigError, at_least
from areal_x.protocols.workflow import Generator, Result
from areal_x.rewards.pool import Reward, RewardLimits, RewardPool
from areal_x.runtime import background
from areal_x.runtime.loop import serve
from areal_x.runtime.thread import in_thread
from areal_x.runtime.waits import waiting, whose
from areal_x.types import Failed, Outcome, Scored, Task

T = TypeVar("T")
AgentResult = float | str | None
Solve = Callable[[Task, str, str], Awaitable[AgentResult] | AgentResult]

GRACE_SECONDS = 10.0  # for an agent whose episode is over to end by itself
NEVER_CALLED = (
    "the agent never called the model: is it pointed at the base_url, with the key, that it was"
    " given?"
)
NO_REWARD = (
    "the agent gave no reward: let it return a number, give one to its session, or set a reward"
    " function"
)


@dataclass(frozen=True, kw_only=True)
class AgentWorkflow(GatewayWorkflow):
    """reward: a function (task, text) -> number, or -> (number, {name: number}): judges the text
    that the agent gave, or what the model said last where it gave nothing. reward_workers,
    reward_timeout_seconds, reward_limits: as of single_turn."""

    reward: Reward | None = None
    reward_workers: int = 4
    reward_timeout_seconds: float = 10.0
    reward_limits: RewardLimits = field(default_factory=RewardLimits)
    pool: RewardPool | None = None

    def setup(self, tokenizer: Any) -> Any:
        pool = None
        if self.reward is not None:
            pool = RewardPool(
                self.reward, self.reward_workers, self.reward_timeout_seconds, self.reward_limits
            )
        return replace(super().setup(tokenizer), pool=pool)

    async def work(self, task: Task, session: GatewaySession) -> AgentResult:
        """What the agent does, and says in the end: its reward, a text, or nothing."""
        raise NotImplementedError

    async def run(self, task: Task, engine: Generator) -> Result:
        with await self.open(engine) as session:
            return await self.episode(session, await self.outcome(task, session))

    async def outcome(self, task: Task, session: GatewaySession) -> Outcome:
        """Raises: what the agent raised; EngineError where the engine was lost."""
        working, ending = (
            asyncio.ensure_future(self.work(task, session)),
            asyncio.ensure_future(session.ended()),
        )
        try:
            with waiting(
                whose(), "its agent", lambda: f"task {task.id}, {len(session.calls())} calls so far"
            ):
                await asyncio.wait({working, ending}, return_when=asyncio.FIRST_COMPLETED)
            if not ending.done():
                return await self.judge(task, session, working.result())
            if isinstance(outcome := ending.result(), Scored):
                await asyncio.wait({working}, timeout=GRACE_SECONDS)
            return outcome
        finally:
            working.cancel()
            ending.cancel()
            await asyncio.gather(working, ending, return_exceptions=True)

    async def judge(self, task: Task, session: GatewaySession, result: AgentResult) -> Outcome:
        """What became of an episode whose session the agent left open."""
        calls = session.calls()
        if not calls:
            return Failed(NEVER_CALLED)
        if isinstance(result, Real) and not isinstance(result, bool):
            value = float(result)
            return (
                Scored(value)
                if math.isfinite(value)
                else Failed(f"the agent returned {value} for its reward")
            )
        if result is None and session.state.rewards:
            return session.end()
        if self.pool is None:
            return Failed(NO_REWARD)
        return await self.pool.score(
            task,
            session.renderer.text(calls[-1].completion.tokens) if result is None else str(result),
        )

    async def close(self) -> None:
        await super().close()
        if self.pool is not None:
            await self.pool.close()


@gin.configurable("agent", denylist=["host", "pool", "background_loop"])
@dataclass(frozen=True, kw_only=True)
class Agent(AgentWorkflow):
    """A function of yours that does the task with any client, against an address of the run's own.

    solve: `async def solve(task, base_url, api_key)`; an ordinary function runs on a thread. It
    returns the reward, a text for `reward` to judge, or nothing where it gave its rewards to the
    session (POST base_url + "/reward", areal_x.agents.session). An Anthropic client takes base_url
    as it is too.
    """

    __doc__ = documented(__doc__, GatewayWorkflow.__doc__, AgentWorkflow.__doc__)

    solve: Solve
    background_loop: BackgroundLoop | None = None

    def __post_init__(self) -> None:
        if not callable(self.solve):
            raise ConfigError(
                "agent.solve", self.solve, "a function (in gin `@name`, without parentheses)"
            )

    def setup(self, tokenizer: Any) -> Any:
        return replace(super().setup(tokenizer), background_loop=BackgroundLoop())

    async def work(self, task: Task, session: GatewaySession) -> AgentResult:
        assert self.background_loop is not None
        return await self.background_loop.run(
            call_function(self.solve, task, session.base_url, session.key)
        )

    async def close(self) -> None:
        await super().close()
        if self.background_loop is not None:
            with waiting("the rollout", "the agents' thread to end"):
                await asyncio.to_thread(self.background_loop.close)


async def call_function(function: Callable[..., Any], *arguments: Any) -> Any:
    """Of an async function what it gives; an ordinary one runs on a thread of its own, so that any
    number may block at once."""
    if inspect.iscoroutinefunction(inspect.unwrap(function)):
        return await function(*arguments)
    given = await in_thread(function, *arguments)
    return await given if inspect.isawaitable(given) else given


class BackgroundLoop:
    """An event loop on a thread of its own: what blocks there keeps no engine waiting."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """What it gives, from another loop. Cancelling this cancels it there."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            failed = background.on_loop()
            background.watch(self._loop, failed)
            self._thread = background.thread(
                serve, self._loop, what="the agents' thread", failed=failed, name="agents"
            )
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def close(self) -> None:
        if self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop = None


@gin.configurable("agent_process", denylist=["host", "pool"])
@dataclass(frozen=True, kw_only=True)
class AgentProcess(AgentWorkflow):
    """Any command, in any language, that finds its address in the environment.

    command: its words; in them {prompt} and {id} stand for the task's. No shell reads it.
    variables: names of the run's environment variables that it gets beside PATH, HOME and others
    without a secret (as ("HTTPS_PROXY", "SEARCH_KEY")). environment: more variables, with their
    values. directory: that it runs in. processes: most of its episodes' processes at once.
    output_kilobytes: of what it prints, the end of which is kept.

    It finds OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY, which the
    official clients read, and the task as JSON in AREAL_X_TASK (id, prompt and metadata, not the
    answer). It may give rewards to its session (areal_x.agents.session, or POST OPENAI_BASE_URL +
    "/reward"); else `reward` judges what it printed. An exit status other than 0 fails the episode.
    Whatever it started ends with it.
    """

    __doc__ = documented(__doc__, GatewayWorkflow.__doc__, AgentWorkflow.__doc__)

    command: tuple[str, ...]
    variables: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    directory: str = "."
    processes: int = 64
    output_kilobytes: int = 64

    def __post_init__(self) -> None:
        if isinstance(self.command, str) or not self.command:
            raise ConfigError(
                "agent_process.command", self.command, 'a tuple of words, as ("node", "agent.mjs")'
            )
        if isinstance(self.variables, str):
            raise ConfigError(
                "agent_process.variables", self.variables, 'a tuple of names, as ("HTTPS_PROXY",)'
            )
        at_least("agent_process.processes", self.processes, 1)
        at_least("agent_process.output_kilobytes", self.output_kilobytes, 1)

    def setup(self, tokenizer: Any) -> Any:
        """Raises UserError where there is no such program."""
        program = self.command[0]
        if shutil.which(program) is None and not (Path(self.directory) / program).is_file():
            raise ConfigError(
                "agent_process.command",
                self.command,
                f"a program that is there: no {program!r} is found",
            )
        return super().setup(tokenizer)

    async def work(self, task: Task, session: GatewaySession) -> AgentResult:
        address = Session(session.url, session.key)
        environment = {
            **inherited_environment(self.variables),
            **address.environment,
            **self.environment,
        }
        most = self.output_kilobytes * 1024
        printed = await run_program(
            self.command, task, environment, self.directory, most, self.processes
        )
        return None if session.state.rewards else printed
