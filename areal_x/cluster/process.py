"""One process of a gang on Ray: the actor around its object."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from typing import Any

from areal_x.cluster.failures import Failure, reported
from areal_x.cluster.gang import Make, Span
from areal_x.cluster.leader import Call, Leader, Returned
from areal_x.cluster.measures import differences, measured
from areal_x.cluster.surroundings import Surroundings
from areal_x.errors import UserError

PACKAGE = "areal-x"


class Process:
    """The actor around a process's object."""

    _object: Any
    _leader: Leader | None = None

    def node(self, expected: str) -> tuple[str, str]:
        """Returns the id and the address of its node. Raises: UserError unless the package has the
        expected version there."""
        import ray

        own = ray.get_runtime_context().get_node_id()
        address = next(n["NodeManagerAddress"] for n in ray.nodes() if n["NodeID"] == own)
        with reported():
            if (found := version(PACKAGE)) != expected:
                raise UserError(
                    f"the node {address} has {PACKAGE} {found}, the driver {expected}: install the"
                    " same version on all nodes"
                )
        return own, address

    def enter(self, surroundings: Surroundings, name: str) -> None:
        with reported():
            surroundings.enter(name)

    def make(self, make: Make, rank: int) -> None:
        with reported():
            self._object = make(rank)

    def call(self, method: str, *arguments: Any) -> Any:
        with reported():
            return getattr(self._object, method)(*arguments)

    # ---- of a gang

    def run(
        self, method: str, arguments: tuple[Any, ...] = (), batch: Any = None, keep: bool = True
    ) -> Returned:
        """Runs a method of the object. batch: its last argument, unless it is None. keep: False
        forgets its result."""
        arguments = arguments if batch is None else (*arguments, batch)
        with reported(), measured(method, self._object) as clock:
            found = getattr(self._object, method)(*arguments)
        return Returned(clock.span, found if keep else None)

    def exhaust(self, method: str, arguments: tuple[Any, ...]) -> Returned:
        """Runs a generator of the object to its end."""
        with reported(), measured(method, self._object) as clock:
            for _ in getattr(self._object, method)(*arguments):
                pass
        return Returned(clock.span, None)

    def stay(self) -> None:
        """Never returns: the call fails as soon as this process is gone."""
        threading.Event().wait()

    # ---- of the first process

    def lead(self, others: Sequence[Any], nodes: Sequence[int], group: str) -> None:
        """Makes this process the one that passes calls on. others: the actors of the others.
        nodes: the index of each process's node. group: in which they stay."""
        self._leader = Leader(others, nodes, group)

    def watch(self) -> Failure:
        """Returns once a process has failed: the failure to report."""
        assert self._leader is not None
        return self._leader.failure()

    def behind(self) -> list[int]:
        """Returns the ranks of the processes that have not finished their calls."""
        assert self._leader is not None
        return self._leader.behind()

    def spans(self) -> list[tuple[int, Span]]:
        """Returns the calls of all processes that have ended since the last time, by rank."""
        assert self._leader is not None
        return self._leader.spans()

    def call_all(self, call: Call) -> tuple[Any, list[Any], dict[str, float]]:
        """Makes all processes run a call. Returns the result here, references to those of the
        others if the call gathers them, and how the processes differ if it waits for them."""
        assert self._leader is not None
        with self._leader.leading():
            others = self._leader.pass_on(call)
            own = self.run(call.method, call.arguments, self._leader.own_batch(call))
            self._leader.note(0, own.span)
        if not call.waits:
            return own.value, others if call.gathers else [], {}
        returned = self._leader.wait(others)  # this process is not behind any more
        return own.value, [], differences([own.span, *(x.span for x in returned)])

    def stream_all(self, call: Call) -> Iterator[Any]:
        """Yields what the object's generator does, while the others run theirs to the end."""
        assert self._leader is not None
        with self._leader.leading():
            self._leader.pass_on(call, "exhaust")
            with reported(), measured(call.method, self._object) as clock:
                # Not "yield from": Ray sends something back, which only generators take.
                for item in getattr(self._object, call.method)(*call.arguments):  # noqa: UP028
                    yield item
        self._leader.note(0, clock.span)
