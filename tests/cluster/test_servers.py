"""vLLM servers on the nodes of a Ray cluster: no process of one is left whatever ends, and one that is lost is placed anew."""

from __future__ import annotations

import itertools
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from areal_x.engines.fleet.folders import LOCK
from areal_x.monitor.metrics import read
from tests.cluster.cluster import HEAD, ROLE, Cluster, cluster
from tests.cluster.families import ANSWER, family, is_up, write_family
from tests.cluster.watched import Watched, servers_left
from tests.conftest import environment_with
from tests.launching import ONE_RANK, ONLINE, command_of, slow_rewards, started
from tests.thorough import thorough

pytest.importorskip("ray")
pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.timeout(600)]

# The watchdogs allow 7 seconds. Ray notices the end of a driver within a few.
SECONDS_TO_END = 30
DEFAULTS = {"RAY_kill_child_processes_on_worker_exit": "true", "RAY_worker_niceness": "15"}
OURS: dict[str, str] = {}
SETTINGS = {"defaults": DEFAULTS, "ours": OURS}


@dataclass
class Driver:
    """The process of tests.cluster.families."""

    process: subprocess.Popen[str]

    def ask(self, line: str) -> str:
        self.tell(line)
        return self.answer()

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        return self.until(ANSWER).removeprefix(ANSWER)

    def until(self, pattern: str) -> str:
        """Reads lines until one matches, and returns it. Fails at the end of the process."""
        assert self.process.stdout is not None
        lines: list[str] = []
        for line in self.process.stdout:
            lines.append(line.strip())
            if re.match(pattern, lines[-1]):
                return lines[-1]
        raise AssertionError("\n".join(lines))


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stand_in")
    write_family(folder)
    return folder


@pytest.fixture(scope="module", params=SETTINGS)
def ray(request: pytest.FixtureRequest, stand_in: Path) -> Iterator[Cluster]:
    path = environment_with(1).get("PYTHONPATH", "")
    with cluster(3, PYTHONPATH=f"{stand_in}:{path}", **SETTINGS[request.param]) as made:
        yield made


