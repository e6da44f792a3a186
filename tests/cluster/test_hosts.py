"""Rewards on the nodes of a Ray cluster, one of which is killed while it computes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.cluster.cluster import cluster

pytest.importorskip("ray")
pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.timeout(600)]

# Scores until another node has scored too; prints the processes of the actors that did; once a line arrives, more rewards
# than this machine can run at once begin, and the host that was printed is killed in the middle of them.
DRIVER = """
import asyncio, os, sys
from pathlib import Path

import psutil

from areal_x.cluster.config import ClusterConfig
from areal_x.cluster.connection import connected
from areal_x.cluster.hosts import hosts_on_ray
from areal_x.cluster.surroundings import surroundings
from areal_x.rewards.pool import RewardPool, SpreadPool
from areal_x.types import Scored, Task
from tests.cluster.test_hosts import waits_for_file

folder = Path(sys.argv[1])


def actor_of(worker: int) -> int:
    return next(p.pid for p in psutil.Process(worker).parents() if "ray::" in " ".join(p.cmdline()) or p.pid == os.getpid())


async def main() -> None:
    with hosts_on_ray(ClusterConfig(), surroundings(folder), print) as hosts:
        pool = RewardPool(waits_for_file, workers=2, timeout_seconds=200)
        spread = SpreadPool(pool, hosts)
        try:
            while len(hosts.there()) < int(sys.argv[2]):
                await asyncio.sleep(0.05)
            tasks = [Task(str(i), "p", str(folder)) for i in range(6)]
            scoring = [asyncio.ensure_future(spread.score(task, "text")) for task in tasks]
            started = lambda: sorted(folder.glob("*.started"))
            while len(started()) < 2 * (1 + int(sys.argv[2])):
                await asyncio.sleep(0.05)
            actors = {actor_of(int(file.read_text())) for file in started()} - {os.getpid()}
            print("hosts", *actors, flush=True)
            await asyncio.to_thread(sys.stdin.readline)
            (folder / "go").touch()
            outcomes = await asyncio.gather(*scoring)
            assert [o.reward for o in outcomes if isinstance(o, Scored)] == [4.0] * 6, outcomes
            while len(hosts.there()) < int(sys.argv[2]):  # the node itself is still there
                await asyncio.sleep(0.05)
        finally:
            await spread.close()
    print("all scored", flush=True)


with connected(cpus=1):
    asyncio.run(main())
"""


def waits_for_file(task, text: str) -> float:
    import time

    folder = Path(task.answer)
    started = folder / f"{task.id}-{os.getpid()}"
    started.write_text(str(os.getpid()))
    started.rename(started.with_suffix(".started"))
    while not (folder / "go").exists():
        time.sleep(0.02)
    return float(len(text))


def test_rewards_run_on_every_node_and_elsewhere_when_a_host_is_killed(tmp_path: Path) -> None:
    words = [sys.executable, "-c", DRIVER, str(tmp_path), "1"]
    with cluster(2) as ray:
        environment = {**os.environ, **ray.environment}
        with subprocess.Popen(words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as driver:
            assert driver.stdin is not None
            assert driver.stdout is not None
            lines = iter(driver.stdout)  # Ray prints to it too
            word = next(line for line in lines if line.startswith("hosts ")).split()
            (host,) = (psutil.Process(int(pid)) for pid in word[1:])
            family = host.children(recursive=True)
            host.kill()
            driver.stdin.write("go\n")
            driver.stdin.flush()
            assert "all scored\n" in lines
            assert driver.wait(timeout=120) == 0
            assert psutil.wait_procs(family, timeout=60)[1] == []
