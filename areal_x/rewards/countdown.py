"""Countdown: reach the target with an arithmetic expression of the given numbers, each used at most
once."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Mapping
from fractions import Fraction

import gin

from areal_x.tasks.answer_tags import tagged_answer
from areal_x.types import Task

MAX_CHARACTERS = 500  # a longer expression is not evaluated
SPELLINGS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-"})


@gin.configurable
def countdown(task: Task, text: str, partial: float = 0.0) -> float:
    """1.0 if the expression in `text` uses only the given numbers, each at most once, and equals
    the target.

    task.answer is {"numbers": integers, "target": integer}. The expression is the text in the last
    <answer>…</answer>, or without one the last non-empty line, up to a "=". Integers, + - * / and
    parentheses are allowed; division is exact.

    Args:
        partial: Reward of a valid expression that does not equal the target.

    Raises: ValueError for a task without numbers or target.
    """
    numbers, target = _numbers_and_target(task)
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


def _numbers_and_target(task: Task) -> tuple[list[int], int]:
    answer = task.answer
    if not isinstance(answer, Mapping) or not {"numbers", "target"} <= set(answer):
        raise ValueError(
            f'the answer of task {task.id} must be {{"numbers": …, "target": …}}, not {answer!r}'
        )
    return [int(number) for number in answer["numbers"]], int(answer["target"])


def _expression(text: str) -> str:
    lines = [line for line in tagged_answer(text).splitlines() if line.strip()]
    expression = lines[-1].partition("=")[0].translate(SPELLINGS).strip() if lines else ""
    return expression if len(expression) <= MAX_CHARACTERS else ""


def _value(tree: ast.expr) -> Fraction:
    """The exact value of an expression. Raises: ValueError for syntax that is not allowed,
    ZeroDivisionError."""
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
