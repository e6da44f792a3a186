"""The servers of a run, divided among its shards."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from areal_x.engines.fleet.config import FleetConfig
from areal_x.errors import ConfigError

C = TypeVar("C", bound=FleetConfig)


def check_division(config: FleetConfig, shards: int) -> None:
    """Raises: ConfigError if a shard would have no server, or if they cannot be divided."""
    least, _ = config.bounds
    servers, binding = (
        (len(config.urls), f"{config.binding}.urls")
        if config.urls
        else (least, "the servers that it begins with")
    )
    if shards > servers:
        wanted = f"at most {servers}, the number of {binding}: each shard needs one"
        raise ConfigError("cluster.shards", shards, wanted)
    if config.direct:
        wanted = "'files' with cluster.shards, each of which publishes to its own servers"
        raise ConfigError(f"{config.binding}.transport", config.transport, wanted)
    if config.delta:
        wanted = "0 with cluster.shards: each shard adopts the whole files that the trainer stages"
        raise ConfigError(f"{config.binding}.delta", config.delta, wanted)


def servers_of(config: C, shard: int, shards: int) -> tuple[C, int]:
    """Returns the servers of one shard, and the number of the first among all: neighbours, and the
    sizes differ by one at most."""
    if config.urls:
        first, size = share(len(config.urls), shard, shards)
        return replace(config, urls=config.urls[first : first + size]), first
    least, most = config.bounds
    first, size = share(most, shard, shards)
    port = config.port + first if config.port else 0
    if not config.most:
        return replace(config, servers=size, port=port), first
    _, fewest = share(least, shard, shards)
    return replace(config, servers=1, least=fewest, most=size, port=port), first


def share(count: int, shard: int, shards: int) -> tuple[int, int]:
    """Returns the first of a shard's items, and their number."""
    each, more = divmod(count, shards)
    return shard * each + min(shard, more), each + (shard < more)
