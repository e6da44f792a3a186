"""What a change costs: a few scripts on the working tree and on an earlier commit, in turns, and a history of the ratios.

    python benchmarks/history.py                          # make bench
    python benchmarks/history.py --base COMMIT --rounds 5 --only check

Each round runs every script once on either tree, in an order that changes from round to round, so that other work on the
machine and its drifting speed meet both. A ratio is the time on the working tree divided by that on the other commit in the
same round: in seconds, and in CPU seconds of the script's processes, which other work changes less and a wait does not change
at all. The first round, which compiles and fills caches, is left out.

The base is a worktree of its own. By default it is the last commit of the history that this repository has, otherwise the merge
base with main, or the commit before if that is the current one.

The medians of the ratios are appended to benchmarks/history.jsonl with their least and largest, the machine, the date, both
commits (the working tree's with "+" if it has changes) and the versions; every one above 1.10 is named, and the exit status is
then 1. A ratio whose least is below 1 may be noise: repeat it with more rounds. Nothing is written with --dry.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
HISTORY = ROOT / "benchmarks" / "history.jsonl"
LOSS = 1.10  # a median ratio above it is named
ROUNDS = 3
PACKAGES = ("jax", "torch", "transformers", "numpy")
EXAMPLE = "examples/arithmetic/grpo.gin"
SHORT = ("-b", "train.steps = 8", "-b", "train.evaluate_every = 0", "-b", "train.checkpoint_every = 0")
# What is run, as arguments of python in the folder of a tree: about half a minute of a quiet core each at most.
SCRIPTS: dict[str, Sequence[str]] = {
    "check": ("-m", "areal_x.check", EXAMPLE),
    "check, torch": ("-m", "areal_x.check", EXAMPLE, "-b", "train.backend = 'torch'"),
    "8 steps": ("-m", "areal_x.train", EXAMPLE, *SHORT, "-b", "train.runs = '{scratch}'"),
    "8 steps, torch": (
        "-m",
        "areal_x.train",
        EXAMPLE,
        *SHORT,
        "-b",
        "train.runs = '{scratch}'",
        "-b",
        "train.backend = 'torch'",
    ),
    "updates": ("benchmarks/own_pass.py", "--rounds", "2", "--sequences", "4"),
    "losses": ("benchmarks/algorithms.py", "kl"),
}


@dataclass(frozen=True)
class Ratio:
    """New time divided by old, of the rounds of one script."""

    script: str

    clock: str
    """"seconds" or "CPU"."""

    median: float
    least: float
    largest: float

    @property
    def lost(self) -> bool:
        return self.median > LOSS

    def __str__(self) -> str:
        return f"{self.script}, {self.clock}: {self.median:.2f} × ({self.least:.2f} to {self.largest:.2f})"


Times = dict[str, list[float]]  # by clock, of each counted round


def ratios(script: str, new: Times, old: Times) -> list[Ratio]:
    """Returns the ratios of one script, round by round, for each clock."""
    found = []
    for clock in new:
        each = [mine / theirs for mine, theirs in zip(new[clock], old[clock], strict=True)]
        found.append(Ratio(script, clock, statistics.median(each), min(each), max(each)))
    return found


def compare(new: Path, old: Path, scripts: Mapping[str, Sequence[str]], rounds: int) -> list[Ratio]:
    """Runs the scripts on two trees in turns. Raises: RuntimeError with the end of its output if one fails."""
    trees = {"new": new, "old": old}
    times: dict[str, dict[str, Times]] = {s: {t: {"seconds": [], "CPU": []} for t in trees} for s in scripts}
    for number in range(rounds + 1):
        for name, words in scripts.items():
            for tree in list(trees)[:: 1 if number % 2 else -1]:
                seconds, cpu = timed(trees[tree], name, words)
                if number:
                    times[name][tree]["seconds"].append(seconds)
                    times[name][tree]["CPU"].append(cpu)
        print(f"round {number} of {rounds} is over", file=sys.stderr)
    return [ratio for name, of in times.items() for ratio in ratios(name, of["new"], of["old"])]


def timed(tree: Path, name: str, words: Sequence[str]) -> tuple[float, float]:
    """Returns the seconds and CPU seconds of one script on a tree, with the processes that it waited for."""
    parts = (tree, tree / "backends" / "jax", tree / "backends" / "torch")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, parts))}
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, *(word.replace("{scratch}", scratch) for word in words)]
        began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        ended = subprocess.run(
            command, cwd=tree, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if ended.returncode:
        raise RuntimeError(f"{name} ended with {ended.returncode} in {tree}:\n{ended.stdout[-2000:]}")
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@contextmanager
def worktree(root: Path, commit: str) -> Iterator[Path]:
    """A worktree of a commit, for the duration."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        git(root, "worktree", "add", "--quiet", "--detach", str(tree), commit)
        try:
            yield tree
        finally:
            git(root, "worktree", "remove", "--force", str(tree))


