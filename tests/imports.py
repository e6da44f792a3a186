"""The imports between this project's modules, read from the source, including imports inside functions, type-only imports and
modules named in strings (entry points, `python -m`, processes that are started)."""

from __future__ import annotations

import ast
import gc
import re
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "areal_x": ROOT / "areal_x",
    "areal_x_jax": ROOT / "backends" / "jax" / "areal_x_jax",
    "areal_x_torch": ROOT / "backends" / "torch" / "areal_x_torch",
}
NAMED = re.compile(r"(areal_x\w*(?:\.\w+)+)(?::\w+)?")  # a whole string that names a module or its function


def parsed(source: str) -> ast.Module:
    """The tree of a source. No collection runs meanwhile: CPython 3.11 raises SystemError if a finalizer parses then, or lets
    another thread parse."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(source)
    finally:
        if enabled:
            gc.enable()


@cache
def modules() -> Mapping[str, Path]:
    """The path of every module by its dotted name."""
    found = {}
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = (package, *path.relative_to(folder).with_suffix("").parts)
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(module: str, path: Path) -> Iterator[str]:
    """The project's modules that this one imports or names."""
    known = modules()
    for node in ast.walk(parsed(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                if inner in known:
                    yield inner
                elif node.module in known:
                    yield node.module
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            named = NAMED.fullmatch(node.value)
            if named and named[1] in known:
                yield named[1]


@cache
def arrows() -> frozenset[tuple[str, str]]:
    """(importing module, imported module) of every import of this project."""
    return frozenset((m, other) for m, path in modules().items() for other in imports_of(m, path) if other != m)


def entry_points(group: str) -> dict[str, str]:
    """The entry points that the core declares, as "module:attribute" by name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return dict(project.get("entry-points", {}).get(group, {}))
