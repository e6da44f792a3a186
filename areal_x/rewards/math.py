"""The reward for a final answer in mathematics, by math-verify: 1 if it equals the reference, in
whatever form."""

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
    answer may be in \boxed{}, between dollar signs or in a sentence; of several, the one in \boxed{}
    counts, else the last. math-verify's own time limits, which use signals, are off: the process
    that a reward runs in has a time limit already.

    Raises: ValueError for a reference that cannot be parsed, UserError if math-verify is not
    installed.
    """
    try:
        from math_verify import parse, verify
    except ImportError:
        raise UserError(
            "the reward math_answer needs math-verify: pip install 'areal-x[math]'"
        ) from None
    # It would warn that its time limits are off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    solution = "" if task.answer is None else str(task.answer)
    reference = solution.rpartition(GSM8K_MARK)[2].strip()
    gold = parse(rf"\boxed{{{reference}}}", parsing_timeout=None)
    if not gold:
        raise ValueError(
            f"the answer of task {task.id} is not a number or LaTeX expression: {reference!r}"
        )
    return float(verify(gold, parse(text, parsing_timeout=None), timeout_seconds=None))
