"""The gang on Ray: actors in a placement group. Imported only by runs that are on Ray."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from typing import Any

import numpy as np

from areal_x.cluster.gang import Lost, Make, Room
from areal_x.cluster.process import PACKAGE, Process, Raised
from areal_x.cluster.room import check_room, missing
from areal_x.cluster.surroundings import Surroundings
from areal_x.errors import UserError
from areal_x.runtime import interrupts
from areal_x.runtime.waits import waiting, whose
from areal_x.types import Batch

POLL_SECONDS = 0.2
# An error of one process is often the consequence of another's end, which Ray reports soon after.
SECONDS_TO_BLAME = 3.0
STREAMED = 4  # tensors that the first process computes ahead of the driver
# Groups of calls that run beside the calls of all.
SAMPLING, SAVING = "sampling", "saving"


class RayGang:
    """Actors in one placement group (areal_x.cluster.gang.Gang).

    name: of one process, in messages. make: makes the object of each, in these surroundings.

    Raises: ConfigError if no node has the room, UserError or Lost as `call`.
    """

    def __init__(
        self, name: str, size: int, room: Room, make: Make, surroundings: Surroundings
    ) -> None:
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._name, self._size = name, size
        self._lost: Lost | None = None
        self._ended = False
        self._submitting = threading.Lock()  # so that all processes get calls in one order
        self._actors: list[Any] = []
        labels = [room.labels] * size if room.labels else None
        self._group = placement_group(
            [room.bundle()] * size, strategy="PACK", bundle_label_selector=labels
        )
        try:
            self._wait_for_room(room)
            actor = ray.remote(concurrency_groups={SAMPLING: 1, SAVING: 1}, max_restarts=0)(Process)
            for rank in range(size):
                place = PlacementGroupSchedulingStrategy(self._group, rank)
                resources = {room.resource: room.accelerators} if room.accelerators else {}
                gpus = resources.pop("GPU", 0)
                self._actors.append(
                    actor.options(
                        scheduling_strategy=place,
                        num_cpus=room.cpus,
                        num_gpus=gpus,
                        resources=resources,
                    ).remote()
                )
            nodes = self._results([actor.node.remote(version(PACKAGE)) for actor in self._actors])
            ranked = list(enumerate(self._actors))
            self._results([a.enter.remote(surroundings, f"{name}-{rank}") for rank, a in ranked])
            self._results([a.make.remote(make, rank) for rank, a in ranked])
        except BaseException:
            self.end()
            raise
        self.addresses: Sequence[str] = [address for _, address in nodes]
        self.nodes: Sequence[str] = [node for node, _ in nodes]

    def call(self, method: str, *arguments: Any) -> Any:
        return self._call_all(method, arguments)

    def beside(self, method: str, *arguments: Any) -> Any:
        return self._call_all(method, arguments, concurrency_group=SAVING)

    def _call_all(self, method: str, arguments: Sequence[Any], **options: Any) -> Any:
        shared = [self._put(x) for x in arguments]
        with self._submitting:
            called = [a.call.options(**options).remote(method, *shared) for a in self._actors]
        return self._results(called)[0]

    def each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        pairs = zip(self._actors, arguments, strict=True)
        with self._submitting:
            called = [actor.call.remote(method, *own) for actor, own in pairs]
        return self._results(called)

    def one(self, rank: int, method: str, *arguments: Any) -> Any:
        beside = self._actors[rank].call.options(concurrency_group=SAMPLING)
        return self._results([beside.remote(method, *arguments)], [rank])[0]

    def stream(self, method: str, *arguments: Any) -> Iterator[Any]:
        with self._submitting:
            first = (
                self._actors[0]
                .stream.options(_generator_backpressure_num_objects=STREAMED)
                .remote(method, *arguments)
            )
            others = [a.exhaust.remote(method, *arguments) for a in self._actors[1:]]
        try:
            for reference in first:
                yield self._results([reference], [0])[0]
        finally:
            if not self._ended:  # the processes gather the rest too
                for reference in first:
                    self._results([reference], [0])
                self._results(others, range(1, self._size))

    def end(self) -> None:
        import ray
        from ray.util.placement_group import remove_placement_group

        if self._ended:
            return
        self._ended = True
        for actor in self._actors:
            with suppress(Exception):
                ray.kill(actor)
        with suppress(Exception):
            remove_placement_group(self._group)

    def _put(self, value: Any) -> Any:
        """Batches travel once, through the object store, whatever the number of processes."""
        import ray

        if not isinstance(value, Batch):
            return value
        try:
            return ray.put(value)
        except ray.exceptions.ObjectStoreFullError:
            size = sum(np.asarray(x).nbytes for x in vars(value).values() if x is not None)
            raise UserError(
                f"a batch of {size / 1e6:.0f} MB does not fit into Ray's object store on this node:"
                " raise ray start --object-store-memory, or lower train.groups_per_step"
            ) from None

    def _results(self, references: Sequence[Any], ranks: Sequence[int] = ()) -> list[Any]:
        """Returns the results in order. Ends the gang before it raises, unless it is interrupted."""
        import ray

        rank_of = dict(zip(references, ranks or range(len(references)), strict=True))
        pending = list(references)
        results = {}
        try:
            with waiting(whose(), "the processes that train", lambda: behind(rank_of, pending)):
                while pending:
                    done, pending = ray.wait(pending, timeout=POLL_SECONDS)
                    if threading.current_thread() is threading.main_thread():
                        interrupts.raise_if_interrupted()
                    for reference in done:
                        results[reference] = self._result(reference, rank_of)
            return [results[reference] for reference in references]
        except Exception:
            self.end()
            raise

    def _result(self, reference: Any, rank_of: Mapping[Any, int]) -> Any:
        """Returns the result of a call that has ended. Raises: the call's own UserError; Lost if it
        raised something else or its process is gone."""
        import ray

        if self._lost is not None:
            raise self._lost
        try:
            return ray.get(reference)
        except ray.exceptions.RayError as found:
            error: Exception = found
        if not isinstance(error, ray.exceptions.RayTaskError):
            raise self._lose(rank_of[reference], error) from error
        raised = error.cause
        if not isinstance(raised, Raised):  # the call's arguments could not be read
            raised = Raised(f"{type(raised).__name__}: {raised}", False, str(error))
        if raised.is_mistake:
            raise UserError(raised.text) from None
        gone = gone_soon([other for other in rank_of if other is not reference])
        if gone is not None:
            raise self._lose(rank_of[gone[0]], gone[1]) from raised
        print(raised.traceback, file=sys.stderr)
        self._lost = Lost(f"{self._name} {rank_of[reference]} failed: {raised.text}", died=False)
        raise self._lost from error

    def _lose(self, rank: int, error: Exception) -> Lost:
        if self._lost is None:  # the first is the one to report
            lines = str(error).strip().splitlines() or [type(error).__name__]
            # In the creation of the actor the last line is the exception.
            reason = lines[-1] if "creation task" in lines[0] else lines[0]
            self._lost = Lost(f"{self._name} {rank} is gone: {reason}", died=True)
        return self._lost

    def _wait_for_room(self, room: Room) -> None:
        import ray

        check_room(room, "cluster.accelerators", "cluster.cpus")

        def free() -> str:
            return missing(room, self._size)

        ready = self._group.ready()
        with waiting("the run", f"room for {self._size} processes in the cluster", free):
            while not ray.wait([ready], timeout=POLL_SECONDS)[0]:
                interrupts.raise_if_interrupted()


def behind(rank_of: Mapping[Any, int], pending: Sequence[Any]) -> str:
    """Names the ranks whose calls have not ended."""
    return f"{sorted(rank_of[reference] for reference in pending)} have not answered"


def error_of(reference: Any) -> Exception | None:
    """Returns the exception of a call that has ended; None if it has a result."""
    import ray

    try:
        ray.get(reference)
    except ray.exceptions.RayError as error:
        found: Exception = error
        return found
    return None


def gone_soon(references: Sequence[Any]) -> tuple[Any, Exception] | None:
    """Returns the first of these calls whose process is gone, and the error that says so; waits a
    while for it."""
    import ray

    until = time.monotonic() + SECONDS_TO_BLAME
    pending = list(references)
    while pending and time.monotonic() < until:
        done, pending = ray.wait(pending, timeout=POLL_SECONDS)
        for reference in done:
            error = error_of(reference)
            if error is not None and not isinstance(error, ray.exceptions.RayTaskError):
                return reference, error
    return None
