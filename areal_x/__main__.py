"""The command `areal-x SUBCOMMAND`, and `python -m areal_x SUBCOMMAND`.

A subcommand is the module of the same name (areal_x.rollout_command and areal_x.agents_command for
rollout and agents), imported only when it is the one to run, so that none needs what only another
one imports. `python -m areal_x.SUBCOMMAND` runs the same function.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from importlib import import_module

import areal_x
from areal_x.runtime.command import module_of

SUBCOMMANDS = {
    "train": "train what a gin file describes",
    "check": "check everything that a run depends on, in seconds",
    "launch": "write the job that runs a gin file on a cluster",
    "plan": "divide accelerators between generation and training",
    "evaluate": "evaluate models: pass@k, confidence intervals, comparisons",
    "rollout": "attempt and score tasks without training, into a journal",
    "synthesize": "make tasks for agents from proposals that are verified",
    "replay": "train on a recorded run again, without an engine",
    "serve": "serve a run's model to agents, without training it",
    "tinker": "serve training and sampling to clients of the Tinker API",
    "agents": "run agents on this machine for a run on another one",
    "lab": "look at runs in a browser: metrics, trajectories, failures",
    "top": "watch a run in a terminal: where it is, and where its time goes",
    "report": "write a run's page to one file, to send to somebody",
    "convert": "write another framework's settings as a gin file",
    "export": "write a checkpoint as a plain Hugging Face model",
    "push": "upload a run's model to a Hugging Face hub",
    "example": "copy an example out of the package",
}
FAILED = 1
WRONG = 2  # the exit status of argparse for a wrong command line


def main() -> int:
    """Runs this process's command line and returns the exit status."""
    # A scheduler's SIGTERM closes servers as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return run(sys.argv[1:])


def run(words: Sequence[str]) -> int:
    """Runs a subcommand with its arguments and returns the exit status."""
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return 0 if words else WRONG
    if words[0] == "--version":
        print(areal_x.__version__)
        return 0
    if words[0] not in SUBCOMMANDS:
        from areal_x.errors import nearest

        hint = nearest(words[0], list(SUBCOMMANDS)) or f": choose {', '.join(SUBCOMMANDS)}"
        print(f"error: there is no subcommand {words[0]!r}{hint}", file=sys.stderr)
        return WRONG
    from areal_x.errors import UserError

    try:
        module = import_module(module_of(words[0]))
    except UserError as error:  # the extra that the subcommand needs is not installed
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    status: int = module.main(words[1:])
    return status


def usage() -> str:
    lines = [f"  {name:10} {what}" for name, what in SUBCOMMANDS.items()]
    return "\n".join(
        [
            "usage: areal-x SUBCOMMAND …",
            "",
            *lines,
            "",
            "areal-x SUBCOMMAND --help describes one; areal-x --version prints the version.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
