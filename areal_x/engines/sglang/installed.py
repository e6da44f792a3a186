"""The SGLang that an interpreter has."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from functools import cache

from areal_x.errors import UserError

OLDEST = (0, 5, 20)  # the first that returns the version of every token
SECONDS = 60.0  # for an interpreter to start on a busy machine
ASK = """
import json
from importlib.metadata import PackageNotFoundError, version
found = {}
for name in ("sglang", "torch"):
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        pass
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Installed:
    """What an interpreter has."""

    version: str
    """SGLang's."""

    is_cpu: bool
    """True if its torch computes on CPUs."""


def interpreter(python: str) -> str:
    """Returns the interpreter of the setting sglang.python."""
    return python or sys.executable


@cache
def installed(python: str) -> Installed:
    """Returns what the interpreter of the setting sglang.python has. Nothing of it is imported.

    Raises: UserError if it cannot be run, or has no SGLang or one that is too old.
    """
    program = interpreter(python)
    try:
        run = subprocess.run(
            [program, "-I", "-c", ASK], capture_output=True, text=True, timeout=SECONDS, check=True
        )
        found = json.loads(run.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        raise UserError(
            f"sglang.python = {python!r} cannot be run: {error}; it must be a Python interpreter,"
            " under the same path on every machine that serves"
        ) from error
    if "sglang" not in found:
        wanted = (
            "install it in an environment of its own and set sglang.python to that environment's"
            " interpreter (docs/sglang.md), or set sglang.urls to servers elsewhere"
        )
        raise UserError(f"{program} has no SGLang: {wanted}")
    check_version(found["sglang"], f"the SGLang of {program}")
    return Installed(found["sglang"], "cpu" in found.get("torch", ""))


def check_version(version: str, what: str) -> None:
    """Raises: UserError for a release before the oldest that can be used. Other forms of a version,
    as of a development build, pass."""
    numbers = version.split("+")[0].split(".")[:3]
    if not all(number.isdigit() for number in numbers) or len(numbers) < 3:
        return
    if tuple(map(int, numbers)) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise UserError(
            f"{what} is {version}, which does not tell the weight version of every token: use"
            f" {oldest} or later"
        )
