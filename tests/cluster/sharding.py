"""A rollout in shards that are actors of a Ray of this machine's own: `python -m tests.cluster.sharding FOLDER` prints its
groups, without shards and with two, one of which is killed in the middle."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

from areal_x.cluster.config import ClusterConfig
from areal_x.cluster.connection import connected
from areal_x.cluster.places import places_on_ray, shard_room
from areal_x.cluster.surroundings import surroundings
from areal_x.rollout.episodes import EpisodeSettings
from areal_x.rollout.queue import TrajectoryQueue
from areal_x.rollout.rollout import Rollout
from areal_x.rollout.runner import Runner
from areal_x.shards.engine import ShardedEngine
from areal_x.shards.episodes import ShardedEpisodes
from areal_x.shards.shard import Shard, ShardParts
from areal_x.shards.shards import Shards
from areal_x.tasks.stream import TaskStream
from tests.rollout.fakes import TASKS, FakeEngine, Plain
from tests.shards.fakes import FakeStager

SIZE, STEP, STEPS = 3, 4, 6


def parts(folder: Path, number: int, times: int, message) -> ShardParts:
    (folder / f"shard-{number}-{times}").write_text(str(os.getpid()))
    return ShardParts(FakeEngine(), Plain(), Plain().greedy())


def groups(make, between=lambda step: None) -> str:
    """The tasks, tokens and rewards of the groups of some steps, in strict order."""
    queue, stream = TrajectoryQueue(STEP, 1), TaskStream(TASKS, shuffle=False)
    with Rollout(make(workflow=Plain(), stream=stream, queue=queue, group_size=SIZE, seed=5)) as rollout:
        rollout.start()
        rollout.publish(SimpleNamespace(version=0))
        found = []
        for step in range(1, STEPS + 1):
            found += rollout.take()
            between(step)
            rollout.publish(SimpleNamespace(version=step))
        answers = [episode.reward for episode in rollout.evaluate(TASKS[:7])]
    tokens = [[t.tokens.tolist() for e in group.episodes for t in e.trajectories] for group in found]
    return json.dumps([[group.task.id for group in found], [group.rewards for group in found], tokens, answers])


def main(folder: Path) -> None:
    print("here", groups(partial(Runner, FakeEngine())), flush=True)
    cluster, settings, messages = ClusterConfig(shards=2), EpisodeSettings(SIZE, seed=5), []
    make = partial(Shard, partial(parts, folder), settings)

    def kill(step: int) -> None:
        """Kills a shard and waits for its return, which needs the newest weights."""
        if step == 3:
            os.kill(int((folder / "shard-1-0").read_text()), signal.SIGKILL)
        while step == 5 and "shard 1 is there again" not in messages:
            time.sleep(0.05)

    with (
        connected(cpus=2),
        places_on_ray(shard_room(cluster), 1, make, surroundings(folder), name="shard") as places,
    ):
        shards = Shards(2, settings.attempts, places, messages.append)
        engine = ShardedEngine(shards, FakeStager(), 64)
        print("shards", groups(partial(Runner, engine, episodes=partial(ShardedEpisodes, shards, engine)), kill), flush=True)
    print("messages", *messages, sep="\n", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
