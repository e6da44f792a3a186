"""The model acts in an environment: observations are messages, replies are actions, and each turn gets its own reward."""

from __future__ import annotations

import asyncio
import json
import random
import re
import shutil
import string
import sys
import threading
import types
from pathlib import Path
from typing import ClassVar

import gin
import numpy as np
import pytest

from areal_x.agents.chat.credit import Credit
from areal_x.agents.environment import Environment, environment_tasks
from areal_x.errors import ConfigError, UserError
from areal_x.protocols.engine import PromptTooLong, SamplingParams
from areal_x.types import Failed, Scored, Task
from tests.agents.chat.speaking import Says, tokenizer_of
from tests.experiments import tiny_experiment

END = "<|im_end|>"
TASK = Task("t", "", metadata={"seed": 12})


class Adds:
    """Adds the numbers in its actions; ends above 10, and each step's reward is the number it added. Remembers its threads."""

    made: ClassVar[list] = []

    def __init__(self, bonus=0):
        self.bonus, self.threads, self.closed = bonus, {threading.get_ident()}, threading.Event()
        Adds.made.append(self)

    def reset(self, seed=None, options=None):
        self.threads.add(threading.get_ident())
        self.total = 0
        return f"start {seed} {options}", {}

    def step(self, action):
        self.threads.add(threading.get_ident())
        self.total += int(action)
        return {"total": self.total}, np.float32(int(action) + self.bonus), self.total > 10, False, {}

    def close(self):
        self.threads.add(threading.get_ident())
        self.closed.set()


@pytest.fixture(autouse=True)
def fresh():
    Adds.made = []


def play(workflow, *replies, task=TASK, **how):
    tokenizer = tokenizer_of("qwen25")
    engine = Says(*(tokenizer.encode(reply, add_special_tokens=False) for reply in replies), **how)

    async def once():
        ready = workflow.setup(tokenizer)
        try:
            return await ready.run(task, engine)
        finally:
            await ready.close()

    episode = asyncio.run(once())
    return episode, [tokenizer.decode(prompt.tolist()) for prompt in engine.prompts]


def said_by_user(prompt):
    return [part.split(END)[0] for part in prompt.split("<|im_start|>user\n")[1:]]


def test_observations_are_messages_replies_are_actions_and_rewards_are_summed():
    episode, prompts = play(Environment(Adds), f"5{END}", f"2{END}", f"7{END}", f"never{END}")
    assert said_by_user(prompts[-1]) == ["start 12 None", '{"total": 5}', '{"total": 7}']
    counts = {"first": 1, "continued": 2, "rewritten": 0, "forked": 0}
    assert episode.outcome == Scored(14.0, {"turns": 3, "refused_actions": 0, "ended": 1.0, "had_room": 1.0, **counts})
    (trajectory,) = episode.trajectories
    assert trajectory.reward == 14.0
    assert tokenizer_of("qwen25").decode(trajectory.tokens[trajectory.mask]) == f"5{END}2{END}7{END}"


def test_the_reward_of_a_step_is_earned_where_the_turn_that_took_it_ends():
    episode, _ = play(Environment(Adds, credit=Credit("given")), f"5{END}", f"2{END}", f"7{END}")
    (trajectory,) = episode.trajectories
    earned = trajectory.token_rewards.astype(np.float64)
    earned[np.flatnonzero(trajectory.mask)[-1]] += trajectory.reward  # as the batch adds it
    ends = np.flatnonzero(trajectory.tokens == tokenizer_of("qwen25").convert_tokens_to_ids(END))
    assert [earned[end] for end in ends if trajectory.mask[end]] == [5.0, 2.0, 7.0]
    assert np.isclose(earned.sum(), 14.0)


def test_an_environment_lives_in_one_thread_of_its_own_and_is_closed():
    play(Environment(Adds), f"20{END}")
    (world,) = Adds.made
    assert world.closed.wait(60)
    assert len(world.threads) == 1
    assert threading.get_ident() not in world.threads


def test_a_step_that_blocks_does_not_stop_the_loop():
    release = threading.Event()

    class Waits(Adds):
        def step(self, action):
            assert release.wait(60)
            return super().step(action)

    async def both():
        tokenizer = tokenizer_of("qwen25")
        ready = Environment(Waits).setup(tokenizer)
        playing = asyncio.create_task(ready.run(TASK, Says(tokenizer.encode(f"20{END}", add_special_tokens=False))))
        while not Adds.made:
            await asyncio.sleep(0)
        release.set()
        return await playing

    assert asyncio.run(both()).outcome.reward == 20.0


