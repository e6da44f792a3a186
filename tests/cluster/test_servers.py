"""vLLM servers on the nodes of a Ray cluster: no process of one is left whatever ends, and one that is lost is placed anew."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster, cluster
from tests.cluster.families import family, is_up, write_family
from tests.conftest import environment_with

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
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


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
    words = [sys.executable, "-m", "tests.cluster.families", str(count), str(folder), *arguments]
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


def wait_for(condition: Callable[[], object], seconds: float, folder: Path) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, (folder / "driver.err").read_text()
        time.sleep(0.05)


GONE = ("node", "keeper", "group", "driver SIGKILL", "driver SIGTERM", "stop")
FAMILIES = {"obedient": (), "stubborn": ("--stubborn",)}
IN_EVERY_SUITE = {("defaults", "stubborn", "node"), ("ours", "obedient", "driver SIGKILL")}
CASES = [
    pytest.param(
        settings,
        kind,
        gone,
        id=f"{settings}-{kind}-{gone}",
        marks=() if (settings, kind, gone) in IN_EVERY_SUITE else pytest.mark.cluster,
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
        if gone == "node":
            ray.ask("add")
        if expected == 1:
            assert any(is_up(tmp_path, number) for number in (0, 1))
            assert drives.process.stdin is not None
            drives.process.stdin.close()
            assert drives.process.wait(timeout=60) == 0, (tmp_path / "driver.err").read_text()
        wait_for(lambda: left() == 2, SECONDS_TO_END, tmp_path)
