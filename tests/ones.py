"""A reward by itself: the process of a reward imports no more than where it stands, half a second less than a whole run."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from areal_x.types import Task


def counts_ones(task: Task, text: str) -> tuple[float, dict[str, float]]:
    """Reward: the number of ones in the text, divided by 8."""
    return text.count("1") / 8, {"length": len(text)}
