"""Places for objects on the nodes of a Ray cluster that live as long as the run: each is in an actor
of its own, the keeper. The keepers of one place, each on another node, share a placement group.
Imported only by runs that are on Ray.

A keeper that is gone is not started again by Ray: whoever needs it asks its place for others.
"""

from __future__ import annotations

import asyncio
import os
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
from areal_x.runtime import background
from areal_x.runtime.waits import waiting, whose

POLL_SECONDS = 0.2
SECONDS_TO_ANSWER = 10.0  # for a keeper to report that it is alive
CALLS = 8  # that a keeper runs at the same time


@contextmanager
def places_on_ray(
    room: Room,
    hosts: int,
    make: Callable[[], Any],
    surroundings: Surroundings,
    joins: bool = False,
    name: str = "keeper",
    settings: tuple[str, str] = ("cluster.server_accelerators", "cluster.server_cpus"),
) -> Iterator[RayPlaces]:
    """Returns places for objects, in the cluster that this process is connected to; their keepers
    end with the body. room: for each keeper. hosts: the keepers of one place, each on a node of its
    own. make: makes the object of each, in these surroundings. joins: nodes with the room may join
    later. name: of one keeper's process, without its number. settings: those that ask for the room's
    accelerators and CPUs.

    Raises: UserError or ConfigError if no node has the labels or the room, unless nodes join.
    """
    if not joins:
        check_room(room, *settings, hosts)
    places = RayPlaces(room, hosts, make, surroundings, name)
    try:
        yield places
    finally:
        places.end()


def server_room(
    cluster: ClusterConfig, width: int, there: Sequence[Mapping[str, float]] | None = None
) -> Room:
    """Returns what one server needs of a node. width: how many accelerators it computes on there,
    if there are any. there: the resources of each node, by default the cluster's."""
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


def shard_room(cluster: ClusterConfig) -> Room:
    """Returns what one shard of the rollout needs of a node."""
    labels = {ROLE: cluster.shards_on} if cluster.shards_on else {}
    return Room(cpus=cluster.shard_cpus, labels=labels)


class RayPlaces:
    """Places by their numbers (areal_x.engines.fleet.placed.Places); each is made when its keepers
    are first wanted."""

    def __init__(
        self,
        room: Room,
        hosts: int,
        make: Callable[[], Any],
        surroundings: Surroundings,
        name: str = "keeper",
    ) -> None:
        self._room, self._hosts = room, hosts
        self._make, self._surroundings, self._name = make, surroundings, name
        self._places: dict[int, RayPlace] = {}

    async def keepers(self, number: int) -> list[RayKeeper]:
        """Returns the keepers of a place. Raises: see `RayPlace.keepers`."""
        if number not in self._places:
            self._places[number] = RayPlace(
                self._room, self._hosts, self._make, self._surroundings, f"{self._name}-{number}"
            )
        return await self._places[number].keepers()

    def departing(self) -> set[int]:
        """Returns the places on nodes that are being drained."""
        drained = drained_nodes()
        return {
            number
            for number, place in list(self._places.items())
            if drained & {keeper.node_id for keeper in place.held}
        }

    def vacate(self, number: int) -> None:
        """Ends a place."""
        if (place := self._places.pop(number, None)) is not None:
            place.end()

    def end(self) -> None:
        """Ends all places."""
        for number in list(self._places):
            self.vacate(number)


