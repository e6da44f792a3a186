"""Runs `python -m areal_x.convert`."""

import sys

from areal_x.convert import main

if __name__ == "__main__":
    sys.exit(main())
