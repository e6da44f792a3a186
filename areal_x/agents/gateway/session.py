"""A session while it is open: its state, its conversation, and the wait for its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from areal_x.agents.chat.calls import Call
from areal_x.agents.chat.dialogue import ChatAnswer, ChatEngine, ChatRequest
from areal_x.agents.chat.rendering import Renderer
from areal_x.agents.gateway.content import IMAGES, without_images
from areal_x.agents.gateway.errors import ApiError
from areal_x.agents.gateway.exchange import (
    CallAnswer,
    Exchange,
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
from areal_x.types import Message, Outcome, Scored

LOG = logging.getLogger(__name__)
T = TypeVar("T")
MOST_STORED = 256  # responses, each with its request
IGNORED = "ignored "  # before the names among those that were logged


class GatewaySession:
    """One episode of an agent, as the workflow holds it. A context manager that closes itself.

    id, key, url: what the agent receives; base_url: for its client (an OpenAI client uses base_url,
    an Anthropic one url). conversations: of the responses that the responses API stores, by id; stored: the latest of
    these responses.
    overruled: how often the agent requested other sampling or other tool calls than it got, by
    parameter. ignored: how many requests held a parameter, or a part of a message, that has no
    effect because nobody here knows it or the model cannot be shown it. All methods belong to the gateway's event loop.
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
        warned: set[str],
        closed: Callable[[str], None],
    ) -> None:
        self.id = id
        self.key = key
        self.url = url
        self.base_url = f"{url}/v1"
        self.engine = engine
        self.renderer = renderer
        self.sampling = sampling
        self.limits = limits
        self.chat_engine = ChatEngine(renderer, engine)
        self.state = SessionState(limits, _now())
        self.conversations: dict[str, tuple[Message, ...]] = {}
        self.stored: OrderedDict[str, tuple[Exchange, Sequence[CallAnswer]]] = OrderedDict()
        self.overruled: Counter[str] = Counter()
        self.ignored: Counter[str] = Counter()
        self.schemas = CheckedSchemas()
        self.sent = SentAnswers()
        self._policy = policy
        self._warned = warned
        self._closed = closed
        self._running: set[asyncio.Future[ChatAnswer]] = set()
        self._changed = asyncio.Event()
        self._lost: EngineError | None = None

    def __enter__(self) -> GatewaySession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def outcome(self) -> Outcome | None:
        """None while the session is open."""
        return self.state.outcome

    def calls(self) -> tuple[Call, ...]:
        """Returns the calls that have finished, in the order in which they were requested, with the
        rewards that they were given."""
        return self.state.calls()

    async def ended(self) -> Outcome:
        """Waits for the end: by the agent, by `end`, or by a time limit. Raises: EngineError if the
        engine was lost."""
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
        """Ends the session with the episode's reward; calls in progress are cancelled. Raises:
        ApiError if it was over."""
        self._do(self.state.end, reward)
        assert self.outcome is not None
        return self.outcome

    def close(self) -> None:
        """Closes the session to its agent; safe to call twice. A session that was still open
        becomes a failed one."""
        self.state.fail("the session was closed before the agent ended it")
        self._changed.set()
        self._stop()
        self._closed(self.id)

    def ignore(self, names: Iterable[str]) -> None:
        """Counts what had no effect in a request, and logs each name once per run."""
        found = sorted(set(names) - (IMAGES if self.renderer.sees_images else frozenset()))
        self.ignored.update(found)
        fresh = [name for name in found if IGNORED + name not in self._warned]
        if fresh:
            self._warned.update(IGNORED + name for name in fresh)
            LOG.warning("an agent sent what has no effect here: %s (logged once)", ", ".join(fresh))

    def store(self, id: str, exchange: Exchange, answers: Sequence[CallAnswer]) -> None:
        """Keeps a response to be retrieved by its id, until many others were."""
        self.stored[id] = exchange, answers
        if len(self.stored) > MOST_STORED:
            self.stored.popitem(last=False)

    def complete(self, chat_request: ChatRequest, requested: RequestedSampling) -> ChatRequest:
        """Returns the request with the sampling that the run allows. Parameters that it overrules
        are counted, and logged once per run."""
        chosen, overruled = sampling_for(self.sampling, requested, self._policy)
        self.overruled.update(overruled)
        for name in sorted(set(overruled) - self._warned):
            self._warned.add(name)
            LOG.warning(
                "an agent requested %s = %s and gets %s, because of gateway.sampling = %r (logged"
                " once)",
                name,
                getattr(requested, name),
                getattr(chosen, name),
                self._policy,
            )
        return replace(self.shown(chat_request), sampling=chosen)

    def shown(self, chat_request: ChatRequest) -> ChatRequest:
        """Returns the request with notices in place of images if the model reads none."""
        if self.renderer.sees_images:
            return chat_request
        return replace(chat_request, messages=tuple(without_images(chat_request.messages)))

    async def answers(self, chat_request: ChatRequest, ids: Sequence[str]) -> list[CallAnswer]:
        """Returns as many completions as there are ids, and records them as calls once all have
        finished.

        Raises: ApiError because of limits, the session's end, or an aborted completion; what the
        chat engine raises.
        """
        self._do(self.state.begin, ids)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._answer(chat_request, id)) for id in ids]
            answers = [CallAnswer(id, task.result()) for id, task in zip(ids, tasks, strict=True)]
            for one in answers:
                answer = one.answer
                call = Call(one.id, answer.prompt, answer.completion, images=answer.images)
                self._do(self.state.finish, call)
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
        """Returns the response to GET: counts and numbers, no texts."""
        calls = self.state.calls()
        return {
            "id": self.id,
            "state": "open" if self.outcome is None else type(self.outcome).__name__.lower(),
            "calls": len(calls),
            "running": self.state.running,
            "prompt_tokens": sum(len(call.prompt) for call in calls),
            "generated_tokens": self.state.generated,
            "rewards": dict(self.state.rewards),
            "reward": self.outcome.reward if isinstance(self.outcome, Scored) else None,
            "seconds": _now() - self.state.opened,
            "limits": dict(vars(self.limits)),
            "overruled": dict(self.overruled),
            "ignored": dict(self.ignored),
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
                503, "the engine aborted the completion: try again", "aborted", retry_after=1
            )
        return answer

    async def _count_unmet(self, chat_request: ChatRequest, answer: ChatAnswer) -> None:
        missed = await unmet_constraints(chat_request, answer.reply)
        self.overruled.update(missed)
        for name in set(missed) - self._warned:
            self._warned.add(name)
            requested = chat_request.format if name == "format" else chat_request.template[name]
            LOG.warning(
                "an agent requested %s = %.200s, which the model did not follow (logged once)",
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
