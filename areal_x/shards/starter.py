"""Starts vLLM servers on the nodes of the cluster that this process is connected to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from areal_x.cluster.config import ClusterConfig
from areal_x.engines.vllm.config import VLLMConfig
from areal_x.engines.vllm.server import Starter

SERVERS_READ = "VLLM_"  # the environment variables that vLLM reads begin with it


@contextmanager
def server_starter(config: VLLMConfig, placement: ClusterConfig) -> Iterator[Starter]:
    """Returns what starts servers, which end with the body.

    Raises: UserError or ConfigError if no node has the labels or the room.
    """
    from areal_x.cluster.places import places_on_ray, server_room
    from areal_x.cluster.surroundings import surroundings
    from areal_x.engines.vllm.placed import ClusterStarter, Keeper, accelerators_of

    room = server_room(placement, accelerators_of(config.arguments) // config.hosts)
    around = surroundings(logs=None, more=[SERVERS_READ])
    with places_on_ray(room, config.hosts, Keeper, around, joins=config.most > 0) as places:
        yield ClusterStarter(places)


def threads_of(config: VLLMConfig, placement: ClusterConfig) -> int:
    """Returns the compute threads of a server on another node, whose cores are not this one's to
    divide."""
    return config.threads or max(1, int(placement.server_cpus))
