"""Digests by which a resumed run recognises the tasks that it was started with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

# Most tasks that a digest reads: a long dataset need not be in memory.
MAX_DIGESTED_TASKS = 10_000


def dataset_digest(dataset: Sequence[Any]) -> str:
    """Returns the SHA-256 of tasks (areal_x.types.Task) in their order, the same in every process.
    Only MAX_DIGESTED_TASKS of a longer dataset are read, at equal distances."""
    digest = hashlib.sha256()
    for index in (
        np.unique(np.linspace(0, len(dataset) - 1, MAX_DIGESTED_TASKS).astype(int))
        if len(dataset)
        else ()
    ):
        task = dataset[int(index)]
        about = [getattr(task, name, None) for name in ("id", "prompt", "answer")]
        # Values that JSON cannot express may print differently in each process: only their type
        # counts.
        digest.update(
            json.dumps(about, default=lambda x: type(x).__qualname__, skipkeys=True).encode()
        )
    return digest.hexdigest()
