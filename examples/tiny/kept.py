"""What takes half a minute to make is made once and kept in the user's cache,
$XDG_CACHE_HOME/areal_x."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from areal_x.types import Batch
from examples.tiny import model, supervised


def made_once(
    name: str, settings: Mapping[str, Any], code: Sequence[ModuleType], make: Callable[[Path], None]
) -> Path:
    """The directory that `make` fills, made now unless one of the same settings and code is kept
    already.

    name: of the example, and of the directory in the cache. settings: what JSON can hold. code: the
    modules on which what is made depends, beside those of every tiny model. What raises leaves
    nothing behind; of two runs at once either may be kept.
    """
    home = cache(name)
    made = home / _digest(settings, code)
    if not made.is_dir():
        unfinished = Path(tempfile.mkdtemp(dir=home, prefix=f".{made.name}."))
        try:
            make(unfinished)
            unfinished.rename(made)
        except OSError:
            if not made.is_dir():  # then it is not that another run was quicker
                raise
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return made


def supervised_once(
    name: str,
    settings: Mapping[str, Any],
    code: Sequence[ModuleType],
    write: Callable[[Path], object],
    lessons: Callable[[], Iterable[Batch]],
    backend: str,
) -> str:
    """The directory of a model that was supervised, made now unless one of the same settings and
    code is kept already.

    name, code: as of `made_once`. settings: what JSON can hold, `seed` and `learning_rate` among
    them. write: fills a directory with the model of random weights. lessons: the batches that it is
    taught. backend: what trains it; where it is not installed, the one that is.
    """

    def make(directory: Path) -> None:
        write(directory)
        seed, rate = settings["seed"], settings["learning_rate"]
        supervised.supervise(
            directory,
            lessons(),
            backend=supervised.installed(backend),
            seed=seed,
            learning_rate=rate,
        )

    return str(made_once(name, settings, [sys.modules[__name__], *code], make))


def cache(name: str) -> Path:
    """The example's own directory in the cache."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "areal_x" / name
    home.mkdir(parents=True, exist_ok=True)
    return home


def _digest(settings: Mapping[str, Any], code: Sequence[ModuleType]) -> str:
    """Names the settings and the code: a model made by other code is another model."""
    texts = [Path(str(module.__file__)).read_text() for module in (model, supervised, *code)]
    return hashlib.sha256(json.dumps([settings, texts]).encode()).hexdigest()[:16]
