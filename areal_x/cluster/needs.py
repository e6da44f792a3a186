"""What a run needs of the nodes of a cluster: ranks, servers and shards of the rollout, each with
room on one node.

One description for three readers: `launch` compares it with the nodes that are asked for, `check` and
the run itself with those that are there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from areal_x.cluster.config import ROLE, ClusterConfig
from areal_x.cluster.gang import Room
from areal_x.cluster.places import server_room, shard_room
from areal_x.cluster.trainers import accelerators
from areal_x.errors import ConfigError

CPU = "CPU"
SHARD = "shard"
Resources = Mapping[str, float]
"""The resources of a node, by Ray's names. Without "CPU" it is not known how many it has."""


@dataclass(frozen=True)
class Node:
    """A node of a cluster."""

    resources: Resources

    role: str = ""
    """Value of its label "role"."""


@dataclass(frozen=True)
class Need:
    """Processes of one kind."""

    name: str
    """Of one of them, in messages."""

    count: int

    room: Room
    """Of each."""

    count_setting: str
    """Setting of the count; of its quotient by `parts`."""

    accelerators_setting: str

    cpus_setting: str

    parts: int = 1
    """How many of them form one server, each on a node of its own."""

    @property
    def role(self) -> str:
        """The label "role" that their nodes must have; "" allows any node."""
        return self.room.labels.get(ROLE, "")

    def may_use(self, node: Node) -> bool:
        return self.role in ("", node.role)

    def fits_on(self, resources: Resources) -> int:
        """Returns how many have room on a node."""
        wanted = {
            name: size
            for name, size in self.room.bundle().items()
            if size and (name != CPU or CPU in resources)
        }
        return min((int(resources.get(x, 0) // y) for x, y in wanted.items()), default=self.count)

    def __str__(self) -> str:
        accelerators = self.room.accelerators
        each = [f"{accelerators} {self.room.resource}"] if accelerators else []
        each += [f"{self.room.cpus:g} {CPU}"] if self.room.cpus else []
        names = self.name if self.count == 1 else f"{self.name}s"
        on = f" on nodes with {ROLE}={self.role}" if self.role else ""
        return f"{self.count} {names} of {' and '.join(each) or 'nothing'}{on}"


@dataclass(frozen=True)
class Servers:
    """The servers that a run begins with on the nodes of a cluster."""

    count: int

    accelerators: int
    """Of each server."""

    hosts: int
    """Nodes of each server."""

    binding: str
    """Name of their settings in gin."""


def rank_room(backend: str, cluster: ClusterConfig, there: Sequence[Resources]) -> Room:
    """Returns what one process that trains needs of its node. there: the resources of each node."""
    return Room(
        cpus=cluster.cpus,
        accelerators=accelerators(backend, cluster, there),
        resource=cluster.resource,
        labels={ROLE: cluster.ranks_on} if cluster.ranks_on else {},
    )


def most_of(resource: str, there: Sequence[Resources]) -> int:
    """Returns how many of a resource the node has that has most of it."""
    return int(max((node.get(resource, 0) for node in there), default=0))


def needs_of(
    backend: str,
    processes: int,
    servers: Servers | None,
    cluster: ClusterConfig,
    there: Sequence[Resources],
) -> list[Need]:
    """Returns what a run needs, in the order in which it is placed. processes: those that train.
    servers: None for a run that places none. there: the resources of each node."""
    ranks = Need(
        name="rank",
        count=processes,
        room=rank_room(backend, cluster, there),
        count_setting="mesh.processes",
        accelerators_setting="cluster.accelerators",
        cpus_setting="cluster.cpus",
    )
    needs = [ranks]
    if servers is not None:
        hosts = servers.hosts
        placed = Need(
            name="server" if hosts == 1 else "server's part",
            count=servers.count * hosts,
            room=server_room(cluster, servers.accelerators // hosts, there),
            count_setting=f"{servers.binding}.servers",
            accelerators_setting="cluster.server_accelerators",
            cpus_setting="cluster.server_cpus",
            parts=hosts,
        )
        needs.append(placed)
    if cluster.shards:
        shards = Need(
            name=SHARD,
            count=cluster.shards,
            room=shard_room(cluster),
            count_setting="cluster.shards",
            accelerators_setting="cluster.shards",
            cpus_setting="cluster.shard_cpus",
        )
        needs.append(shards)
    return needs


def with_roles(needs: Sequence[Need], nodes: int, resources: Resources) -> list[Node]:
    """Returns so many equal nodes with the labels that the needs ask for: those of the first need
    first, as few as it needs, then those of the second; shards with a label of their own are on the
    last."""
    if needs[-1].name == SHARD:
        *others, shards = needs
        own = shards.role not in ("", *(need.role for need in others))
        last = min(nodes - 1, _nodes_for(shards, resources)) if own else 0
        return [
            *with_roles(others, nodes - last, resources),
            *[Node(resources, shards.role)] * last,
        ]
    roles = {need.role for need in needs}
    if len(roles) == 1:
        return [Node(resources, needs[0].role)] * nodes
    first, second = needs
    begin = min(nodes, _nodes_for(first, resources))
    if second.role and not first.role:
        begin = max(0, min(begin, nodes - _nodes_for(second, resources)))
    return [Node(resources, first.role)] * begin + [Node(resources, second.role)] * (nodes - begin)


def _nodes_for(need: Need, resources: Resources) -> int:
    return -(-need.count // max(1, need.fits_on(resources)))


def check_needs(needs: Sequence[Need], nodes: Sequence[Node]) -> None:
    """Raises: ConfigError for the first need without room, naming what it asks for and how much
    would work. Each need fills the nodes in their order, as Ray packs."""
    left = [dict(node.resources) for node in nodes]
    for number, need in enumerate(needs):
        usable = [i for i, node in enumerate(nodes) if need.may_use(node)]
        alone = [nodes[i].resources for i in usable]
        if usable:
            check_node(need.room, alone, need.accelerators_setting, need.cpus_setting)
        wanted = need.count
        for i in usable:
            placed = min(wanted, need.fits_on(left[i]))
            if need.parts > 1:  # one of each server, which suffices to place them all apart
                placed = min(placed, need.count // need.parts)
            wanted -= placed
            for name, size in need.room.bundle().items():
                if name in left[i]:
                    left[i][name] -= placed * size
        if wanted:
            each = max(map(need.fits_on, alone), default=0)
            role = f" with {ROLE}={need.role}" if need.role else ""
            if len(usable) == 1:
                on = f"{each} on the only node{role}"
            else:
                on = f"{each} on each" if each > 1 else "a node each,"
                on = f"{on} of {len(usable)} nodes{role}"
            beside = f", beside {needs[number - 1]}" if number else ""
            most = (need.count - wanted) // need.parts
            if need.parts > 1:
                on = f"each in {need.parts} parts, {on}"
            raise ConfigError(
                need.count_setting, need.count // need.parts, f"at most {most}, {on}{beside}"
            )


def check_node(
    room: Room, there: Sequence[Resources], accelerators_setting: str, cpus_setting: str
) -> None:
    """Raises: ConfigError if none of these nodes could hold a process."""
    wanted = room.bundle()
    if any(
        all(node.get(x, y if x == CPU else 0) >= y for x, y in wanted.items()) for node in there
    ):
        return
    end = "as many as a node of the cluster has"
    most = most_of(room.resource, there)
    if room.accelerators > most:
        raise ConfigError(accelerators_setting, room.accelerators, f"at most {most}, {end}")
    cpus = max(node.get(CPU, 0) for node in there)
    raise ConfigError(cpus_setting, room.cpus, f"at most {cpus:g}, {end}")
