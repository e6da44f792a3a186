"""Which versions of an adapter servers hold, each under a name of its own, so that publishing one
stops nothing.

A request begins on the newest version and ends on it. A version that is no longer the newest goes
when its last request has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from areal_x.engines.vllm.client import MODEL
from areal_x.engines.vllm.staging import StagedFiles
from areal_x.errors import ConfigError

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # those that vLLM makes room for
# versions that vLLM batches together, and that it keeps before it reads one again from its folder
BATCHED, CACHED = 4, 16


def name_of(version: int) -> str:
    return f"{MODEL}-{version}"


def arguments(rank: int) -> list[str]:
    """For the server's command line. Raises: ConfigError for a rank above what vLLM has room
    for."""
    room = next((size for size in RANKS if size >= rank), None)
    if room is None:
        raise ConfigError("lora.rank", rank, f"at most {RANKS[-1]} with train.engine = 'vllm'")
    sizes = {"--max-lora-rank": room, "--max-loras": BATCHED, "--max-cpu-loras": CACHED}
    return ["--enable-lora", *(word for name, size in sizes.items() for word in (name, str(size)))]


class AdapterVersions:
    """newest: where requests begin; None before the first version, when they go to the model
    itself."""

    def __init__(self) -> None:
        self.newest: StagedFiles | None = None
        self._older: list[StagedFiles] = []
        self._requests: Counter[int] = Counter()

    @contextmanager
    def request(self) -> Iterator[StagedFiles | None]:
        """The version that a request begins on, which is held until the request has ended."""
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
        """Those that a server must have: the newest, and older ones that requests are on."""
        return [*self._older, *([self.newest] if self.newest else [])]

    def publish(self, staged: StagedFiles) -> list[StagedFiles]:
        """Makes a version the newest, and gives those that no request is on any more, which are
        forgotten."""
        self._older += [self.newest] if self.newest else []
        self.newest = staged
        unused = [old for old in self._older if not self._requests[old.version]]
        self._older = [old for old in self._older if self._requests[old.version]]
        return unused
