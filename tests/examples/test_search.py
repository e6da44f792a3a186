"""A library of invented people: what it holds, what a search finds, and an episode as it was demonstrated."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from areal_x.agents.multi_turn import ToolUse
from areal_x.agents.tools.toolbox import tool_of
from areal_x.errors import ConfigError
from areal_x.types import Scored, Task
from examples.search import warm_start as module
from examples.search.task import library, questions, tools, verify
from examples.search.warm_start import PIECES, batches, given_up, searched
from examples.tiny.chat import CHAT_TEMPLATE, demonstration
from examples.tiny.model import write_model
from tests.examples.running import ROOT, check_file, conversed, gin_files, same_tokens, trained
from tests.thorough import thorough


@pytest.mark.parametrize("file", gin_files("search"), ids=lambda file: file.stem)
def test_an_example_can_be_run(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    check_file(file)


def test_the_documents_say_what_is_asked_for() -> None:
    shelves = library(300, 40, seed=1)
    assert len(shelves.documents) == 340
    for id, (title, text) in shelves.documents.items():
        assert shelves.ids[title] == id
        if title in shelves.home:
            assert text == f"{title} was born in {shelves.home[title]}."
        else:
            assert text == f"The mayor of {title} is {shelves.mayor[title]}."
    names = [*shelves.home, *shelves.mayor, *shelves.mayor.values()]
    assert len(set(names)) == len(names) == 380
    assert library(300, 40, seed=1) == shelves != library(300, 40, seed=2)


def test_a_search_for_a_name_and_the_documents_that_it_finds_lead_to_the_answer() -> None:
    search, show = tools(people=300, towns=40)
    town_asked, mayor_asked = questions(people=300, towns=40), questions(people=300, towns=40, hops=2)
    for one, two in zip(town_asked[:50], mayor_asked[:50], strict=True):
        person = re.fullmatch(r"Where was (\w+) born\?", one.prompt[0]["content"])[1]
        assert two.prompt[0]["content"] == f"Who is the mayor of the town where {person} was born?"
        assert search(person).splitlines()[0].split()[1] == person
        town = re.search(r"born in (\w+)\.", show(search(person).split()[0]))[1]
        found = [show(line.split()[0]) for line in search(town).splitlines()]
        (mayor,) = [text for text in found if text.startswith(f"The mayor of {town} ")]
        assert (one.answer, two.answer) == (town, mayor.split()[-1].rstrip("."))


def test_what_is_not_there_is_said() -> None:
    search, show = tools(people=300, towns=40)
    assert search("Xyzzy") == search("") == "Nothing was found."
    assert show("340") == "There is no document '340'."
    assert [tool_of(tool).name for tool in (search, show)] == ["search", "open"]


def test_the_last_200_people_are_held_out() -> None:
    train, test = questions(people=300, towns=40), questions("test", people=300, towns=40)
    assert (len(train), len(test)) == (100, 200)
    assert not {task.id for task in train} & {task.id for task in test}
    with pytest.raises(ConfigError, match=r"search\.questions\.people"):
        questions(people=200)
    with pytest.raises(ConfigError, match=r"search\.questions\.split"):
        questions("all")


def test_only_the_name_is_right_and_in_words_where_the_answer_is_marked() -> None:
    task = Task("Kemo", "", "Badu")
    assert [verify(task, text) for text in ("Badu", "badu", "Badu.", "In Badu", "")] == [1, 0, 0, 0, 0]
    marked = (
        "It is <answer> Badu </answer>.",
        "<answer>Rila</answer> No: <answer>Badu</answer>",
        "Badu",
        "<answer>Rila</answer>",
    )
    assert [verify(task, text, exact=False) for text in marked] == [1, 1, 0, 0]


@pytest.mark.parametrize("gives_up", [False, True])
def test_an_episode_is_token_for_token_the_demonstration(tmp_path: Path, gives_up: bool) -> None:
    write_model(tmp_path, PIECES, 0, CHAT_TEMPLATE)
    task = questions()[0]
    turns = given_up(task.id) if gives_up else searched(library(800, 100, 0), task.id)
    shown = demonstration(PIECES, turns, tools=True)
    workflow = ToolUse(reward=verify, tools=tools(), reward_workers=1)
    episode = conversed(workflow, tmp_path, task, shown)
    assert isinstance(episode.outcome, Scored)
    assert (episode.outcome.reward, episode.outcome.details["tool_calls"]) == ((0.0, 0) if gives_up else (1.0, 2))
    same_tokens(episode, shown)
    assert len(shown) < module.ROW_LENGTH


def test_the_tutor_searches_as_often_as_he_is_told() -> None:
    giving_up, calling = (PIECES.index(piece) + 2 for piece in (module.GIVEN_UP, module.TOOLS[0]))
    tokens = [token for batch in batches(20, seed=0, calls=0.25) for token in batch.tokens.ravel().tolist()]
    given, called = tokens.count(giving_up), tokens.count(calling)
    assert called / (called + given) == pytest.approx(0.25, abs=0.03)


def test_the_library_that_is_shown_is_not_the_one_that_is_asked_about() -> None:
    shown, asked = library(4000, 400, module.OTHER), library(800, 100, 0)
    same = [person for person, town in asked.home.items() if shown.home.get(person) == town]
    assert len(same) < 0.02 * len(asked.home)


@thorough
def test_two_steps_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"search__warm_start__steps": 2, "search__warm_start__backend": "torch", "search__questions__people": 208}
    rows = trained("search/tiny.gin", tmp_path, monkeypatch, **settings, search__tools__people=208)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[-1]["scored"] >= 8
    assert (rows[-1]["failed"], rows[-1]["timed_out"]) == (0, 0)
    assert rows[-1]["reward/turns"] >= 1
