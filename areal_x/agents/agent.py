"""Agents that know nothing of this project: they are given an address and a key, and are trained on
the completions that they request there.

    train.workflow = @agent()
    agent.solve = @my_agent.solve          # async def solve(task, base_url, api_key)

Each episode is a session of the run's own gateway (areal_x.agents.gateway). `agent_process`
(areal_x.agents.agent_process) runs a command instead of a function.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, Self

import gin

from areal_x.agents.calling import AgentResult, BackgroundLoop, Solve, call_function
from areal_x.agents.gateway.session import GatewaySession
from areal_x.agents.gateway_workflow import GatewayWorkflow
from areal_x.errors import ConfigError
from areal_x.protocols.workflow import EpisodeResult, Generator, RewardProcesses
from areal_x.rewards.pool import Reward, RewardLimits, RewardPool, SpreadPool
from areal_x.runtime.hosts import Hosts
from areal_x.runtime.waits import waiting, whose
from areal_x.types import Failed, Outcome, Scored, Task

GRACE_SECONDS = 10.0  # for an agent to return once its episode is over
NEVER_CALLED = (
    "the agent never called the model: check that its client uses the base_url and the key that it"
    " was given"
)
NO_REWARD = (
    "the agent gave no reward: return a number, give one to its session, or set a reward function"
)


@dataclass(frozen=True, kw_only=True)
class AgentWorkflow(GatewayWorkflow):
    """A workflow that runs an agent's code against a session, and scores the episode with the
    reward, or the text, that the agent returns."""

    reward: Reward | None = None
    """A function (task, text) -> number, or -> (number, {name: number}): scores the text that the
    agent returned, or the last completion if it returned none."""
    reward_workers: int = 4
    """Most processes that compute rewards at once."""
    reward_timeout_seconds: float = 10.0
    """Seconds after which a reward is killed with its process."""
    reward_limits: RewardLimits = field(default_factory=RewardLimits)
    """What a reward's process may use beside time."""
    pool: RewardProcesses | None = None

    def setup(self, tokenizer: Any) -> Any:
        pool = self.reward_processes(self.reward_workers)
        return replace(super().setup(tokenizer), pool=pool)

    def on_hosts(self, hosts: Hosts) -> Self:
        if not isinstance(self.pool, RewardPool):  # without a reward function
            return self
        return replace(self, pool=SpreadPool(self.pool, hosts))

    def reward_function(self) -> Reward | None:
        return self.reward

    def reward_processes(self, workers: int) -> RewardPool | None:
        if self.reward is None:
            return None
        return RewardPool(self.reward, workers, self.reward_timeout_seconds, self.reward_limits)

    async def work(self, task: Task, session: GatewaySession) -> AgentResult:
        """Runs the agent and returns its result: a reward, a text, or None."""
        raise NotImplementedError

    async def run(self, task: Task, engine: Generator) -> EpisodeResult:
        with await self.open(engine) as session:
            return await self.episode(session, await self.outcome(task, session))

    async def outcome(self, task: Task, session: GatewaySession) -> Outcome:
        """Raises: what the agent raised; EngineError if the engine was lost."""
        working = asyncio.ensure_future(self.work(task, session))
        ending = asyncio.ensure_future(session.ended())
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
        """Returns the outcome of an episode whose session the agent left open."""
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
    """An async function that does the task with any client, pointed at the run's own gateway. Its
    episodes share one event loop on a thread of its own."""

    solve: Solve
    """`async def solve(task, base_url, api_key)`; a plain function runs on a thread of its own. It
    returns the reward, a text for `reward` to score, or None if it gave its rewards to the session
    (POST base_url + "/reward", areal_x.agents.session). An Anthropic client takes the same
    base_url."""
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
