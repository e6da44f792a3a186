"""Shows where a run is and where its time goes, in a terminal, from the run's files alone.

python -m areal_x.top runs/NAME           # until the run ends, or Ctrl-C
python -m areal_x.top runs/NAME --once
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from areal_x.errors import UserError
from areal_x.lab.terminal import run_at, show
from areal_x.runtime.command import command_of, in_this_form


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 1 after one sentence about a mistake."""
    parser = argparse.ArgumentParser(
        prog=command_of("top"),
        description=in_this_form(str(__doc__), "top"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="a run's directory")
    parser.add_argument("--once", action="store_true", help="print it once")
    options = parser.parse_args(arguments)
    try:
        show(run_at(options.run), sys.stdout, options.once)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
