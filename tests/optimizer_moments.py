"""AdamW's state as a portable checkpoint stores it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from areal_x.hf.model_dir import write_optimizer_state

FIRST, SECOND = "exp_avg.", "exp_avg_sq."  # prefixes of AdamW's two moments of a tensor


def write_adamw_state(
    directory: Path | None, moments: Iterable[tuple[str, np.ndarray, np.ndarray]], state: Mapping[str, Any]
) -> None:
    """Writes AdamW's moments (name, first, second), which any backend continues, and trainer.json."""
    named = (pair for name, first, second in moments for pair in ((FIRST + name, first), (SECOND + name, second)))
    write_optimizer_state(directory, named, state)
