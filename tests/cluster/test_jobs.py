"""Jobs that a cluster starts again and again: the batch script that `areal-x launch slurm` writes, run by stand-ins for Slurm
on two nodes (tests/cluster/nodes.py); a command that is killed nine times; what `areal-x check` says of the nodes."""

from __future__ import annotations

import hashlib
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from areal_x import launch
from areal_x.monitor.metrics import read
from areal_x.run import checkpoint
from tests.cluster.cluster import ROLE, Cluster, cluster
from tests.cluster.nodes import JOB, Slurm, can_make_nodes, signal_task, slurm
from tests.conftest import environment_with
from tests.launching import WRITTEN, command_of, finished, started

pytest.importorskip("ray")
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.xdist_group("ray"),
    pytest.mark.timeout(900),
]
NODES = pytest.mark.skipif(not can_make_nodes(), reason="needs root and Linux namespaces")
JAX, TORCH = "train.backend = 'jax'", "train.backend = 'torch'"
# One CPU a node, so that each has one of the two ranks.
ON_TWO_NODES = ("--nodes", "2", "--cpus", "1", "-b", "mesh.processes = 2", "-b", "mesh.fsdp = 2")
STEPS = 3


def script_of(model: Path, folder: Path, *bindings: str) -> Path:
    """Writes the job of a run, in a folder of its own."""
    command_of(model, folder, WRITTEN)
    words = ["slurm", str(folder / "run.gin"), *ON_TWO_NODES, *(x for b in bindings for x in ("-b", b))]
    script = folder / "job.sbatch"
    with script.open("w") as out, redirect_stdout(out), pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        assert launch.main(words) == 0
    return script


def begun(nodes: Slurm, script: Path, attempt: int = 0) -> subprocess.Popen[bytes]:
    with (script.parent / f"out-{attempt}").open("w") as out:
        return nodes.start(script, out, **environment_with(1), SLURM_RESTART_COUNT=str(attempt))


def wait_for(condition: Callable[[], object], job: subprocess.Popen[bytes], script: Path) -> None:
    until = time.monotonic() + 400
    while not condition():
        assert job.poll() is None, output(script)
        assert time.monotonic() < until, output(script)
        time.sleep(0.1)


def output(script: Path) -> str:
    return "\n".join(file.read_text() for file in sorted(script.parent.glob("out-*")))


def left(nodes: Slurm) -> list[str]:
    return [" ".join(process.cmdline())[:200] for node in nodes.nodes for process in node.processes()]


@NODES
@pytest.mark.parametrize(
    ("family", "backend", "loopback"),
    [("IPv4", TORCH, True), ("IPv6", TORCH, True), ("IPv6", JAX, False)],  # JAX's gloo listens where the node's name leads
)
def test_a_batch_script_takes_three_steps_on_two_nodes(
    family: str, backend: str, loopback: bool, tiny_model_dir: Path, tmp_path: Path
) -> None:
    folder, alone = tmp_path / "run", tmp_path / "alone"
    script = script_of(tiny_model_dir, folder, backend, f"train.steps = {STEPS}")
    run = folder / "runs" / "run"
    with slurm(tmp_path / "slurm", family, loopback) as nodes:
        job = begun(nodes, script)
        assert job.wait(timeout=600) == 0, output(script)
        assert left(nodes) == []
        assert nodes.requeued() == []
    assert list(folder.glob(".ray-token*")) == []
    one = command_of(tiny_model_dir, alone, WRITTEN, backend, f"train.steps = {STEPS}", "mesh.processes = 1", "mesh.fsdp = 1")
    finished(one, 1, 1, alone)
    rows, expected = read(run), read(alone / "runs" / "run")
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    for row, other in zip(rows[1:], expected[1:], strict=True):
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-5)


