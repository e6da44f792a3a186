"""Writes what is known of a run to one HTML file, to send to somebody: where it is and where its time
goes, curves, failures, the slowest, best and worst trajectories, and all settings.

    python -m areal_x.report runs/NAME              # writes NAME.html
    python -m areal_x.report runs/NAME FILE.html

The file has no script and makes no request. It holds texts of the run's trajectories and the paths
that its settings name.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from areal_x.errors import UserError
from areal_x.lab.report import write_report
from areal_x.lab.terminal import run_at
from areal_x.lab.vocabulary import tokenizer_file
from areal_x.runtime.command import command_of, in_this_form


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 1 after one sentence about a mistake."""
    parser = argparse.ArgumentParser(
        prog=command_of("report"),
        description=in_this_form(str(__doc__), "report"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="a run's directory")
    parser.add_argument("file", metavar="FILE", nargs="?", type=Path, help="default: NAME.html")
    parser.add_argument(
        "--tokenizer",
        type=Path,
        help="a folder with tokenizer.json, for a run whose own is not on this machine",
    )
    options = parser.parse_args(arguments)
    try:
        run = run_at(options.run)
        file = options.file or Path(f"{run.path.resolve().name}.html")
        print(f"wrote {write_report(run, file, tokenizer_file(options.tokenizer))}")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
