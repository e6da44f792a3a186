"""What an agent asked the policy for: the record from which trajectories are made."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32

from areal_x.protocols.engine import Completion


@dataclass(frozen=True)
class Call:
    """One completion that an agent asked for.

    id: by which a reward may be given to it later, unique in its episode. prompt: the tokens that
    the engine was given, P of them. completion: what it generated. reward: the call's own, where it
    was given one.
    """

    id: str
    prompt: Int32[np.ndarray, " P"]
    completion: Completion
    reward: float | None = None
