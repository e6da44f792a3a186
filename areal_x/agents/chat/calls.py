"""The completions that an agent requested: the record from which trajectories are made."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32

from areal_x.protocols.engine import Completion
from areal_x.types import Images


@dataclass(frozen=True)
class Call:
    """One completion that an agent requested.

    id: unique in its episode; a reward can be given to it later. prompt: the P tokens that the
    engine was given. completion: what the engine generated. reward: the call's own, if it was given
    one. images: those that tokens of the prompt stand for.
    """

    id: str
    prompt: Int32[np.ndarray, " P"]
    completion: Completion
    reward: float | None = None
    images: Images | None = None
