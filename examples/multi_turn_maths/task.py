"""Feedback after a wrong attempt, for a model whose vocabulary contains only its problems."""

from __future__ import annotations

import gin

from areal_x import Task


@gin.configurable(module="multi_turn_maths")
def asked_again(task: Task, text: str, reward: float) -> str:
    """Repeats the problem: the addition model has no tokens for words."""
    return str(task.prompt)
