"""Runs whose trainer is in the processes of a Ray cluster, on CPUs, over gloo."""

from __future__ import annotations

import hashlib
import re
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from socket import SOCK_DGRAM

import psutil
import pytest

from areal_x.monitor.metrics import read
from areal_x.run import checkpoint
from areal_x.runtime import timeline
from tests.cluster.cluster import Cluster, cluster
from tests.launching import (
    ONLINE,
    WRITTEN,
    Process,
    assert_measured_alike,
    assert_recorded_alike,
    command_of,
    finished,
    started,
)
from tests.thorough import further, thorough

pytest.importorskip("ray")
pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.timeout(600)]

RAY = "train.cluster = 'ray'"
JAX = "train.backend = 'jax'"
TORCH = "train.backend = 'torch'"
TWO = RAY, "mesh.processes = 2", "mesh.fsdp = 2"
STAGES = RAY, "mesh.processes = 2", "mesh.fsdp = 1", "mesh.stage = 2"
BACKENDS = pytest.mark.parametrize("backend", [pytest.param(TORCH, id="torch"), pytest.param(JAX, id="jax", marks=thorough)])


def wait_for(condition: Callable[[], object], process: Process, folder: Path) -> None:
    until = time.monotonic() + 300
    while not condition():
        assert process.poll() is None, (folder / "err-0").read_text()
        assert time.monotonic() < until
        time.sleep(0.05)


def rank(number: int, run: Path) -> psutil.Process:
    """The process of a rank, which is the one that writes its log."""
    log = str((run / "logs" / f"rank-{number}.log").resolve())
    for process in psutil.process_iter():
        try:
            if str(Path(f"/proc/{process.pid}/fd/1").readlink()) == log and process.status() != psutil.STATUS_ZOMBIE:
                return process
        except OSError:
            continue
    raise AssertionError(f"no process writes {log}")


def digest(run: Path) -> str:
    last = checkpoint.steps(run)[-1]
    return hashlib.sha256((run / "checkpoints" / str(last) / "trainer" / "model.safetensors").read_bytes()).hexdigest()


def updates_by_step(lanes: dict[str, list[timeline.Interval]]) -> list[tuple[timeline.Interval, ...]]:
    """The updates of both ranks, step by step."""
    return list(zip(*([x for x in lanes[f"rank {rank}"] if x.name == "update"] for rank in (0, 1)), strict=True))


