"""Countdown problems: solvable, apart from those held out, and a tutor who is right where he needs no product."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from random import Random

import numpy as np
import pytest

from areal_x.errors import ConfigError
from areal_x.rewards.countdown import countdown
from areal_x.types import Task
from examples.countdown import warm_start as module
from examples.countdown.task import Problem, drawn_problems, problems
from examples.countdown.warm_start import HIGHEST, LARGEST, NUMBERS, PIECES, answer, batches
from tests.examples.running import ROOT, check_file, gin_files, trained


@pytest.mark.parametrize("file", gin_files("countdown"), ids=lambda file: file.stem)
def test_an_example_can_be_run(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    check_file(file)


def judge(problem: Problem, text: str) -> float:
    return countdown(Task("", "", {"numbers": problem.numbers, "target": problem.target}), text)


@pytest.mark.parametrize("numbers, largest, highest", [((3,), 9, 99), ((3, 4), 99, 999), ((2, 6), 20, 100)])
def test_the_expression_of_a_problem_solves_it(numbers: tuple[int, ...], largest: int, highest: int) -> None:
    for problem in islice(drawn_problems(Random(0), numbers, largest, highest), 2000):
        assert judge(problem, problem.expression) == 1.0, problem
        assert len(problem.numbers) in numbers
        assert 1 <= min(problem.numbers) <= max(problem.numbers) <= largest
        assert 1 <= problem.target <= highest
        assert problem.target not in problem.numbers


def test_problems_are_fixed_by_the_seed_and_none_is_held_out() -> None:
    train, test = problems(), problems("test")
    assert (len(train), len(test)) == (20_000, 200)
    assert problems(seed=0) == train != problems(seed=1)
    assert problems("test", seed=1) == test
    assert not {task.id for task in train} & {task.id for task in test}
    assert len({task.id for task in test}) == 200


def test_a_problem_in_words_and_short() -> None:
    words, short = problems("test")[0], problems("test", wording="short")[0]
    assert words.answer == short.answer
    numbers, target = words.answer["numbers"], words.answer["target"]
    assert short.prompt == f"{','.join(map(str, numbers))}={target}:"
    assert f"numbers {', '.join(map(str, numbers))}, write" in words.prompt[0]["content"]
    assert f"equals {target}." in words.prompt[0]["content"]


def test_what_cannot_work_is_refused() -> None:
    for name, value in {"split": "all", "wording": "long", "numbers": (1, 3), "largest": 8, "highest": 10}.items():
        with pytest.raises(ConfigError, match=rf"countdown\.problems\.{name}"):
            problems(**{name: value})
    with pytest.raises(ConfigError, match=r"countdown\.warm_start\.steps"):
        module.warm_start(steps=1)


def test_the_tutor_is_right_where_sums_and_differences_do_and_seldom_elsewhere() -> None:
    random = Random(0)
    drawn = list(islice(drawn_problems(random, NUMBERS, LARGEST, HIGHEST), 2000))
    right = {problem: judge(problem, answer(problem, random)) for problem in drawn}
    sums = [value for problem, value in right.items() if not set("*/") & set(problem.expression)]
    assert 0.2 < len(sums) / len(right) < 0.6
    assert np.mean(sums) == 1.0
    assert sum(right.values()) - sum(sums) < 0.15 * (len(right) - len(sums))


def test_batches_are_of_demonstrations_whose_answers_are_learnt() -> None:
    colon = PIECES.index(":") + 2
    for batch in batches(3, seed=0):
        assert batch.shape == (25, module.ROW_LENGTH)
        assert np.mean(batch.segment_ids > 0) > 0.9
        for row, segments, mask in zip(batch.tokens, batch.segment_ids, batch.mask, strict=True):
            for segment in range(1, segments.max() + 1):
                tokens, learnt = row[segments == segment].tolist(), mask[segments == segment].tolist()
                context = tokens.index(colon) + 1
                assert learnt == [False] * context + [True] * (len(tokens) - context)


def test_two_steps_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"countdown__warm_start__steps": 2, "countdown__warm_start__backend": "torch"}
    rows = trained("countdown/tiny.gin", tmp_path, monkeypatch, **settings)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[-1]["scored"] >= 8
    assert (rows[-1]["failed"], rows[-1]["timed_out"]) == (0, 0)
