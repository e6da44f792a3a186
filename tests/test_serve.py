"""The model of a gin file, served to agents as the command does it."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from areal_x.agents.client import SessionError, session
from areal_x.errors import printable
from tests import forking
from tests.agents.test_agent import ask
from tests.conftest import environment_with
from tests.thorough import further

ROOT = Path(__file__).parents[1]
CONFIG = """
model.path = '{model}'
import examples.arithmetic.task
train.dataset = @arithmetic.problems()
train.workflow = @single_turn()
single_turn.reward = @math_answer
sampling.max_tokens = 8
sampling.top_p = 0.9  # which training refuses
train.row_length = 64
train.backend = '{backend}'
embedded.slots = 8
"""


@pytest.mark.parametrize("backend", ["jax", *further("torch")])
def test_the_command_serves_whoever_has_its_key_until_it_is_interrupted(backend, tiny_model_dir, tmp_path):
    pytest.importorskip(backend)
    file, address = tmp_path / "serve.gin", tmp_path / "gateway.json"
    file.write_text(CONFIG.format(model=tiny_model_dir, backend=backend))
    command = [sys.executable, "-m", "areal_x.serve", str(file), "--address", str(address)]
    read, write = os.pipe()
    with os.fdopen(write, "w") as out, (tmp_path / "err").open("w") as err:
        serving = forking.popen(command, environment_with(1, PYTHONUNBUFFERED="1"), ROOT, out, err)
    printed = os.fdopen(read)
    try:
        line = printed.readline()
        url = json.loads(address.read_text())["url"]
        assert line == f"serving at {url}; its address and key are in {address}\n"
        with session(address, label="mine\x1b[2J") as episode:
            said = ask(episode.base_url, episode.key, "1+2=")
            assert 1 <= said["usage"]["completion_tokens"] <= 8
            episode.reward(0.5)
        assert printed.readline().endswith("(mine�[2J): 1 calls, reward 0.5\n")
        with pytest.raises(SessionError):
            episode.reward(0.5)
    finally:
        serving.send_signal(signal.SIGINT)
        serving.wait(timeout=60)
        printed.close()
    assert serving.returncode == 130


def test_a_label_has_no_commands_for_the_terminal():
    assert printable("\x1b]0;mine\x07é\u202e\n") == "�]0;mine�é�\n"
