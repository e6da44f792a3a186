"""What the journal of `areal-x tinker` costs a request: the milliseconds until it is on disk, for bodies of several
sizes, one after the other and 32 at once.

    python -m benchmarks.tinker_journal [DIRECTORY]

The directory should be on the disk that the server would use; a file system in memory flushes nothing.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from pathlib import Path

from areal_x.tinker.journal import Journal, Sent

SIZES = 1 << 10, 1 << 16, 1 << 20
COUNT, AT_ONCE = 32, 32


async def measured(directory: Path) -> None:
    journal = Journal(directory)
    number = 0

    async def send(size: int) -> None:
        nonlocal number
        number += 1
        journal.request("owner", f"m:{number}", "m", number, Sent("optim_step", bytes(size)))
        await journal.written()
        journal.outcome(f"m:{number}", b"{}", needed=False)

    print(f"{'bytes':>9}  {'one (ms)':>9}  {f'{AT_ONCE} at once (ms each)':>22}")
    for size in SIZES:
        start = time.perf_counter()
        for _ in range(COUNT):
            await send(size)
        middle = time.perf_counter()
        await asyncio.gather(*(send(size) for _ in range(AT_ONCE)))
        end = time.perf_counter()
        one, many = (middle - start) / COUNT, (end - middle) / AT_ONCE
        print(f"{size:9}  {1000 * one:9.2f}  {1000 * many:22.2f}")
    await journal.close()


def main() -> None:
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if sys.argv[1:] else None) as directory:
        asyncio.run(measured(Path(directory)))


if __name__ == "__main__":
    main()
