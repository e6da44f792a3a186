"""Episodes in an environment of a real OpenEnv server."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_x.agents.environment import Environment
from areal_x.agents.openenv import openenv, openenv_action
from areal_x.errors import ConfigError, UserError
from areal_x.types import Scored, Task
from tests.agents.test_environment import play, said_by_user

END = "<|im_end|>"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    pytest.importorskip("openenv")
    script = Path(__file__).with_name("openenv_server.py")
    process = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    port = process.stdout.readline().strip()
    assert port, "the server did not start"
    yield f"http://127.0.0.1:{port}"
    process.kill()
    process.communicate()


def number(seed: int, most: int = 100) -> int:
    return random.Random(seed).randint(1, most)


def test_an_episode_is_a_session_of_the_server(server: str) -> None:
    right = number(7)
    workflow = Environment(make=openenv, options={"base_url": server, "action": "number", "observation": "hint"}, turns=4)
    replies = [f"{right - 1}{END}", f"{right + 1}{END}", f"{right}{END}"]
    episode, prompts = play(workflow, *replies, task=Task("t", "", metadata={"seed": 7}))
    assert isinstance(episode.outcome, Scored)
    assert (episode.outcome.reward, episode.outcome.details["ended"], episode.outcome.details["turns"]) == (1.0, 1.0, 3)
    assert said_by_user(prompts[-1]) == ["1 to 100", "higher", "lower"]


def test_whole_actions_and_observations_are_json_and_what_is_none_takes_a_turn(server: str) -> None:
    right = number(3, most=5)
    workflow = Environment(make=openenv, options={"base_url": server}, read_action=openenv_action, turns=3)
    task = Task("t", "", metadata={"seed": 3, "options": {"most": 5}})
    episode, prompts = play(workflow, f"three{END}", f'Here:\n```json\n{{"number": {right}}}\n```{END}', task=task)
    assert isinstance(episode.outcome, Scored)
    assert (episode.outcome.reward, episode.outcome.details["refused_actions"]) == (1.0, 1)
    assert '"hint": "1 to 5"' in said_by_user(prompts[0])[0]
    assert said_by_user(prompts[1])[1] == "Answer with an action as a JSON object."


def test_a_server_that_is_not_there_is_an_error_with_its_address(server: str) -> None:
    with pytest.raises(RuntimeError, match=r"http://127\.0\.0\.1:9 does not answer"):
        openenv("http://127.0.0.1:9", seconds=1)
    with pytest.raises(ConfigError, match=r"openenv\.base_url"):
        openenv("127.0.0.1:9")


@pytest.mark.parametrize("text", ["", "[1]", "3", "{", "```json\n[]\n```"])
def test_a_reply_that_is_no_object_is_no_action(text: str) -> None:
    with pytest.raises(ValueError, match="JSON object"):
        openenv_action(text)


def test_without_the_package_it_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openenv.core", None)
    with pytest.raises(UserError, match="pip install openenv"):
        openenv("http://127.0.0.1:9")
