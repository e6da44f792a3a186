"""GSM8K from local files in the form of the real ones, and the real ones where they are there."""

from __future__ import annotations

import json
import string
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from areal_x.errors import UserError
from areal_x.testing.models import write_model, write_tokenizer
from examples.gsm8k.task import INSTRUCTION, gsm8k
from tests import forking
from tests.conftest import environment_with
from tests.experiments import BACKEND

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


def test_the_experiment_starts_rolls_out_scores_and_steps_with_a_tiny_model(files: str, tmp_path: Path) -> None:
    """The command of the README with another model, other files and smaller sizes; the reward is its own."""
    pytest.importorskip("math_verify")
    model = write_model(tmp_path / "model", vocab_size=len(string.printable) + 2)
    write_tokenizer(model, string.printable)
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\nassistant: {% endfor %}")
    bindings = {
        "model.path": str(model),
        "gsm8k.path": files,
        "train.backend": BACKEND,
        "train.engine": "embedded",
        "train.steps": 2,
        "train.groups_per_step": 2,
        "train.group_size": 2,
        "train.window": 1,
        "train.row_length": 256,
        "train.runs": str(tmp_path / "runs"),
        "train.name": "gsm8k",
        "sampling.max_tokens": 16,
        "embedded.slots": 8,
        "vllm.context": 0,
    }
    arguments = [part for name, value in bindings.items() for part in ("-b", f"{name} = {value!r}")]
    command = [sys.executable, "-m", "areal_x.train", "examples/gsm8k/grpo.gin", *arguments]
    root = Path(__file__).parents[2]
    done = forking.run(command, environment_with(1), root)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "runs" / "gsm8k" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[0]["accuracy"] == 0.0  # a random model solves nothing, and is judged so
    assert rows[2]["scored"] >= 8
    assert rows[2]["failed"] == rows[2]["timed_out"] == 0
    assert 0 < rows[2]["response_length"] <= 16
