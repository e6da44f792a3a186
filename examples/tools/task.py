"""Products of a three-digit and a two-digit number, which the model cannot compute but Python can.

    417*86=  →  <tool_call>{"name": "python", "arguments": {"code": "417*86"}}</tool_call>  →  35862  →  35862

The reward is 1 if the last answer is exactly the product, whatever came before it.
"""

from __future__ import annotations

from collections.abc import Iterator

import gin
import numpy as np

from areal_x import Task, within

HELD_OUT = 200


@gin.configurable(module="tools")
def problems(count: int = 20_000, seed: int = 0) -> list[Task]:
    """Returns the training problems, none of which is a held-out pair.

    Args:
        count: Number of problems.
        seed: Determines the problems.
    """
    unseen = set(_held_out_pairs())
    drawn = (pair for pair in _pairs(np.random.default_rng([1, seed])) if pair not in unseen)
    return [_task(*next(drawn)) for _ in range(count)]


@gin.configurable(module="tools")
def held_out(count: int = HELD_OUT) -> list[Task]:
    """Returns the held-out problems, the same for every seed of a run.

    Args:
        count: The first `count` of 200.
    """
    within("tools.held_out.count", count, 1, HELD_OUT)
    return [_task(*pair) for pair in _held_out_pairs()[:count]]


@gin.configurable(module="tools")
def verify(task: Task, text: str) -> float:
    """Returns 1.0 if the answer is exactly the product, otherwise 0.0."""
    return float(text == task.answer)


def _held_out_pairs() -> list[tuple[int, int]]:
    pairs = _pairs(np.random.default_rng(0))
    different: dict[tuple[int, int], None] = {}
    while len(different) < HELD_OUT:
        different[next(pairs)] = None
    return list(different)


def _pairs(rng: np.random.Generator) -> Iterator[tuple[int, int]]:
    while True:
        yield from map(tuple, rng.integers((100, 10), (1000, 100), (1024, 2)).tolist())


def _task(a: int, b: int) -> Task:
    return Task(f"{a}*{b}", [{"role": "user", "content": f"{a}*{b}="}], str(a * b))
