"""python -m tests.mutants [WORD …]: plants each bug in a copy of the code and prints which test saw it."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from tests.mutants.all import MUTANTS
from tests.mutants.mutant import ROOT, Mutant

LONGEST = 1200  # seconds that the tests of one mutant may take: one that hangs is seen too
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


def copied(to: Path) -> Path:
    """A copy of the files that git knows, and those that it does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    return to


def run_tests(root: Path, tests: Sequence[str]) -> tuple[int, str]:
    """pytest's exit status and the end of its output, in a copy that wins over what is installed."""
    paths = os.pathsep.join(str(root / part) for part in ("", "backends/jax", "backends/torch"))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not server and not cluster", *tests]
    try:
        done = subprocess.run(
            command, cwd=root, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=LONGEST
        )
    except subprocess.TimeoutExpired:
        return 1, f"FAILED none-of-them-ended-in-{LONGEST}-s"
    return done.returncode, done.stdout[-20_000:]


def seen_by(root: Path, mutant: Mutant) -> str:
    """The test that fails with the mutant, "" where none does, or where pytest could not run, which is then said."""
    file = root / mutant.file
    before = file.read_text(encoding="utf-8")
    file.write_text(mutant.applied(before), encoding="utf-8")
    try:
        code, output = run_tests(root, mutant.tests)
    finally:
        file.write_text(before, encoding="utf-8")
    if code == 0:
        return ""
    found = FAILED.search(output)
    if code != 1 or found is None:
        print(f"{mutant.bug}: pytest ended with {code}\n{output[-3000:]}", file=sys.stderr)
        return ""
    return found[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="only mutants whose bug or file contains one of these")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--clean", action=argparse.BooleanOptionalAction, default=True, help="first run the tests without a bug"
    )
    options = parser.parse_args()
    chosen = [m for m in MUTANTS if not options.words or any(word in m.bug or word in m.file for word in options.words)]
    with tempfile.TemporaryDirectory() as made, ThreadPoolExecutor(options.workers) as pool:
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(options.workers):
            copies.put(copied(Path(made) / str(number)))

        def with_a_copy(work: Mutant | Sequence[str]) -> str:
            root = copies.get()
            try:
                if isinstance(work, Mutant):
                    return seen_by(root, work)
                code, output = run_tests(root, work)
                return "" if code == 0 else output[-3000:]
            finally:
                copies.put(root)

        files = sorted({test for mutant in chosen for test in mutant.tests})
        shares = [files[i :: options.workers] for i in range(options.workers)] if options.clean else []
        for broken in filter(None, pool.map(with_a_copy, shares)):
            print(f"the tests fail without any mutant:\n{broken}", file=sys.stderr)
            return 2
        print("| # | file | bug | seen by |\n|---|---|---|---|")
        survivors = 0
        for number, (mutant, test) in enumerate(zip(chosen, pool.map(with_a_copy, chosen), strict=True), 1):
            survivors += not test
            print(f"| {number} | `{mutant.file}` | {mutant.bug} | {f'`{test}`' if test else '**none**'} |", flush=True)
    print(f"\n{len(chosen) - survivors} of {len(chosen)} are detected")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