def git(root: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout.strip()


def current(root: Path) -> str:
    """Returns the commit of the working tree, with a "+" if tracked files differ from it."""
    return git(root, "rev-parse", "HEAD") + ("+" if git(root, "status", "--porcelain", "--untracked-files=no") else "")


def default_base(root: Path, history: Path) -> str:
    """Returns the commit to compare with, see above."""
    recorded = [json.loads(line)["commit"] for line in history.read_text().splitlines()] if history.exists() else []
    now = current(root)
    for commit in reversed(recorded):
        known = subprocess.run(["git", "cat-file", "-e", f"{commit}^{{commit}}"], cwd=root, capture_output=True, check=False)
        if "+" not in commit and commit != now and known.returncode == 0:
            return str(commit)
    base = git(root, "merge-base", "HEAD", "main")
    return base if base != now else git(root, "rev-parse", "HEAD~1")


def record(root: Path, base: str, found: Sequence[Ratio]) -> dict[str, Any]:
    """Returns the history's line for these ratios."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": current(root),
        "base": git(root, "rev-parse", base),
        "machine": f"{os.cpu_count()} × {processor()}",
        "versions": versions,
        "ratios": [{name: x if isinstance(x, str) else round(x, 3) for name, x in asdict(ratio).items()} for ratio in found],
    }


def processor() -> str:
    """Returns the processor's name, on Linux that of /proc/cpuinfo."""
    info = Path("/proc/cpuinfo")
    names = (
        [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        if info.exists()
        else []
    )
    return names[0] if names else platform.machine()


def main(arguments: Sequence[str] | None = None, scripts: Mapping[str, Sequence[str]] = SCRIPTS, root: Path = ROOT) -> int:
    """Returns the exit status: 1 if a ratio is above 1.10. root: the repository."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", help="the commit to compare with")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"counted rounds (default: {ROUNDS})")
    parser.add_argument(
        "--only", nargs="+", choices=list(scripts), default=list(scripts), metavar="SCRIPT", help=", ".join(scripts)
    )
    parser.add_argument("--dry", action="store_true", help="write nothing")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    history = root / HISTORY.relative_to(ROOT)
    base = options.base or default_base(root, history)
    with worktree(root, base) as old:
        found = compare(root, old, {name: scripts[name] for name in options.only}, options.rounds)
    both = f"{current(root)[:12]} against {git(root, 'rev-parse', base)[:12]}"
    print(f"{both}, median (least to largest) of {options.rounds} rounds:")
    print(*(f"  {ratio}" for ratio in found), sep="\n")
    if not options.dry:
        with history.open("a") as file:
            file.write(json.dumps(record(root, base, found), ensure_ascii=False) + "\n")
    lost = [ratio for ratio in found if ratio.lost]
    print(*(f"LOST {ratio}" for ratio in lost), sep="\n") if lost else print(f"no ratio is above {LOSS:.2f}")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
