"""Tasks of reasoning-gym: determined by the seed, and scored by it."""

from __future__ import annotations

import asyncio
import sys

import pytest

from areal_x.errors import ConfigError, UserError
from areal_x.rewards.pool import RewardPool
from areal_x.tasks.reasoning import reasoning_gym, reasoning_gym_answer
from areal_x.types import Scored, Task


@pytest.fixture
def gym():
    return pytest.importorskip("reasoning_gym")


def test_tasks_are_messages_with_the_answer_and_depend_on_the_seed_alone(gym):
    tasks = reasoning_gym("leg_counting", 5, 3)
    assert tasks == reasoning_gym("leg_counting", 5, 3)
    assert tasks != reasoning_gym("leg_counting", 5, 4)
    entries = list(gym.create_dataset("leg_counting", size=5, seed=3))
    assert [task.prompt[-1] for task in tasks] == [{"role": "user", "content": entry["question"]} for entry in entries]
    assert [task.answer for task in tasks] == [entry["answer"] for entry in entries]
    assert [task.id for task in tasks] == [f"leg_counting/3/{n}" for n in range(5)]
    assert tasks[0].prompt[0]["role"] == "system"
    assert len(reasoning_gym("leg_counting", 1, instruction="")[0].prompt) == 1


@pytest.mark.parametrize("name", ["leg_counting", "basic_arithmetic", "word_sorting", "countdown"])
def test_its_own_answers_are_right_and_others_are_not(gym, name):
    for task in reasoning_gym(name, 5):
        assert reasoning_gym_answer(task, f"So it is <answer>{task.answer}</answer>.") == 1.0
        assert reasoning_gym_answer(task, f" {task.answer} ") == 1.0
        assert reasoning_gym_answer(task, "<answer>no idea</answer>") < 0.5


def test_settings_of_a_dataset_can_be_given(gym):
    (task,) = reasoning_gym("leg_counting", 1, settings={"min_animals": 2, "max_animals": 2})
    assert task.metadata["metadata"]["difficulty"]["num_animals"] == (2, 2)
    with pytest.raises(UserError, match="rejects the settings of 'leg_counting'"):
        reasoning_gym("leg_counting", 1, settings={"min_animals": -1})
    with pytest.raises(UserError, match="rejects the settings"):
        reasoning_gym("leg_counting", 1, settings={"no_such": 1})


def test_a_name_that_is_none_is_refused(gym):
    with pytest.raises(UserError, match=r"did you mean 'leg_counting'"):
        reasoning_gym("leg_countin")
    with pytest.raises(ConfigError, match=r"reasoning_gym\.size"):
        reasoning_gym("leg_counting", 0)


def test_it_judges_in_a_process_of_rewards(gym):
    (task,) = reasoning_gym("leg_counting", 1)

    async def judged():
        pool = RewardPool(reasoning_gym_answer, workers=1, timeout_seconds=120)
        try:
            return await pool.score(task, f"<answer>{task.answer}</answer>")
        finally:
            await pool.close()

    assert asyncio.run(judged()) == Scored(1.0)


def test_without_the_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(UserError, match=r"areal-x\[environments\]"):
        reasoning_gym("leg_counting")
    with pytest.raises(UserError, match=r"areal-x\[environments\]"):
        reasoning_gym_answer(Task("t", "p"), "")
