"""What a run whose parts wait for each other left about it: logs/waits.json (areal_x.runtime.waits)."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from areal_x.runtime.waits import STATE

MOST_BYTES = 8 << 20
MOST_WAITS, MOST_THREADS, MOST_CHARACTERS = 500, 200, 20_000


def read_stall(run: Path, goes_on: bool) -> dict[str, Any] | None:
    """Returns who waits for whom in a run in which nothing moves, as the run's own log and display
    say it: `silent_seconds` (until now, if it goes on), `sentences`, `waits` and the `threads` with
    their stacks. None for a run that moves, or a file that cannot be read.
    """
    file = run / "logs" / STATE
    try:
        if file.stat().st_size > MOST_BYTES:
            return None
        found = json.loads(file.read_bytes())
        since = time.time() - float(found["time"]) if goes_on else 0.0
        return {
            "silent_seconds": float(found["silent_seconds"]) + max(0.0, since),
            "sentences": [str(x)[:MOST_CHARACTERS] for x in found["sentences"][:MOST_WAITS]],
            "waits": [
                {
                    "who": str(x["who"])[:MOST_CHARACTERS],
                    "about": str(x["about"])[:MOST_CHARACTERS],
                    "idle": bool(x["idle"]),
                }
                for x in found["waits"][:MOST_WAITS]
            ],
            "threads": [
                {"name": str(x["name"])[:200], "stack": str(x["stack"])[-MOST_CHARACTERS:]}
                for x in found["threads"][:MOST_THREADS]
            ],
        }
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
