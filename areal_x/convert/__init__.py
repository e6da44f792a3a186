"""Converts another framework's settings into a gin file.

    areal-x convert areal gsm8k_grpo.yaml                     # prints it
    areal-x convert areal gsm8k_grpo.yaml -o gsm8k_grpo.gin
    areal-x convert areal my_grpo.yaml -o my.gin --tasks 40000

Every field of AReaL's YAML is either carried over or listed in a comment at the end of the gin file
with the reason. --tasks is the number of training tasks, from which epochs become steps; it is known
for GSM8K. What AReaL has in Python (datasets, rewards, workflows) is not converted: the gin file says
what to bind in its place. Check the result with `areal-x check FILE.gin`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from areal_x.convert.areal import convert
from areal_x.errors import UserError
from areal_x.runtime.command import command_of

FRAMEWORKS = ("areal",)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 1 after one sentence about a mistake."""
    parser = argparse.ArgumentParser(
        prog=command_of("convert"),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("framework", choices=FRAMEWORKS)
    parser.add_argument("file", metavar="FILE.yaml", type=Path)
    parser.add_argument("-o", "--output", metavar="FILE.gin", type=Path)
    parser.add_argument("--tasks", type=int, help="number of training tasks")
    options = parser.parse_args(arguments)
    try:
        text = convert(options.file, options.tasks)
        if options.output is None:
            print(text, end="")
        elif options.output.exists():
            raise UserError(f"{options.output} exists and is not overwritten: choose another file")
        else:
            options.output.write_text(text, encoding="utf-8")
            print(
                f"written: {options.output}; check it with: {command_of('check')} {options.output}"
            )
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
