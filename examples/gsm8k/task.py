"""GSM8K (arXiv 2110.14168): word problems whose solutions end in a number, asked in the model's
chat template.

The reward is `areal_x.rewards.math.math_answer`: 1 where the final answer equals that of the
solution, after "####".
"""

from __future__ import annotations

from collections.abc import Sequence

import gin

from areal_x.errors import at_least
from areal_x.tasks.datasets import Record, load_dataset
from areal_x.types import Task

# as Qwen's own evaluation words it
INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."


@gin.configurable
def gsm8k(path: str = "openai/gsm8k", split: str = "train", count: int = 0) -> Sequence[Task]:
    """The problems of a split.

    path: the hub's name, or a directory with train.jsonl and test.jsonl, or one .jsonl file, of
    {"question", "answer"}. split: "train" (7473 problems) or "test" (1319). count: how many of
    them, from the first; 0 takes all.
    """
    at_least("gsm8k.count", count, 0)
    tasks = load_dataset(path, split, subset="main", to_task=to_task)
    return tasks[:count] if count else tasks


def to_task(record: Record, id: str) -> Task:
    """One user message: the question, then the instruction."""
    return Task(
        id, [{"role": "user", "content": f"{record['question']}\n{INSTRUCTION}"}], record["answer"]
    )
