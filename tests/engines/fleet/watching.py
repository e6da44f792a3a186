"""Failures of real servers that no test asked for: a fleet heals, so a server that dies would go unnoticed.

Every loss that a fleet reports and every traceback in a server's log fails the test in which it came, unless the test declares
it: `@pytest.mark.loses(*patterns)` for the reports, `@pytest.mark.log_errors(*patterns)` for the tracebacks' last lines. Each
pattern must match at least one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from areal_x.engines.fleet import server as servers
from areal_x.engines.fleet import supervisor
from areal_x.engines.fleet.fleet import Fleet
from areal_x.engines.fleet.server_log import PREFIX

TRACEBACK = "Traceback (most recent call last):"
BEGIN, SHUTDOWN = "non-default args: ", "[shutdown] "
LOGS = "vllm-*.log"  # as a run names them


class Watch:
    """Losses that fleets reported, and errors in servers' logs, since the last check."""

    def __init__(self) -> None:
        self.losses: list[str] = []
        self.logs: dict[Path, int] = {}  # how many tracebacks of each were looked at

    def check(self, losses: Iterable[str], errors: Iterable[str], folder: Path | None) -> None:
        """Fails for what was not declared, and for what was declared and did not come. folder: where processes that the test
        started may have started servers."""
        for log in folder.rglob(LOGS) if folder is not None else ():
            self.logs.setdefault(log, 0)
        found, self.losses = self.losses, []
        compare("a server was lost", found, losses)
        compare("a server's log has a traceback", [error for log in list(self.logs) for error in self._new(log)], errors)

    def _new(self, log: Path) -> list[str]:
        found = list(tracebacks(log.read_text(errors="replace"))) if log.exists() else []
        new, self.logs[log] = found[self.logs[log] :], len(found)
        return [f"{error} ({log})" for error in new]


def tracebacks(log: str) -> Iterator[str]:
    """Yields the error that each traceback in a server's log ends with. A server that is being stopped may log that its engine
    died."""
    inside = ending = False
    for line in (PREFIX.sub("", line).rstrip() for line in log.splitlines()):
        ending = line.startswith(SHUTDOWN) or (ending and BEGIN not in line)
        if ending:
            inside = False
        elif line == TRACEBACK:
            inside = True
        elif inside and line and not line[0].isspace():
            inside = False
            yield line
    if inside:
        yield "a traceback without an end"


def compare(what: str, found: Iterable[str], expected: Iterable[str]) -> None:
    found, expected = list(found), list(expected)
    unasked = [line for line in found if not any(re.search(pattern, line) for pattern in expected)]
    assert not unasked, f"{what}, which the test does not declare:\n" + "\n".join(unasked)
    missing = [pattern for pattern in expected if not any(re.search(pattern, line) for line in found)]
    assert not missing, f"declared and did not come ({what}): {missing}, only {found}"


def declared(node: pytest.Item, mark: str) -> list[str]:
    return [pattern for marker in node.iter_markers(mark) for pattern in marker.args]


@contextmanager
def watching() -> Iterator[Watch]:
    watch, start = Watch(), servers.start

    class Watched(Fleet):
        def lost(self, name: str, reason: str, now: float) -> None:
            before = len(self._messages)
            super().lost(name, reason, now)
            watch.losses += self._messages[before:]

        def quarantine(self, name: str, reason: str, now: float) -> None:
            before = len(self._messages)
            super().quarantine(name, reason, now)
            watch.losses += self._messages[before:]

    def started(launch: servers.Launch, **options: Any) -> Any:
        server = start(launch, **options)
        watch.logs.setdefault(server.log, 0)
        return server

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervisor, "Fleet", Watched)
        patch.setattr(servers, "start", started)
        yield watch
