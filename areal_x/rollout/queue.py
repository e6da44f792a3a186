"""The trajectory queue: how old a group may be when it is trained on, as a pure state machine.

It knows no clock, thread or engine: the runner admits and finishes, the trainer takes and
publishes, and a test drives it with any order of the four. Source: the windowed FIFO of section
6.2.4 of arXiv 2605.26494.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

from areal_x.errors import at_least
from areal_x.types import Group


@dataclass
class _Live:
    """A group that was neither consumed nor given back. group: None until it is finished.
    admitted_version: None while it waits to be admitted again, without a slot."""

    admitted_version: int | None
    group: Group | None = None


class TrajectoryQueue:
    """B = (max_staleness + 1) · groups_per_step slots between admission and publication; nothing
    finished is ever discarded.

    A group takes a slot when it is admitted and gives it back when it has been consumed *and* the
    weights of the step that consumed it are out. Consumption is a FIFO with a look-ahead: the next
    group is the finished one with the lowest ticket, if that ticket is less than `window` from the
    oldest live one (window = 1: strict FIFO). Only whole steps are consumed. max_staleness = 0 is
    synchronous training: nothing is admitted between a step and its publication.

    The bound. P = groups_per_step, W = window. A group admitted when version a was out and consumed
    by the step that starts from version v has age v − a, and v − a ≤ (B + W − 2) // P. Proof: rank
    the groups that are never given back by ticket, from 0, and let g be this group's rank. (1) When
    it was admitted it held one slot itself, so at most B − 1 were held by others. Each of the g
    groups ranked before
        it had been admitted, and either still held one of those slots or had returned it; only groups consumed by the steps
        below a have returned theirs, and those are a·P. So g ≤ a·P + B − 1.
    (2) When it is consumed, every group consumed earlier has rank ≤ g + W − 1: if it has a higher
    ticket, this group was live
        then, so the window began at or before this group's ticket, and ranks are no further apart than tickets. So at most
        g + W − 1 others were consumed earlier, among them the v·P groups of all earlier steps: v·P ≤ g + W − 1.
    Together (v − a)·P ≤ B + W − 2, and ages are whole. ∎ A run that begins at another version than
    0 counts from there; a resumed one is as one that never ended, in which what was unfinished took
    longer.

    Something can always happen: an unfinished group can finish; if all are finished and there are P
    of them, the lowest is always inside the window, so a step can be taken; if fewer, either a step
    is unpublished or there is a free slot.

    Raises ConfigError for sizes that cannot work.
    """

    def __init__(self, groups_per_step: int, max_staleness: int, window: int = 1) -> None:
        at_least("train.groups_per_step", groups_per_step, 1)
        at_least("train.max_staleness", max_staleness, 0)
        at_least("train.window", window, 1)
        self.groups_per_step = groups_per_step
        self.max_staleness = max_staleness
        self.window = window
        self.slots = (max_staleness + 1) * groups_per_step
        self.admitted = 0
        self.consumed = 0
        self.given_back = 0
        self.begin(0)

    def begin(
        self,
        version: int,
        next_ticket: int = 0,
        pending: Sequence[int] = (),
        finished: Sequence[Group] = (),
        order: Sequence[Sequence[int]] = (),
    ) -> None:
        """Starts from the weights of `version`. pending: tickets that an earlier run had admitted
        and not finished; they are admitted again first, lowest first, each as soon as there is a
        slot, and nothing passes them meanwhile but as the window allows. finished: groups of an
        earlier run that wait to be consumed; order: the tickets of the next steps, where an earlier
        run took them."""
        self.version = version  # published, so what engines hold
        self.step = version  # steps taken
        self.next_ticket = next_ticket
        self._readmit = sorted(pending, reverse=True)
        self._order = [list(tickets) for tickets in reversed(order)]
        live = {ticket: _Live(None) for ticket in pending} | {
            g.ticket: _Live(g.admitted_version, g) for g in finished
        }
        self._live = dict(sorted(live.items()))  # in the order of tickets
        self._finished = sorted(group.ticket for group in finished)
        # no ticket below it is live and unfinished
        self._first_unfinished = min(live, default=next_ticket)

    @property
    def depth(self) -> int:
        """Groups that are finished and wait to be consumed."""
        return len(self._finished)

    @property
    def free(self) -> int:
        """Slots left: those not held by a live group or by a step whose weights are not out. Less
        than none where a run goes on with more groups than it has slots."""
        return (
            self.slots
            - (len(self._live) - len(self._readmit))
            - (self.step - self.version) * self.groups_per_step
        )

    @property
    def admits(self) -> bool:
        """Whether there is a slot for another group."""
        return self.free > 0 or self._is_waited_for()

    def admit(self) -> int | None:
        """A slot for the next group: its ticket. None while every slot is held."""
        if not self.admits:
            return None
        if self._readmit:
            ticket = self._readmit.pop()
            self._live[ticket].admitted_version = self.version
        else:
            ticket = self.next_ticket
            self.next_ticket += 1
            self._live[ticket] = _Live(self.version)
        self.admitted += 1
        return ticket

    def _is_waited_for(self) -> bool:
        """Whether the oldest group that is not finished waits to be admitted again, and too few
        before it are for a step: a run that goes on with fewer slots than it had must not stand
        still. Fewer than groups_per_step are ranked between it and those consumed, so that (1)
        above holds."""
        if (
            not self._readmit
            or self._order
            or self.step != self.version
            or self._readmit[-1] != self._oldest_unfinished()
        ):
            return False
        return (
            self.depth < self.groups_per_step
            or self._finished[self.groups_per_step - 1] > self._readmit[-1]
        )

    def finish(self, ticket: int, group: Group) -> None:
        """The group may now be consumed."""
        self._unfinished(ticket).group = group
        insort(self._finished, ticket)

    def give_back(self, ticket: int) -> None:
        """The group is not worth training on: its slot is free at once."""
        self._unfinished(ticket)
        del self._live[ticket]
        self.given_back += 1

    def take(self) -> list[Group] | None:
        """The next step's groups in the order they are consumed, or None while the window does not
        hold a whole step."""
        if self.depth < self.groups_per_step:
            return None
        if self._order:
            return self._taken(self._order.pop())
        # The lowest finished ticket always goes next, so it is these; and what the window begins at
        # is, of those not yet taken, either that ticket itself or an unfinished one. So the last of
        # them decides.
        batch = self._finished[: self.groups_per_step]
        return self._taken(batch) if batch[-1] < self._oldest_unfinished() + self.window else None

    def _oldest_unfinished(self) -> int:
        """The lowest ticket that is live and not finished; the next one where there is none. It
        only rises, so finding it costs one look a ticket, all calls together."""
        while self._first_unfinished < self.next_ticket:
            slot = self._live.get(self._first_unfinished)
            if slot is not None and slot.group is None:
                break
            self._first_unfinished += 1
        return self._first_unfinished

    def _taken(self, tickets: Sequence[int]) -> list[Group]:
        groups = [
            group for ticket in tickets if (group := self._live.pop(ticket).group) is not None
        ]
        taken = set(tickets)
        self._finished = [ticket for ticket in self._finished if ticket not in taken]
        self.step += 1
        self.consumed += len(groups)
        return groups

    def published(self, version: int) -> None:
        """The weights of `version` are in every engine: the slots of all steps below it are free.

        Raises ValueError for a version that was out before or that no step has made.
        """
        if not self.version <= version <= self.step:
            raise ValueError(
                f"version {version} cannot be published: {self.version} is out and {self.step}"
                " steps were taken"
            )
        self.version = version

    @property
    def unfinished(self) -> int:
        """Groups that are still being generated or judged."""
        return len(self._live) - len(self._readmit) - self.depth

    def ages(self) -> dict[int, int]:
        """By ticket, how many versions old each live group would be if the next step consumed
        it."""
        return {
            t: self.step - slot.admitted_version
            for t, slot in self._live.items()
            if slot.admitted_version is not None
        }

    def pending(self) -> list[int]:
        """Tickets admitted and neither consumed nor given back, lowest first: what `begin` needs to
        lose none of them."""
        return list(self._live)

    def _unfinished(self, ticket: int) -> _Live:
        slot = self._live.get(ticket)
        if slot is None or slot.admitted_version is None or slot.group is not None:
            raise ValueError(
                f"ticket {ticket} is not in flight:"
                f" {'it is finished' if slot and slot.group else 'it holds no slot'}"
            )
        return slot
