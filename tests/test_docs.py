"""Documentation that is made from the code says what the code says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_page_of_configurables_is_what_the_code_says():
    subprocess.run([sys.executable, "docs/generate.py", "--check"], cwd=ROOT, check=True)


def test_the_loss_of_the_guide_is_code_that_runs():
    example = re.search(r"```python\n(.*?)```", (ROOT / "docs" / "extending.md").read_text(), re.DOTALL)[1]
    use = (
        "import sys; sys.path.insert(0, '.')\n"
        "import numpy as np\n"
        "from areal_x.types import Policy\n"
        "from tests.algorithms.test_losses import make\n"
        "theta, batch = make()\n"
        "batch = batch.replace(advantages=np.where(batch.mask, batch.advantages, np.nan))\n"
        "terms, metrics = algorithm.loss(Policy(logp=theta), batch)\n"
        "assert np.isfinite(terms).all() and (terms[~batch.mask] == 0).all() and (terms[batch.mask] != 0).any()\n"
    )
    subprocess.run([sys.executable, "-c", example + use], cwd=ROOT, check=True)
