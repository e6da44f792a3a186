"""The newest version on the server's side of a slow link: what the next delta is applied to.

    PARENT/areal_x-RUN-cache/          one for all servers of a run on a machine, theirs alone (mode 0700)
        lock                           held by each process that uses the cache, while it lives
        making                         held by the one that makes a version
        partial/                       what it has made so far
        DIGEST/                        a whole version, as staged folders are, once its digest was checked

It takes the room of one version, and of a second one while that is made.

Used inside servers: it imports nothing but numpy and the standard library, and safetensors when it
reads.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import stat
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from areal_x.engines.fleet.delta.codec import Broken
from areal_x.engines.fleet.delta.version import Delta, write_version
from areal_x.engines.fleet.folders import LOCK, PREFIX, default_parent, remove_left_behind
from areal_x.engines.fleet.manifest import MANIFEST, inside, shards

MAKING, PARTIAL = "making", "partial"
RUN = re.compile(rf"{PREFIX}[\w.-]+")
DIGEST = re.compile(r"[0-9a-f]{64}")
FULL = (errno.ENOSPC, errno.EDQUOT)
ATTEMPTS = 100  # to lock a folder that others remove meanwhile


@dataclass(frozen=True)
class Order:
    """A version that a server is to have in its cache."""

    parent: str
    """Folder below which the cache is; '' is shared memory."""
    run: str
    """Name of the run's staging folder, which no other run has."""
    staging_root: str
    folder: str
    """Contains the version, whole or as a delta."""
    digest: str
    """Of the version."""
    base: str = ""
    """The version that the delta is of; '' if the folder contains whole files."""


def parsed(text: str) -> Order:
    """Returns an order. Raises: ValueError for a name or a digest that is none."""
    order = Order(**json.loads(text))
    if not RUN.fullmatch(order.run) or not DIGEST.fullmatch(order.digest):
        raise ValueError("it names no run, or no digest")
    if order.base and not DIGEST.fullmatch(order.base):
        raise ValueError("it names no base")
    return order


class Cache:
    """The cache of a run on this machine. Raises: Broken if it cannot be used."""

    def __init__(self, parent: str, run: str) -> None:
        self.run = run
        below = Path(parent).resolve() if parent else default_parent()
        self.folder = below / f"{run}-cache"
        try:
            below.mkdir(parents=True, exist_ok=True)
            remove_left_behind(below)
            self._take()
        except OSError as error:
            raise Broken(f"{self.folder} cannot be used ({error.strerror})") from error

    def _take(self) -> None:
        for _ in range(ATTEMPTS):
            self.folder.mkdir(mode=0o700, exist_ok=True)
            found = self.folder.lstat()
            private = found.st_uid == os.geteuid() and not found.st_mode & 0o077
            if not stat.S_ISDIR(found.st_mode) or not private:
                raise Broken(f"{self.folder} belongs to somebody else")
            self._lock = writable(self.folder / LOCK)
            with suppress(BlockingIOError):
                fcntl.flock(self._lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                if self.is_there():
                    return
            self._lock.close()  # somebody takes it for a dead run's, and removes it
        raise Broken(f"{self.folder} cannot be locked")

    def find(self, digest: str) -> Path | None:
        """Returns the folder of a version, if it is here."""
        folder = self.folder / digest
        return folder if (folder / MANIFEST).is_file() else None

    def make(self, order: Order) -> Path | None:
        """Returns the folder of a version, after making it; None if another process makes one.

        Raises: Broken, with a sentence.
        """
        with writable(self.folder / MAKING) as making:
            try:
                fcntl.flock(making, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return None
            try:
                return self.find(order.digest) or self._made_with_room(order)
            except (OSError, ValueError) as error:
                if isinstance(error, OSError) and error.errno in FULL:
                    raise Broken(f"{self.folder.parent} has no room for it") from error
                raise Broken(f"{error}") from error
            finally:
                shutil.rmtree(self.folder / PARTIAL, ignore_errors=True)

    def _made_with_room(self, order: Order) -> Path:
        """Does `_made`; for a whole version in the room of those that are here if there is no other."""
        try:
            return self._made(order)
        except OSError as error:
            if order.base or error.errno not in FULL:
                raise
        self.keep(None)
        return self._made(order)

    def _made(self, order: Order) -> Path:
        partial = self.folder / PARTIAL
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        with ExitStack() as files:
            delta = None
            if order.base:
                base = self.find(order.base)
                if base is None:
                    raise Broken("the server does not have the version before")
                delta = Delta(inside(order.staging_root, order.folder), files)
                if (delta.base, delta.digest) != (order.base, order.digest):
                    raise Broken("the delta is of other versions")
                sources = sorted(base.glob("*.safetensors"))
            else:
                sources = shards(order.staging_root, order.folder)
            found = write_version(partial, sources, delta)
        if found != order.digest:
            raise Broken("the result is not what the trainer published")
        sizes = {file.name: file.stat().st_size for file in partial.iterdir()}
        (partial / MANIFEST).write_text(json.dumps(sizes))
        made = partial.rename(self.folder / order.digest)
        self.keep(made)
        return made

    def keep(self, kept: Path | None) -> None:
        """Removes all versions but this one; None removes all."""
        for folder in self.folder.iterdir():
            if folder != kept and DIGEST.fullmatch(folder.name):
                shutil.rmtree(folder, ignore_errors=True)

    def is_there(self) -> bool:
        """True unless another process has removed it."""
        try:
            return os.path.samestat(os.fstat(self._lock.fileno()), (self.folder / LOCK).stat())
        except FileNotFoundError:
            return False

    def remove(self) -> None:
        """Removes the cache. It cannot be used any more."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()

    def close(self) -> None:
        """Leaves the cache to the other processes that use it."""
        self._lock.close()


def writable(path: Path) -> BinaryIO:
    """Opens a file that locks are on."""
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "r+b")
