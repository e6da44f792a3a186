"""The command by which this process was started, for help texts and messages."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

PACKAGE = "areal_x"
CONSOLE = "areal-x"
# The modules of subcommands that share their name with a package.
MODULES = {"rollout": "rollout_command", "agents": "agents_command"}


def module_of(name: str) -> str:
    """Returns the module of a subcommand."""
    return f"{PACKAGE}.{MODULES.get(name, name)}"


def command_of(name: str) -> str:
    """Returns a subcommand ("train") in the form in which this process was started: "areal-x train",
    "python -m areal_x train" or "python -m areal_x.train"."""
    program = Path(sys.argv[0])
    if program.stem == CONSOLE:
        return f"{CONSOLE} {name}"
    if program.name == "__main__.py" and program.parent.name == PACKAGE:
        return f"python -m {PACKAGE} {name}"
    return f"python -m {module_of(name)}"


def is_own_process() -> bool:
    """True if this process was started as a command of this package, False in a test, a notebook or
    another program that imports it."""
    program = Path(sys.argv[0])
    return program.stem == CONSOLE or program.parent == Path(__file__).parents[1]


def in_this_form(text: str, name: str) -> str:
    """Returns a help text with its `python -m areal_x.NAME` commands in the form of
    `command_of`."""
    return text.replace(f"python -m {module_of(name)}", command_of(name))


def quote(text: str) -> str:
    """Quotes a binding for a shell, in double quotes if they suffice, because bindings often contain
    single ones."""
    return shlex.quote(text) if set(text) & set('"$`\\!') else f'"{text}"'
