"""Hosts of rewards and programs on the nodes of a Ray cluster: an actor on every node but the
driver's own, as long as the run lasts. Nodes may come and go. Imported only by runs that are on Ray.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from typing import Any

from areal_x.cluster.config import ROLE, ClusterConfig
from areal_x.cluster.places import RayKeeper, made, own_node, result
from areal_x.cluster.process import PACKAGE, Process
from areal_x.cluster.surroundings import Surroundings
from areal_x.errors import UserError
from areal_x.runtime import background
from areal_x.runtime.hosts import Host, Services
from areal_x.runtime.loop import new_loop, serve

POLL_SECONDS = 5.0  # between looks for new nodes
CALLS = 64  # that a host runs at once, of all services together


@contextmanager
def hosts_on_ray(
    cluster: ClusterConfig, surroundings: Surroundings, message: Callable[[str], None]
) -> Iterator[RayHosts]:
    """Starts a host on each node of the cluster that this process is connected to, also on those that
    come later; they end with the body. message: receives why a node is not used."""
    hosts = RayHosts(cluster, surroundings, message)
    try:
        yield hosts
    finally:
        hosts.close()


class RayHosts:
    """The hosts of a run (areal_x.runtime.hosts.Hosts). Returns before they are ready."""

    def __init__(
        self, cluster: ClusterConfig, surroundings: Surroundings, message: Callable[[str], None]
    ) -> None:
        self._cpus, self._surroundings, self._message = cluster.host_cpus, surroundings, message
        self._labels = {ROLE: cluster.hosts_on} if cluster.hosts_on else {}
        self._actors: dict[str, Any] = {}  # by node
        self._ready: dict[str, RayKeeper] = {}
        self._refused: set[str] = set()
        self._loop = new_loop()
        background.watch(self._loop, self._failed)
        self._thread = background.thread(
            serve, self._loop, what="the thread of the hosts", failed=self._failed, name="hosts"
        )
        asyncio.run_coroutine_threadsafe(self._watch(own_node()), self._loop)

    def there(self) -> Sequence[Host]:
        return tuple(self._ready.copy().values())

    def lost(self, host: Host) -> None:
        self._loop.call_soon_threadsafe(self._remove, host)
        for node, ready in self._ready.copy().items():
            if ready is host:
                self._ready.pop(node, None)

    def close(self) -> None:
        """Ends all hosts."""
        import ray

        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        for actor in self._actors.values():
            with suppress(Exception):
                ray.kill(actor)

    async def _watch(self, own: str) -> None:
        starting: set[asyncio.Task[None]] = set()
        while True:
            for node, name in await asyncio.to_thread(present, self._labels, self._cpus):
                if node not in self._actors and node != own and node not in self._refused:
                    self._actors[node] = start_on(node)
                    task = background.start(self._start(node, name), f"the host on {name}")
                    starting.add(task)
                    task.add_done_callback(starting.discard)
            await asyncio.sleep(POLL_SECONDS)

    async def _start(self, node: str, name: str) -> None:
        actor = self._actors[node]
        try:
            await result(actor.node.remote(version(PACKAGE)), name)
            await result(actor.enter.remote(self._surroundings, f"host-{node[:8]}"), name)
            await result(actor.make.remote(made_services, 0), name)
        except ConnectionError:  # the node is gone, or will be tried again
            self._actors.pop(node, None)
        except UserError as error:
            self._refused.add(node)
            self._message(f"the node {name} computes no rewards: {error}")
        else:
            self._ready[node] = RayKeeper(actor, name, name, node)

    def _remove(self, host: Host) -> None:
        for node, actor in list(self._actors.items()):
            if isinstance(host, RayKeeper) and host.is_of(actor):
                del self._actors[node]
                host.end()

    def _failed(self, error: BaseException) -> None:
        self._message(f"{error}: no further nodes compute rewards")


def made_services(rank: int) -> Services:
    """Makes the object of a host, in its process, which then ends with its node."""
    services: Services = made(Services, rank)
    return services


def present(labels: dict[str, str], cpus: float) -> list[tuple[str, str]]:
    """Returns the id and the address of each node that is there and has the labels and the CPUs."""
    import ray

    return [
        (node["NodeID"], node["NodeManagerAddress"])
        for node in ray.nodes()
        if node["Alive"]
        and labels.items() <= node.get("Labels", {}).items()
        and node["Resources"].get("CPU", 0) >= cpus
    ]


def start_on(node: str) -> Any:
    """Starts an actor on this node and no other. It reserves nothing: a server that is placed later
    could lack the room."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    actor = ray.remote(max_concurrency=CALLS, max_restarts=0)(Process)
    place = NodeAffinitySchedulingStrategy(node, soft=False)
    return actor.options(scheduling_strategy=place, num_cpus=0).remote()
