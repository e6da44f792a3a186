"""How this process was started, for help texts and messages."""

from __future__ import annotations

import sys
from pathlib import Path

CONSOLE = "areal-x"


def command_of(module: str) -> str:
    """Returns the command that runs `module` in the way this process was started: "areal-x train",
    "python -m areal_x train" or "python -m areal_x.train" for areal_x.train."""
    package, _, name = module.rpartition(".")
    program = Path(sys.argv[0])
    if program.stem == CONSOLE:
        return f"{CONSOLE} {name}"
    if program.name == "__main__.py" and program.parent.name == package:
        return f"python -m {package} {name}"
    return f"python -m {module}"


def in_this_form(text: str, module: str) -> str:
    """Returns a help text whose `python -m MODULE` commands have the form of `command_of`."""
    return text.replace(f"python -m {module}", command_of(module))
