"""A server for clients of the Tinker API (docs/tinker.md): they train and sample by HTTP, on this
machine's own accelerators and either backend.

areal-x tinker FILE.gin         # the model of a gin file
areal-x tinker --model DIR
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec

PACKAGES = ("starlette", "uvicorn")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status: 1 also if the packages that serve HTTP are
    not installed."""
    for package in PACKAGES:
        if find_spec(package) is None:
            print(
                f"error: the server needs the package {package}: pip install 'areal-x[tinker]'",
                file=sys.stderr,
            )
            return 1
    from areal_x.tinker.command import main as command

    return command(arguments)
