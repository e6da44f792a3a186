"""python -m areal_x.testing.conformance [--backend NAME] [options of pytest]"""

from __future__ import annotations

import sys

import pytest

if __name__ == "__main__":
    package = "areal_x.testing.conformance"
    sys.exit(pytest.main(["-p", f"{package}.plugin", *sys.argv[1:], "--pyargs", package]))
