"""Filters: functions `(group) → bool` that choose which groups are trained on."""

from __future__ import annotations

import gin

from areal_x.types import Group


@gin.configurable(module="filters")
def varied(group: Group) -> bool:
    """True if the rewards of a group differ: equal rewards give no training signal. Source: DAPO,
    arXiv 2503.14476, eq. 11."""
    return len(set(group.rewards)) > 1
