"""A session while it lives: its state, its conversation, and what waits for its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from areal_x.agents.chat.calls import Call
from areal_x.agents.chat.dialogue import ChatAnswer, ChatEngine, ChatRequest
from areal_x.agents.chat.rendering import Renderer
from areal_x.agents.gateway.errors import ApiError
from areal_x.agents.gateway.exchange import (
    CallAnswer,
    RequestedSampling,
    sampling_for,
    unmet_constraints,
)
from areal_x.agents.gateway.retries import SentAnswers
from areal_x.agents.gateway.session_state import SessionLimits, SessionState, over
from areal_x.agents.json_checks.schemas import CheckedSchemas
from areal_x.protocols.engine import EngineError, SamplingParams
from areal_x.protocols.workflow import Generator
from areal_x.rollout.episode import first_of
from areal_x.runtime.waits import waiting, whose
from areal_x.types import Message, Outcome

LOG = logging.getLogger(__name__)
T = TypeVar("T")


class GatewaySession:
    """One episode of an agent, as the workflow holds it. A context manager that closes itself.

    id, key, url: what the agent is told; base_url: what its client is given (an OpenAI client
    base_url, an Anthropic one url). conversations: of the answers that the responses API keeps, by
    their ids. overruled: how often the agent asked for other sampling or other tool calls than it
    got, by parameter. All methods belong to the gateway's event loop.
    """

    def __init__(
        self,
        id: str,
        key: str,
        url: str,
        engine: Generator,
        renderer: Renderer,
        sampling: SamplingParams,
        limits: SessionLimits,
        *,
        policy: str,
        told: set[str],
        closed: Callable[[str], None],
    ) -> None:
        self.id, self.key, self.url, self.base_url = id, key, url, f"{url}/v1"
        self.engine, self.renderer, self.sampling, self.limits = engine, renderer, sampling, limits
        self.chat_engine = ChatEngine(renderer, engine)
        self.state = SessionState(limits, _now())
        self.conversations: dict[str, tuple[Message, ...]] = {}
        self.overruled: Counter[str] = Counter()
        self.schemas = CheckedSchemas()
        self.sent = SentAnswers()
        self._policy, self._warned, self._closed = policy, told, closed
        self._running: set[asyncio.Future[ChatAnswer]] = set()
        self._changed = asyncio.Event()
        self._lost: EngineError | None = None

    def __enter__(self) -> GatewaySession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def outcome(self) -> Outcome | None:
        """None while it goes on."""
        return self.state.outcome

    def calls(self) -> tuple[Call, ...]:
        """What was finished so far, in the order in which it was asked for, with the rewards that
        were given."""
        return self.state.calls()

    async def ended(self) -> Outcome:
        """Waits for the end: by the agent, by `end`, or as its time is over. Raises: EngineError
        where the engine was lost."""
        while True:
            if self._lost is not None:
                raise self._lost
            if (outcome := self.state.abandon(_now())) is not None:
                self._stop()
                return outcome
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self.state.deadline()):
                    with waiting(whose(), "its session to end", idle=True):
                        await self._changed.wait()

    def touch(self) -> None:
        self._do(self.state.touch)

    def reward(self, value: float, call: str | None = None) -> str:
        """Gives a call its reward, by default the last; returns its id. Raises: ApiError, see
        SessionState."""
        return self._do(self.state.reward, call, value)

    def end(self, reward: float | None = None) -> Outcome:
        """Ends it with the episode's reward; what still runs is cancelled. Raises: ApiError where
        it was over."""
        self._do(self.state.end, reward)
        assert self.outcome is not None
        return self.outcome

    def close(self) -> None:
        """Shuts it to its agent; safe to call twice. A session that was not over becomes a failed
        one."""
        self.state.fail("the session was closed before the agent had ended it")
        self._changed.set()
        self._stop()
        self._closed(self.id)

    def complete(self, chat_request: ChatRequest, requested: RequestedSampling) -> ChatRequest:
        """The request with the sampling that the run allows. What it does not allow is counted, and
        said once a run."""
        chosen, overruled = sampling_for(self.sampling, requested, self._policy)
        self.overruled.update(overruled)
        for name in sorted(set(overruled) - self._warned):
            self._warned.add(name)
            LOG.warning(
                "an agent asked for %s = %s and gets %s, as gateway.sampling = %r (said once)",
                name,
                getattr(requested, name),
                getattr(chosen, name),
                self._policy,
            )
        return replace(chat_request, sampling=chosen)

    async def answers(self, chat_request: ChatRequest, ids: Sequence[str]) -> list[CallAnswer]:
        """As many completions as there are ids, recorded as calls when all of them are there, and
        only then.

        Raises: ApiError by limits, an end meanwhile, or an aborted completion; what the speaker
        raises.
        """
        self._do(self.state.begin, ids)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._answer(chat_request, id)) for id in ids]
            answers = [CallAnswer(id, task.result()) for id, task in zip(ids, tasks, strict=True)]
            for one in answers:
                self._do(self.state.finish, Call(one.id, one.answer.prompt, one.answer.completion))
                await self._count_unmet(chat_request, one.answer)
        except BaseExceptionGroup as errors:
            error = first_of(errors)
            if isinstance(error, EngineError):
                self._lost = error
                self.state.fail(str(error))
            raise error from None
        finally:
            self._do(self.state.drop, ids)
        return answers

    def summary(self) -> dict[str, Any]:
        """What GET tells of it: counts and numbers, no texts."""
        calls = self.state.calls()
        return {
            "id": self.id,
            "state": "open" if self.outcome is None else type(self.outcome).__name__.lower(),
            "calls": len(calls),
            "running": self.state.running,
            "prompt_tokens": sum(len(call.prompt) for call in calls),
            "generated_tokens": self.state.generated,
            "rewards": dict(self.state.rewards),
            "reward": getattr(self.outcome, "reward", None),
            "seconds": _now() - self.state.opened,
            "limits": dict(vars(self.limits)),
            "overruled": dict(self.overruled),
        }

    async def _answer(self, chat_request: ChatRequest, id: str) -> ChatAnswer:
        work = asyncio.ensure_future(self.chat_engine.answer(chat_request, id))
        self._running.add(work)
        try:
            answer = await work
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if self.outcome is not None and current is not None and not current.cancelling():
                raise over() from None
            raise
        finally:
            self._running.discard(work)
        if answer.completion.finish_reason == "abort":
            raise ApiError(
                503, "the engine aborted the completion: ask again", "aborted", retry_after=1
            )
        return answer

    async def _count_unmet(self, chat_request: ChatRequest, answer: ChatAnswer) -> None:
        missed = await unmet_constraints(chat_request, answer.reply)
        self.overruled.update(missed)
        for name in set(missed) - self._warned:
            self._warned.add(name)
            requested = chat_request.format if name == "format" else chat_request.template[name]
            LOG.warning(
                "an agent asked for %s = %.200s, which the model did not follow (said once)",
                name,
                requested,
            )

    def _do(self, change: Callable[..., T], *arguments: Any) -> T:
        try:
            return change(*arguments, _now())
        finally:
            self._changed.set()
            if self.outcome is not None:
                self._stop()

    def _stop(self) -> None:
        for work in list(self._running):
            work.cancel()


def _now() -> float:
    return asyncio.get_running_loop().time()
