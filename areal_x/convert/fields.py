"""The fields of a YAML file, with a record of which were read, so that none is lost unseen."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from areal_x.errors import UserError

REFERENCE = re.compile(r"\$\{([\w.]+)\}")
NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")  # YAML 1.1 reads 1e-5 as text
DEEPEST = 20  # references to references


class Fields:
    """The leaves of nested mappings, by their dotted paths. Lists are leaves."""

    def __init__(self, tree: Mapping[str, Any]) -> None:
        self._leaves = dict(_leaves(tree, ""))
        self._read: set[str] = set()
        self.last = ""  # the path that was read last, for a message about its value

    def get(self, path: str, default: Any = None) -> Any:
        """Returns a leaf with references resolved, and records that it was read; `default` for one
        that is missing or null."""
        self._read.add(path)
        self.last = path
        value = self.peek(path)
        return default if value is None else value

    def peek(self, path: str) -> Any:
        """Returns a leaf with references resolved, None if there is none, without a record."""
        return self._resolved(self._leaves.get(path))

    def any_below(self, prefix: str) -> bool:
        """True if a section has any leaf that is not null."""
        return any(
            path.startswith(prefix + ".") and value is not None
            for path, value in self._leaves.items()
        )

    def unread(self) -> dict[str, Any]:
        """Returns the leaves that were not read, as they stand in the file."""
        return {path: x for path, x in self._leaves.items() if path not in self._read}

    def _resolved(self, value: Any) -> Any:
        for _ in range(DEEPEST):
            if not isinstance(value, str):
                return value
            whole = REFERENCE.fullmatch(value)
            if whole:
                if whole[1] not in self._leaves:
                    return value
                value = self._leaves[whole[1]]
                continue
            filled = REFERENCE.sub(lambda m: str(self._leaves.get(m[1], m[0])), value)
            if filled == value:
                return float(value) if NUMBER.fullmatch(value) else value
            value = filled
        raise UserError(f"{value!r} refers to itself")


def read_fields(file: Path) -> Fields:
    """Returns the fields of a YAML file. Raises: UserError if it is none, or not a mapping."""
    try:
        tree = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise UserError(f"{file} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(tree, Mapping):
        raise UserError(f"{file} has no fields: it must be a mapping, such as `actor:`")
    return Fields(tree)


def _leaves(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, path + ".")
        else:
            yield path, value
