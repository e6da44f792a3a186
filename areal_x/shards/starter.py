"""Starts servers on the nodes of the cluster that this process is connected to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from areal_x.cluster.config import ClusterConfig
from areal_x.engines.fleet.config import FleetConfig
from areal_x.engines.fleet.server import Starter

SERVERS_READ = ("VLLM_", "SGLANG_")  # the environment variables that servers read begin so


@contextmanager
def server_starter(config: FleetConfig, placement: ClusterConfig) -> Iterator[Starter]:
    """Returns what starts servers, which end with the body.

    Raises: UserError or ConfigError if no node has the labels or the room.
    """
    from areal_x.cluster.places import places_on_ray, server_room
    from areal_x.cluster.surroundings import surroundings
    from areal_x.engines.fleet.placed import ClusterStarter, Keeper

    room = server_room(placement, config.widths.on_each_host)
    around = surroundings(logs=None, more=SERVERS_READ)
    with places_on_ray(room, config.hosts, Keeper, around, joins=config.most > 0) as places:
        yield ClusterStarter(places)


def threads_of(config: FleetConfig, placement: ClusterConfig) -> int:
    """Returns the compute threads of a server's worker on another node, whose cores are not this
    one's to divide."""
    workers = config.widths.on_each_host
    return config.threads or max(1, int(placement.server_cpus) // workers)
