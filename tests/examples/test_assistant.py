"""An assistant that people use while it learns: two at once, whose thumbs come at once, late or never."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from openai import APIConnectionError

from areal_x.agents.client import SessionError
from examples.assistant.chat import NEW, conversations, judged
from tests.examples.running import ROOT, check_file, gin_files, trained


@pytest.mark.parametrize("file", gin_files("assistant"), ids=lambda file: file.stem)
def test_an_example_can_be_run(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    check_file(file)


class Told:
    """An episode that notes its rewards, and refuses what comes twice."""

    def __init__(self) -> None:
        self.rewards: dict[str, float] = {}

    def reward(self, value: float, call: str) -> None:
        if call in self.rewards:
            raise SessionError(409, "it has its reward")
        self.rewards[call] = value


def test_a_thumb_judges_the_answer_that_it_names_once() -> None:
    episode, calls = Told(), ["a", "b", "c"]
    assert [judged(episode, calls, "+", 3), judged(episode, calls, "-", 1)] == ["(thank you)"] * 2
    assert episode.rewards == {"c": 1.0, "a": -1.0}
    assert judged(episode, calls, "+", 1) == "(it has its reward)"
    assert [judged(episode, calls, "+", n) for n in (0, 4)] == ["(there is no answer 0)", "(there is no answer 4)"]
    assert episode.rewards == {"c": 1.0, "a": -1.0}


def prompt_user(begin: threading.Event) -> Iterator[str]:
    """Judges each answer as soon as it is there."""
    begin.wait(120)
    while True:
        yield from ("12*3=", "+", "4*5=", "-", NEW)


def late_user(unjudged: threading.Event) -> Iterator[str]:
    """Judges nothing in the first conversation, and in others the first answer after the second."""
    yield from ("6*7=", NEW)
    unjudged.set()
    while True:
        yield from ("12*3=", "4*5=", "+1", "+1", NEW)


def test_two_people_use_it_at_once_and_it_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = tmp_path / "gateway.json"
    heard: dict[str, list[str]] = {"prompt": [], "late": []}
    over, unjudged = threading.Event(), threading.Event()

    def use(name: str, lines: Iterator[str]) -> None:
        while not (address.exists() or over.wait(0.05)):
            pass
        try:
            conversations(lines, heard[name].append, str(address))
        except (OSError, APIConnectionError, SessionError):
            return  # the run has ended

    with ThreadPoolExecutor(2) as people:
        using = [people.submit(use, "prompt", prompt_user(unjudged)), people.submit(use, "late", late_user(unjudged))]
        try:
            settings = {"tools__warm_start__steps": 2, "tools__warm_start__backend": "torch", "train__evaluate_every": 0}
            rows = trained(
                "assistant/tiny.gin", tmp_path, monkeypatch, **settings, train__group_size=1, online__address_file=str(address)
            )
        finally:
            over.set()
        for one in using:
            one.result(120)
    steps = rows[1:]
    assert [row["step"] for row in steps] == [1, 2]
    assert all(row["trained_tokens"] > 0 for row in steps)
    assert steps[-1]["scored"] >= 4
    assert steps[-1]["failed"] == 1  # whose reward never came
    assert all("(thank you)" in said for said in heard.values())
    assert any(said.startswith("2: ") for said in heard["late"])
