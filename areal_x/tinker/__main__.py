"""Runs `python -m areal_x.tinker`."""

import sys

from areal_x.tinker import main

if __name__ == "__main__":
    sys.exit(main())
