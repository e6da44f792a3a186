"""The overlong penalty under its first address; it lives in areal_x.algorithms.shaping."""

from areal_x.algorithms.shaping import overlong_penalty

__all__ = ["overlong_penalty"]
