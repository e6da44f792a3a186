"""The life of a session: calls, rewards, an end. A state machine that knows neither clock, socket
nor engine."""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import gin
import numpy as np

from areal_x.agents.chat.calls import Call
from areal_x.agents.gateway.errors import ApiError
from areal_x.errors import at_least, positive
from areal_x.types import Failed, Outcome, Scored, TimedOut

T = TypeVar("T")

REMEMBERED = 4096  # closed sessions, to distinguish them from unknown ones


@gin.configurable("session_limits")
@dataclass(frozen=True)
class SessionLimits:
    """Limits of one session (one episode of an agent)."""

    calls: int = 1000
    """Most completions that it may request."""
    tokens: int = 1_000_000
    """Once this many tokens were generated, further calls are refused."""
    seconds: float = 3600.0
    """Longest time from its opening to its end."""
    idle_seconds: float = 600.0
    """Longest time without any request, and with none in progress; a tool may take as long."""
    body_megabytes: float = 8.0
    """Largest request."""

    def __post_init__(self) -> None:
        at_least("session_limits.calls", self.calls, 1)
        at_least("session_limits.tokens", self.tokens, 1)
        positive("session_limits.seconds", self.seconds)
        positive("session_limits.idle_seconds", self.idle_seconds)
        positive("session_limits.body_megabytes", self.body_megabytes)