def test_turns_are_limited():
    episode, prompts = play(Environment(Adds, turns=2), f"1{END}", f"1{END}", f"1{END}")
    assert len(prompts) == 2
    assert (episode.outcome.reward, episode.outcome.details["turns"], episode.outcome.details["ended"]) == (2.0, 2, 0.0)


def test_an_action_that_cannot_be_read_is_told_and_takes_a_turn():
    def number(text):
        if not text.strip().isdigit():
            raise ValueError("Say a number.")
        return int(text)

    episode, prompts = play(Environment(Adds, read_action=number), f"five{END}", f"11{END}")
    assert said_by_user(prompts[-1])[-1] == "Say a number."
    assert (episode.outcome.reward, episode.outcome.details["refused_actions"]) == (11.0, 1.0)


def test_without_room_for_another_reply_the_episode_ends_as_it_is():
    episode, prompts = play(Environment(Adds, sampling=SamplingParams(max_tokens=1)), *[f"1{END}"] * 9, context=80)
    assert 1 <= len(prompts) < 9
    assert episode.outcome.reward == len(prompts)
    assert (episode.outcome.details["had_room"], episode.outcome.details["ended"]) == (0.0, 0.0)
    with pytest.raises(PromptTooLong):
        play(Environment(Adds), f"1{END}", context=5)


def test_an_aborted_reply_fails_the_episode():
    assert play(Environment(Adds), f"1{END}", finish_reason="abort")[0] == Failed("the engine aborted the request")


def test_an_environment_that_raises_fails_the_episode_and_is_closed():
    with pytest.raises(ValueError, match="invalid literal"):
        play(Environment(Adds), f"x{END}")
    assert Adds.made[0].closed.wait(60)


@pytest.mark.parametrize(
    ("prompt", "first"),
    [
        ("", "<|im_start|>user\nstart 12 None<"),
        ("Play.", "<|im_start|>user\nPlay.\n\nstart 12 None<"),
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "b<|im_end|>\n<|im_start|>user\nstart 12"),
    ],
)
def test_the_tasks_prompt_comes_before_the_first_observation(prompt, first):
    _, prompts = play(Environment(Adds), f"20{END}", task=Task("t", prompt, metadata={"seed": 12}))
    assert first in prompts[0]


def test_instructions_and_options_arrive():
    workflow = Environment(Adds, options={"bonus": 100}, instructions="Be brief.")
    task = Task("t", "", metadata={"seed": 1, "options": {"level": 2}, "other": 3})
    episode, prompts = play(workflow, f"20{END}", task=task)
    assert "<|im_start|>system\nBe brief.<|im_end|>" in prompts[0]
    assert said_by_user(prompts[0]) == ["start 1 {'level': 2}"]
    assert episode.outcome.reward == 120.0


def test_greedy_changes_the_temperature_alone():
    ready = Environment(Adds).setup(tokenizer_of("qwen25"))
    assert ready.greedy().sampling.temperature == 0.0
    assert ready.greedy().sampling.stop_token_ids == ready.sampling.stop_token_ids != ()


def test_tasks_are_seeds():
    tasks = environment_tasks(3, 7, "Play.")
    assert [(task.id, task.prompt, task.metadata) for task in tasks] == [(f"seed/{n}", "Play.", {"seed": n}) for n in (7, 8, 9)]
    with pytest.raises(ConfigError, match=r"environment_tasks\.size"):
        environment_tasks(0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"make": 3}, "environment.make = 3"), ({"make": ""}, "make = ''"), ({"make": Adds, "read_action": 3}, "read_action = 3")],
)
def test_settings_that_cannot_work_are_refused(settings, words):
    with pytest.raises(UserError, match=words):
        Environment(**settings)
    with pytest.raises(ConfigError, match=r"environment\.turns"):
        Environment(Adds, turns=0)


