"""Places for objects on the nodes of a Ray cluster that live as long as the run: each is in an actor
of its own, the keeper, in a placement group of its own. Imported only by runs that are on Ray.

A keeper that is gone is not started again by Ray: whoever needs it asks its place for another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from importlib.metadata import version
from typing import Any

from areal_x.cluster.config import ROLE, ClusterConfig
from areal_x.cluster.connection import LOOPBACK, nodes
from areal_x.cluster.failures import failure_of
from areal_x.cluster.gang import Room
from areal_x.cluster.parent import end_with_parent
from areal_x.cluster.process import PACKAGE, Process
from areal_x.cluster.room import check_room, missing
from areal_x.cluster.surroundings import Surroundings
from areal_x.errors import UserError
from areal_x.runtime.waits import waiting, whose

POLL_SECONDS = 0.2
SECONDS_TO_ANSWER = 10.0  # for a keeper that is asked whether it lives
CALLS = 8  # that a keeper runs at the same time


@contextmanager
def places_on_ray(
    count: int, room: Room, make: Callable[[], Any], surroundings: Surroundings
) -> Iterator[list[RayPlace]]:
    """Returns places for so many objects, in the cluster that this process is connected to; their
    keepers end with the body. make: makes the object of each, in these surroundings.

    Raises: UserError or ConfigError if no node has the labels or the room.
    """
    check_room(room, "cluster.server_accelerators", "cluster.server_cpus")
    places = [RayPlace(room, make, surroundings, f"keeper-{index}") for index in range(count)]
    try:
        yield places
    finally:
        for place in places:
            place.end()


def server_room(
    cluster: ClusterConfig, width: int, there: Sequence[Mapping[str, float]] | None = None
) -> Room:
    """Returns what one server needs of its node. width: how many accelerators it computes on, if
    there are any. there: the resources of each node, by default the cluster's."""
    accelerators = cluster.server_accelerators
    if accelerators is None:
        there = nodes() if there is None else there
        accelerators = width if any(node.get(cluster.resource) for node in there) else 0
    return Room(
        cpus=cluster.server_cpus,
        accelerators=accelerators,
        resource=cluster.resource,
        labels={ROLE: cluster.servers_on} if cluster.servers_on else {},
    )


class RayPlace:
    """Room for one keeper. name: of its actor's process."""

    def __init__(
        self, room: Room, make: Callable[[], Any], surroundings: Surroundings, name: str
    ) -> None:
        self._room, self._make, self._surroundings, self._name = room, make, surroundings, name
        self._group: Any = None
        self._keeper: RayKeeper | None = None

    async def keeper(self) -> RayKeeper:
        """Returns the keeper; a new one if the last is gone, once a node has room for it.

        Raises: UserError if its node cannot be used, ConnectionError if it is gone at once.
        """
        if self._keeper is not None and await self._keeper.lives():
            return self._keeper
        self.end()
        try:
            free = partial(missing, self._room, 1)
            with waiting(whose(), "room for a server in the cluster", free):
                self._group = await asyncio.to_thread(reserve, self._room)
                ready = self._group.ready()
                while not has_ended(ready):
                    await asyncio.sleep(POLL_SECONDS)
            actor = start_actor(self._group, self._room)
            with waiting(whose(), "its keeper to start", self._name):
                node, address = await result(actor.node.remote(version(PACKAGE)), "a node")
                await result(actor.enter.remote(self._surroundings, self._name), address)
                await result(actor.make.remote(partial(made, self._make), 0), address)
        except BaseException:
            self.end()
            raise
        self._keeper = RayKeeper(actor, LOOPBACK if node == own_node() else address, address)
        return self._keeper

    def end(self) -> None:
        """Ends the keeper, if there is one, and gives its room back. Safe to call twice."""
        from ray.util.placement_group import remove_placement_group

        if self._keeper is not None:
            self._keeper.end()
        if self._group is not None:
            with suppress(Exception):
                remove_placement_group(self._group)  # ends an actor that is in it
        self._keeper = self._group = None


class RayKeeper:
    """The actor, seen from the driver. host: the address that its servers listen on, loopback on
    the driver's own node. node: its node's address."""

    def __init__(self, actor: Any, host: str, node: str) -> None:
        self._actor, self.host, self.node = actor, host, node

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """Makes the object run a method. The future raises UserError if the method does, and
        ConnectionError as soon as the actor is gone."""
        return answer(self._actor.call.remote(method, *arguments), self.node)

    async def lives(self) -> bool:
        called = answer(self._actor.node.remote(version(PACKAGE)), self.node)
        try:
            async with asyncio.timeout(SECONDS_TO_ANSWER):
                await asyncio.wrap_future(called)
        except (ConnectionError, UserError, TimeoutError):
            return False
        return True

    def is_of(self, actor: Any) -> bool:
        return self._actor is actor

    def end(self) -> None:
        import ray

        with suppress(Exception):
            ray.kill(self._actor)


def reserve(room: Room) -> Any:
    """Asks for a placement group, and returns before it has its room."""
    from ray.util.placement_group import placement_group

    labels = [room.labels] if room.labels else None
    return placement_group([room.bundle()], strategy="PACK", bundle_label_selector=labels)


def start_actor(group: Any, room: Room) -> Any:
    """Starts the actor in its placement group."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    actor = ray.remote(max_concurrency=CALLS, max_restarts=0)(Process)
    resources = {room.resource: room.accelerators} if room.accelerators else {}
    gpus = resources.pop("GPU", 0)
    place = PlacementGroupSchedulingStrategy(group, 0)
    return actor.options(
        scheduling_strategy=place, num_cpus=room.cpus, num_gpus=gpus, resources=resources
    ).remote()


def own_node() -> str:
    """Returns the id of this process's node."""
    import ray

    own: str = ray.get_runtime_context().get_node_id()
    return own


def has_ended(reference: Any) -> bool:
    import ray

    return bool(ray.wait([reference], timeout=0)[0])


async def result(reference: Any, node: str) -> Any:
    """Returns the result of a call. Raises: as the future of `RayKeeper.call`."""
    return await asyncio.wrap_future(answer(reference, node))


def answer(reference: Any, node: str) -> Future[Any]:
    """Returns the result to come of a call, with errors that name the node."""
    found: Future[Any] = Future()

    def settle(done: Future[Any]) -> None:
        error = done.exception()
        if not found.set_running_or_notify_cancel():
            return
        if error is None:
            found.set_result(done.result())
        else:
            found.set_exception(readable(error, node))

    reference.future().add_done_callback(settle)
    return found


def readable(error: BaseException, node: str) -> Exception:
    """Returns what the driver is told of a call's error."""
    failure = failure_of(0, error)
    if failure.died:
        return ConnectionError(f"its keeper on {node} is gone: {failure.text}")
    return UserError(failure.text)


def made(make: Callable[[], Any], rank: int) -> Any:
    """Makes the object, in its process, which then ends with its node."""
    end_with_parent()
    return make()
