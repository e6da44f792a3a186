"""The fleet: which servers serve, what is done about those that do not, and where each request is.
A pure state machine.

    starting ──▶ checking ──▶ ready ⇄ suspect          quarantined   deviates from the other servers: never used again
       ▲            │           │       │              given up      started by the run, several times in vain
       └── down ◀───┴───────────┴───────┘              leaving       gets nothing new, and hands over what it has

It knows no clock, process or connection: events carry the time (seconds, from any origin), and the
engine acts on the state. A request that entered is either placed on a ready or suspect server, or
waits; it leaves when it was answered or is no longer wanted. The requests of a lost server wait
again, ahead of later ones. A leaving server keeps those that it has until they are answered, in
part or whole, or until it has left.

Versions. `target` is the newest version that a swap has begun with, `floor` that of the last
completed swap. A server that joins or returns serves once it has `target`; during a swap, servers
with either `target` or `floor` serve.

Sleep. While the servers sleep, their accelerators are the trainer's: none is started or reached, and
none is lost because it answers no request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from areal_x.engines.fleet.routing import Loads, choose

# Missed heartbeats in a row after which a server is lost; after the first it gets no new requests.
MISSES = 3
ERRORS = 3  # failed requests in a row after which a server is lost
TRIES = 5  # failed starts in a row after which a server of ours is given up
FIRST_RETRY_SECONDS, LONGEST_RETRY_SECONDS = 1.0, 60.0
STEADY_SECONDS = 300.0  # after serving this long, a server's tries are counted anew


class State(Enum):
    STARTING = "starting"
    CHECKING = "checking"
    READY = "ready"
    SUSPECT = "suspect"
    DOWN = "down"
    QUARANTINED = "quarantined"
    GIVEN_UP = "given up"
    LEAVING = "leaving"


SERVING = (State.READY, State.SUSPECT)
FINAL = (State.QUARANTINED, State.GIVEN_UP)


@dataclass
class Member:
    """A server of the fleet."""

    ours: bool
    """True if the run started it, and restarts it."""
    limit: int | None = None
    """Maximum number of requests at a time; None for any number."""
    state: State = State.DOWN
    version: int | None = None
    """Version of its weights."""
    requests: set[int] = field(default_factory=set)
    misses: int = 0
    errors: int = 0
    tries: int = 0
    retry_at: float = 0.0
    ready_at: float = 0.0
    progress_at: float = 0.0
    """When it last answered a request, or had none to answer."""
    reason: str = ""
    """Why it does not serve."""

    @property
    def serves(self) -> bool:
        return self.state in SERVING

    @property
    def takes_requests(self) -> bool:
        room = self.limit is None or len(self.requests) < self.limit
        return self.state is State.READY and room


class Fleet:
    """The servers and the requests placed on them.

    silence_seconds: a server that has requests and answers none for this long is lost.

    Events about a server that no longer concern it (such as a late answer of a lost one) change
    nothing.
    """

    def __init__(self, version: int, silence_seconds: float) -> None:
        self.members: dict[str, Member] = {}
        # each request's server, or None while it waits
        self.placed: dict[int, str | None] = {}
        self.loads = Loads()  # of the servers that take requests
        self._serving: set[str] = set()
        self.floor = self.target = version
        self.silence_seconds = silence_seconds
        self.asleep = False
        self.none_since: float | None = None  # since when no server serves
        self._messages: list[str] = []

    # ---- servers

    def join(self, name: str, ours: bool, now: float, limit: int | None = None) -> None:
        self.members[name] = Member(ours, limit, retry_at=now)
        self._update_none_since(now)

    def leave(self, name: str, now: float) -> None:
        self._release(self.members.pop(name))
        self._update_load(name)
        self._update_none_since(now)

    def retire(self, name: str, now: float) -> None:
        """The server is about to leave: it gets no new requests, and is not started again."""
        if name in self.members:
            self.members[name].state = State.LEAVING
            self._update_load(name)
            self._update_none_since(now)

    def is_leaving(self, name: str) -> bool:
        return self._is(name, State.LEAVING)

    def set_limit(self, name: str, limit: int) -> None:
        """Sets how many requests a server may have at a time; those that it has stay."""
        self.members[name].limit = limit
        self._update_load(name)

    def due(self, now: float) -> list[str]:
        """Returns the servers to be started, or reached, now."""
        if self.asleep:
            return []
        names = [
            name
            for name, member in self.members.items()
            if member.state is State.DOWN and member.retry_at <= now
        ]
        for name in names:
            self.members[name].state = State.STARTING
        return names

    def reached(self, name: str) -> None:
        """The server responds: next it gets the weights and is checked."""
        if self._is(name, State.STARTING):
            self.members[name].state = State.CHECKING

    def accepted(self, name: str, version: int, now: float) -> bool:
        """The server has this version and passed the check. Returns False if a newer version was
        begun meanwhile, which it must load first."""
        if not self._is(name, State.CHECKING) or version != self.target:
            return False
        member = self.members[name]
        member.state, member.version, member.reason = State.READY, version, ""
        member.misses = member.errors = 0
        member.ready_at = member.progress_at = now
        if member.tries:
            self._messages.append(f"{name} serves again, with the weights of version {version}")
        self._update_load(name)
        self._update_none_since(now)
        return True

    def lost(self, name: str, reason: str, now: float) -> None:
        """The server died, hangs, failed too often, could not be started or could not load
        weights."""
        member = self.members.get(name)
        if member is None or member.state is State.DOWN or member.state in FINAL:
            return
        if member.state is State.LEAVING:
            self._release(member)
            return
        if member.serves and now - member.ready_at > STEADY_SECONDS:
            member.tries = 0
        member.tries += 1
        if member.ours and member.tries > TRIES:
            self._end(name, State.GIVEN_UP, f"given up after {TRIES} starts in vain: {reason}", now)
            return
        was_serving = member.serves
        member.state, member.reason = State.DOWN, reason
        wait = min(FIRST_RETRY_SECONDS * 2 ** (member.tries - 1), LONGEST_RETRY_SECONDS)
        member.retry_at = now + wait
        self._release(member)
        self._update_load(name)
        retry = f"{'restarted' if member.ours else 'tried again'} in {wait:g} s"
        if was_serving:
            message = f"{name} is lost ({reason}): its requests go to others, and it is {retry}"
        else:
            message = f"{name} does not come back ({reason}): it is {retry}"
        self._messages.append(message)
        self._update_none_since(now)

    def quarantine(self, name: str, reason: str, now: float) -> None:
        """The server's numbers are wrong: none of its tokens is trusted any more."""
        if name in self.members and self.members[name].state not in FINAL:
            self._end(name, State.QUARANTINED, f"quarantined: {reason}", now)

    def heartbeat(self, name: str, answered: bool, now: float) -> None:
        member = self.members.get(name)
        if member is None or not member.serves:
            return
        member.misses = 0 if answered else member.misses + 1
        if member.misses >= MISSES:
            self.lost(name, f"no answer to {MISSES} heartbeats", now)
        elif (
            member.requests and not self.asleep and now - member.progress_at > self.silence_seconds
        ):
            self.lost(name, f"no request answered for {self.silence_seconds:g} s", now)
        else:
            member.state = State.READY if answered else State.SUSPECT
            self._update_load(name)

    # ---- requests

    def enter(self, request: int) -> None:
        self.placed[request] = None

    def route(self, request: int, cached: Mapping[str, int], slack: int, now: float) -> str | None:
        """Places a waiting request and returns its server; None while no server takes it. cached:
        how many of its tokens some servers have in cache. slack: how many requests more than the
        least loaded server one may have because of its cache."""
        name = choose(self.loads, cached, slack)
        if name is not None:
            member = self.members[name]
            if not member.requests:
                member.progress_at = now
            member.requests.add(request)
            self.placed[request] = name
            self._update_load(name)
        return name

    def answered(self, request: int, name: str, now: float) -> bool:
        """Returns True if the answer counts, because the request is still on this server; the
        request then leaves."""
        if self.placed.get(request) != name:
            return False
        member = self.members[name]
        member.requests.discard(request)
        member.errors, member.progress_at = 0, now
        del self.placed[request]
        self._update_load(name)
        return True

    def failed(self, request: int, name: str, reason: str, now: float) -> None:
        """The server responded with an error, or broke off: the request waits again."""
        if self.placed.get(request) != name:
            return
        member = self.members[name]
        member.requests.discard(request)
        self.placed[request] = None
        member.errors += 1
        if member.errors >= ERRORS:
            self.lost(name, reason, now)
        elif member.state is State.READY:
            member.state = State.SUSPECT  # until its next heartbeat
        self._update_load(name)

    def withdraw(self, request: int) -> None:
        """Removes a request that is no longer wanted; harmless if it has left."""
        name = self.placed.pop(request, None)
        if name is not None:
            self.members[name].requests.discard(request)
            self._update_load(name)

    # ---- weights

    def begin(self, version: int) -> list[str]:
        """Begins a swap to this version; returns the servers that must load it."""
        self.target = version
        return self.serving()

    def updated(self, name: str, now: float) -> None:
        member = self.members.get(name)
        if member is not None and member.serves:
            member.version, member.progress_at = self.target, now

    def published(self, now: float) -> None:
        """Ends the swap: servers without its version are lost."""
        self.floor = self.target
        self._lose_others(now)

    def refused(self, now: float) -> None:
        """Abandons the swap, as no server could load the version: all continue with the previous
        one."""
        self.target = self.floor
        self._lose_others(now)

    # ---- sleep

    def sleep(self) -> None:
        """The servers are about to sleep."""
        self.asleep = True

    def wake(self, now: float) -> None:
        """The servers are about to wake: clocks that ran while they slept begin anew."""
        self.asleep = False
        for member in self.members.values():
            member.progress_at = now
        if self.none_since is not None:
            self.none_since = now

    # ---- what can be seen

    def serving(self) -> list[str]:
        return [name for name, member in self.members.items() if member.serves]

    def serves(self, name: str) -> bool:
        return name in self._serving

    def why_hopeless(self) -> str | None:
        """Returns why no server will ever serve again, or None."""
        if any(member.state not in FINAL for member in self.members.values()):
            return None
        return "no server is left: " + (
            "; ".join(f"{n} was {m.reason}" for n, m in self.members.items()) or "all have left"
        )

    def messages(self) -> list[str]:
        """Returns the messages for the user since the last call."""
        messages, self._messages = self._messages, []
        return messages

    def _is(self, name: str, state: State) -> bool:
        return name in self.members and self.members[name].state is state

    def _end(self, name: str, state: State, reason: str, now: float) -> None:
        member = self.members[name]
        member.state, member.reason = state, reason
        self._release(member)
        self._update_load(name)
        self._messages.append(f"{name} was {reason}")
        self._update_none_since(now)

    def _release(self, member: Member) -> None:
        for request in member.requests:
            self.placed[request] = None
        member.requests.clear()
        member.version = None

    def _update_load(self, name: str) -> None:
        """Keeps `loads`, and which servers serve, true after any change of a server."""
        member = self.members.get(name)
        if member is not None and member.serves:
            self._serving.add(name)
        else:
            self._serving.discard(name)
        if member is not None and member.takes_requests:
            self.loads.set(name, len(member.requests))
        else:
            self.loads.remove(name)

    def _lose_others(self, now: float) -> None:
        for name in self.serving():
            if self.members[name].version != self.target:
                self.lost(name, f"it did not load the weights of version {self.target}", now)

    def _update_none_since(self, now: float) -> None:
        if self._serving:
            self.none_since = None
        elif self.none_since is None:
            self.none_since = now
