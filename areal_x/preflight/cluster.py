"""Checks that the nodes of a cluster have what a run needs of them."""

from __future__ import annotations

import os
from collections.abc import Sequence

from areal_x.cluster.config import ROLE
from areal_x.cluster.connection import connected
from areal_x.cluster.installed import check_installed
from areal_x.cluster.needs import Need, Node, Resources, Servers, check_needs, needs_of
from areal_x.errors import ConfigError, UserError
from areal_x.protocols.backends import load_backend
from areal_x.settings import Settings

ADDRESS = "RAY_ADDRESS"


def check_cluster_nodes(settings: Settings) -> str:
    """Describes what the run needs of its nodes, and compares it with those of the cluster of
    RAY_ADDRESS, if that is set.

    Raises: UserError or ConfigError if that cluster cannot be used, has no room for the run, or
    other versions on a node.
    """
    if not os.environ.get(ADDRESS):
        servers, resource = placed_servers(settings), settings.placement.resource
        each = servers.accelerators if servers is not None else 1
        return (
            f"{described(settings, [{resource: each}])} (no {resource} where no node has any);"
            f" {ADDRESS} is not set, so the run starts Ray on this machine alone (areal-x launch"
            " writes jobs for several)"
        )
    with connected(cpus=0):
        nodes = cluster_nodes()
        check_labels(settings, nodes)
        there = [node.resources for node in nodes]
        check_room(needs(settings, there), nodes)
        versions = check_installed()
    return (
        f"{described(settings, there)}: {len(nodes)} node{'s' if len(nodes) > 1 else ''} at"
        f" {os.environ[ADDRESS]} have the room, with {versions}"
    )


def check_room(wanted: Sequence[Need], nodes: Sequence[Node]) -> None:
    """Raises: ConfigError if the needs have no room, neither in the order of the nodes nor with the
    smallest first: which of them Ray fills first is not known."""
    try:
        check_needs(wanted, nodes)
    except ConfigError:
        check_needs(wanted, sorted(nodes, key=lambda node: sum(node.resources.values())))


def needs(settings: Settings, there: Sequence[Resources]) -> list[Need]:
    """Returns what the run needs. there: the resources of each node."""
    return needs_of(
        backend=settings.backend,
        processes=settings.trainer.mesh.processes,
        servers=placed_servers(settings),
        cluster=settings.placement,
        there=there,
    )


def placed_servers(settings: Settings) -> Servers | None:
    """Returns the servers that the run places on nodes; None if it places none."""
    fleet = settings.fleet
    if fleet is None or not settings.places_servers:
        return None
    return Servers(fleet.bounds[0], fleet.widths.accelerators, fleet.hosts, fleet.binding)


def described(settings: Settings, there: Sequence[Resources]) -> str:
    """Returns what the run needs, each process with its room on one node."""
    ranks, *others = needs(settings, there)
    text = f"{ranks}"
    takes_all = load_backend(settings.backend).DEVICES_EACH is None
    if takes_all and settings.placement.accelerators is None:
        resource = settings.placement.resource
        text = f"{ranks.count} rank{'s' if ranks.count > 1 else ''} on a node each, with all of its {resource}s"
    return "; ".join([text, *map(str, others)])


def cluster_nodes() -> list[Node]:
    """Returns the nodes of the cluster that this process is connected to."""
    import ray

    return [
        Node(node["Resources"], node.get("Labels", {}).get(ROLE, ""))
        for node in ray.nodes()
        if node["Alive"]
    ]


def check_labels(settings: Settings, nodes: Sequence[Node]) -> None:
    """Raises: UserError for a label that no node has."""
    there = {node.role for node in nodes}
    cluster = settings.placement
    wanted = {"cluster.ranks_on": cluster.ranks_on}
    if settings.places_servers:
        wanted["cluster.servers_on"] = cluster.servers_on
    if cluster.shards:
        wanted["cluster.shards_on"] = cluster.shards_on
    for name, role in wanted.items():
        if role and role not in there:
            has = ", ".join(sorted(filter(None, there))) or "none"
            raise UserError(
                f"{name} = {role!r}, and no node of the cluster has the label: start some with ray"
                f" start --labels {ROLE}={role} (labels that are there: {has})"
            )