@pytest.mark.parametrize(
    "backend, mesh",
    [
        pytest.param(TORCH, TWO, id="torch"),
        pytest.param(JAX, TWO, marks=thorough, id="jax"),
        pytest.param(TORCH, STAGES, marks=thorough, id="torch-stages"),
    ],
)
def test_two_processes_measure_what_one_does_alone(
    backend: str, mesh: Sequence[str], ray: Cluster, tiny_model_dir: Path, tmp_path: Path
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    recorded = "journal.token_share = 1.0", "journal.entropy = True"
    finished(command_of(tiny_model_dir, one, ONLINE, backend, *recorded, "mesh.fsdp = 1"), 1, 1, one)
    finished(command_of(tiny_model_dir, two, ONLINE, backend, *recorded, *mesh), 1, 1, two, **ray.environment)
    assert_measured_alike(one, two)
    assert_recorded_alike(one, two)
    lanes = timeline.read(two / "runs" / "run")
    for of_rank in ("rank 0", "rank 1"):
        assert [call.name for call in lanes[of_rank]].count("update") == 2
    for row, calls in zip(read(two / "runs" / "run")[1:], updates_by_step(lanes), strict=True):
        took = [call.end - call.start for call in calls]
        assert (row["ranks/seconds_min"], row["ranks/seconds_max"]) == pytest.approx((min(took), max(took)), abs=1e-4)
        assert 0 < row["ranks/cpu_seconds_min"] <= row["ranks/cpu_seconds"] <= row["ranks/cpu_seconds_max"]
        assert 50e6 < row["ranks/peak_bytes_min"] <= row["ranks/peak_bytes_max"] < 16e9
        assert row["ranks/slowest"] in (0, 1)
    updates = [span for span in lanes["trainer"] if span.name == "update"]
    for span, call in zip(updates, [x for x in lanes["rank 1"] if x.name == "update"], strict=True):
        assert call.start < span.end  # by one clock, as the update is collective
        assert span.start < call.end


@pytest.mark.parametrize(
    "backend, gone",
    [
        pytest.param(JAX, 0, marks=pytest.mark.cluster, id="jax-0"),
        pytest.param(JAX, 1, marks=thorough, id="jax-1"),
        pytest.param(TORCH, 0, marks=thorough, id="torch-0"),
        pytest.param(TORCH, 1, marks=pytest.mark.cluster, id="torch-1"),
    ],
)
def test_a_run_goes_on_without_a_rank_that_was_killed_to_the_same_weights(
    backend: str, gone: int, ray: Cluster, tiny_model_dir: Path, tmp_path: Path
) -> None:
    folder, whole = tmp_path / "run", tmp_path / "whole"
    until = "train.steps = 9"
    run = folder / "runs" / "run"
    with started(command_of(tiny_model_dir, folder, WRITTEN, backend, *TWO, until), 1, 1, folder, **ray.environment) as (
        process,
    ):
        wait_for(lambda: checkpoint.steps(run), process, folder)
        rank(gone, run).kill()
        assert process.wait(timeout=300) == 0, (folder / "err-0").read_text()
    assert re.search(r"rank [01] is gone: .*; the run continues", (folder / "out-0").read_text())
    finished(command_of(tiny_model_dir, whole, WRITTEN, backend, *TWO, until), 1, 1, whole, **ray.environment)
    assert digest(run) == digest(whole / "runs" / "run")
    assert [row["step"] for row in read(run)] == list(range(10))
    assert [row.get("loss") for row in read(run)] == [row.get("loss") for row in read(whole / "runs" / "run")]


# A loss that raises in one process in the middle of a step, while the other waits for what they compute together.
FAILING = """
@gin.configurable(module="processes_test")
def failing(policy, batch):
    import os
    from areal_x.algorithms import losses
    if os.environ["RANK"] == "1" and os.path.exists("fail"):
        if os.path.exists("once"):
            os.remove("fail")
        raise ArithmeticError("too many numbers")
    return losses.sft(policy, batch)
"""


@pytest.mark.cluster
@pytest.mark.parametrize("once", [True, False])
def test_a_rank_that_raises_is_tried_again_but_not_at_the_same_step(
    once: bool, ray: Cluster, tiny_model_dir: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    command = command_of(tiny_model_dir, folder, WRITTEN, TORCH, *TWO, "sft.loss = @processes_test.failing", "train.steps = 12")
    with (folder / "processes_tasks.py").open("a") as tasks:
        tasks.write(FAILING)
    run = folder / "runs" / "run"
    with started(command, 1, 1, folder, **ray.environment) as (process,):
        wait_for(lambda: checkpoint.steps(run), process, folder)
        if once:
            (folder / "once").touch()
        (folder / "fail").touch()
        assert process.wait(timeout=300) == (0 if once else 1)
    said = (folder / "err-0").read_text()
    # The traceback of the process that raised, to the line.
    assert re.search(r'processes_tasks\.py", line \d+, in failing\n.*raise ArithmeticError\("too many numbers"\)', said)
    if once:
        assert [row["step"] for row in read(run)] == list(range(13))
    else:
        assert "error: rank 1 failed: ArithmeticError: too many numbers\n" in said


def listening(processes: Sequence[psutil.Process]) -> dict[str, str]:
    """The command line of each process that listens, by address."""
    found = {}
    for process in processes:
        for socket in process.net_connections("inet"):
            if socket.status == psutil.CONN_LISTEN or (socket.type == SOCK_DGRAM and not socket.raddr):
                found[f"{socket.laddr.ip}:{socket.laddr.port}"] = " ".join(process.cmdline())[:200]
    return found


@pytest.mark.parametrize(
    "backend, number",
    [
        pytest.param(TORCH, signal.SIGTERM, id="torch-terminated"),
        pytest.param(JAX, signal.SIGINT, marks=pytest.mark.cluster, id="jax-interrupted"),
    ],
)
def test_a_cluster_of_its_own_listens_on_loopback_and_ends_with_a_signal_to_the_run(
    backend: str, number: signal.Signals, tiny_model_dir: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    run = folder / "runs" / "run"
    with started(command_of(tiny_model_dir, folder, WRITTEN, backend, *TWO), 1, 1, folder) as (process,):
        wait_for(lambda: checkpoint.steps(run), process, folder)
        driver = psutil.Process(process.pid)
        family = driver.children(recursive=True)
        sockets = listening([driver, *family])
        assert len(sockets) > 5
        assert {at: who for at, who in sockets.items() if not at.startswith(("127.0.0.1:", "::ffff:127.0.0.1:"))} == {}
        process.send_signal(number)
        assert process.wait(timeout=100) == 130
    said = (folder / "err-0").read_text()
    assert "Traceback" not in said
    goes_on = r"^stopped: the run is in .*; continue from step \d+ with: python -m areal_x\.train .* --resume$"
    assert re.search(goes_on, said, flags=re.MULTILINE), said
    assert len(family) > 3
    assert psutil.wait_procs(family, timeout=60)[1] == []


@pytest.mark.cluster
def test_a_driver_that_is_killed_leaves_no_process_and_the_run_resumes(
    ray: Cluster, tiny_model_dir: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    run = folder / "runs" / "run"
    command = command_of(tiny_model_dir, folder, WRITTEN, TORCH, *TWO)
    with started(command, 1, 1, folder, **ray.environment) as (process,):
        wait_for(lambda: checkpoint.steps(run), process, folder)
        ranks = [rank(number, run) for number in (0, 1)]
        process.kill()
        assert psutil.wait_procs(ranks, timeout=60)[1] == []
    last = checkpoint.steps(run)[-1]
    finished([*command, "-b", f"train.steps = {last + 1}", "--resume=auto"], 1, 1, folder, **ray.environment)
    assert read(run)[-1]["step"] == last + 1


@pytest.mark.cluster
def test_a_run_goes_on_without_a_node_that_was_killed(ray: Cluster, tiny_model_dir: Path, tmp_path: Path) -> None:
    folder, until = tmp_path / "run", "train.steps = 400"
    run = folder / "runs" / "run"
    # No node has room for both.
    command = command_of(tiny_model_dir, folder, WRITTEN, TORCH, *TWO, until, "cluster.cpus = 2")
    with started(command, 1, 1, folder, **ray.environment) as (process,):
        wait_for(lambda: checkpoint.steps(run), process, folder)
        here = [psutil.Process(rank(number, run).pid).ppid() for number in (0, 1)]
        assert here[0] != here[1]
        while ray.ask("kill") == "done" and all(map(psutil.pid_exists, here)):
            ray.ask("add")
        ray.ask("add")
        assert process.wait(timeout=300) == 0, (folder / "err-0").read_text()
    assert "the run continues" in (folder / "out-0").read_text()
    assert [row["step"] for row in read(run)] == list(range(401))


def refused(command: list[str], folder: Path, **environment: str) -> str:
    with started(command, 1, 1, folder, **environment) as (process,):
        assert process.wait(timeout=200) == 1, (folder / "out-0").read_text()
    return (folder / "err-0").read_text().strip().splitlines()[-1]


@pytest.mark.parametrize(
    "bindings, sentence",
    [
        (["cluster.accelerators = 1"], "cluster.accelerators = 1 cannot work: it must be at most 0, as many as a node"),
        *further(
            (["cluster.cpus = 3"], "cluster.cpus = 3 cannot work: it must be at most 2, as many as a node of the cluster has"),
            (["cluster.ranks_on = 'train'"], "no node of the cluster has the label role = 'train'"),
        ),
    ],
)
def test_room_that_no_node_has_is_refused(
    bindings: list[str], sentence: str, ray: Cluster, tiny_model_dir: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    assert sentence in refused(command_of(tiny_model_dir, folder, WRITTEN, *TWO, *bindings), folder, **ray.environment)


def test_an_address_where_nothing_answers_is_refused(tiny_model_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    said = refused(command_of(tiny_model_dir, folder, WRITTEN, *TWO), folder, RAY_ADDRESS="127.0.0.1:9")
    assert said == "error: no Ray cluster answers at 127.0.0.1:9 (Connection refused): see RAY_ADDRESS"


@thorough
def test_another_token_is_refused(ray: Cluster, tiny_model_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = command_of(tiny_model_dir, folder, WRITTEN, *TWO)
    said = refused(command, folder, **ray.environment | {"RAY_AUTH_TOKEN": "another token, of enough characters"})
    assert said.startswith(f"error: the Ray cluster at {ray.address} cannot be used: ")


@thorough
def test_a_cluster_that_needs_no_token_is_refused(tiny_model_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with cluster(1, RAY_AUTH_MODE="disabled") as open_to_all:
        command = command_of(tiny_model_dir, folder, WRITTEN, *TWO)
        said = refused(command, folder, **open_to_all.environment)
    assert said.startswith(
        f"error: the Ray cluster at {open_to_all.address} needs no token, so anyone who reaches it can run code"
    )


def test_several_processes_without_a_cluster_are_refused(tiny_model_dir: Path, tmp_path: Path) -> None:
    said = refused(command_of(tiny_model_dir, tmp_path / "run", WRITTEN, "mesh.processes = 2"), tmp_path / "run")
    assert "train.cluster = 'here' cannot work: it must be 'ray' with mesh.processes above 1" in said
