"""Questions that a command-line agent answers in one word.

    What is the capital of France?  →  Paris

The agents surround each question with ten thousand words and more: instructions, tools, the state of the
machine. The reward is 1 if the last word of the answer is right. There are few questions, because each episode is
a process that takes seconds to start.
"""

from __future__ import annotations

import gin

from areal_x import Task

CAPITALS = {"France": "Paris", "Japan": "Tokyo", "Italy": "Rome", "Peru": "Lima"}


@gin.configurable(module="coding_agents")
def problems() -> list[Task]:
    """Returns the questions. Training repeats them."""
    return [
        Task(country, f"What is the capital of {country}? Answer in one word.", capital)
        for country, capital in CAPITALS.items()
    ]


@gin.configurable(module="coding_agents")
def verify(task: Task, text: str) -> float:
    """Returns 1.0 if the last word is the capital, otherwise 0.0."""
    return float(text.split()[-1:] == [task.answer])
