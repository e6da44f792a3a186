"""The trainer's side of deltas: what servers have, in host memory, and what is published of the next
version.

Two copies of the weights are in host memory: the version that servers have and the newest one. A delta
is computed from both in the thread that writes weights, and a server that cannot use it gets the
version whole, which is then written from its copy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from areal_x.engines.fleet.delta.files import Digest, Encoder, NoDelta
from areal_x.engines.fleet.proof.claims import Claiming
from areal_x.engines.fleet.staging import StagedFiles, Staging
from areal_x.hf.weight_copy import Tensors, WeightCopy
from areal_x.protocols.engine import EngineError

Guard = Callable[[Tensors], Iterator[tuple[str, np.ndarray]]]
WHOLE = "-whole"  # ends the name of a folder that was written beside a delta


class History:
    """The versions that deltas are computed from. every: publications from one of whole weights to
    the next. guard: yields tensors, and raises once the writing is to end."""

    def __init__(self, every: int, guard: Guard) -> None:
        self._every, self._guard = every, guard
        self._copies: dict[int, WeightCopy] = {}  # by version, at most two
        self._deltas = 0  # since the last whole publication
        self._lock = threading.Lock()  # of the copies, while one is written or overwritten
        self.metrics = {"published_bytes": 0.0, "published_share": 0.0}
        """What the newest publication wrote: bytes, and their share of whole weights."""

    def take(self, version: int, tensors: Tensors, base: StagedFiles | None) -> int:
        """Copies the tensors of a new version, and returns their bytes. base: the version that
        servers have, whose copy is kept."""
        with self._lock:
            kept = None if base is None else self._copies.pop(base.version, None)
            unused = next(iter(self._copies.values()), WeightCopy())
            self._copies = {} if base is None or kept is None else {base.version: kept}
            size = unused.take(tensors)
            self._copies[version] = unused
        return size

    def stage(
        self,
        staging: Staging,
        version: int,
        base: StagedFiles | None,
        claiming: Callable[[], Claiming | None],
    ) -> StagedFiles:
        """Writes a version: a delta of the base, or whole."""
        tensors = self._copies[version].tensors
        size = sum(tensor.nbytes for tensor in tensors.values())
        before = self._base(version, base)
        staged = None
        if base is not None and before is not None:
            encoder = Encoder(before, base.digest, size)
            try:
                staged = staging.stage(
                    self._guard(tensors.items()), version, encoder.write, claiming()
                )
            except NoDelta:
                pass
            else:
                staged = replace(staged, digest=encoder.digest, base=base.digest)
        if staged is None:
            digest = Digest()
            written = digest.of(self._guard(tensors.items()))
            staged = staging.stage(written, version, None, claiming())
            staged = replace(staged, digest=digest.hexdigest())
        self._deltas = self._deltas + 1 if staged.base else 0
        self.metrics = {"published_bytes": staged.bytes, "published_share": staged.bytes / size}
        return staged

    def _base(self, version: int, base: StagedFiles | None) -> Mapping[str, np.ndarray] | None:
        """Returns the tensors that the delta is to be of; None if whole weights are due."""
        if base is None or base.version == version or self._deltas + 1 >= self._every:
            return None
        copy = self._copies.get(base.version)
        return None if copy is None else copy.tensors

    def stage_whole(self, staging: Staging, staged: StagedFiles) -> StagedFiles:
        """Writes the whole files of a version of which only a delta was written.

        Raises: EngineError if its copy is no longer there, as there are newer ones.
        """
        with self._lock:
            copy = self._copies.get(staged.version)
            if copy is None:
                raise EngineError(
                    f"version {staged.version} is no longer held: there is a newer one"
                )
            whole = staging.stage(self._guard(copy), staged.version, name=WHOLE)
            size = sum(tensor.nbytes for tensor in copy.tensors.values())
        sent = self.metrics["published_bytes"] + whole.bytes
        self.metrics = {"published_bytes": sent, "published_share": sent / size}
        return replace(whole, digest=staged.digest, probe_logp=staged.probe_logp)
