"""The run of the notebooks: its tasks, its reward and the model that it begins with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.letters import task


def test_the_alphabet_is_a_circle():
    assert {t.prompt: t.answer for t in task.problems()} == {"a": "bcd", "b": "cde", "c": "dea", "d": "eab", "e": "abc"}


@pytest.mark.parametrize(("text", "share"), [("cde", 1), ("cda", 2 / 3), ("dec", 0), ("", 0), ("c", 1 / 3), ("cdeee", 1)])
def test_the_reward_is_the_share_of_right_letters(text, share):
    b = task.problems()[1]
    assert task.share_right(b, text) == pytest.approx(share)


def test_a_model_of_another_shape_is_another_and_each_is_made_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    wide, small = task.random_model(), task.random_model(hidden_size=16)
    assert task.random_model() == wide != small
    assert [json.loads(Path(m, "config.json").read_text())["hidden_size"] for m in (wide, small)] == [32, 16]
