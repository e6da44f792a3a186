"""GSM8K from local files in the form of the real ones, and the real ones where they are there."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from areal_x.errors import UserError
from examples.gsm8k.task import INSTRUCTION, gsm8k

REAL = Path(__file__).parents[3] / "shared" / "data" / "gsm8k"


@pytest.fixture
def files(tmp_path: Path) -> str:
    records = [
        {"question": f"What is {n} + {n}?", "answer": f"{n} + {n} = <<{n}+{n}={2 * n}>>{2 * n}.\n#### {2 * n}"}
        for n in range(3)
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (tmp_path / "test.jsonl").write_text(json.dumps(records[0]) + "\n")
    return str(tmp_path)


def test_a_problem_is_one_user_message_that_ends_in_the_instruction(files: str) -> None:
    task = gsm8k(files)[1]
    assert task.prompt == [{"role": "user", "content": f"What is 1 + 1?\n{INSTRUCTION}"}]
    assert task.answer.endswith("#### 2")


def test_splits_and_counts(files: str) -> None:
    assert len(gsm8k(files)) == 3
    assert len(gsm8k(files, split="test")) == 1
    assert gsm8k(files, count=2) == gsm8k(files)[:2]
    with pytest.raises(UserError, match=r"gsm8k\.count"):
        gsm8k(files, count=-1)


@pytest.mark.skipif(not REAL.is_dir(), reason="the real files are not here")
def test_the_real_files_are_read_whole_and_every_solution_judges_itself_right() -> None:
    pytest.importorskip("math_verify")
    from areal_x.rewards.math import math_answer

    train, test = gsm8k(str(REAL)), gsm8k(str(REAL), split="test")
    assert (len(train), len(test)) == (7473, 1319)
    for task, other in pairwise(test[:201]):
        final = task.answer.rpartition("#### ")[2]
        assert math_answer(task, rf"So the answer is \boxed{{{final}}}.") == 1.0
        same = float(final.replace(",", "")) == float(other.answer.rpartition("#### ")[2].replace(",", ""))
        assert math_answer(other, f"The answer is {final}.") == float(same)
