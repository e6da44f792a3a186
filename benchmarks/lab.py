"""The page of `areal-x lab` over a journal of a million trajectories: how long answers take, and the server's memory.

    python benchmarks/lab.py [--trajectories N] [--folder FOLDER] [--browser PYTHON]

Claims: filters answer within 300 ms at 10⁶ trajectories, and the index takes less than 100 MB of the server's memory.

The journal is synthetic: groups of eight answers of 50 to 300 tokens, 3 % of them without (failed or late), written as a run
writes them, with the same bytes for every 64th group. The server is a process of its own; each question is asked over HTTP,
with the page's own parameters, ten times, and reported with the server's CPU time, which other work on the machine does
not change.
--browser names an interpreter with playwright (make browser installs one): the pages are then opened in Chromium as well, which
measures the first paint, and filters from the input to the frame with their answer.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from areal_x.run.group_bytes import encode
from areal_x.run.journal import FILE, TABLES
from areal_x.types import Episode, Failed, Group, Scored, Task, TimedOut, Trajectory
from tests.lab.journals import write_metrics, write_tokenizer

ROOT = Path(__file__).resolve().parent.parent
GROUP, GROUPS_PER_STEP, DIFFERENT, TASKS = 8, 64, 64, 20_000
NEEDLE = b"needle"
TIMES = 10
SEARCH_MS = 60_000  # after which a search is stopped
QUESTIONS: dict[str, dict[str, Any]] = {
    "everything, newest first": {},
    "lowest reward": {"order": "reward"},
    "longest": {"order": "-length"},
    "reward from 0.5, longest": {"reward_min": 0.5, "order": "-length"},
    "failed": {"outcome": "failed"},
    "task contains 0123": {"task": "0123"},
    "task contains 1": {"task": "1"},
    "steps 100 to 200": {"step_min": 100, "step_max": 200},
    "page 10,000": {"begin": 500_000},
}


def some_group(random: np.random.Generator, number: int) -> bytes:
    episodes = []
    for index in range(GROUP):
        kind = random.random()
        if kind < 0.02:
            episodes.append(Episode(Failed(f"ValueError: {number % 5}", "Traceback …")))
        elif kind < 0.03:
            episodes.append(Episode(TimedOut(3.0)))
        else:
            tokens = random.integers(97, 122, int(random.integers(50, 300))).astype(np.int32)
            if number == 0 and index == 1:
                tokens[:6] = list(NEEDLE)
            reward = float(random.random() < 0.5)
            prompt = random.integers(97, 122, 30).astype(np.int32)
            logprobs = -random.random(len(tokens)).astype(np.float32)
            versions = np.full(len(tokens), number, np.int32)
            trajectory = Trajectory.from_completion(prompt, tokens, logprobs, versions, reward)
            episodes.append(Episode(Scored(reward, {"exact": reward}), (trajectory,)))
    return encode(Group(Task("", ""), 0, 0, tuple(episodes)))


def write_run(run: Path, trajectories: int) -> None:
    random = np.random.default_rng(0)
    blobs = [some_group(random, number) for number in range(DIFFERENT)]
    count = trajectories // GROUP
    steps = count // GROUPS_PER_STEP
    write_tokenizer(run / "checkpoints" / "1" / "trainer")
    write_metrics(run, [{"step": i, "reward": i / (steps or 1), "seconds": 30.0} for i in range(steps)])
    (run / "config.gin").write_text(f"train.steps = {steps}\n")
    connection = sqlite3.connect(run / FILE)
    connection.executescript(f"PRAGMA journal_mode = WAL; PRAGMA synchronous = OFF; {TABLES}")
    with connection:
        rows = ((i, i, f"task-{i % TASKS:05d}", i // GROUPS_PER_STEP, "finished", blobs[i % DIFFERENT]) for i in range(count))
        connection.executemany("INSERT INTO groups VALUES (?, ?, ?, ?, ?, ?)", rows)
        consumed = ((1 + i // GROUPS_PER_STEP, i % GROUPS_PER_STEP, i) for i in range(steps * GROUPS_PER_STEP))
        connection.executemany("INSERT INTO consumed VALUES (?, ?, ?)", consumed)
    connection.close()


@contextmanager
def served(place: Path) -> Iterator[tuple[str, int]]:
    """Yields the page's address and the server's process."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, "-u", "-m", "areal_x.lab", str(place)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stdout is not None
        yield server.stdout.readline().strip(), server.pid
        server.send_signal(signal.SIGINT)
        server.wait()


def ask(address: str, path: str, **parameters: Any) -> Any:
    with urlopen(f"{address}api/runs/run/{path}?{urlencode(parameters)}") as answer:
        return json.load(answer)


def memory(pid: int, what: str) -> float:
    """Megabytes of a process: VmRSS now, VmHWM at most, RssAnon without the pages of files."""
    found = re.search(rf"^{what}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) / 1000


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(place: Path, browser: str | None) -> None:
    size = (place / "run" / FILE).stat().st_size
    with served(place) as (address, pid):
        before, began = memory(pid, "RssAnon"), time.monotonic()
        slowest = 0.0
        while True:
            asked = time.monotonic()
            found = ask(address, "trajectories")
            slowest = max(slowest, time.monotonic() - asked)
            if found["progress"] == 1:
                break
            time.sleep(0.2)
        print(f"journal: {size / 1e9:.2f} GB, {found['indexed']:,} rows; server before: {before:.0f} MB")
        built = f"{time.monotonic() - began:.1f} s, of these {cpu_seconds(pid):.1f} s of CPU"
        print(f"index built in {built}; slowest answer meanwhile {1000 * slowest:.0f} ms")
        for name, parameters in QUESTIONS.items():
            times, used = [], cpu_seconds(pid)
            for number in range(TIMES):
                asked = time.monotonic()
                # another condition each time, as the last selection is kept
                found = ask(address, "trajectories", **parameters, length_min=number)
                times.append(1000 * (time.monotonic() - asked))
            used = 1000 * (cpu_seconds(pid) - used) / TIMES
            print(f"{name}: {np.median(times):.0f} ms, at most {max(times):.0f}, CPU {used:.0f} ms; {found['total']:,} rows")
        times, begin, hits, used = [], 0, 0, cpu_seconds(pid)
        while sum(times) < SEARCH_MS:
            asked = time.monotonic()
            found = ask(address, "search", text="NEEDLE", begin=begin)
            times.append(1000 * (time.monotonic() - asked))
            hits += len(found["rows"])
            begin = found["next"]
            if begin >= found["total"]:
                break
        used = cpu_seconds(pid) - used
        print(f"search: {begin:,} in {sum(times) / 1000:.0f} s, {used:.1f} s of CPU; {hits:,} found")
        print(f"search: an answer after {np.median(times):.0f} ms, at most {max(times):.0f}")
        now, most, own = memory(pid, "VmRSS"), memory(pid, "VmHWM"), memory(pid, "RssAnon")
        print(f"server: {now:.0f} MB now ({own:.0f} MB its own), {most:.0f} MB at most")
        if browser:
            judge = [browser, str(ROOT / "tests" / "lab" / "browser.py"), address, "--search", "needle"]
            print(subprocess.run(judge, capture_output=True, text=True, check=True).stdout.strip())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, help="keeps the journal there, and uses one that it has")
    parser.add_argument("--browser", metavar="PYTHON", help="an interpreter with playwright")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        place = options.folder or Path(temporary)
        if not (place / "run" / FILE).is_file():
            write_run(place / "run", options.trajectories)
        measure(place, options.browser)


if __name__ == "__main__":
    main()
