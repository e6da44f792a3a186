"""Selects and orders the trajectories of an index by what its columns say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from areal_x.errors import one_of
from areal_x.lab.index import NONE, OUTCOMES, PRUNED, STATUSES, Index

ORDERS = ("newest", "oldest", "reward", "-reward", "length", "-length")


@dataclass(frozen=True)
class Filter:
    """Conditions that a trajectory must meet, all of them; None is no condition."""

    outcome: str | None = None
    reward_min: float | None = None
    reward_max: float | None = None
    step_min: int | None = None
    step_max: int | None = None
    length_min: int | None = None
    length_max: int | None = None

    task: str | None = None
    """A part of the task's id."""

    finish: str | None = None
    """The finish reason."""

    error: int | None = None
    """The number of an error in `Index.failures`."""

    status: str | None = None
    """What became of the group: "finished" or "given back"."""

    ticket: int | None = None

    recorded: str | None = None
    """"yes": groups of which the journal has what training made of their tokens."""

    order: str = "newest"

    def __post_init__(self) -> None:
        one_of("order", self.order, ORDERS)
        if self.outcome is not None:
            one_of("outcome", self.outcome, OUTCOMES)
        if self.status is not None:
            one_of("status", self.status, STATUSES)
        if self.recorded is not None:
            one_of("recorded", self.recorded, ("yes",))


class Selection(Protocol):
    """The rows of an index that a filter selects, in its order."""

    def __len__(self) -> int: ...

    def page(self, begin: int, count: int) -> Any:
        """Returns the numbers of rows `begin` to `begin + count` of the order."""
        ...


@dataclass(frozen=True)
class ByTicket:
    """Rows in the order of their groups' tickets. A group's rows follow each other in the index, so
    a place is found by counting, and a late page costs as little as the first."""

    chosen: Any
    """A flag per row of the index."""

    first: Any
    """The first row of each group, by ticket."""

    sizes: Any
    """The number of rows of each group, by ticket."""

    ends: Any
    """How many chosen rows the groups have up to each one, by ticket."""

    descending: bool

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def page(self, begin: int, count: int) -> Any:
        whole = len(self)
        end = min(begin + count, whole)
        if begin >= end:
            return np.empty(0, np.int64)
        low, high = (whole - end, whole - begin) if self.descending else (begin, end)
        groups = np.arange(
            np.searchsorted(self.ends, low, side="right"),
            np.searchsorted(self.ends, high, side="left") + 1,
        )
        before = int(self.ends[groups[0] - 1]) if groups[0] else 0
        rows = [
            first + np.flatnonzero(self.chosen[first : first + size])
            for first, size in zip(self.first[groups], self.sizes[groups], strict=True)
        ]
        found = np.concatenate(rows).astype(np.int64)[low - before : high - before]
        return found[::-1] if self.descending else found


@dataclass(frozen=True)
class ByKey:
    """Rows in the order of a column.

    Their keys are sorted only as far as somebody reads: a page of a million rows takes no sort of
    the million.
    """

    keys: Any
    """One uint64 per row, all different: what it is ordered by, then its number."""

    descending: bool

    def __len__(self) -> int:
        return len(self.keys)

    def page(self, begin: int, count: int) -> Any:
        end = min(begin + count, len(self.keys))
        if begin >= end:
            return np.empty(0, np.int64)
        if self.descending:
            low, high = len(self.keys) - end, len(self.keys) - begin
        else:
            low, high = begin, end
        parted = np.partition(self.keys, (low, high - 1))[low:high]
        found = (np.sort(parted) & np.uint64(0xFFFFFFFF)).astype(np.int64)
        return found[::-1] if self.descending else found


def select(index: Index, wanted: Filter) -> Selection:
    """Returns the trajectories that meet a filter's conditions. The last selection is kept: the next
    page, or the next slice of a search, asks the same again."""
    asked = (wanted, index.changes)
    if index.selected is None or index.selected[0] != asked:
        index.selected = (asked, _select(index, wanted))
    found: Selection = index.selected[1]
    return found


def _select(index: Index, wanted: Filter) -> Selection:
    rows = index.rows
    count = len(rows)
    group = rows.column("group", count)
    keep = _groups(index, wanted)
    chosen = np.ones(count, np.bool_) if keep is None else keep[group]
    reward = rows.column("reward", count)
    length = rows.column("length", count)
    if wanted.outcome is not None:
        chosen &= rows.column("outcome", count) == OUTCOMES.index(wanted.outcome)
    for column, low, high in (
        (reward, wanted.reward_min, wanted.reward_max),
        (length, wanted.length_min, wanted.length_max),
    ):
        if low is not None:
            chosen &= column >= column.dtype.type(low)
        if high is not None:
            chosen &= column <= column.dtype.type(high)
    if wanted.finish is not None:
        known = wanted.finish in index.reasons
        number = index.reasons.index(wanted.finish) if known else NONE
        chosen &= rows.column("finish", count) == number if known else False
    if wanted.error is not None:
        chosen &= rows.column("error", count) == wanted.error
    by, descending = wanted.order.removeprefix("-"), wanted.order.startswith("-")
    if by in ("newest", "oldest"):
        return by_ticket(index, chosen, descending=by == "newest")
    numbers = np.flatnonzero(chosen)
    if by == "length":
        first = length[numbers].astype(np.uint64)
    else:
        numbers = numbers[~np.isnan(reward[numbers])]  # what was not scored has no place in it
        first = ordered(reward[numbers])
    keys = (first << np.uint64(32)) | numbers.astype(np.uint64)
    return ByKey(keys, descending)


def by_ticket(index: Index, chosen: Any, descending: bool) -> ByTicket:
    """Returns the chosen rows in the order of tickets. Groups whose rows came after `chosen` was made
    are left out."""
    numbers = index.in_order()
    first, sizes = (index.groups.column(name)[numbers] for name in ("first", "rows"))
    there = first + sizes <= len(chosen)
    first, sizes = first[there], sizes[there]
    until = np.zeros(len(chosen) + 1, np.int32)
    np.cumsum(chosen, out=until[1:])
    ends = np.cumsum(until[first + sizes] - until[first])
    return ByTicket(chosen, first, sizes, ends, descending)


def ordered(x: Any) -> Any:
    """Returns unsigned integers that are in the order of float32 numbers."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31)).astype(np.uint64)


def _groups(index: Index, wanted: Filter) -> Any:
    """Returns a flag per group: whether its trajectories may be selected; None if all may."""
    groups = index.groups
    count = len(groups)
    status = groups.column("status", count)
    step = groups.column("step", count)
    conditions = [status != PRUNED] if index.has_pruned else []
    if wanted.status is not None:
        conditions.append(status == STATUSES.index(wanted.status))
    if wanted.step_min is not None:
        conditions.append(step >= wanted.step_min)
    if wanted.step_max is not None:
        conditions.append((step <= wanted.step_max) & (step >= 0))
    if wanted.recorded is not None:
        conditions.append(groups.column("recorded", count) == 1)
    if wanted.ticket is not None:
        conditions.append(groups.column("ticket", count) == wanted.ticket)
    if wanted.task:
        named = np.zeros(count, np.bool_)
        found = index.tasks.containing(wanted.task)
        named[found[found < count]] = True
        conditions.append(named)
    return np.logical_and.reduce(conditions) if conditions else None
