"""A cache for models and data that take a while to make: $XDG_CACHE_HOME/areal_x."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from examples.tiny import model, supervised


def made_once(
    name: str, settings: Mapping[str, Any], code: Sequence[ModuleType], make: Callable[[Path], None]
) -> Path:
    """Returns the directory that `make` fills, from the cache if it holds one with the same
    settings and code.

    If `make` raises, nothing is left behind. If two processes run at once, either result may be
    kept.

    Args:
        name: The example, and its directory in the cache.
        settings: Anything that JSON can hold.
        code: The modules on which the result depends, besides those of every tiny model.
        make: Fills an empty directory.
    """
    home = cache(name)
    made = home / _digest(settings, code)
    if not made.is_dir():
        unfinished = Path(tempfile.mkdtemp(dir=home, prefix=f".{made.name}."))
        try:
            make(unfinished)
            unfinished.rename(made)
        except OSError:
            if not made.is_dir():  # otherwise another process was faster
                raise
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return made


def cache(name: str) -> Path:
    """The example's directory in the cache, created if it does not exist."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "areal_x" / name
    home.mkdir(parents=True, exist_ok=True)
    return home


def _digest(settings: Mapping[str, Any], code: Sequence[ModuleType]) -> str:
    """A name for settings and code: changed code makes a different model."""
    texts = [Path(str(module.__file__)).read_text() for module in (model, supervised, *code)]
    return hashlib.sha256(json.dumps([settings, texts]).encode()).hexdigest()[:16]
