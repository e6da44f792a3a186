"""LoRA adapters on servers: each version has a name of its own, so that publishing one pauses
nothing.

A request begins on the newest version and ends on it. An older version is unloaded when its last
request has ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from areal_x.engines.fleet.client import MODEL
from areal_x.engines.fleet.staging import StagedFiles


def name_of(version: int) -> str:
    return f"{MODEL}-{version}"


class AdapterVersions:
    """Tracks the versions of an adapter that servers must hold, and the requests on each.

    newest: the version that new requests use; None before the first version, when they use the
    model itself.
    """

    def __init__(self) -> None:
        self.newest: StagedFiles | None = None
        self._older: list[StagedFiles] = []
        self._requests: Counter[int] = Counter()

    @contextmanager
    def request(self) -> Iterator[StagedFiles | None]:
        """Yields the version that a request begins on, which is held until the request has
        ended."""
        own = self.newest
        if own is None:
            yield None
            return
        self._requests[own.version] += 1
        try:
            yield own
        finally:
            self._requests[own.version] -= 1

    def held(self) -> list[StagedFiles]:
        """Returns the versions that a server must have: the newest, and older ones with requests in
        flight."""
        return [*self._older, *([self.newest] if self.newest else [])]

    def publish(self, staged: StagedFiles) -> list[StagedFiles]:
        """Makes a version the newest. Returns the versions without requests, which are
        forgotten."""
        self._older += [self.newest] if self.newest else []
        self.newest = staged
        unused = [old for old in self._older if not self._requests[old.version]]
        self._older = [old for old in self._older if self._requests[old.version]]
        return unused
