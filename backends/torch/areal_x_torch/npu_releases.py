"""Whether torch-npu is installed, and for this torch, read before torch is imported: torch loads
torch-npu itself then, and one of another release ends that with an error from its own code."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.version import Version

from areal_x.errors import UserError

NPU = Path("/dev/davinci0")  # of Ascend's driver, where a machine has NPUs
VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"


def check_releases() -> None:
    """Raises: UserError if torch-npu is installed beside a torch that it was not made for, or if the
    machine has NPUs that torch could not find without it."""
    torch, plugin = (_release_of(name) for name in ("torch", "torch-npu"))
    if plugin is None:
        if NPU.exists() and os.environ.get(VISIBLE) != "":
            raise UserError(
                "this machine has NPUs, and torch-npu, without which torch finds none, is not"
                f" installed: pip install 'areal-x[ascend]', or set {VISIBLE}= to train on the CPU"
            )
    elif torch is not None and torch != plugin:
        raise UserError(
            f"torch-npu {plugin} and torch {torch} are installed, and torch-npu works with the torch of"
            " its own number alone: install releases that belong together (docs/ascend.md)"
        )


def _release_of(distribution: str) -> str | None:
    """Returns major and minor number of an installed distribution; None if it is not installed."""
    try:
        found = Version(version(distribution))
    except PackageNotFoundError:
        return None
    return f"{found.major}.{found.minor}"
