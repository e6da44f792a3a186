"""Countdown: an expression that makes the target of the given numbers, each used at most once."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Mapping
from fractions import Fraction

import gin

from areal_x.types import Task

OPENED, CLOSED = "<answer>", "</answer>"
LONGEST = 500  # characters of an expression that is looked at
SPELLINGS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-"})


@gin.configurable
def countdown(task: Task, text: str, partial: float = 0.0) -> float:
    """1.0 if the expression in `text` is made of the numbers, each used at most once, and gives the
    target.

    task.answer: {"numbers": integers, "target": integer}. The expression is what stands in the last
    <answer>…</answer>, or where there is none the last line that is not empty, up to a "=". Allowed
    are integers, + - * / and parentheses; division is exact. partial: the reward of one that is
    allowed and gives another number. Raises: ValueError for a task without numbers or target.
    """
    numbers, target = _asked(task)
    try:
        tree = ast.parse(_expression(text), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return 0.0
    used = Counter(
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and type(node.value) is int
    )
    if not used <= Counter(numbers):
        return 0.0
    try:
        return 1.0 if _value(tree) == target else partial
    except (ValueError, ZeroDivisionError):
        return 0.0


def _asked(task: Task) -> tuple[list[int], int]:
    answer = task.answer
    if not isinstance(answer, Mapping) or not {"numbers", "target"} <= set(answer):
        raise ValueError(
            f'the answer of task {task.id} must be {{"numbers": …, "target": …}}, not {answer!r}'
        )
    return [int(number) for number in answer["numbers"]], int(answer["target"])


def _expression(text: str) -> str:
    lines = [line for line in _answer(text).splitlines() if line.strip()]
    expression = lines[-1].partition("=")[0].translate(SPELLINGS).strip() if lines else ""
    return expression if len(expression) <= LONGEST else ""


def _answer(text: str) -> str:
    """What the last pair of marks encloses, or the whole where there is none. In one pass:
    `<answer>(.*?)</answer>` would look at the rest of the text again for each mark that is never
    closed."""
    found, at = text, 0
    while (start := text.find(OPENED, at)) >= 0 and (end := text.find(CLOSED, start)) >= 0:
        found, at = text[start + len(OPENED) : end], end
    return found


def _value(tree: ast.expr) -> Fraction:
    """Raises ValueError for what is not allowed, ZeroDivisionError."""
    match tree:
        case ast.Constant(value=int(number)) if type(number) is int:
            return Fraction(number)
        case ast.BinOp(left, ast.Add(), right):
            return _value(left) + _value(right)
        case ast.BinOp(left, ast.Sub(), right):
            return _value(left) - _value(right)
        case ast.BinOp(left, ast.Mult(), right):
            return _value(left) * _value(right)
        case ast.BinOp(left, ast.Div(), right):
            return _value(left) / _value(right)
        case _:
            raise ValueError(f"{type(tree).__name__} is not allowed")
