"""The gang on Ray: actors in a placement group. Imported only by runs that are on Ray."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import fields, is_dataclass
from importlib.metadata import version
from typing import Any

import numpy as np

from areal_x.cluster.failures import Failure, failure_of
from areal_x.cluster.gang import Lost, Make, PerNode, Room, Span
from areal_x.cluster.leader import SECONDS_TO_BLAME, Call
from areal_x.cluster.process import PACKAGE, Process
from areal_x.cluster.room import check_room, missing
from areal_x.cluster.surroundings import Surroundings
from areal_x.errors import UserError
from areal_x.runtime import interrupts
from areal_x.runtime.waits import waiting, whose

POLL_SECONDS = 0.2
STREAMED = 4  # tensors that the first process computes ahead of the driver
SECONDS_TO_SAY = 2.0  # for the first process, asked which others are behind
# Groups of calls that run beside the calls of all.
SAMPLING, SAVING, WATCHING = "sampling", "saving", "watching"
# Bytes of batches that travel inside a call; larger ones go through the object store.
INSIDE = 64 << 10


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
        self._ended, self._ending = False, threading.Lock()
        self._watch: Any = None
        self._actors: list[Any] = []
        labels = [room.labels] * size if room.labels else None
        self._group = placement_group(
            [room.bundle()] * size, strategy="PACK", bundle_label_selector=labels
        )
        try:
            self._wait_for_room(room)
            groups = {SAMPLING: 1, SAVING: 1, WATCHING: 2}
            actor = ray.remote(concurrency_groups=groups, max_restarts=0)(Process)
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
            self.addresses: Sequence[str] = [address for _, address in nodes]
            self.nodes: Sequence[str] = [node for node, _ in nodes]
            self._lead()
        except BaseException:
            self.end()
            raise

    def _lead(self) -> None:
        """Makes the first process pass calls on, and watches all from now on."""
        first, index = self._actors[0], {x: i for i, x in enumerate(dict.fromkeys(self.nodes))}
        nodes = [index[node] for node in self.nodes]
        self._results([first.lead.remote(self._actors[1:], nodes, WATCHING)], [0])
        self._call_of = {
            None: first.call_all,
            SAVING: first.call_all.options(concurrency_group=SAVING),
        }
        self._sample = first.call.options(concurrency_group=SAMPLING)
        self._stream = first.stream_all.options(_generator_backpressure_num_objects=STREAMED)
        self._behind = first.behind.options(concurrency_group=WATCHING)
        self._spans = first.spans.options(concurrency_group=WATCHING)
        self._watch = first.watch.options(concurrency_group=WATCHING).remote()
        self._watch.future().add_done_callback(self._noticed)

    def call(self, method: str, *arguments: Any, batch: PerNode | None = None) -> Any:
        return self._all(Call(method, arguments, self._put(batch)))[0]

    def gather(self, method: str, *arguments: Any, batch: PerNode | None = None) -> list[Any]:
        own, references, _ = self._all(Call(method, arguments, self._put(batch), gathers=True))
        others = self._results(references, range(1, self._size))
        return [own, *(returned.value for returned in others)]

    def beside(self, method: str, *arguments: Any) -> Any:
        return self._all(Call(method, arguments, waits=True, group=SAVING))[0]

    def measured(
        self, method: str, *arguments: Any, batch: PerNode | None = None
    ) -> tuple[Any, dict[str, float]]:
        own, _, differ = self._all(Call(method, arguments, self._put(batch), waits=True))
        return own, differ

    def _all(self, call: Call) -> tuple[Any, list[Any], dict[str, float]]:
        found: tuple[Any, list[Any], dict[str, float]]
        (found,) = self._results([self._call_of[call.group].remote(call)], [0])
        return found

    def each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        pairs = zip(self._actors, arguments, strict=True)
        return self._results([actor.call.remote(method, *own) for actor, own in pairs])

    def first(self, method: str, *arguments: Any) -> Any:
        return self._results([self._sample.remote(method, *arguments)], [0])[0]

    def spans(self) -> list[tuple[int, Span]]:
        """Returns the calls of all that have ended since the last time, with the rank of each."""
        if self._ended:
            return []
        found: list[tuple[int, Span]]
        (found,) = self._results([self._spans.remote()], [0])
        return found

    def stream(self, method: str, *arguments: Any) -> Iterator[Any]:
        streamed = self._stream.remote(Call(method, arguments))
        try:
            for reference in streamed:
                yield self._results([reference], [0])[0]
        finally:
            if not self._ended:  # the processes gather the rest too
                for reference in streamed:
                    self._results([reference], [0])

    def end(self) -> None:
        import ray
        from ray.util.placement_group import remove_placement_group

        with self._ending:
            if self._ended:
                return
            self._ended = True
            interrupts.withdraw()
        for actor in self._actors:
            with suppress(Exception):
                ray.kill(actor)
        with suppress(Exception):
            remove_placement_group(self._group)

    def _noticed(self, watch: Future[Failure]) -> None:
        """Ends the run's wait for something else, on a thread of Ray's."""
        error = watch.exception()
        with self._ending:
            if not self._ended:
                found = watch.result() if error is None else failure_of(0, error)
                interrupts.fail(self._error_of(found))

    def _put(self, batch: PerNode | None) -> tuple[Any, ...]:
        """Puts what the processes of each node read into the object store, once."""
        import ray

        if batch is None:
            return ()
        values = [batch.values[node] for node in dict.fromkeys(self.nodes)]
        size = max(map(bytes_of, values))
        if size < INSIDE:
            return tuple(values)
        try:
            put: dict[int, Any] = {}
            for value in values:
                if id(value) not in put:
                    put[id(value)] = ray.put(value)
            return tuple(put[id(value)] for value in values)
        # Ray keeps what does not fit into memory on the node's disk.
        except (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError):
            raise UserError(
                f"a batch of {size / 1e6:.0f} MB does not fit into Ray's object store on this node,"
                " nor on its disk: raise ray start --object-store-memory, free space in ray start"
                " --temp-dir (/tmp/ray), or lower train.groups_per_step"
            ) from None

    def _results(self, references: Sequence[Any], ranks: Sequence[int] = ()) -> list[Any]:
        """Returns the results in order. Ends the gang before it raises, unless it is interrupted."""
        import ray

        rank_of = dict(zip(references, ranks or range(len(references)), strict=True))
        watched = [] if self._watch is None else [self._watch]
        pending = list(references)
        results = {}
        try:
            with waiting(whose(), "the processes that train", lambda: self._late(rank_of, pending)):
                while pending:
                    done, _ = ray.wait([*pending, *watched], timeout=POLL_SECONDS)
                    if threading.current_thread() is threading.main_thread():
                        interrupts.raise_if_interrupted()
                    for reference in done:
                        if reference is not self._watch:
                            pending.remove(reference)
                            results[reference] = self._result(reference, rank_of[reference])
                    if pending and self._watch in done:
                        raise self._error_of(self._blamed())
            return [results[reference] for reference in references]
        except Exception:
            self.end()
            raise

    def _late(self, rank_of: dict[Any, int], pending: Sequence[Any]) -> str:
        """Names the ranks whose calls have not ended."""
        import ray

        late = sorted(rank_of[reference] for reference in pending)
        if self._watch is not None:
            late = ray.get(self._behind.remote(), timeout=SECONDS_TO_SAY)
        return f"{late} have not answered"

    def _result(self, reference: Any, rank: int) -> Any:
        """Returns the result of a call that has ended. Raises: the call's own UserError; Lost if it
        raised something else or its process is gone."""
        import ray

        if self._lost is not None:
            raise self._lost
        try:
            return ray.get(reference)
        except ray.exceptions.RayError as error:
            failure = failure_of(rank, error)
            if not (failure.died or failure.is_mistake or self._watch is None):
                # Another process that is gone may be behind it.
                waited = ray.wait([self._watch], timeout=2 * SECONDS_TO_BLAME)[0]
                failure = self._blamed() if waited else failure
            raise self._error_of(failure) from error

    def _blamed(self) -> Failure:
        """Returns the failure that the first process has reported, or its own end."""
        import ray

        try:
            found: Failure = ray.get(self._watch)
        except ray.exceptions.RayError as error:
            return failure_of(0, error)
        return found

    def _error_of(self, failure: Failure) -> UserError:
        """Returns what a failure raises; of several, the first is the one to report."""
        if failure.is_mistake:
            return UserError(failure.text)
        if self._lost is None:
            if failure.traceback:
                print(failure.traceback, file=sys.stderr)
            what = "is gone" if failure.died else "failed"
            self._lost = Lost(f"{self._name} {failure.rank} {what}: {failure.text}", failure.died)
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


def bytes_of(value: Any, seen: set[int] | None = None) -> int:
    """Returns the bytes of all arrays in a value, of one object once, as a message has it. seen: ids of
    objects that are counted."""
    seen = set() if seen is None else seen
    if isinstance(value, dict):
        return sum(bytes_of(x, seen) for x in value.values())
    if is_dataclass(value):
        return sum(bytes_of(getattr(value, field.name), seen) for field in fields(value))
    if not hasattr(value, "dtype") or id(value) in seen:
        return 0
    seen.add(id(value))
    return np.asarray(value).nbytes
