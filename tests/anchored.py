"""A loss for tests of meshes: proximal policy and corrections, one weight a sequence, are of the step's own forward pass."""

from __future__ import annotations

from functools import partial

from areal_x.algorithms import corrections
from areal_x.algorithms.recipes import rloo

ANCHORED = rloo(corrections=partial(corrections.truncated, level="sequence")).step_loss(own_pass=True)
