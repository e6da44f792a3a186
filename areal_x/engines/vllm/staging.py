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

from areal_x.engines.vllm.loading import MANIFEST
from areal_x.errors import UserError
from areal_x.hf.weight_copy import Tensors, write_shards
from areal_x.protocols.engine import Staged

PREFIX = "areal_x-"
LOCK = "lock"
SHARED_MEMORY = Path("/dev/shm")
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


@dataclass(frozen=True, kw_only=True)
class CopiedWeights(Staged):
    """Weights that were copied from the trainer and are on their way to files."""

    files: Future[StagedFiles]

    probe_logp: Float32[np.ndarray, " T"] | None = None
    """As of StagedFiles."""


def default_parent() -> Path:
    """Returns shared memory if there is any, which is written once, read by every server of this
    machine and never touches a disk; else the temporary directory."""
    return SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())


class NoRoom(UserError):
    """The file system that weights are staged on is full."""


class Staging:
    """A folder below `parent` that belongs to this run, with one folder per version. Folders that
    dead runs left there are removed.

    A run holds a lock in its folder for as long as it lives. (The kernel releases it with the
    process, however that ends; a process id in the name could belong to another container or to a
    newer process.)
    """

    def __init__(self, parent: Path) -> None:
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
            raise UserError(f"{reason}: set vllm.staging to a writable folder") from error

    def stage(self, weights: Tensors, version: int, write: Write | None = None) -> StagedFiles:
        """Writes the tensors, one shard in memory at a time. The folder gets its name only once it
        is complete, with a manifest of its files.

        write: fills the folder, by default `write_shards`. Raises: NoRoom if the file system is
        full.
        """
        folder, partial = self.root / f"v{version:08d}", self.root / "partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            sizes = (write or write_shards)(partial, weights)
            if sizes is None:
                sizes = {file.name: file.stat().st_size for file in partial.iterdir()}
            (partial / MANIFEST).write_text(json.dumps(dict(sizes)))
        except Exception as error:
            shutil.rmtree(partial, ignore_errors=True)
            if is_disk_full(error):
                reason = f"no room to stage the weights in {self.root.parent}"
                raise NoRoom(f"{reason}: set vllm.staging to a folder with more space") from error
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
                f" {staged.folder} ({error}): set vllm.staging to a folder that all nodes share"
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


def remove_left_behind(parent: Path) -> None:
    """Removes the staging folders below `parent` whose runs ended without removing them."""
    for folder in parent.glob(f"{PREFIX}*"):
        try:
            with (folder / LOCK).open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue  # alive, another user's, or on a file system without locks
