"""Documentation that is made from the code says what the code says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_page_of_configurables_is_what_the_code_says():
    subprocess.run([sys.executable, "docs/generate.py", "--check"], cwd=ROOT, check=True)