def test_gin_makes_it_with_a_function_and_the_runs_credit():
    gin.external_configurable(Adds, name="adds_for_the_test", module="tests")
    try:
        with gin.unlock_config():
            gin.parse_config("environment.make = @tests.adds_for_the_test\ncredit.how = 'given'\nenvironment.turns = 1")
        episode, _ = play(gin.config.ConfigurableReference("environment", True).scoped_configurable_fn(), f"5{END}", f"5{END}")
        assert episode.outcome.reward == 5.0
        assert episode.trajectories[0].token_rewards is not None
    finally:
        gin.clear_config()


def test_an_environment_of_gymnasium_is_made_by_its_name():
    gymnasium = pytest.importorskip("gymnasium")
    from gymnasium import spaces

    class Echo(gymnasium.Env):
        observation_space = action_space = spaces.Text(100, charset=string.ascii_lowercase + string.digits + " ")

        def __init__(self, word="w"):
            self.word = word

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return f"{self.word} {self.np_random.integers(1000)}", {}

        def step(self, action):
            return f"heard {action}", float(len(action)), action == "end", False, {}

    gymnasium.register("areal_x_test/Echo-v0", entry_point=Echo)
    try:
        workflow = Environment("areal_x_test/Echo-v0", options={"word": "word"})
        episode, prompts = play(workflow, f"hi{END}", f"end{END}")
        _, prompts_again = play(workflow, f"hi{END}", f"end{END}")
    finally:
        del gymnasium.registry["areal_x_test/Echo-v0"]
    assert said_by_user(prompts[-1])[1] == "heard hi"
    assert said_by_user(prompts[0])[0].startswith("word ")
    assert prompts == prompts_again  # the task's seed
    assert episode.outcome.reward == 5.0


def test_without_gymnasium_a_name_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(UserError, match=r"areal-x\[environments\]"):
        Environment("CartPole-v1").setup(tokenizer_of("qwen25"))


def test_details_are_plain_numbers():
    episode, _ = play(Environment(Adds), f"20{END}")
    json.dumps(dict(episode.outcome.details))


class Ones:
    """The reward of each step is the number of ones in the action."""

    def reset(self, seed=None, options=None):
        self.turn = 0
        return f"{seed}=", {}

    def step(self, action):
        self.turn += 1
        return "+", float(action.count("1")), self.turn == 3, False, {}


def test_a_run_learns_from_an_environment(tiny_model_dir, tmp_path):
    model = shutil.copytree(tiny_model_dir, tmp_path / "model")
    template = "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}<end>{% endif %}{% endfor %}"
    (model / "chat_template.jinja").write_text(template)
    workflow = Environment(Ones, sampling=SamplingParams(max_tokens=4), credit=Credit("given"))
    settings = {"dataset": environment_tasks(8), "workflow": workflow, "steps": 2, "row_length": 48}
    experiment = tiny_experiment(model, tmp_path, **settings)
    rewards = []
    for turn in experiment.turns(experiment.open()):
        if turn.groups:
            assert turn.metrics["reward/turns"] == 3
            assert turn.metrics["policy_gap"] <= 1e-4
            rewards += [reward for group in turn.groups for reward in group.rewards]
    assert len(rewards) == 2 * 2 * 4


def test_the_game_of_the_guide_runs():
    page = (Path(__file__).parents[2] / "docs" / "tools.md").read_text()
    game = types.ModuleType("my_game")
    (code,) = re.findall(r"```python\n(# my_game.py\n.*?)```", page, re.DOTALL)
    exec(code, game.__dict__)
    try:
        with gin.unlock_config():
            (bindings,) = re.findall(r"```gin\nimport my_game\n(.*?train\.dataset.*?)```", page, re.DOTALL)
            gin.parse_config([line for line in bindings.splitlines() if not line.startswith("train.")])
        workflow = gin.get_configurable("environment")()
        number = random.Random(12).randint(1, 100)
        episode, prompts = play(workflow, f"I say 0{END}", f"what?{END}", f"so {number}{END}")
        assert len(gin.get_configurable("environment_tasks")()) == 1000
    finally:
        gin.clear_config()
        for name in ("guess", "last_number"):  # else the page's own test cannot register them
            gin.config._REGISTRY.pop(f"my_game.{name}")
    assert said_by_user(prompts[-1]) == ["Guess a number from 1 to 100.", "higher", "Say a number from 1 to 100."]
    assert episode.outcome.reward == 1.0
