"""Runs `python -m areal_x.lab`."""

import sys

from areal_x.lab import main

if __name__ == "__main__":
    sys.exit(main())
