"""Copies of servers' logs from nodes that do not share the run's directory, so that each log is in the
run's directory under its name, also once its node is gone."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from areal_x.errors import UserError
from areal_x.runtime import background

COPY_SECONDS = 5.0  # that a copy is behind at most
COPY_BYTES = 1 << 20  # of one message; of a log that grows faster, the newest


@dataclass(frozen=True)
class LogPart:
    """What a log has from an offset on."""

    text: bytes

    end: int
    """Offset of the next part."""

    is_last: bool


def log_part(log: Path, offset: int, has_ended: Callable[[], bool]) -> LogPart:
    """Returns what was written to a log after the offset, once that is something or its server has
    ended; not sooner than COPY_SECONDS unless it has ended."""
    until = time.monotonic() + COPY_SECONDS
    while not (ended := has_ended()):
        if time.monotonic() >= until and log.stat().st_size > offset:
            break
        time.sleep(min(COPY_SECONDS, 0.2))
    with log.open("rb") as opened:
        end = opened.seek(0, os.SEEK_END)
        begin = max(offset, end - COPY_BYTES)
        opened.seek(begin)
        text = opened.read(end - begin)
    if begin > offset:
        text = b"[%d bytes are left out]\n" % (begin - offset) + text
    return LogPart(text, end, ended)


class LogCopy:
    """Copies a log as it grows, in a thread, as the server may outlive the event loop that started
    it. ask: requests the part that begins at an offset. offset: where the log begins. start: where
    the copy begins in its file. ended: set when no more follows."""

    def __init__(self, ask: Callable[[int], Future[LogPart]], offset: int, file: Path) -> None:
        self.start = file.stat().st_size if file.exists() else 0
        self.ended = threading.Event()
        what = f"the copy of the log {file.name}"
        background.thread(self._copy, ask, offset, file, what=what, failed=background.on_loop())

    def _copy(self, ask: Callable[[int], Future[LogPart]], offset: int, file: Path) -> None:
        try:
            is_last = False
            while not is_last:
                part = ask(offset).result()
                append(file, part.text)
                offset, is_last = part.end, part.is_last
        except (OSError, UserError):  # the keeper is gone, or this disk is full
            pass
        finally:
            self.ended.set()


def append(file: Path, text: bytes) -> None:
    with file.open("ab") as opened:
        opened.write(text)
