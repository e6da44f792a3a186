"""The list of files of a staged folder, and their check by a server that is about to read them.

Used inside servers too: it imports nothing but the standard library, and safetensors when it reads.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, BinaryIO

MANIFEST = "manifest.json"  # the size of each file of a staged folder, by its name; written last
MOST_HEADER = 10**8  # bytes of a safetensors header, as the format has it


def shards(staging_root: str, folder: str) -> list[Path]:
    """Returns the weight files of a staged folder, after checking that all that its manifest lists
    are there, that each is whole and no tensor is in two of them.

    Raises: ValueError for a folder outside the staging root, without weights, or with a damaged or
    missing file.
    """
    from safetensors import SafetensorError, safe_open

    path = inside(staging_root, folder)
    sizes = manifest(path)
    files = [path / name for name in sorted(sizes)]
    names: Counter[str] = Counter()
    for file in files:
        try:
            found = file.stat().st_size
            # compares the file's size with what its header lists
            with safe_open(file, framework="pt") as opened:
                names.update(opened.keys())
        except (SafetensorError, OSError) as error:
            # vLLM hides whole paths
            raise ValueError(f"{file.name} cannot be read: {error}") from error
        if found != sizes[file.name]:
            raise ValueError(f"{file.name} has {found} bytes instead of {sizes[file.name]}")
    if twice := [name for name, count in names.items() if count > 1]:
        raise ValueError(f"{folder} has {', '.join(twice)} in more than one file")
    return files


def inside(staging_root: str, folder: str) -> Path:
    """Returns a folder below the staging root. Raises: ValueError for one outside of it."""
    root, path = Path(staging_root).resolve(), Path(folder).resolve()
    if root not in path.parents:
        raise ValueError(
            f"refused to read weights from {folder}: it is outside the staging folder"
            f" {staging_root}"
        )
    return path


def manifest(folder: Path) -> dict[str, int]:
    """Returns the sizes of a staged folder's weight files by their names. A list is needed because
    several machines may have written them, and a network's file system may show some later.

    Raises: ValueError for a folder without a manifest.
    """
    try:
        sizes = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{folder} has no {MANIFEST}: it was not staged completely, or this machine cannot see"
            " the staging folder"
        ) from error
    found = {Path(name).name: size for name, size in sizes.items() if name.endswith(".safetensors")}
    if not found:
        raise ValueError(f"{folder} has no *.safetensors: it contains no weights")
    return found


def header(file: BinaryIO) -> tuple[bytes, dict[str, Any]]:
    """Reads the header of an opened safetensors file. Returns its bytes with their length in front,
    and the `dtype`, `shape` and `data_offsets` of each tensor by its name.

    Raises: ValueError for a file without one.
    """
    length = file.read(8)
    text = file.read(min(int.from_bytes(length, "little"), MOST_HEADER))
    entries = json.loads(text)
    entries.pop("__metadata__", None)
    return length + text, entries
