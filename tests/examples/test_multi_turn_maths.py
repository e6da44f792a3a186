"""Several tries: the examples load, and a wrong first try of the tiny one is followed by the same problem."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from areal_x.agents.multi_turn import MultiTurn
from areal_x.types import Scored
from examples.arithmetic.model import END, encode, write_model
from examples.arithmetic.task import problems, verify
from examples.multi_turn_maths.task import asked_again
from examples.tiny.supervised import supervised_trajectory
from tests.examples.running import ROOT, check_file, conversed, gin_files, same_tokens, trained
from tests.thorough import thorough


@pytest.mark.parametrize("file", gin_files("multi_turn_maths"), ids=lambda file: file.stem)
def test_an_example_can_be_run(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    check_file(file)


@pytest.mark.parametrize("tries, reward", [(1, 1.0), (2, 0.5)])
def test_a_wrong_try_is_followed_by_the_same_problem_and_a_later_success_earns_half(
    tmp_path: Path, tries: int, reward: float
) -> None:
    write_model(tmp_path, seed=0)
    task = problems(1)[0]
    asked, end = encode(str(task.prompt)), np.array([END], np.int32)
    wrong, right = (np.concatenate([encode(text), end]) for text in (">1", f">{task.answer}"))
    parts = [(asked, False), (wrong, True)] * (tries - 1) + [(asked, False), (right, True)]
    workflow = MultiTurn(reward=verify, reward_workers=1, turns=2, feedback=asked_again, discount_turns=0.5)
    episode = conversed(workflow, tmp_path, task, supervised_trajectory(*parts))
    assert isinstance(episode.outcome, Scored)
    assert (episode.outcome.reward, episode.outcome.details["tries"]) == (reward, tries)
    same_tokens(episode, supervised_trajectory(*parts))


@thorough
def test_two_steps_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {
        "arithmetic__warm_start__steps": 2,
        "arithmetic__warm_start__backend": "torch",
        "arithmetic__held_out__count": 8,
    }
    rows = trained("multi_turn_maths/tiny.gin", tmp_path, monkeypatch, **settings)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[-1]["reward/tries"] == 2.0  # a model that was hardly taught is never right
    assert rows[-1]["scored"] >= 8
    assert (rows[-1]["failed"], rows[-1]["timed_out"]) == (0, 0)
