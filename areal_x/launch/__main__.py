"""`python -m areal_x.launch`."""

import sys

from areal_x.launch import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