@dataclass
class SessionState:
    """Every method with the parameter `now` (seconds of any one clock) counts as activity, except
    `abandon`.

    Raises: ApiError for a request that the client should not have made.
    """

    limits: SessionLimits
    opened: float
    touched: float = field(init=False)
    outcome: Outcome | None = None  # None while the session is open
    rewards: dict[str, float] = field(default_factory=dict)  # by call
    generated: int = 0  # tokens
    _unseen: set[str] = field(default_factory=set)  # calls whose response no client read
    # in the order in which they began; None while in progress
    _calls: dict[str, Call | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.touched = self.opened

    @property
    def running(self) -> int:
        return sum(call is None for call in self._calls.values())

    def calls(self) -> tuple[Call, ...]:
        """Returns the finished calls in the order in which they began, each with its reward, if
        any.

        A call whose response no client read is left out, unless it was given a reward or a later
        call continues it.
        """
        finished = [call for call in self._calls.values() if call is not None]
        if self._unseen:
            finished = [
                call
                for call in finished
                if call.id not in self._unseen or self._is_known(call, finished)
            ]
        return tuple(replace(call, reward=self.rewards.get(call.id)) for call in finished)

    def unseen(self, ids: Iterable[str]) -> None:
        """Records that no client read the response to these calls."""
        self._unseen.update(ids)

    def seen(self, ids: Iterable[str]) -> None:
        """Records that the response to these calls is sent, possibly again."""
        self._unseen.difference_update(ids)

    def touch(self, now: float) -> None:
        """Records a request of any kind. Once the session is over it has no effect."""
        if self.abandon(now) is None:
            self.touched = max(self.touched, now)

    def begin(self, ids: Iterable[str], now: float) -> None:
        """Starts calls that are requested together: all of them, or none."""
        self._go_on(now)
        ids = tuple(ids)
        if len(self._calls) + len(ids) > self.limits.calls:
            raise _limit(f"{self.limits.calls} calls", "calls")
        if self.generated >= self.limits.tokens:
            raise _limit(f"{self.limits.tokens} generated tokens", "tokens")
        self._calls |= dict.fromkeys(ids)

    def finish(self, call: Call, now: float) -> None:
        self._go_on(now)
        self._calls[call.id] = call
        self.generated += len(call.completion.tokens)

    def drop(self, ids: Iterable[str], now: float) -> None:
        """Forgets those of these calls that have no completion: they failed, or their client
        disconnected."""
        self.touch(now)
        for call in ids:
            if call in self._calls and self._calls[call] is None:
                del self._calls[call]

    def reward(self, call: str | None, value: float, now: float) -> str:
        """Gives a call its reward, by default the last finished one, and returns its id."""
        self._go_on(now)
        _finite(value)
        if call is None:
            finished = self.calls()
            if not finished:
                raise ApiError(
                    404, "no call has finished that could be rewarded", "no_such_call", "call"
                )
            call = finished[-1].id
        if call not in self._calls:
            raise ApiError(404, f"the session has no call {call!r}", "no_such_call", "call")
        if self._calls[call] is None:
            raise ApiError(409, f"call {call} is not finished yet", "call_running", "call")
        if call in self.rewards:
            raise ApiError(
                409,
                f"call {call} already has a reward: {self.rewards[call]:g}",
                "already_rewarded",
                "call",
            )
        self.rewards[call] = float(value)
        return call

    def end(self, reward: float | None, now: float) -> None:
        """Ends the session with the episode's reward, by default the sum of its calls' rewards."""
        self._go_on(now)
        if reward is not None:
            _finite(reward)
            self.outcome = Scored(float(reward))
        elif self.rewards:
            self.outcome = Scored(math.fsum(self.rewards.values()))
        else:
            self.outcome = Failed("the session was ended without a reward")

    def fail(self, why: str) -> None:
        """Ends the session from the run's side; no effect once it is over."""
        self.outcome = self.outcome or Failed(why)

    def deadline(self) -> float:
        """Returns the time at which `abandon` will end the session if nothing happens before."""
        quiet = math.inf if self.running else self.touched + self.limits.idle_seconds
        return min(quiet, self.opened + self.limits.seconds)

    def abandon(self, now: float) -> Outcome | None:
        """Ends the session as timed out once its time is over, and returns its outcome so far."""
        if self.outcome is None and now >= self.deadline():
            self.outcome = TimedOut(now - self.opened)
        return self.outcome

    def _is_known(self, call: Call, calls: Sequence[Call]) -> bool:
        held = np.concatenate([call.prompt, call.completion.tokens])
        return call.id in self.rewards or any(
            np.array_equal(other.prompt[: len(held)], held) for other in calls
        )

    def _go_on(self, now: float) -> None:
        self.touch(now)
        if self.outcome is not None:
            raise over()


@dataclass
class _Entry(Generic[T]):
    name: str
    key: str
    thing: T | None  # None once it was closed


@dataclass
class SessionKeys(Generic[T]):
    """The session of each key. A key is looked up by its digest, so that response times reveal
    nothing about it."""

    _by_name: dict[str, _Entry[T]] = field(default_factory=dict)
    _by_digest: dict[bytes, _Entry[T]] = field(default_factory=dict)
    _closed: dict[str, None] = field(default_factory=dict)  # in the order in which they were

    def __len__(self) -> int:
        return len(self._by_name) - len(self._closed)

    def open(self, name: str, key: str, thing: T) -> None:
        self._by_name[name] = self._by_digest[_digest(key)] = _Entry(name, key, thing)

    def close(self, name: str) -> None:
        entry = self._by_name.get(name)
        if entry is None or entry.thing is None:
            return
        entry.thing = None
        self._closed[name] = None
        if len(self._closed) > REMEMBERED:
            oldest = self._by_name.pop(next(iter(self._closed)))
            del self._closed[oldest.name], self._by_digest[_digest(oldest.key)]

    def things(self) -> list[T]:
        return [entry.thing for entry in self._by_name.values() if entry.thing is not None]

    def named(self, name: str) -> T:
        """Returns the open session of this name, for a process that found it by a key. Raises:
        ApiError 409 for any other."""
        entry = self._by_name.get(name)
        if entry is None or entry.thing is None:
            raise over()
        return entry.thing

    def find(self, name: str | None, keys: Sequence[str]) -> T:
        """Returns the session of this name, or of a key alone.

        keys: those that the client sent, one of which must match. Raises: ApiError 404 for an
        unknown name, 401 if no key matches, 409 for a session that was closed.
        """
        if name is not None:
            entry = self._by_name.get(name)
            if entry is None:
                raise ApiError(404, f"there is no session {name!r}", "no_such_session")
        else:
            entry = next(
                (e for key in keys if (e := self._by_digest.get(_digest(key))) is not None), None
            )
        if entry is None or not any(same(key, entry.key) for key in keys):
            raise ApiError(
                401,
                "the key is missing or wrong: send the session's as `Authorization: Bearer KEY` or"
                " `x-api-key: KEY`",
                "invalid_api_key",
            )
        if entry.thing is None:
            raise over()
        return entry.thing


def same(given: str, key: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "surrogatepass"), key.encode())


def over() -> ApiError:
    return ApiError(409, "the session is over", "session_over")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _finite(reward: float) -> None:
    if not math.isfinite(reward):
        raise ApiError(
            400, f"a reward must be a finite number, not {reward}", "invalid_value", "reward"
        )


def _limit(what: str, name: str) -> ApiError:
    return ApiError(
        429, f"the session has used its {what}: raise session_limits.{name}", f"session_{name}"
    )
