"""The rollout in shards on a real Ray: with engines that answer at once, and with vLLM servers."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from areal_x.monitor.metrics import read
from tests.cluster.cluster import HEAD, ROLE, cluster
from tests.cluster.watched import Watched, servers_left
from tests.conftest import environment_with
from tests.launching import ONE_RANK, ONLINE, command_of, started

pytest.importorskip("ray")
pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.timeout(600)]


def test_shards_on_ray_make_the_groups_of_one_process_though_one_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.cluster.sharding", str(tmp_path)]
    with (tmp_path / "err").open("w") as errors:
        found = subprocess.run(command, env=environment_with(1), stdout=subprocess.PIPE, stderr=errors, text=True, timeout=300)
    assert found.returncode == 0, (tmp_path / "err").read_text()
    here, shards = (re.search(rf"^{name} (.*)$", found.stdout, re.MULTILINE)[1] for name in ("here", "shards"))  # type: ignore[index]
    assert shards == here
    assert re.search(r"^shard 1 is lost \(its keeper on \S+ is gone: .*\): its groups go to others", found.stdout, re.MULTILINE)
    assert {file.name for file in tmp_path.glob("shard-?-?")} == {"shard-0-0", "shard-1-0", "shard-1-1"}
    assert (tmp_path / "shard-0.log").exists()
    left = [int(file.read_text()) for file in tmp_path.glob("shard-?-?")]
    assert not any(psutil.pid_exists(pid) for pid in left)


SHARDED = f"""
train.engine = 'vllm'
train.max_staleness = 2
train.steps = 60
train.evaluate_every = 20
train.held_out = @processes_test.tasks()
train.algorithm = @grpo()
vllm.servers = 2
vllm.concurrency = 8
cluster.shards = 2
cluster.shard_cpus = 0.5
cluster.ranks_on = '{HEAD}'
cluster.servers_on = '{ROLE}'
cluster.shards_on = '{HEAD}'
cluster.cpus = 0.5
"""


@pytest.mark.cluster
@pytest.mark.server
@pytest.mark.parametrize("more", [(), ("lora.rank = 4",)], ids=["weights", "adapters"])
def test_a_run_in_shards_whose_servers_are_real_goes_on_though_one_is_killed(
    more: tuple[str, ...], tiny_model_dir: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    command = command_of(tiny_model_dir, folder, ONLINE + SHARDED, *ONE_RANK, *more)

    with cluster(3) as ray, started(command, 1, 1, folder, **ray.environment) as (process,):
        watched = Watched(process, folder)
        watched.until(lambda: watched.step() >= 3)
        watched.actor("shard-1.log").kill()
        watched.until(lambda: "shard 1 is lost" in watched.out())
        lost = watched.step()
        watched.until(lambda: watched.step() >= lost + 3)  # the other one makes all groups
        watched.succeeds(400)
    rows = read(watched.run)
    assert [row["step"] for row in rows] == list(range(61))
    assert not any(row.get("failed") for row in rows)
    assert {row["shards"] for row in rows[1:]} <= {1.0, 2.0}
    assert sum("accuracy" in row for row in rows) == 4
    assert not servers_left(tiny_model_dir)
