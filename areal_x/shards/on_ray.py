"""The rollout in shards, which are actors on the nodes of a Ray cluster. Imported only by runs that
are on Ray."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from areal_x.cluster.places import places_on_ray, shard_room
from areal_x.cluster.surroundings import surroundings
from areal_x.engines.fleet.probe import probe_prompt
from areal_x.engines.fleet.stager import Stager
from areal_x.protocols.trainer import Scorer
from areal_x.rollout.episodes import Episodes, EpisodeSettings
from areal_x.runtime.shared_folder import marked
from areal_x.shards.engine import ShardedEngine
from areal_x.shards.episodes import ShardedEpisodes
from areal_x.shards.parts import VLLMParts
from areal_x.shards.shard import Shard
from areal_x.shards.shards import Shards
from areal_x.shards.starter import SERVERS_READ


@dataclass(frozen=True)
class Sharded:
    """A rollout in shards, in the driver."""

    engine: ShardedEngine

    episodes: Callable[[Callable[[], None]], Episodes]
    """Makes what runs the episodes (areal_x.rollout.runner.MakeEpisodes)."""


@contextmanager
def sharded_on_ray(
    parts: VLLMParts,
    settings: EpisodeSettings,
    scorer: Scorer | None,
    message: Callable[[str], None],
) -> Iterator[Sharded]:
    """Returns the shards, not yet opened, in the cluster that this process is connected to; their
    processes end with the body. scorer: computes the log-probabilities that the servers' are compared
    with, None for none.

    Raises: UserError or ConfigError if no node has the labels or the room.
    """
    config, cluster = parts.config, parts.placement
    key = os.environ.get(config.key_variable)
    parts = replace(parts, keys={config.key_variable: key} if key and config.urls else {})
    stager = Stager(
        config,
        parts.directory,
        lora=parts.lora,
        scorer=scorer,
        probe_prompt=partial(probe_prompt, parts.vocabulary, config.context),
        report=message,
        prove_every=config.prove_every,
    )
    with (
        marked(parts.logs) as mark,
        places_on_ray(
            shard_room(cluster),
            hosts=1,
            make=partial(Shard, parts, settings),
            surroundings=surroundings(parts.logs, more=SERVERS_READ, mark=mark),
            name="shard",
            settings=("cluster.shards", "cluster.shard_cpus"),
        ) as places,
    ):
        shards = Shards(cluster.shards, settings.attempts, places, message)
        engine = ShardedEngine(shards, stager, config.context)
        yield Sharded(engine, partial(ShardedEpisodes, shards, engine))
