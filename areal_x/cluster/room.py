"""Room for processes on the nodes of a Ray cluster."""

from __future__ import annotations

from areal_x.cluster.connection import nodes
from areal_x.cluster.gang import Room
from areal_x.errors import ConfigError, UserError


def check_room(room: Room, accelerators: str, cpus: str, hosts: int = 1) -> None:
    """Raises: UserError if fewer nodes than `hosts` have the labels, ConfigError if fewer could hold
    a process. accelerators, cpus: the settings that ask for them."""
    there, bundle = nodes(room.labels), room.bundle()
    if not there:
        listed = ", ".join(f"{name} = {value!r}" for name, value in room.labels.items())
        raise UserError(f"no node of the cluster has the label {listed}: ray start --labels")
    if sum(all(node.get(x, 0) >= y for x, y in bundle.items()) for node in there) >= hosts:
        return
    if hosts > 1:
        raise UserError(
            f"a server on {hosts} nodes needs {bundle} on each, which fewer nodes of the cluster"
            f" have (there are {len(there)}): lower vllm.hosts, or see {accelerators} and {cpus}"
        )
    most = max(node.get(room.resource, 0) for node in there)
    if room.accelerators > most:
        wanted = f"at most {most:g}, as many as a node of the cluster has"
        raise ConfigError(accelerators, room.accelerators, wanted)
    most = max(node.get("CPU", 0) for node in there)
    raise ConfigError(cpus, room.cpus, f"at most {most:g}, as many as a node of the cluster has")


def missing(room: Room, size: int) -> str:
    """Describes what `size` processes want and what is free."""
    import ray

    there = ray.available_resources()
    listed = [
        f"{size * y:g} {x} wanted, {there.get(x, 0):g} free" for x, y in room.bundle().items()
    ]
    on = f", on nodes with {room.labels}" if room.labels else ""
    return ", ".join(listed) + on
