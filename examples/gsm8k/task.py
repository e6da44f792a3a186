"""GSM8K (arXiv 2110.14168): word problems with numeric answers, in the model's chat template.

The reward is `areal_x.rewards.math.math_answer`: 1 if the final answer equals the solution's, which
follows "####".
"""

from __future__ import annotations

from collections.abc import Sequence

import gin

from areal_x import Record, Task, at_least, load_dataset

# the wording of Qwen's own evaluation
INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."


@gin.configurable
def gsm8k(path: str = "openai/gsm8k", split: str = "train", count: int = 0) -> Sequence[Task]:
    """Returns the problems of a split.

    Args:
        path: Hub name, or a directory with train.jsonl and test.jsonl, or one .jsonl file; each line
            is {"question", "answer"}.
        split: "train" (7473 problems) or "test" (1319).
        count: The first `count` problems; 0 means all.
    """
    at_least("gsm8k.count", count, 0)
    tasks = load_dataset(path, split, subset="main", to_task=to_task)
    return tasks[:count] if count else tasks


def to_task(record: Record, id: str) -> Task:
    """One user message: the question, then the instruction."""
    return Task(
        id, [{"role": "user", "content": f"{record['question']}\n{INSTRUCTION}"}], record["answer"]
    )
