"""What the log of a vLLM server tells of its end."""

from __future__ import annotations

import os
import re
from pathlib import Path

LAST_BYTES = 4096  # of a log, in which its last line is
# vLLM's prefix of a line, such as "(EngineCore pid=7) ERROR 11-20 13:50:51 [core.py:1] "
PREFIX = re.compile(r"^(?:\(\w+ pid=\d+\) )?(?:[A-Z]+ \S+ \S+ \[[^\]]*\] )?")
ERROR = re.compile(r"[\w.]*(?:Error|Exception)\b: |[\w.]+: error: ")
EFFECTS = (
    "Engine core initialization failed",
    "WorkerProc initialization failed",
    "EngineCore encountered an issue",
)


def read_log(log: Path, start: int, most: int | None = None) -> str:
    """Returns what a log has from this offset on. most: of its last bytes; None for all."""
    with log.open("rb") as opened:
        end = opened.seek(0, os.SEEK_END)
        opened.seek(start if most is None else max(start, end - most))
        return opened.read().decode(errors="replace")


def last_line_in(log: str) -> str:
    lines = [line for line in log.splitlines() if line.strip()]
    return f"its log ends: {lines[-1][:300]}" if lines else "its log is empty"


def failure_in(log: str) -> str:
    """Returns the last error in a server's log that is more than a reference to an earlier one;
    without any, its last lines."""
    lines = [PREFIX.sub("", line).rstrip() for line in log.splitlines()]
    # a traceback's frames are indented
    lines = [line for line in lines if line and not line[0].isspace()]
    errors = [line for line in lines if ERROR.match(line)]
    causes = [line for line in errors if not any(effect in line for effect in EFFECTS)]
    return (causes or errors or [" | ".join(lines[-3:]) or "it wrote nothing"])[-1]