@NODES
def test_a_job_stops_before_its_time_ends_or_when_it_is_cancelled_or_loses_a_node_and_goes_on(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    script = script_of(tiny_model_dir, folder, TORCH)
    run = folder / "runs" / "run"
    with slurm(tmp_path / "slurm", "IPv4") as nodes:
        for attempt, ends in enumerate(("time", "cancelled", "lost")):
            before = checkpoint.steps(run)[-1] if attempt else 0
            job = begun(nodes, script, attempt)
            wait_for(lambda before=before: checkpoint.steps(run) and checkpoint.steps(run)[-1] > before, job, script)
            (token,) = folder.glob(".ray-token*")
            assert stat.S_IMODE(token.stat().st_mode) == 0o600
            if ends == "time":
                signal_task(job, signal.SIGUSR1)
            elif ends == "cancelled":
                nodes.cancel(job)
            else:  # Ray on the second node
                for process in nodes.nodes[1].processes():
                    process.kill()
            assert job.wait(timeout=300) == 130, output(script)
            said = (folder / f"out-{attempt}").read_text()
            assert re.search(r"^stopped: the run is in .*; continue from step \d+ with: ", said, flags=re.MULTILINE), said
            assert "Traceback" not in said
            assert left(nodes) == []
            assert not token.exists()
            assert nodes.requeued() == [JOB] * (1 if ends != "lost" else 2), "not when it is cancelled"
        last = checkpoint.steps(run)[-1] + 1
        script.write_text(script.read_text().replace("--resume=auto", f'--resume=auto -b "train.steps = {last}"'))
        assert begun(nodes, script, 3).wait(timeout=600) == 0, output(script)
    assert [row["step"] for row in read(run)] == list(range(last + 1))


@pytest.fixture(scope="module")
def ray() -> Iterator[Cluster]:
    with cluster(3) as made:
        yield made


RAY = ("train.cluster = 'ray'", "mesh.processes = 2", "mesh.fsdp = 2")
TOTAL = 60


def steps_taken(run: Path) -> int:
    rows = read(run) if (run / "metrics.jsonl").is_file() else []
    return int(rows[-1]["step"]) if rows else 0


def newest(run: Path) -> int:
    return max(checkpoint.steps(run), default=0)


# What is seen of a run when its process is killed. before: its newest checkpoint when the process was started.
MOMENTS: dict[str, Callable[[Path, int], bool]] = {
    "at once": lambda run, before: True,
    "with its directory": lambda run, before: run.is_dir(),
    "with its ranks": lambda run, before: (run / "logs" / "rank-1.log").is_file(),
    "with its first step": lambda run, before: steps_taken(run) >= 1,
    "with its first checkpoint": lambda run, before: newest(run) > 0,
    "as soon as it goes on": lambda run, before: steps_taken(run) > before,
    "in the middle of a checkpoint": lambda run, before: any((run / "checkpoints").glob(f"{checkpoint.UNFINISHED}*")),
    "after a checkpoint": lambda run, before: newest(run) > before,
    "between two checkpoints": lambda run, before: steps_taken(run) > newest(run) + 1 > before + 1,
}


def digest(run: Path) -> str:
    weights = run / "checkpoints" / str(TOTAL) / "trainer" / "model.safetensors"
    return hashlib.sha256(weights.read_bytes()).hexdigest()


@pytest.mark.parametrize("backend", [JAX, TORCH])
def test_a_command_that_is_killed_nine_times_ends_with_the_weights_of_one_that_is_not(
    backend: str, ray: Cluster, tiny_model_dir: Path, tmp_path: Path
) -> None:
    folder, whole = tmp_path / "run", tmp_path / "whole"
    run = folder / "runs" / "run"
    bindings = (backend, *RAY, f"train.steps = {TOTAL}")
    command = [*command_of(tiny_model_dir, folder, WRITTEN, *bindings), "--resume=auto"]
    finished(command_of(tiny_model_dir, whole, WRITTEN, *bindings), 1, 1, whole, **ray.environment)
    resumed = []
    for name, moment in MOMENTS.items():
        before = newest(run)
        with started(command, 1, 1, folder, **ray.environment) as (process,):
            until = time.monotonic() + 300
            while not moment(run, before):
                assert process.poll() is None, f"it ended before it was killed {name}: {(folder / 'err-0').read_text()}"
                assert time.monotonic() < until, name
                time.sleep(0.002)
            process.kill()
            process.wait(timeout=60)
        resumed.append(before)
    resumed.append(newest(run))
    assert resumed[-1] < TOTAL
    finished(command, 1, 1, folder, **ray.environment)
    assert digest(run) == digest(whole / "runs" / "run")
    assert [row["step"] for row in read(run)] == list(range(TOTAL + 1))
    assert [row.get("loss") for row in read(run)] == [row.get("loss") for row in read(whole / "runs" / "run")]
    assert resumed == sorted(resumed)
    assert len(set(resumed)) > 3, f"it went on from {resumed}"


def checked(model: Path, folder: Path, *bindings: str, **environment: str) -> tuple[int, str]:
    """Returns the status of `areal-x check` and its line about nodes."""
    command = [word.replace("areal_x.train", "areal_x.check") for word in command_of(model, folder, WRITTEN, *RAY, *bindings)]
    with started(command, 1, 1, folder, **environment) as (process,):
        status = process.wait(timeout=200)
    lines = (folder / "out-0").read_text().splitlines()
    (line,) = (line for line in lines if re.match(r"\w+ +nodes: ", line))
    return status, line


@pytest.mark.parametrize(
    ("bindings", "sentence"),
    [
        (["mesh.processes = 7"], "mesh.processes = 7 cannot work: it must be at most 6, 2 on each of 3 nodes"),
        (["cluster.ranks_on = 'train'"], "cluster.ranks_on = 'train', and no node of the cluster has the label"),
        (["cluster.cpus = 2", "mesh.processes = 3", f"cluster.ranks_on = '{ROLE}'"], "a node each, of 2 nodes with role=other"),
    ],
)
def test_check_compares_the_run_with_the_nodes(
    bindings, sentence: str, ray: Cluster, tiny_model_dir: Path, tmp_path: Path
) -> None:
    _, line = checked(tiny_model_dir, tmp_path / "run", TORCH, *bindings, **ray.environment)
    assert line.startswith("PROBLEM")
    assert sentence in line


def test_check_says_that_the_nodes_have_room_and_the_same_versions(ray: Cluster, tiny_model_dir: Path, tmp_path: Path) -> None:
    _, line = checked(tiny_model_dir, tmp_path / "run", TORCH, **ray.environment)
    wanted = r"ok +nodes: 2 ranks of 1 CPU: 3 nodes at [\d.:]+ have the room, with Python 3[\d.]+, Ray 2[\d.]+, areal-x [\d.]+"
    assert re.fullmatch(wanted, line), line


OTHER = """
from unittest.mock import patch
from areal_x.cluster import connection, installed
from areal_x.errors import UserError
with connection.connected(cpus=0), patch.object(installed.platform, "python_version", lambda: "3.9.9"):
    try:
        installed.check_installed()
    except UserError as error:
        print(error)
"""


def test_a_node_with_another_version_is_named(ray: Cluster) -> None:
    environment = environment_with(1, **ray.environment)
    said = subprocess.run([sys.executable, "-c", OTHER], env=environment, stdout=subprocess.PIPE, text=True, timeout=200).stdout
    assert re.match(
        r"the node [\d.]+ \(\S+\) has Python 3[\d.]+, this one \(\S+\) 3\.9\.9: install the same version on all", said
    )


SIGNALLED = """
import os, signal, sys, time
from unittest.mock import patch
from areal_x.cluster import connection
from areal_x.runtime import interrupts
import ray
from ray._private import worker
signal.signal(signal.SIGTERM, signal.default_int_handler)
connect = worker.connect
def signalled(*arguments, **named):
    if "before" in sys.argv:  # Ray's C++ code sets its handlers
        os.kill(os.getpid(), signal.SIGTERM)
    connect(*arguments, **named)
    if "after" in sys.argv:
        os.kill(os.getpid(), signal.SIGTERM)
with patch.object(worker, "connect", signalled):
    try:
        with interrupts.deferred_interrupts(), connection.connected(cpus=0):
            print("connected", flush=True)
            time.sleep(4)  # an alarm of that handler's would end it
    except KeyboardInterrupt:
        print("stopped")
"""


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_signal_that_comes_while_it_connects_stops_it_in_order(moment: str, ray: Cluster) -> None:
    environment = environment_with(1, **ray.environment)
    done = subprocess.run(
        [sys.executable, "-c", SIGNALLED, moment], env=environment, stdout=subprocess.PIPE, text=True, timeout=200
    )
    assert (done.returncode, done.stdout.split()) == (0, ["connected", "stopped"])


def test_check_without_a_cluster_says_what_the_run_needs(tiny_model_dir: Path, tmp_path: Path) -> None:
    _, line = checked(tiny_model_dir, tmp_path / "run", JAX)
    assert "ok       nodes: 2 ranks on a node each, with all of its GPUs (no GPU where no node has any); RAY_ADDRESS is" in line
