"""The first process of a gang on Ray passes the driver's calls on to the others, so that a call costs
the driver the same whatever the number of processes, and finds which of them is gone.

    driver ── call_all ──▶ process 0 ── run ──▶ process 1, 2, …
       ▲                      │  ▲──── stay, which never returns, and results ────┘
       └──── watch: the failure to report ────┘
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from areal_x.cluster.failures import Failure, Raised, failure_of
from areal_x.cluster.gang import Span

# An error of one process is often the consequence of another's end, which Ray reports soon after.
SECONDS_TO_BLAME = 3.0
SPANS = 10_000  # that are kept until the driver fetches them


@dataclass(frozen=True)
class Call:
    """A call that all processes make."""

    method: str

    arguments: tuple[Any, ...] = ()

    batches: tuple[Any, ...] = ()
    """For each node the last argument of its processes, or a reference to it."""

    gathers: bool = False
    """True if the driver needs the results of all, not of the first alone."""

    waits: bool = False
    """True if the call ends when all have."""

    group: str | None = None
    """The group of calls that run beside others."""


@dataclass(frozen=True)
class Returned:
    """What a process other than the first returns of a call."""

    span: Span

    value: Any
    """None unless the call gathers results."""


class Leader:
    """What the first process knows of the others. nodes: index of each process's node. group: of
    the calls by which their ends are noticed."""

    def __init__(self, others: Sequence[Any], nodes: Sequence[int], group: str) -> None:
        self._others, self._nodes = others, nodes
        self._failures: SimpleQueue[Failure] = SimpleQueue()
        self._spans: deque[tuple[int, Span]] = deque(maxlen=SPANS)
        self._pending = [0] * (1 + len(others))
        for rank, actor in enumerate(others, 1):
            stays = actor.stay.options(concurrency_group=group).remote()
            self._observe(rank, stays)

    @contextmanager
    def leading(self) -> Iterator[None]:
        """Reports an exception of the body, an own call, like those of the others."""
        self._pending[0] += 1
        try:
            yield
        except Raised as error:
            self._failures.put(Failure(0, error.text, False, error.is_mistake, error.traceback))
            raise
        finally:
            self._pending[0] -= 1

    def pass_on(self, call: Call, by: str = "run") -> list[Any]:
        """Submits a call to all others, by this method of theirs."""
        found = []
        for rank, actor in enumerate(self._others, 1):
            remote = getattr(actor, by)
            if call.group is not None:
                remote = remote.options(concurrency_group=call.group)
            more = (call.batches[self._nodes[rank]],) if call.batches else (None,)
            more = (*more, call.gathers) if by == "run" else ()
            found.append(remote.remote(call.method, call.arguments, *more))
            self._pending[rank] += 1
            self._observe(rank, found[-1])
        return found

    def own_batch(self, call: Call) -> Any:
        import ray

        if not call.batches:
            return None
        batch = call.batches[self._nodes[0]]
        return ray.get(batch) if isinstance(batch, ray.ObjectRef) else batch

    def wait(self, references: Sequence[Any]) -> list[Returned]:
        """Returns the results of the others, once all are there. If one of them fails it never
        returns: its failure is reported, not this process's, and the driver ends all."""
        import ray

        try:
            found: list[Returned] = ray.get(list(references))
        except ray.exceptions.RayError:
            while True:
                threading.Event().wait()
        return found

    def note(self, rank: int, span: Span) -> None:
        self._spans.append((rank, span))

    def spans(self) -> list[tuple[int, Span]]:
        """Returns the calls that have ended since the last time, with the rank of each."""
        found = []
        while self._spans:
            found.append(self._spans.popleft())
        return found

    def behind(self) -> list[int]:
        """Returns the ranks whose calls have not ended."""
        return [rank for rank, count in enumerate(self._pending) if count]

    def failure(self) -> Failure:
        """Waits for a failure, and returns the one to report: of processes that fail at about the
        same time, the first that is gone."""
        first = self._failures.get()
        until = time.monotonic() + SECONDS_TO_BLAME
        failure = first
        while self._others and not (failure.died or failure.is_mistake):
            try:
                failure = self._failures.get(timeout=max(until - time.monotonic(), 0))
            except Empty:
                return first
        return failure

    def _observe(self, rank: int, reference: Any) -> None:
        reference.future().add_done_callback(partial(self._ended, rank))

    def _ended(self, rank: int, call: Future[Any]) -> None:
        error = call.exception()
        if error is not None:
            self._failures.put(failure_of(rank, error))
            return
        self._pending[rank] -= 1
        self.note(rank, call.result().span)