@contextmanager
def driver(ray: Cluster, folder: Path, count: int, *arguments: str) -> Iterator[Driver]:
    words = [sys.executable, "-m", "tests.cluster.families", str(folder), *arguments]
    with (
        (folder / "driver.err").open("w") as errors,
        subprocess.Popen(
            words,
            env=environment_with(1, **ray.environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        try:
            yield Driver(process)
        finally:
            process.kill()
            for left in (left for number in range(count) for left in family(folder, number)):
                with suppress(psutil.NoSuchProcess):
                    left.kill()


def wait_for(condition: Callable[[], object], seconds: float, folder: Path) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, (folder / "driver.err").read_text()
        time.sleep(0.05)


GONE = ("node", "keeper", "group", "driver SIGKILL", "driver SIGTERM", "stop")
FAMILIES = {"obedient": (), "stubborn": ("--stubborn",)}
MARKS = {("defaults", "stubborn", "node"): (), ("ours", "obedient", "driver SIGKILL"): thorough}
CASES = [
    pytest.param(
        settings,
        kind,
        gone,
        id=f"{settings}-{kind}-{gone}",
        marks=MARKS.get((settings, kind, gone), pytest.mark.cluster),
    )
    for settings, kind, gone in itertools.product(SETTINGS, FAMILIES, GONE)
]


@pytest.mark.parametrize(("ray", "kind", "gone"), CASES, indirect=["ray"])
def test_no_process_of_a_server_is_left(ray: Cluster, kind: str, gone: str, tmp_path: Path) -> None:
    def left() -> int:
        return sum(not family(tmp_path, number) for number in (0, 1))

    with driver(ray, tmp_path, 2, *FAMILIES[kind]) as drives:
        for number in (0, 1):
            assert drives.ask(f"start {number}").startswith(f"started at http://{ray.address.partition(':')[0]}:")
        wait_for(lambda: is_up(tmp_path, 0) and is_up(tmp_path, 1), 30, tmp_path)
        expected = 1  # the other server goes on
        match gone.split():
            case ["node"]:
                assert ray.ask("kill") == "done"
            case ["keeper"]:
                assert drives.ask("kill 0") == "killed"
            case ["group"]:
                assert drives.ask("remove 0") == "removed"
            case ["stop"]:
                assert drives.ask("stop 0") == "stopped"
                assert not family(tmp_path, 0), "stop returns when they are gone"
            case ["driver", name]:
                drives.process.send_signal(signal.Signals[name])
                expected = 2
        began = time.monotonic()
        wait_for(lambda: left() >= expected, SECONDS_TO_END, tmp_path)
        print(f"\ngone after {time.monotonic() - began:.1f} s: {gone}, {kind}")
        assert left() == expected
        assert (tmp_path / LOCK).exists(), "the staged weights are the driver's"
        if gone == "node":
            ray.ask("add")
        if expected == 1:
            assert any(is_up(tmp_path, number) for number in (0, 1))
        if gone == "stop":
            assert drives.process.stdin is not None
            drives.process.stdin.close()  # the run ends
            assert drives.process.wait(timeout=60) == 0, (tmp_path / "driver.err").read_text()
            wait_for(lambda: left() == 2, SECONDS_TO_END, tmp_path)


@pytest.mark.cluster
@pytest.mark.parametrize("ray", ["ours"], indirect=True)
def test_a_lost_server_waits_for_room_and_is_placed_where_it_is(ray: Cluster, tmp_path: Path) -> None:
    with driver(ray, tmp_path, 2) as drives:
        for number in (0, 1):
            assert drives.ask(f"start {number}").startswith("started at http://")
        wait_for(lambda: is_up(tmp_path, 0) and is_up(tmp_path, 1), 30, tmp_path)
        before = family(tmp_path, 0)
        assert drives.ask("poll 0").startswith("None ")
        assert drives.ask("kill 0") == "killed"
        wait_for(lambda: not family(tmp_path, 0), SECONDS_TO_END, tmp_path)
        assert re.match(r"137 its keeper on [\d.]+ is gone: ", drives.ask("poll 0"))
        assert drives.ask("start 0").startswith("started at http://")  # there is room where it was
        wait_for(lambda: is_up(tmp_path, 0), 30, tmp_path)
        assert not {p.pid for p in before} & {p.pid for p in family(tmp_path, 0)}

        assert ray.ask("kill") == "done"
        wait_for(lambda: not (family(tmp_path, 0) and family(tmp_path, 1)), SECONDS_TO_END, tmp_path)
        lost = 1 if family(tmp_path, 0) else 0
        drives.tell(f"start {lost}")
        waits = r"nothing has moved .* room in the cluster \(2 CPU wanted, \d free, on nodes with .*other"
        drives.until(waits)  # Ray writes there too
        assert is_up(tmp_path, 1 - lost)
        assert ray.ask("add") == "done"
        assert drives.answer().startswith("started at http://")
        wait_for(lambda: is_up(tmp_path, lost), 30, tmp_path)


@pytest.mark.parametrize(
    ("bindings", "sentence"),
    [
        (["cluster.server_accelerators = 1"], "cluster.server_accelerators = 1 cannot work: it must be at most 0, as many as"),
        (["cluster.server_cpus = 3"], "cluster.server_cpus = 3 cannot work: it must be at most 2, as many as a node"),
        (["cluster.servers_on = 'serve'"], "no node of the cluster has the label role = 'serve'"),
    ],
)
@pytest.mark.cluster
@pytest.mark.parametrize("ray", ["ours"], indirect=True)
def test_room_for_a_server_that_no_node_has_is_refused(
    ray: Cluster, bindings: list[str], sentence: str, tiny_model_dir: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    command = command_of(tiny_model_dir, folder, ONLINE, *ONE_RANK, "train.engine = 'vllm'", *bindings)
    with started(command, 1, 1, folder, **ray.environment) as (process,):
        assert process.wait(timeout=200) == 1, (folder / "out-0").read_text()
    assert sentence in (folder / "err-0").read_text().strip().splitlines()[-1]


SERVED = f"""
single_turn.reward = @processes_test.slow_ones
single_turn.reward_workers = 1
train.engine = 'vllm'
train.max_staleness = 2
train.steps = 150
train.algorithm = @grpo()
vllm.servers = 2
vllm.concurrency = 8
vllm.slice_tokens = 4
cluster.ranks_on = '{HEAD}'
cluster.servers_on = '{ROLE}'
cluster.server_cpus = 2
"""


@pytest.mark.cluster
@pytest.mark.server
def test_a_run_goes_on_while_the_node_of_a_server_is_gone_and_uses_the_next_one(tiny_model_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = command_of(tiny_model_dir, folder, ONLINE + SERVED, *ONE_RANK)
    fast = slow_rewards(folder)

    with cluster(3) as ray, started(command, 1, 1, folder, **ray.environment) as (process,):
        watched = Watched(process, folder, 200)
        watched.until(lambda: watched.step() >= 3)
        assert ray.ask("kill") == "done"
        began = time.monotonic()
        watched.until(lambda: "is lost" in watched.out())
        print(f"\nnoticed after {time.monotonic() - began:.1f} s")
        lost = watched.step()
        watched.until(lambda: watched.step() >= lost + 5)  # the other one serves alone: no node has room
        assert "serves again" not in watched.out()
        assert ray.ask("add") == "done"
        watched.until(lambda: "serves again" in watched.out())
        print(f"serves again at step {watched.step()}")
        fast.touch()
        watched.succeeds(300)
    rows = read(watched.run)
    assert [row["step"] for row in rows] == list(range(151))
    assert not any(row.get("failed") for row in rows)
    assert len(re.findall(r"vLLM server \d of 2 is lost ", watched.out())) == 1
    assert not servers_left(tiny_model_dir)


KEPT = f"""
train.engine = 'vllm'
train.max_staleness = 1
train.steps = 14
train.checkpoint_every = 4
train.keep_checkpoints = 2
train.algorithm = @grpo()
vllm.concurrency = 8
cluster.ranks_on = '{HEAD}'
cluster.servers_on = '{ROLE}'
"""


@pytest.mark.cluster
@pytest.mark.server
def test_a_server_goes_on_while_a_lost_rank_is_placed_again(tiny_model_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = command_of(tiny_model_dir, folder, ONLINE + KEPT, *ONE_RANK)

    def serving() -> set[int]:
        return {p.pid for p in servers_left(tiny_model_dir) if "api_server" in " ".join(p.cmdline())}

    with cluster(2) as ray, started(command, 1, 1, folder, **ray.environment) as (process,):
        watched = Watched(process, folder)
        watched.until(lambda: watched.step() >= 5)
        before = serving()
        assert before
        watched.actor("rank-0.log").kill()
        watched.until(lambda: "the run continues" in watched.out())
        watched.until(lambda: watched.step() >= 9)
        assert serving() == before
        watched.succeeds(300)
    assert [row["step"] for row in read(watched.run)] == list(range(15))
    assert not servers_left(tiny_model_dir)
