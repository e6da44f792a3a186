"""The trajectory queue: bounds how old a group may be when it is trained on, as a pure state
machine.

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
    """A group that was neither consumed nor dropped."""

    admitted_version: int | None
    """None while the group waits, without a slot, to be admitted again."""
    group: Group | None = None
    """None until the group is finished."""


class TrajectoryQueue:
    """B = (max_staleness + 1) · groups_per_step slots between admission and publication; nothing
    finished is ever discarded.

    A group takes a slot when it is admitted and releases it when it has been consumed *and* the
    weights of the step that consumed it are published. Consumption is a FIFO with a look-ahead: the
    next group is the finished one with the lowest ticket, if that ticket is less than `window` from
    the oldest live one (window = 1: strict FIFO). Only whole steps are consumed. max_staleness = 0
    is synchronous training: nothing is admitted between a step and its publication.

    The bound. P = groups_per_step, W = window. A group admitted when version a was published and
    consumed by the step that starts from version v has age v − a, and v − a ≤ (B + W − 2) // P.

    Proof. Rank the groups that are never dropped by ticket, from 0, and let g be this group's rank.

    (1) When the group was admitted it held one slot itself, so at most B − 1 were held by others.
        Each of the g groups ranked before it had been admitted, and either still held one of those
        slots or had released it. Only groups consumed by the steps below a have released theirs,
        and those are a·P. So g ≤ a·P + B − 1.
    (2) When the group is consumed, every group consumed earlier has rank ≤ g + W − 1: if it has a
        higher ticket, this group was live then, so the window began at or before this group's
        ticket, and ranks are no further apart than tickets. So at most g + W − 1 others were
        consumed earlier, among them the v·P groups of all earlier steps: v·P ≤ g + W − 1.

    Together (v − a)·P ≤ B + W − 2, and ages are integers. ∎ A run that begins at a version other
    than 0 counts from there; a resumed run is one that never ended, in which the unfinished groups
    took longer.

    Publications under way. The trainer goes on as soon as the weights of a step are copied, and
    `published` is called when every server has them. Nothing above asks when that is: a is the
    version of the last such call, whatever is on its way, and until the call the step's groups are
    among the B slots of (1), so steps that are taken meanwhile only leave fewer for others. (There
    are at most two such steps: the one whose weights are on their way and the next, since a
    publication begins after the one before has ended; more where versions are left out, see
    areal_x.rollout.rollout.Rollout.publish.) Servers that have the newer weights already
    generate with them, also for groups that were admitted under a: no token is older than its
    group, so the bound holds for tokens too.

    Progress is always possible: an unfinished group can finish; if all are finished and there are P
    of them, the lowest is always inside the window, so a step can be taken; if there are fewer,
    either a step is unpublished, and its publication ends without any other group, or there is a
    free slot.

    Raises ConfigError for invalid sizes.
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
        self.dropped = 0
        self.begin(0)

    def begin(
        self,
        version: int,
        next_ticket: int = 0,
        pending: Sequence[int] = (),
        finished: Sequence[Group] = (),
        order: Sequence[Sequence[int]] = (),
    ) -> None:
        """Starts from the weights of `version`. pending: tickets that an earlier run admitted but
        did not finish; they are admitted again first, lowest first, each as soon as there is a
        slot, and other groups pass them only as far as the window allows. finished: groups of an
        earlier run that wait to be consumed. order: the tickets of the next steps, if an earlier
        run already took them."""
        self.version = version  # published: the engine has these weights
        self.step = version  # steps taken
        self.next_ticket = next_ticket
        self._readmit = sorted(pending, reverse=True)
        self._order = [list(tickets) for tickets in reversed(order)]
        live = {ticket: _Live(None) for ticket in pending} | {
            g.ticket: _Live(g.admitted_version, g) for g in finished
        }
        self._live = dict(sorted(live.items()))  # in the order of tickets
        self._finished = sorted(group.ticket for group in finished)
        # no lower ticket is live and unfinished
        self._first_unfinished = min(live, default=next_ticket)

    @property
    def depth(self) -> int:
        """Number of groups that are finished and wait to be consumed."""
        return len(self._finished)

    @property
    def free(self) -> int:
        """Number of slots held neither by a live group nor by a step whose weights are not yet
        published. Negative if a run resumes with more groups than it has slots."""
        return (
            self.slots
            - (len(self._live) - len(self._readmit))
            - (self.step - self.version) * self.groups_per_step
        )

    @property
    def admits(self) -> bool:
        """True if there is a slot for another group."""
        return self.free > 0 or self._blocks_the_next_step()

    def admit(self) -> int | None:
        """Gives a slot to the next group and returns its ticket; None while every slot is held."""
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

    def _blocks_the_next_step(self) -> bool:
        """True if the oldest unfinished group waits to be admitted again and the finished groups
        before it are too few for a step: a run that resumes with fewer slots than it had must not
        deadlock. Fewer than groups_per_step groups rank between it and the consumed ones, so (1)
        above still holds."""
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
        """Makes the group available for consumption."""
        self._unfinished(ticket).group = group
        insort(self._finished, ticket)

    def drop(self, ticket: int) -> None:
        """Drops an unfinished group that is not worth training on; its slot is free at once."""
        self._unfinished(ticket)
        del self._live[ticket]
        self.dropped += 1

    def take(self) -> list[Group] | None:
        """Returns the next step's groups in the order of consumption, or None while the window does
        not contain a whole step."""
        tickets = self._next_step()
        if tickets is None:
            return None
        if self._order:
            self._order.pop()
        return self._taken(tickets)

    @property
    def ready(self) -> bool:
        """True if `take` would return a step: from then on it stays so until it does."""
        return self._next_step() is not None

    def _next_step(self) -> Sequence[int] | None:
        """Returns the tickets of the next step in the order of consumption, or None."""
        if self.depth < self.groups_per_step:
            return None
        if self._order:
            return self._order[-1]
        # The lowest finished ticket always goes next, so these are the candidates. The window begins
        # at the lowest ticket not yet taken, which is either a candidate or unfinished. So the last
        # candidate decides.
        batch = self._finished[: self.groups_per_step]
        return batch if batch[-1] < self._oldest_unfinished() + self.window else None

    def _oldest_unfinished(self) -> int:
        """Returns the lowest ticket that is live and unfinished, or the next ticket if there is
        none. It only rises, so all calls together look at each ticket once."""
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
        """Frees the slots of all steps below `version`, whose weights are now in every engine.

        Raises ValueError for a version that is already published or that no step has produced.
        """
        if not self.version <= version <= self.step:
            raise ValueError(
                f"version {version} cannot be published: version {self.version} is already"
                f" published and {self.step} steps were taken"
            )
        self.version = version

    @property
    def unfinished(self) -> int:
        """Number of groups that are still being generated or scored."""
        return len(self._live) - len(self._readmit) - self.depth

    def ages(self) -> dict[int, int]:
        """Returns, by ticket, the age in versions that each live group would have if the next step
        consumed it."""
        return {
            t: self.step - slot.admitted_version
            for t, slot in self._live.items()
            if slot.admitted_version is not None
        }

    def pending(self) -> list[int]:
        """Returns the tickets that were admitted and neither consumed nor dropped, lowest first:
        what `begin` needs to lose none of them."""
        return list(self._live)

    def _unfinished(self, ticket: int) -> _Live:
        slot = self._live.get(ticket)
        if slot is None or slot.admitted_version is None or slot.group is not None:
            raise ValueError(
                f"ticket {ticket} is not in flight:"
                f" {'it is finished' if slot and slot.group else 'it holds no slot'}"
            )
        return slot
