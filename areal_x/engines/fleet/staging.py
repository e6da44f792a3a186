"""Stages weights for engines in other processes, as safetensors files, by default in shared memory.

They are written while training and generation go on; generation is paused only while the servers
read them. One process writes them or several, each its own files; a folder gets its name, and its
manifest, only when all are complete.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import numpy as np
from jaxtyping import Float32

from areal_x.engines.fleet.folders import LOCK, PREFIX, remove_left_behind
from areal_x.engines.fleet.manifest import MANIFEST
from areal_x.engines.fleet.proof.claims import Claiming
from areal_x.errors import UserError
from areal_x.hf.weight_copy import Tensors, write_shards
from areal_x.protocols.engine import Staged

Write = Callable[[Path, Tensors], Mapping[str, int] | None]
"""Fills a folder, and returns the size of each file by its name; None if it filled it alone."""


@dataclass(frozen=True, kw_only=True)
class StagedFiles(Staged):
    """A complete set of weights in a folder: *.safetensors under Hugging Face names, or an adapter
    in PEFT's form."""

    folder: Path

    probe_logp: Float32[np.ndarray, " T"] | None = None
    """The trainer's log-probabilities of the probe prompt under these weights; None if servers are
    not compared with the trainer."""

    digest: str = ""
    """Of the weights (areal_x.engines.fleet.delta.files), if deltas are published."""

    base: str = ""
    """The digest of the version that the folder contains a delta of; '' if it contains whole
    files."""


@dataclass(frozen=True, kw_only=True)
class CopiedWeights(Staged):
    """Weights that were copied from the trainer and are on their way to files."""

    files: Future[StagedFiles]

    probe_logp: Float32[np.ndarray, " T"] | None = None
    """As of StagedFiles."""


class NoRoom(UserError):
    """The file system that weights are staged on is full."""


class Staging:
    """A folder below `parent` that belongs to this run (areal_x.engines.fleet.folders), with one
    folder per version. Folders that dead runs left there are removed.

    binding: the setting that `parent` was given as.
    """

    def __init__(self, parent: Path, binding: str = "staging") -> None:
        self._binding = binding
        try:
            parent.mkdir(parents=True, exist_ok=True)
            remove_left_behind(parent)
            # Created under a hidden name and locked before others can see it, so that no other run
            # takes it for a dead run's.
            hidden = Path(tempfile.mkdtemp(prefix=".", dir=parent))
            self._lock: IO[bytes] | None = (hidden / LOCK).open("wb")
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            self.root = hidden.rename(parent / f"{PREFIX}{os.getpid()}-{secrets.token_hex(4)}")
        except OSError as error:
            reason = f"weights cannot be staged in {parent} ({error.strerror})"
            raise UserError(f"{reason}: set {binding} to a writable folder") from error

    def stage(
        self,
        weights: Tensors,
        version: int,
        write: Write | None = None,
        claiming: Claiming | None = None,
        name: str = "",
    ) -> StagedFiles:
        """Writes the tensors, one shard in memory at a time. The folder gets its name only once it
        is complete, with a manifest of its files.

        write: fills the folder, by default `write_shards`. claiming: claims what is written, in a
        file beside it. name: ends the folder's, beside another one of the version. Raises: NoRoom
        if the file system is full.
        """
        tensors = weights if claiming is None else claiming.of(weights)
        folder, partial = self.root / f"v{version:08d}{name}", self.root / f"partial{name}"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            sizes = (write or write_shards)(partial, tensors)
            if sizes is None:
                sizes = {file.name: file.stat().st_size for file in partial.iterdir()}
            if claiming is not None:
                claiming.write(partial)
            (partial / MANIFEST).write_text(json.dumps(dict(sizes)))
        except Exception as error:
            shutil.rmtree(partial, ignore_errors=True)
            if is_disk_full(error):
                reason = f"no room to stage the weights in {self.root.parent}"
                raise NoRoom(
                    f"{reason}: set {self._binding} to a folder with more space"
                ) from error
            raise
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
        return StagedFiles(folder=folder, version=version, bytes=sum(sizes.values()))

    def adopt(self, staged: StagedFiles) -> StagedFiles:
        """Returns a version that another process has staged, in this folder: as links to its files,
        which may then be removed there.

        Raises: UserError if this machine does not see them.
        """
        folder, partial = self.root / staged.folder.name, self.root / "partial"
        shutil.rmtree(partial, ignore_errors=True)
        try:
            shutil.copytree(staged.folder, partial, copy_function=link_or_copy)
        except (OSError, shutil.Error) as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise UserError(
                f"the node {socket.gethostname()} does not see the staged weights in"
                f" {staged.folder} ({error}): set {self._binding} to a folder that all nodes share"
                " under one path"
            ) from error
        shutil.rmtree(folder, ignore_errors=True)
        return replace(staged, folder=partial.rename(folder))

    def keep(self, staged: StagedFiles | None) -> None:
        """Removes all versions older than this one; None removes all."""
        for folder in self.root.glob("v*"):
            if staged is None or folder.name < staged.folder.name:
                shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def link_or_copy(source: str, target: str) -> None:
    """Links a file, or copies it where the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def is_disk_full(error: Exception) -> bool:
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return True
    # The safetensors library wraps the system's message into an error of its own.
    return os.strerror(errno.ENOSPC) in str(error)
