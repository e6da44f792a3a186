"""A session while it is open: its state, its conversation, and the wait for its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from areal_x.agents.chat.calls import Call
from areal_x.agents.chat.prompts import Replies
from areal_x.agents.chat.rendering import Renderer
from areal_x.agents.gateway.content import IMAGES
from areal_x.agents.gateway.errors import ApiError
from areal_x.agents.gateway.exchange import CallAnswer, RequestedSampling, sampling_for
from areal_x.agents.gateway.retries import Attempt, Client, SentAnswer, SentAnswers
from areal_x.agents.gateway.session_state import SessionLimits, SessionState, over
from areal_x.agents.json_checks.schemas import CheckedSchemas
from areal_x.protocols.engine import Completion, EngineError, Request, SamplingParams
from areal_x.protocols.workflow import Generator
from areal_x.runtime.waits import waiting, whose
from areal_x.types import Outcome, Scored

LOG = logging.getLogger(__name__)
T = TypeVar("T")
MOST_STORED = 256  # responses, each with its request
IGNORED = "ignored "  # before the names among those that were logged


@dataclass(frozen=True)
class StoredResponse:
    """A response of the responses API. id: its own. body: as JSON. conversation: what a request with
    this id continues; a worker process encodes it."""

    id: str
    body: bytes
    conversation: Any


class GatewaySession:
    """One episode of an agent, as the workflow holds it: the only record of its calls, wherever
    their requests are parsed and answered. A context manager that closes itself.

    id, key, url: what the agent receives; base_url: for its client (an OpenAI client uses base_url,
    an Anthropic one url). replies: the policy's, with which later prompts begin. conversations: of
    the responses that the responses API stores, by id; stored: the latest of these responses.
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
        self.replies: Replies = {}
        self.state = SessionState(limits, _now())
        self.conversations: dict[str, Any] = {}
        self.stored: OrderedDict[str, bytes] = OrderedDict()
        self.overruled: Counter[str] = Counter()
        self.ignored: Counter[str] = Counter()
        self.schemas = CheckedSchemas()
        self.sent = SentAnswers()
        self._policy = policy
        self._warned = warned
        self._closed = closed
        self._running: set[asyncio.Future[Completion]] = set()
        self._made: dict[str, Call] = {}  # calls that have a completion and are not finished
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

    def allow(self, requested: RequestedSampling) -> SamplingParams:
        """Returns the sampling that the run allows. Parameters that it overrules are counted, and
        logged once per run."""
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
        return chosen

    def count_unmet(self, unmet: Mapping[str, str]) -> None:
        """Counts constraints that a reply does not meet, each with what was requested, and logs them
        once per run."""
        self.overruled.update(list(unmet))
        for name in set(unmet) - self._warned:
            self._warned.add(name)
            LOG.warning(
                "an agent requested %s = %.200s, which the model did not follow (logged once)",
                name,
                unmet[name],
            )

    def begin(
        self,
        ids: Sequence[str],
        attempt: Attempt,
        requested: RequestedSampling,
        ignored: Iterable[str],
    ) -> SamplingParams:
        """Starts the calls of a request, and returns how they are sampled. Raises: ApiError because
        of limits or the session's end."""
        self.ignore(ignored)
        chosen = self.allow(requested)
        self.sent.begin(attempt)
        self._do(self.state.begin, ids)
        return chosen

    async def generate(self, id: str, request: Request) -> Completion:
        """Returns the completion of a call that has begun; the end of the session cancels it.

        Raises: ApiError because of the session's end, or an aborted completion; what the engine
        raises.
        """
        if self.outcome is not None:
            raise over()
        work = asyncio.ensure_future(self.engine.generate(request))
        self._running.add(work)
        try:
            completion = await work
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if self.outcome is not None and current is not None and not current.cancelling():
                raise over() from None
            raise
        except EngineError as error:
            self._lost = error
            self.state.fail(str(error))
            self._changed.set()
            raise
        finally:
            self._running.discard(work)
        if completion.finish_reason == "abort":
            raise ApiError(
                503, "the engine aborted the completion: try again", "aborted", retry_after=1
            )
        self._made[id] = Call(id, request.tokens, completion, images=request.images)
        return completion

    def finish(
        self,
        answers: Sequence[CallAnswer],
        attempt: Attempt,
        client: Client | None,
        stored: StoredResponse | None,
    ) -> None:
        """Records the calls of a request, all of which have a completion. Raises: ApiError because
        of the session's end."""
        for one in answers:
            self._do(self.state.finish, self._made.pop(one.id))
        self.sent.keep(SentAnswer(attempt, answers, client))
        if stored is None:
            return
        self.conversations[stored.id] = stored.conversation
        self.stored[stored.id] = stored.body
        if len(self.stored) > MOST_STORED:
            self.stored.popitem(last=False)

    def forget(self, id: str) -> bool:
        """Forgets a stored response; False if there is none."""
        if self.stored.pop(id, None) is None:
            return False
        del self.conversations[id]
        return True

    def about(self) -> dict[str, str]:
        """Returns what an agent is told that requested the session."""
        return {"id": self.id, "key": self.key, "url": self.url, "base_url": self.base_url}

    def made(self, id: str) -> Call:
        """Returns a call that has a completion, whose request is not finished."""
        return self._made[id]

    def drop(self, ids: Sequence[str]) -> None:
        """Forgets those of these calls that are not finished. No client reads a response to the
        others."""
        for id in ids:
            self._made.pop(id, None)
        self.state.unseen(ids)
        self._do(self.state.drop, ids)

    def find_lost(
        self, attempt: Attempt, client: Client | None, is_open: Callable[[Client | None], bool]
    ) -> SentAnswer | None:
        """Returns the response that this attempt requests again, which is sent to this client; None
        if there is none. See SentAnswers.find_lost."""
        found = self.sent.find_lost(attempt, client, is_open)
        if found is not None:
            self.state.seen([one.id for one in found.answers])
        return found

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
