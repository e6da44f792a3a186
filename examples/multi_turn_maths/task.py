"""What is said after a wrong try where the model knows nothing but its problems."""

from __future__ import annotations

import gin

from areal_x.types import Task


@gin.configurable(module="multi_turn_maths")
def asked_again(task: Task, text: str, reward: float) -> str:
    """The problem once more: the addition model has no tokens for words."""
    return str(task.prompt)
