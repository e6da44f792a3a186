"""Throughput of the sandbox, and the outcomes of misbehaving programs.

    taskset -c 0 python benchmarks/sandbox.py

Claim: at least 50 programs per second on one core, each in its own process, file system and folder; and after programs of every
bad kind no process and no folder is left.

Rates: `--programs` programs that add two numbers, one after the other and `--workers` at once, with each isolation mechanism
that this machine allows (`areal_x.sandbox.isolation.MECHANISMS`), alternately, `--rounds` times; the best round is shown,
because others share this machine, with the latency of a single program. "a new interpreter" is the cost that a fork avoids:
`python -I -S -c pass`.

Bad programs: `--each` of every kind at once, among as many good ones, which must all give the right answer. A process is left
behind if it was started by the sandbox and still runs after the sandbox was closed.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from areal_x.sandbox.isolation import MECHANISMS
from areal_x.sandbox.pool import Sandbox, SandboxLimits

ADDS = "print(1 + 1)"
LIMITS = SandboxLimits(seconds=2, cpu_seconds=2, memory_mb=200, processes=8, output_characters=1000)
KINDS = {
    "loops": "while True: pass",
    "sleeps": "import time; time.sleep(1000)",
    "raises": "1 / 0",
    "segfaults": "import ctypes; ctypes.string_at(0)",
    "allocates": "kept = []\nwhile True: kept.append(bytearray(50_000_000))",
    "prints": "while True: print('x' * 1000)",
    "forks": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "forks and leaves": "import os, time\nif os.fork() == 0:\n    os.setsid()\n    os.fork()\n    time.sleep(1000)",
    "fills its folder": "for i in range(10**6): open(str(i), 'wb').write(bytes(10**6))",
    "kills": "import os\nos.kill(-1, 9)",
    "opens a socket": "import socket; socket.socket()",
    "reads /etc/passwd": "open('/etc/passwd')",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--each", type=int, default=5)
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # the warning about missing isolation, which is measured too
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = folder
        print(f"{len(os.sched_getaffinity(0))} core(s)\n")
        asyncio.run(rates(options))
        asyncio.run(misbehaving(options, Path(folder)))


async def rates(options: argparse.Namespace) -> None:
    mechanisms = [mechanism for mechanism in (*MECHANISMS, "none") if await allowed(mechanism)]
    found: dict[str, list[tuple[float, float, float]]] = {mechanism: [] for mechanism in mechanisms}
    interpreter = []
    for _ in range(options.rounds):
        for mechanism in mechanisms:
            found[mechanism].append(await rate(mechanism, options))
        start = time.perf_counter()
        for _ in range(20):
            subprocess.run([sys.executable, "-I", "-S", "-c", "pass"], check=True)
        interpreter.append((time.perf_counter() - start) / 20)
    print("| kept in by | latency alone, ms (half; 95 %) | one after the other, a second | at once, a second |")
    print("|---|---|---|---|")
    for mechanism, rounds in found.items():
        half, most = min(r[0] for r in rounds), min(r[1] for r in rounds)
        alone, together = 1 / half, max(r[2] for r in rounds)
        print(f"| {mechanism} | {1000 * half:.1f}; {1000 * most:.1f} | {alone:.0f} | {together:.0f} |")
    print(f"| a new interpreter | {1000 * min(interpreter):.1f} | {1 / min(interpreter):.0f} | |\n", flush=True)


async def allowed(mechanism: str) -> bool:
    sandbox = of(mechanism, 1)
    result = await sandbox.run(ADDS)
    await sandbox.close()
    return result.confined or mechanism == "none"


async def rate(mechanism: str, options: argparse.Namespace) -> tuple[float, float, float]:
    """Median and 95 % latency of single programs, in seconds; and programs per second when many run at once."""
    sandbox, seconds = of(mechanism, options.workers), []
    await sandbox.run(ADDS)
    for _ in range(options.programs):
        start = time.perf_counter()
        result = await sandbox.run(ADDS)
        seconds.append(time.perf_counter() - start)
        assert result.output == "2\n", result
    start = time.perf_counter()
    results = await asyncio.gather(*(sandbox.run(ADDS) for _ in range(options.programs)))
    together = options.programs / (time.perf_counter() - start)
    assert all(result.output == "2\n" for result in results)
    await sandbox.close()
    return statistics.median(seconds), statistics.quantiles(seconds, n=20)[-1], together


def of(mechanism: str, workers: int) -> Sandbox:
    return Sandbox(SandboxLimits(), workers, mechanisms=(mechanism,) if mechanism != "none" else ())


async def misbehaving(options: argparse.Namespace, folder: Path) -> None:
    print("| program | what became of them | seconds | processes left | folders left |\n|---|---|---|---|---|")
    for kind, program in KINDS.items():
        sandbox = Sandbox(LIMITS, options.workers)
        start = time.perf_counter()
        results = await asyncio.gather(*(sandbox.run(code) for _ in range(options.each) for code in (program, ADDS)))
        seconds = time.perf_counter() - start
        await sandbox.close()
        bad, good = results[::2], results[1::2]
        assert all(result.output == "2\n" for result in good), good
        words = Counter(f"{result.status}: {(result.error or 'nothing').splitlines()[-1]}" for result in bad)
        found = ", ".join(f"{count} × {text}" for text, count in words.items())
        print(f"| {kind} | {found} | {seconds:.1f} | {left(str(folder))} | {len(list(folder.iterdir()))} |", flush=True)


def left(mark: str) -> int:
    """Processes with the sandbox's folder on their command line, as in all forks of its first process."""
    found = 0
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            found += mark.encode() in (entry / "cmdline").read_bytes()
        except OSError:
            continue
    return found


if __name__ == "__main__":
    main()
