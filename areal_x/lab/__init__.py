"""A page about runs, from their files alone (docs/lab.md): metrics, trajectories, failures, settings.

areal-x lab             # the runs of the folder runs/
areal-x lab runs/NAME   # one of them
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec

PACKAGES = ("starlette", "uvicorn")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status: 1 also if the packages that serve the page
    are not installed."""
    for package in PACKAGES:
        if find_spec(package) is None:
            print(
                f"error: the page needs the package {package}: pip install 'areal-x[lab]'",
                file=sys.stderr,
            )
            return 1
    from areal_x.lab.command import main as command

    return command(arguments)
