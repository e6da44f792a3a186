"""Column addition: the model writes its steps, then the result.

    730+8594=  →  0+4=4,3+9=12,7+5+1=13,0+8+1=9>9324

Columns go from right to left, the shorter number padded with 0, "+1" for a carry; the result
follows ">". The numbers of digits of the operands, 1 to 4, are sampled uniformly and independently.
The reward is 1 for the exact result, whatever the steps were. The warm start's demonstrations drop
most carries, so that there is something left for reinforcement learning to fix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import gin
import numpy as np

from areal_x import Task, within

ALPHABET = "0123456789+=,>"
DIGITS = 4
HELD_OUT = 500
# tokens of a problem and its answer, including the end token
LONGEST = len("9999+9999=" + "9+9=18,9+9+1=19,9+9+1=19,9+9+1=19>19998") + 1


@gin.configurable(module="arithmetic")
def problems(count: int = 20_000, seed: int = 0) -> list[Task]:
    """Returns the training problems, none of which is a held-out pair in either order.

    Args:
        count: Number of problems.
        seed: Determines the problems.
    """
    unseen = {frozenset(pair) for pair in _held_out_pairs()}
    drawn = (
        pair for pair in _pairs(np.random.default_rng([1, seed])) if frozenset(pair) not in unseen
    )
    return [_task(*next(drawn)) for _ in range(count)]


@gin.configurable(module="arithmetic")
def held_out(count: int = HELD_OUT) -> list[Task]:
    """Returns the held-out problems, the same for every seed of a run.

    Both operands are at least 10: there are too few smaller ones to keep some out of the training
    data.

    Args:
        count: The first `count` of 500.
    """
    within("arithmetic.held_out.count", count, 1, HELD_OUT)
    return [_task(*pair) for pair in _held_out_pairs()[:count]]


@gin.configurable(module="arithmetic")
def demonstrated(count: int = 20_000, seed: int = 0, forgetting: float = 0.0) -> list[Task]:
    """Returns problems with worked answers, for supervised fine-tuning.

    Args:
        count: Number of problems.
        seed: Determines the problems and the forgotten carries.
        forgetting: Probability that a demonstration drops a carry.
    """
    tasks = problems(count, seed)
    answers = demonstrations(tasks, forgetting, seed)
    return [replace(task, answer=answer) for task, answer in zip(tasks, answers, strict=True)]


@gin.configurable(module="arithmetic")
def verify(task: Task, text: str) -> float:
    """Returns 1.0 if the text after the first ">" is exactly the sum, otherwise 0.0. The steps before
    it do not count."""
    _, _, result = text.partition(">")
    return float(result == task.answer)


def demonstration(task: Task, forget: Callable[[], bool] = lambda: False) -> str:
    """A worked answer that drops the carry into the next column whenever `forget()` returns
    True."""
    a, b = (number[::-1] for number in task.prompt.rstrip("=").split("+"))
    width = max(len(a), len(b))
    steps, result, carry = [], "", 0
    for x, y in zip(a.ljust(width, "0"), b.ljust(width, "0"), strict=True):
        column = int(x) + int(y) + carry
        steps.append(f"{x}+{y}{'+1' if carry else ''}={column}")
        last = len(steps) == width
        result = (str(column) if last else str(column % 10)) + result
        carry = int(column >= 10 and not forget())
    return ",".join(steps) + ">" + result


def demonstrations(tasks: Sequence[Task], forgetting: float, seed: int) -> list[str]:
    """One demonstration per task; each carry is dropped with probability `forgetting`."""
    rng = np.random.default_rng([2, seed])
    return [demonstration(task, lambda: rng.random() < forgetting) for task in tasks]


def _held_out_pairs() -> list[tuple[int, int]]:
    """500 pairs that stay distinct when operands are swapped."""
    pairs: dict[frozenset[int], tuple[int, int]] = {}
    for pair in _pairs(np.random.default_rng(0)):
        if min(pair) >= 10:
            pairs.setdefault(frozenset(pair), pair)
        if len(pairs) == HELD_OUT:
            break
    return list(pairs.values())


def _pairs(rng: np.random.Generator) -> Iterator[tuple[int, int]]:
    while True:
        digits = rng.integers(1, DIGITS + 1, (1024, 2))
        low = np.where(digits == 1, 0, 10 ** (digits - 1))
        yield from map(tuple, rng.integers(low, 10**digits).tolist())


def _task(a: int, b: int) -> Task:
    return Task(f"{a}+{b}", f"{a}+{b}=", str(a + b))
