"""One file a recipe, each loadable; and the pairs that preferences are learnt from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from areal_x.algorithms import recipes
from areal_x.config.reader import load
from areal_x.config.types import check_early, check_experiment
from areal_x.types import Episode, Group, Scored, Task, Trajectory
from examples.arithmetic import preferences as module
from examples.arithmetic.model import END, encode, write_model
from examples.arithmetic.task import demonstrated, problems, verify

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "examples" / "arithmetic").glob("*.gin"))
RECIPES = recipes.__all__


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_an_example_can_be_run(file: Path) -> None:
    config = load(file, [])
    check_early(config)
    check_experiment(config)


def test_every_recipe_has_an_example_that_holds_what_is_its_own_and_no_more() -> None:
    assert len(RECIPES) >= 27
    for name in RECIPES:
        text = (ROOT / "examples" / "arithmetic" / f"{name}.gin").read_text()
        assert f"train.algorithm = @{name}()" in text
        assert "include 'examples/arithmetic/common.gin'" in text
        assert len(text.splitlines()) <= 25


def group_of(*answers: tuple[str, float]) -> Group:
    prompt = encode("7+8=")

    def episode(text: str, reward: float) -> Episode:
        tokens = np.append(encode(text), END)
        nothing = np.zeros(len(tokens))
        return Episode(Scored(reward), (Trajectory.from_completion(prompt, tokens, nothing, nothing, reward),))

    return Group(Task("7+8", "7+8=", "15"), 0, 0, tuple(episode(*answer) for answer in answers))


def test_a_pair_is_the_first_right_and_the_first_wrong_answer_as_they_were_sampled(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    write_model(tmp_path, seed=0)
    group = group_of(("7+8=15>5", 0.0), ("7+8=15>15", 1.0), ("7+8=1>", 0.0), ("7+8=14>15", 1.0))
    pair = module.pair_of(group, AutoTokenizer.from_pretrained(tmp_path))
    assert pair == ("7+8=", {"chosen": "7+8=15>15", "rejected": "7+8=15>5"})


def test_pairs_are_sampled_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    write_model(tmp_path / "model", seed=0)
    monkeypatch.setattr(module, "warm_start", lambda: str(tmp_path / "model"))
    calls = []

    def sample(*given: object) -> list[Group]:
        calls.append(given)
        return [group_of(("7+8=15>15", 1.0), ("7+8=15>5", 0.0)), group_of(("7+8=1>5", 0.0), ("7+8=1>5", 0.0))]

    monkeypatch.setattr(module, "sample", sample)
    first = module.preferences(problems(2), attempts=2)
    assert module.preferences(problems(2), attempts=2) == first
    assert [task.answer for task in first] == [{"chosen": "7+8=15>15", "rejected": "7+8=15>5"}]  # the other group is all wrong
    assert len(calls) == 1
    module.preferences(problems(2), attempts=3)
    assert len(calls) == 2


def test_all_answers_to_all_problems_are_sampled(tmp_path: Path) -> None:
    pytest.importorskip("areal_x_jax")
    write_model(tmp_path, seed=0)
    tasks = problems(5)
    groups = module.sample(str(tmp_path), tasks, 3, 0, "jax")
    assert {group.task.id for group in groups} == {task.id for task in tasks}
    assert [len(group.scored) for group in groups] == [3] * 5


def test_what_is_demonstrated_is_right_unless_carries_are_forgotten() -> None:
    asked = problems(50, seed=3)
    taught = demonstrated(50, seed=3)
    assert [verify(task, answer.answer) for task, answer in zip(asked, taught, strict=True)] == [1.0] * 50
    sloppy = demonstrated(50, seed=3, forgetting=1.0)
    assert 0 < np.mean([verify(task, answer.answer) for task, answer in zip(asked, sloppy, strict=True)]) < 0.6
