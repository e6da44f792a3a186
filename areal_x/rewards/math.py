"""The judgement of a final answer in mathematics, by math-verify: 1 where it equals the reference,
whatever its form."""

from __future__ import annotations

import logging

import gin

from areal_x.errors import UserError
from areal_x.types import Task

GSM8K_MARK = "####"  # before the final answer in GSM8K's solutions


@gin.configurable
def math_answer(task: Task, text: str) -> float:
    r"""1.0 if the final answer of `text` equals `task.answer`, else 0.0.

    The reference is a number or LaTeX expression, or a GSM8K solution that ends in "#### 42". The
    answer may stand in \boxed{}, between dollar signs or in the sentence; where there are several,
    \boxed{} wins and then the last. math-verify's own time limits are signals; the process that a
    reward runs in has a limit already, so they are turned off. Raises: ValueError for a reference
    that cannot be read, UserError where math-verify is not installed.
    """
    try:
        from math_verify import parse, verify
    except ImportError:
        raise UserError(
            "the reward math_answer needs math-verify: pip install 'areal-x[math]'"
        ) from None
    # it warns that its time limits are off
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    solution = "" if task.answer is None else str(task.answer)
    reference = solution.rpartition(GSM8K_MARK)[2].strip()
    gold = parse(rf"\boxed{{{reference}}}", parsing_timeout=None)
    if not gold:
        raise ValueError(
            f"the answer of task {task.id} is no number or LaTeX expression: {reference!r}"
        )
    return float(verify(gold, parse(text, parsing_timeout=None), timeout_seconds=None))
