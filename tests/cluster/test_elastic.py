"""Real servers that come and go with the nodes of a cluster, and one that is on two nodes."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.autoscaling import autoscaling_cluster
from tests.cluster.cluster import HEAD, ROLE, cluster
from tests.cluster.elastic import ASKING
from tests.cluster.watched import Watched, servers_left
from tests.conftest import environment_with
from tests.launching import ONE_RANK, ONLINE, command_of, slow_rewards, started

pytest.importorskip("ray")
pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.timeout(1200), pytest.mark.cluster, pytest.mark.server]


def found_by(name: str, model: Path, folder: Path, environment: dict[str, str], said: Callable[[str], None]) -> dict[str, Any]:
    """Runs a driver of tests.cluster.elastic to its end. said: called with each line but the last."""
    words = [sys.executable, "-m", "tests.cluster.elastic", name, str(model), str(folder)]
    last = ""
    with (
        (folder / "errors").open("w") as errors,
        subprocess.Popen(
            words, env=environment_with(1, **environment), stdout=subprocess.PIPE, stderr=errors, text=True
        ) as driver,
    ):
        assert driver.stdout is not None
        try:
            for line in driver.stdout:
                last = line.strip()
                said(last)
        finally:
            if driver.poll() is None and not last.startswith("{"):
                driver.kill()
    assert driver.returncode == 0, (folder / "errors").read_text()
    found: dict[str, Any] = json.loads(last)
    print({name: value for name, value in found.items() if name != "lines"})
    return found


@pytest.mark.parametrize("servers", ["scaled", pytest.param("sglang", marks=pytest.mark.sglang)])
def test_no_request_is_lost_while_servers_and_their_nodes_come_and_go(
    servers: str, tiny_model_dir: Path, tmp_path: Path
) -> None:
    with autoscaling_cluster(most=4) as environment:
        found = found_by(servers, tiny_model_dir, tmp_path, environment, lambda line: None)
    assert found["nodes of three"] >= 4, "a node for each server, and the head"
    lines = "\n".join(found["lines"])
    assert "is lost" not in lines
    assert "quarantined" not in lines
    assert lines.count("is being drained: it is placed elsewhere") == 1
    assert found["in flight"] == 0
    assert (
        found["answered"]
        > found["replaced"]["answered"]
        >= found["drained"]["answered"]
        > found["answered by three"]["answered"]
    )
    assert found["answered"] > 4 * ASKING
    assert found["differ"] == 0
    assert not servers_left(tiny_model_dir)


def test_a_server_on_two_nodes_is_placed_anew_when_one_of_them_is_gone(tiny_model_dir: Path, tmp_path: Path) -> None:
    with cluster(3) as ray:

        def said(line: str) -> None:
            if line in ("kill", "add"):
                assert ray.ask(line) == "done"

        found = found_by("spanning", tiny_model_dir, tmp_path, ray.environment, said)
    assert len(set(found["first"])) == len(set(found["second"])) == 2
    assert len(set(found["first"]) & set(found["second"])) == 1, "one node is gone, and another has come"
    lines = "\n".join(found["lines"])
    assert re.search(r"vLLM server 1 of 1 is lost \(", lines)
    assert "vLLM server 1 of 1 serves again, with the weights of version 1" in lines
    assert (found["in flight"], found["differ"]) == (0, 0)
    assert not servers_left(tiny_model_dir)


ELASTIC = f"""
single_turn.reward = @processes_test.slow_ones
single_turn.reward_workers = 4
train.engine = 'vllm'
train.max_staleness = 2
train.steps = 100000
train.algorithm = @grpo()
vllm.most = 2
vllm.concurrency = 8
cluster.host_cpus = 0
cluster.ranks_on = '{HEAD}'
cluster.servers_on = '{ROLE}'
cluster.server_cpus = 2
"""


# A step that takes long while a file is there.
HEAVY = """
@gin.configurable(module="processes_test")
def heavy(policy, batch):
    import os, time
    from areal_x.algorithms import losses
    if os.path.exists(FILE):
        time.sleep(0.8)
    return losses.ppo_clip(policy, batch)
"""


def test_a_run_scales_up_and_down_by_its_own_idle_shares_and_ends(tiny_model_dir: Path, tmp_path: Path) -> None:
    """Rewards are slow until a second server generates; then steps are, until it has left; then nothing."""
    folder, steps = tmp_path / "run", 120
    more = f"train.steps = {steps}", "grpo.loss = @processes_test.heavy"
    command = command_of(tiny_model_dir, folder, ONLINE + ELASTIC, *ONE_RANK, *more)
    fast, slow = slow_rewards(folder, 0.6), folder / "slow"
    with (folder / "processes_tasks.py").open("a") as tasks:
        tasks.write(HEAVY.replace("FILE", repr(str(slow))))

    with cluster(3) as ray, started(command, 1, 1, folder, **ray.environment) as (process,):
        watched = Watched(process, folder, 600)
        watched.until(lambda: [row.get("servers") for row in watched.rows()[-1:]] == [2])
        slow.touch()
        fast.touch()
        watched.until(lambda: watched.rows()[-1].get("servers") == 1)
        slow.unlink()
        watched.succeeds(600)
    rows, out = watched.rows(), watched.out()
    assert [row["step"] for row in rows] == list(range(steps + 1))
    assert (rows[-1]["failed"], rows[-1]["timed_out"], rows[-1]["given_back"]) == (0, 0, 0)
    assert "1 servers generate, and the trainer waits" in out
    assert "2 servers generate, and generation rests" in out
    assert "is lost" not in out
    assert not servers_left(tiny_model_dir)


def test_a_run_whose_trainer_waits_gets_another_server(tiny_model_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = command_of(tiny_model_dir, folder, ONLINE + ELASTIC, *ONE_RANK)
    slow_rewards(folder)

    with cluster(3) as ray, started(command, 1, 1, folder, **ray.environment) as (process,):
        watched = Watched(process, folder, 600)
        watched.until(lambda: any(row.get("servers") == 2 for row in watched.rows()))
        process.send_signal(signal.SIGINT)
        process.wait(timeout=120)
    rows, out = watched.rows(), watched.out()
    assert [row["step"] for row in rows] == list(range(len(rows)))
    assert not any(row.get("failed") for row in rows)
    assert [row["servers"] for row in rows[1:6]] == [1.0] * 5
    assert "1 servers generate, and the trainer waits" in out
    assert "is lost" not in out
    assert not servers_left(tiny_model_dir)
