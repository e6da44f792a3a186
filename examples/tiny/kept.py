"""What takes half a minute to make is made once and kept in the user's cache, $XDG_CACHE_HOME/areal_x."""

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


def made_once(name: str, settings: Mapping[str, Any], code: Sequence[ModuleType], make: Callable[[Path], None]) -> Path:
    """The directory that `make` fills, made now unless one of the same settings and code is kept already.

    name: of the example, and of the directory in the cache. settings: what JSON can hold. code: the modules on which what is
    made depends, beside those of every tiny model. What raises leaves nothing behind; of two runs at once either may be kept.
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


def cache(name: str) -> Path:
    """The example's own directory in the cache."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "areal_x" / name
    home.mkdir(parents=True, exist_ok=True)
    return home


def _digest(settings: Mapping[str, Any], code: Sequence[ModuleType]) -> str:
    """Names the settings and the code: a model made by other code is another model."""
    texts = [Path(str(module.__file__)).read_text() for module in (model, supervised, *code)]
    return hashlib.sha256(json.dumps([settings, texts]).encode()).hexdigest()[:16]
