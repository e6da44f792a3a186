"""Whether another machine sees the folder of this one, and not another folder at the same path."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def marked(folder: Path) -> Iterator[Path]:
    """Makes a file in a folder for the time of the body: whoever shares the folder sees it. Nobody
    has looked its name up before, so that no network file system remembers that it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    mark = folder.absolute() / f".{secrets.token_hex(8)}"
    mark.touch()
    try:
        yield mark
    finally:
        with suppress(OSError):
            mark.unlink()