class RayPlace:
    """Room for the keepers of one place, each on a node of its own. held: the keepers. name: of
    their actors' processes."""

    def __init__(
        self,
        room: Room,
        hosts: int,
        make: Callable[[], Any],
        surroundings: Surroundings,
        name: str,
    ) -> None:
        self._room, self._hosts = room, hosts
        self._make, self._surroundings, self._name = make, surroundings, name
        self._group: Any = None
        self.held: list[RayKeeper] = []

    async def keepers(self) -> list[RayKeeper]:
        """Returns the keepers; new ones if any of the last is gone, once there is room for all.

        Raises: UserError if a node cannot be used, ConnectionError if a keeper is gone at once.
        """
        if self.held and all(await asyncio.gather(*(keeper.lives() for keeper in self.held))):
            return self.held
        self.end()
        try:
            free = partial(missing, self._room, self._hosts)
            with waiting(whose(), "room in the cluster", free):
                self._group = await reserved(self._room, self._hosts)
                ready = self._group.ready()
                while not has_ended(ready):
                    await asyncio.sleep(POLL_SECONDS)
            with waiting(whose(), "its keeper to start", self._name):
                self.held = list(await asyncio.gather(*map(self._keeper, range(self._hosts))))
        except BaseException:
            self.end()
            raise
        return self.held

    async def _keeper(self, index: int) -> RayKeeper:
        """Returns a new keeper in this bundle of the placement group."""
        actor = start_actor(self._group, self._room, index)
        node, address = await result(actor.node.remote(version(PACKAGE)), "a node")
        await result(actor.enter.remote(self._surroundings, self._name), address)
        await result(actor.make.remote(partial(made, self._make), 0), address)
        return RayKeeper(actor, LOOPBACK if node == own_node() else address, address, node)

    def end(self) -> None:
        """Ends the keepers, if there are any, and gives their room back. Safe to call twice."""
        from ray.util.placement_group import remove_placement_group

        for keeper in self.held:
            keeper.end()
        if self._group is not None:
            with suppress(Exception):
                remove_placement_group(self._group)  # ends actors that are in it
        self._group, self.held = None, []


class RayKeeper:
    """The actor, seen from the driver. host: the address that its servers listen on, loopback on
    the driver's own node. node: its node's address. node_id: Ray's id of the node."""

    def __init__(self, actor: Any, host: str, node: str, node_id: str) -> None:
        self._actor, self.host, self.node, self.node_id = actor, host, node, node_id

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


def reserve(room: Room, hosts: int) -> Any:
    """Asks for a placement group with room on this many nodes, and returns before it has it: what
    it waits for is what Ray's autoscaler starts nodes for."""
    from ray.util.placement_group import placement_group

    labels = [room.labels] * hosts if room.labels else None
    strategy = "PACK" if hosts == 1 else "STRICT_SPREAD"
    bundles = [room.bundle() for _ in range(hosts)]
    return placement_group(bundles, strategy=strategy, bundle_label_selector=labels)


async def reserved(room: Room, hosts: int) -> Any:
    """Does `reserve` in a thread; a call that is cancelled leaves no group."""

    async def asked() -> Any:
        return await asyncio.to_thread(reserve, room, hosts)

    # the one who waits gets its error
    reserving = background.start(asked(), "the call for room", failed=lambda _: None)
    try:
        return await asyncio.shield(reserving)
    except asyncio.CancelledError:
        reserving.add_done_callback(give_back)
        raise


def give_back(reserving: asyncio.Future[Any]) -> None:
    """Removes a group that nobody waits for any more."""
    from ray.util.placement_group import remove_placement_group

    with suppress(Exception):
        remove_placement_group(reserving.result())


def drained_nodes() -> set[str]:
    """Returns the ids of nodes that are about to go: preempted, or drained by an operator. None
    while the cluster does not answer."""
    import ray

    with suppress(Exception):  # no part of Ray's stable interface
        return set(ray._private.state.state.get_draining_nodes())
    return set()


def start_actor(group: Any, room: Room, index: int) -> Any:
    """Starts an actor in a bundle of its placement group."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    actor = ray.remote(max_concurrency=CALLS, max_restarts=0)(Process)
    resources = {room.resource: room.accelerators} if room.accelerators else {}
    gpus = resources.pop("GPU", 0)
    place = PlacementGroupSchedulingStrategy(group, index)
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
    """Returns the driver's form of an error of a call."""
    failure = failure_of(0, error)
    if failure.died:
        return ConnectionError(f"its keeper on {node} is gone: {failure.text}")
    return UserError(failure.text)


def made(make: Callable[[], Any], rank: int) -> Any:
    """Makes the object, in its process, which then ends with its node. Programs that it starts find
    the cluster."""
    import ray

    if ray.is_initialized():
        os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    end_with_parent()
    return make()
