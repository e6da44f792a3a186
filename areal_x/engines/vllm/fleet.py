"""Which servers serve, what is done about those that do not, and where each request is: a pure
state machine.

    starting ──▶ checking ──▶ ready ⇄ suspect          quarantined   gives other numbers than the others: never again
       ▲            │           │       │              given up      ours, and started in vain a few times
       └── down ◀───┴───────────┴───────┘

It knows no clock, process or connection: events carry the time (seconds, from any beginning), and
the engine acts on the state. A request that entered is either placed on a server that is ready or
suspect, or it waits; it leaves when it was answered or is no longer wanted. What a server that was
lost had in hand waits again, before what came later.

Versions. `target` is the newest version that a swap has begun with, `floor` that of the last swap
that ended. A server that comes or comes back serves once it holds `target`; in a swap those that
have it and those that have `floor` serve.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from areal_x.engines.vllm.routing import choose

# heartbeats in a row without an answer, after which a server is lost; after the first it gets no
# new request
MISSES = 3
ERRORS = 3  # requests in a row that it fails
TRIES = 5  # starts in a row of a server of ours, before it is given up
FIRST_RETRY_SECONDS, LONGEST_RETRY_SECONDS = 1.0, 60.0
STEADY_SECONDS = 300.0  # a server that served this long has earned all its tries again


class State(Enum):
    STARTING = "starting"
    CHECKING = "checking"
    READY = "ready"
    SUSPECT = "suspect"
    DOWN = "down"
    QUARANTINED = "quarantined"
    GIVEN_UP = "given up"


SERVING = (State.READY, State.SUSPECT)
FINAL = (State.QUARANTINED, State.GIVEN_UP)


@dataclass
class Member:
    """A server. ours: started by the run, which then starts it again. limit: most requests at a
    time, None for any number. version: of the weights that it holds. reason: why it does not serve.
    progress_at: when it last answered a request, or had none to answer."""

    ours: bool
    limit: int | None = None
    state: State = State.DOWN
    version: int | None = None
    requests: set[int] = field(default_factory=set)
    misses: int = 0
    errors: int = 0
    tries: int = 0
    retry_at: float = 0.0
    ready_at: float = 0.0
    progress_at: float = 0.0
    reason: str = ""

    @property
    def serves(self) -> bool:
        return self.state in SERVING


class Fleet:
    """silence_seconds: a server that has requests and answers none for this long is lost.

    Events about a server that they no longer concern (a late answer of one that was lost) change
    nothing.
    """

    def __init__(self, version: int, silence_seconds: float) -> None:
        self.members: dict[str, Member] = {}
        # of each request, its server, or None while it waits
        self.placed: dict[int, str | None] = {}
        self.floor = self.target = version
        self.silence_seconds = silence_seconds
        self.none_since: float | None = None  # since when no server serves
        self._news: list[str] = []

    # ---- servers

    def join(self, name: str, ours: bool, now: float, limit: int | None = None) -> None:
        self.members[name] = Member(ours, limit, retry_at=now)
        self._update_none_since(now)

    def leave(self, name: str, now: float) -> None:
        self._release(self.members.pop(name))
        self._update_none_since(now)

    def due(self, now: float) -> list[str]:
        """Those that shall be started, or reached, now."""
        names = [
            name
            for name, member in self.members.items()
            if member.state is State.DOWN and member.retry_at <= now
        ]
        for name in names:
            self.members[name].state = State.STARTING
        return names

    def reached(self, name: str) -> None:
        """It answers: now it is given the weights, and checked."""
        if self._is(name, State.STARTING):
            self.members[name].state = State.CHECKING

    def accepted(self, name: str, version: int, now: float) -> bool:
        """It holds this version and passed the check. False: a newer one was begun meanwhile, which
        it must be given first."""
        if not self._is(name, State.CHECKING) or version != self.target:
            return False
        member = self.members[name]
        member.state, member.version, member.reason = State.READY, version, ""
        member.misses = member.errors = 0
        member.ready_at = member.progress_at = now
        if member.tries:
            self._news.append(f"{name} serves again, with the weights of version {version}")
        self._update_none_since(now)
        return True

    def lost(self, name: str, reason: str, now: float) -> None:
        """It died, hangs, failed too often, could not be started or could not be given weights."""
        member = self.members.get(name)
        if member is None or member.state is State.DOWN or member.state in FINAL:
            return
        if member.serves and now - member.ready_at > STEADY_SECONDS:
            member.tries = 0
        member.tries += 1
        if member.ours and member.tries > TRIES:
            self._end(name, State.GIVEN_UP, f"given up after {TRIES} starts in vain: {reason}", now)
            return
        said = (
            "is lost ({}): its requests go to others, and it"
            if member.serves
            else "does not come back ({}): it"
        )
        member.state, member.reason = State.DOWN, reason
        wait = min(FIRST_RETRY_SECONDS * 2 ** (member.tries - 1), LONGEST_RETRY_SECONDS)
        member.retry_at = now + wait
        self._release(member)
        again = "started again" if member.ours else "asked again"
        self._news.append(f"{name} {said.format(reason)} is {again} in {wait:g} s")
        self._update_none_since(now)

    def quarantine(self, name: str, reason: str, now: float) -> None:
        """It gives other numbers than it should: no token of it is trusted any more."""
        if name in self.members and self.members[name].state not in FINAL:
            self._end(name, State.QUARANTINED, f"quarantined: {reason}", now)

    def heartbeat(self, name: str, answered: bool, now: float) -> None:
        member = self.members.get(name)
        if member is None or not member.serves:
            return
        member.misses = 0 if answered else member.misses + 1
        if member.misses >= MISSES:
            self.lost(name, f"no answer to {MISSES} heartbeats", now)
        elif member.requests and now - member.progress_at > self.silence_seconds:
            self.lost(name, f"no request answered for {self.silence_seconds:g} s", now)
        else:
            member.state = State.READY if answered else State.SUSPECT

    # ---- requests

    def enter(self, request: int) -> None:
        self.placed[request] = None

    def route(self, request: int, cached: Mapping[str, int], slack: int, now: float) -> str | None:
        """Places a waiting request, or returns None while no server takes it. cached: how many of
        its tokens each server has in cache. slack: how many requests more than the least loaded one
        a server may have for its cache's sake."""
        loads = {
            name: len(member.requests)
            for name, member in self.members.items()
            if member.state is State.READY
            and (member.limit is None or len(member.requests) < member.limit)
        }
        name = choose(loads, cached, slack)
        if name is not None:
            member = self.members[name]
            if not member.requests:
                member.progress_at = now
            member.requests.add(request)
            self.placed[request] = name
        return name

    def answered(self, request: int, name: str, now: float) -> bool:
        """Whether the answer counts, as the request is with this server still: then the request has
        left."""
        if self.placed.get(request) != name:
            return False
        member = self.members[name]
        member.requests.discard(request)
        member.errors, member.progress_at = 0, now
        del self.placed[request]
        return True

    def failed(self, request: int, name: str, reason: str, now: float) -> None:
        """The server answered with an error, or broke off: the request waits again."""
        if self.placed.get(request) != name:
            return
        member = self.members[name]
        member.requests.discard(request)
        self.placed[request] = None
        member.errors += 1
        if member.errors >= ERRORS:
            self.lost(name, reason, now)
        elif member.state is State.READY:
            member.state = State.SUSPECT  # until the next heartbeat

    def withdraw(self, request: int) -> None:
        """The request is wanted no longer; harmless when it has left."""
        name = self.placed.pop(request, None)
        if name is not None:
            self.members[name].requests.discard(request)

    # ---- weights

    def begin(self, version: int) -> list[str]:
        """A swap to this version begins; returns the servers that shall be given it."""
        self.target = version
        return self.serving()

    def updated(self, name: str, now: float) -> None:
        member = self.members.get(name)
        if member is not None and member.serves:
            member.version, member.progress_at = self.target, now

    def published(self, now: float) -> None:
        """The swap has ended: who serves without its version is lost."""
        self.floor = self.target
        self._lose_others(now)

    def refused(self, now: float) -> None:
        """No server would have the version: all go on with the one before."""
        self.target = self.floor
        self._lose_others(now)

    # ---- what can be seen

    def serving(self) -> list[str]:
        return [name for name, member in self.members.items() if member.serves]

    def why_hopeless(self) -> str | None:
        """Why no server will ever serve again, or None."""
        if any(member.state not in FINAL for member in self.members.values()):
            return None
        return "no vLLM server is left: " + (
            "; ".join(f"{n} was {m.reason}" for n, m in self.members.items()) or "all have left"
        )

    def messages(self) -> list[str]:
        """Sentences for the user since the last call."""
        said, self._news = self._news, []
        return said

    def _is(self, name: str, state: State) -> bool:
        return name in self.members and self.members[name].state is state

    def _end(self, name: str, state: State, reason: str, now: float) -> None:
        member = self.members[name]
        member.state, member.reason = state, reason
        self._release(member)
        self._news.append(f"{name} was {reason}")
        self._update_none_since(now)

    def _release(self, member: Member) -> None:
        for request in member.requests:
            self.placed[request] = None
        member.requests.clear()
        member.version = None

    def _lose_others(self, now: float) -> None:
        for name in self.serving():
            if self.members[name].version != self.target:
                self.lost(name, f"it did not take the weights of version {self.target}", now)

    def _update_none_since(self, now: float) -> None:
        if self.serving():
            self.none_since = None
        elif self.none_since is None:
            self.none_since = now
