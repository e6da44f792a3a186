"""How many servers a run should have, and which are added or leave: pure, without a clock.

    trainer idle > 10 %                     one more        generation is too slow
    rollout idle > 30 %, trainer not        one less        the others would suffice

Both are medians of five steps with the same number of servers, so that one slow step decides
nothing. Another server is asked for when all that were asked for serve. One that still waits for
room is given up when the trainer waits no longer, and not one that starts: beside the trainer it
slows it, and would be given up and asked for again without end. One leaves only if the others could
do its work: n servers that are idle for more than 1/n of the time would be busy for at
most all of it as n - 1. So a run whose work does not change settles: with G seconds of one server's
generation and T seconds of training in a step, n servers leave the trainer idle for
1 - T·n/G and are themselves idle for 1 - G/(T·n). One leaves at G/n < T·(n - 1)/n, and then
G/(n - 1) < T: the trainer does not wait for the others. One joins at G/n > T, and then, as n + 1,
none is idle for more than 1/(n + 1).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

TRAINER_IDLE = 0.1
ROLLOUT_IDLE = 0.3
STEPS = 5


class Scaling:
    """Decides after each step. wanted: the number of servers, between `least` and `most`."""

    def __init__(self, least: int, most: int) -> None:
        self.wanted = self._least = least
        self._most = most
        self._serving = 0
        self._idle: deque[tuple[float, float]] = deque(maxlen=STEPS)

    def step(
        self, trainer_idle: float, rollout_idle: float, serving: int, starting: bool = False
    ) -> str | None:
        """Counts a step; returns why `wanted` has changed, if it has. serving: how many servers
        generate now; those that never will again count too, as nothing is to be expected of
        them. starting: True if one that does not generate yet has its place."""
        if serving != self._serving:
            self._serving = serving
            self._idle.clear()
        self._idle.append((trainer_idle, rollout_idle))
        if len(self._idle) < STEPS or not serving:
            return None
        waits, rests = (median(shares) for shares in zip(*self._idle, strict=True))
        if waits > TRAINER_IDLE:
            return self._want(
                self.wanted + (serving >= self.wanted), f"the trainer waits {waits:.0%}"
            )
        if rests > max(ROLLOUT_IDLE, 1 / serving):
            return self._want(min(self.wanted, serving) - 1, f"generation rests {rests:.0%}")
        if starting:
            return None
        # What finds no place is not needed.
        return self._want(min(self.wanted, serving), f"the trainer waits {waits:.0%}")

    def fewer(self) -> None:
        """Lowers the bounds, for a server that somebody else has taken away."""
        self._most -= 1
        self._least = min(self._least, self._most)
        self.wanted = min(self.wanted, self._most)

    def _want(self, number: int, reason: str) -> str | None:
        before, self.wanted = self.wanted, max(self._least, min(self._most, number))
        if self.wanted == before:
            return None
        self._idle.clear()
        change = "one more is wanted" if self.wanted > before else f"{self.wanted} suffice"
        return f"{self._serving} servers generate, and {reason} of the time: {change}"


@dataclass(frozen=True)
class Seen:
    """A server of the run that is not leaving yet."""

    name: str

    serves: bool = True

    final: bool = False
    """True if it will never serve again."""

    departs: bool = False
    """True if its node is being drained."""

    requests: int = 0


def changes(servers: Sequence[Seen], wanted: int) -> tuple[int, list[str]]:
    """Returns how many servers to add, and which leave. servers: in the order in which they joined.

    A server on a node that departs is replaced at once, and leaves as soon as another one serves;
    until then, or until its node is gone, it goes on.
    """
    staying = [server for server in servers if not server.departs]
    newest_first = list(reversed(staying))
    newest_first.sort(key=lambda server: (not server.final, server.serves, server.requests))
    leave = newest_first[: max(0, len(staying) - wanted)]
    others_serve = any(server.serves for server in staying if server not in leave)
    leave += [
        server for server in servers if server.departs and (others_serve or not server.serves)
    ]
    return max(0, wanted - len(staying)), [server.name for server in leave]
