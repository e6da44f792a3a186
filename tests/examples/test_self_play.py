"""A pool of problems that the policy makes up: what gets in, what keeps its place, and that a resumed run has it still."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from random import Random

import numpy as np
import pytest

from areal_x.errors import ConfigError
from areal_x.hf.tokenizer import load_tokenizer
from areal_x.protocols.engine import Completion, Request
from areal_x.rewards.countdown import countdown
from areal_x.rollout.episode import episode_of
from areal_x.types import Episode, Failed, Group, Scored, Task
from areal_x.workflows.single_turn import SingleTurn
from examples.countdown.task import drawn_problems, problems
from examples.countdown.warm_start import PIECES
from examples.self_play import task as module
from examples.self_play.task import Pool, SelfPlay, middling, places, read, solution
from examples.tiny.model import encode, write_model
from tests.examples.running import ROOT, check_file, gin_files, trained

SMALL = {"numbers": (3,), "largest": 9, "highest": 99}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("self_play")
    write_model(directory, PIECES, 0)
    return directory


@pytest.mark.parametrize("file", gin_files("self_play"), ids=lambda file: file.stem)
def test_an_example_can_be_run(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    check_file(file)


@pytest.mark.parametrize("numbers, largest, highest", [((3,), 9, 99), ((3, 4), 99, 999)])
def test_the_search_solves_what_can_be_solved(numbers: tuple[int, ...], largest: int, highest: int) -> None:
    for problem in islice(drawn_problems(Random(0), numbers, largest, highest), 100):
        found = solution(problem.numbers, problem.target)
        assert found is not None
        task = Task("", "", {"numbers": problem.numbers, "target": problem.target})
        assert countdown(task, found) == 1.0, (problem, found)


def test_the_search_finds_no_solution_where_there_is_none() -> None:
    assert solution((1, 1, 1), 4) is None
    assert solution((2, 2), 3) is None
    assert solution((1, 2, 3), 10) is None
    assert solution((1, 5, 5, 5), 24) is not None  # 5 * (5 - 1/5)


def test_what_has_the_form_of_a_problem() -> None:
    assert read("3,7,5=38:") == read(" 3, 7 ,5 = 38\n") == ((3, 7, 5), 38)
    for text in ("", "3=3", "3,7,5", "3,7,5=", "3,,5=8", "3,7,5=38 or 39", "-3,7,5=2", "3,7,5=1234567"):
        assert read(text) == ((), 0), text


def pool() -> Pool:
    return Pool(middling, lambda numbers, target: len(numbers) == 3, frozenset(["1,2,4=8:"]))


def played(pool: Pool, place: str, text: str, rewards: list[float]) -> None:
    """A round on the place by as many players as there are rewards."""
    rounds = [pool.join(place) for _ in rewards]
    if rounds[0].problem is None:
        pool.propose(rounds[0], text)
    for round, reward in zip(rounds, rewards, strict=True):
        round.episodes.append(Episode(Scored(reward)))
        pool.leave(round)


def test_only_new_problems_that_can_be_solved_get_in() -> None:
    there = pool()
    played(there, "a", "3,7,5=38:", [0.0, 1.0])
    assert there.judge("3,7,5=22:") is not None
    for text in ("3,7,5=38:", "1,2,4=8:", "1,1,1=9:", "1,2=3:", "nonsense"):
        assert there.judge(text) is None, text
    working = there.join("b")
    there.propose(working, "3,7,5=22:")
    assert there.judge("3,7,5=22:") is None  # another group works on it


def test_a_problem_keeps_its_place_while_it_is_neither_easy_nor_hard() -> None:
    there = pool()
    played(there, "a", "3,7,5=38:", [0.0, 1.0, 1.0, 0.0])
    played(there, "b", "3,7,5=22:", [0.0] * 4)
    played(there, "c", "3,7,5=8:", [1.0] * 4)
    assert list(there.problems) == ["a"]
    assert there.measures() == {"pool": 1.0, "valid_proposals": 1.0, "pool_pass_rate": 0.5}
    played(there, "a", "", [1.0, 1.0, 1.0, 0.0])
    assert there.measures()["pool_pass_rate"] == 0.75
    played(there, "a", "", [1.0] * 4)  # the policy has learnt it
    assert there.measures() == {"pool": 0.0, "valid_proposals": 1.0}
    assert there.join("a").problem is None


def test_a_round_without_a_score_changes_nothing() -> None:
    there = pool()
    played(there, "a", "3,7,5=38:", [0.0, 1.0])
    round = there.join("a")
    round.episodes.append(Episode(Failed("the engine aborted the request")))
    there.leave(round)
    assert list(there.problems) == ["a"]
    assert not there.rounds


def test_a_restored_pool_is_the_same() -> None:
    there, again = pool(), pool()
    played(there, "a", "3,7,5=38:", [0.0, 1.0])
    played(there, "b", "nonsense", [0.0])
    again.restore(json.loads(json.dumps(there.state())))
    assert (again.problems, again.rates, again.recent) == (there.problems, there.rates, there.recent)
    assert again.measures() == {"pool": 1.0, "valid_proposals": 0.5, "pool_pass_rate": 0.5}


def test_middling_is_between() -> None:
    def group(*rewards: float) -> Group:
        return Group(Task("", ""), 0, 0, tuple(Episode(Scored(reward)) for reward in rewards))

    assert [middling(group(*rewards)) for rewards in ((0, 0), (0, 1), (1, 1))] == [False, True, False]
    assert not middling(group(0, 1, 1, 1), high=0.7)
    assert not middling(group(0, 0, 0, 1), low=0.3)


class Says:
    """An engine that proposes what it is told, one after the other, and answers everything alike."""

    context, version = 32, 0

    def __init__(self, proposals: list[str], answer: str) -> None:
        self.proposals, self.answer = list(proposals), answer
        self.asked: list[str] = []

    async def generate(self, request: Request) -> Completion:
        await asyncio.sleep(0)  # as an engine does, it gives way to others
        proposing = request.tokens.tolist() == encode(PIECES, "?").tolist()
        self.asked.append("?" if proposing else "problem")
        tokens = encode(PIECES, f"{self.proposals.pop(0) if proposing else self.answer}<end>")
        return Completion(tokens, np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.int32), "stop")


def group_of(model: Path, engine: Says, players: int = 3, tries: int = 8) -> tuple[SelfPlay, list[Episode]]:
    workflow = SelfPlay(SingleTurn(countdown, reward_workers=1), tries=tries, **SMALL)

    async def run() -> tuple[SelfPlay, list[Episode]]:
        ready = workflow.setup(load_tokenizer(model))
        try:
            task = places(1)[0]
            results = await asyncio.gather(*(ready.run(task, engine) for _ in range(players)))
            return ready, [episode_of(result) for result in results]
        finally:
            await ready.close()

    return asyncio.run(run())


def test_the_first_of_a_group_proposes_until_it_is_valid_and_all_answer_the_same(model: Path) -> None:
    engine = Says(["1,1,1=9:", "9", "3,7,5=38:"], "(3*(7+5))+2")
    workflow, episodes = group_of(model, engine)
    assert engine.asked == ["?"] * 3 + ["problem"] * 3
    for episode in episodes:
        (trajectory,) = episode.trajectories
        prompt = trajectory.tokens[~trajectory.mask]
        np.testing.assert_array_equal(prompt, encode(PIECES, "3,7,5=38:"))
    assert isinstance(episodes[0].outcome, Scored)
    assert episodes[0].outcome.details["valid_proposals"] == pytest.approx(1 / 3)
    assert workflow.pool is not None
    assert not workflow.pool.problems  # nobody was right


def test_a_group_without_a_valid_proposal_failed_and_leaves_the_place_free(model: Path) -> None:
    engine = Says(["9"] * 4, "")
    workflow, episodes = group_of(model, engine, tries=4)
    assert engine.asked == ["?"] * 4
    assert all(isinstance(e.outcome, Failed) and "none of 4 proposals" in e.outcome.error for e in episodes)
    assert workflow.pool is not None
    assert not workflow.pool.rounds


def test_held_out_problems_never_get_in(model: Path) -> None:
    held_out = problems("test", **SMALL)
    ready = SelfPlay(SingleTurn(countdown), **SMALL).setup(load_tokenizer(model))
    assert ready.pool is not None
    assert all(ready.pool.judge(task.id) is None for task in held_out)


def test_places_ask_for_a_problem_and_in_words_for_different_ones() -> None:
    assert [task.prompt for task in places(2)] == ["?", "?"]
    first, second = (task.prompt[0]["content"] for task in places(2, "words"))
    assert "numbers be 1." in first
    assert "numbers be 2." in second
    with pytest.raises(ConfigError, match=r"self_play\.places\.count"):
        places(0)
    with pytest.raises(ConfigError, match=r"self_play\.numbers"):
        SelfPlay(SingleTurn(countdown), numbers=(5,))


def test_words_are_read_where_they_are_marked(model: Path) -> None:
    workflow = SelfPlay(SingleTurn(countdown), wording="words").setup(load_tokenizer(model))

    class Marked:
        async def generate(self, request: Request) -> Completion:
            return Completion(np.array([2], np.int32), np.zeros(1, np.float32), np.zeros(1, np.int32), "stop")

    class Words:
        eos_token_id = 1

        def encode(self, text: str) -> list[int]:
            return [2]

        def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
            return "So: <problem>1, 2 = 3</problem> no, <problem>3, 7, 5 = 38</problem>."

    marked = replace(workflow, tokenizer=Words())
    text = asyncio.run(marked.proposed(Task("", "asked"), Marked()))  # type: ignore[arg-type]
    assert read(text) == ((3, 7, 5), 38)


def test_two_steps_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A model that was hardly taught proposes nothing of the right form, and is never right.
    drawn = drawn_problems(Random(0), **SMALL)
    texts = (text for problem in drawn for text in ("no problem", problem.short))
    monkeypatch.setattr(module, "read", lambda _: read(next(texts)))
    settings = {"countdown__warm_start__steps": 2, "countdown__warm_start__backend": "torch", "self_play__middling__low": -1.0}
    rows = trained("self_play/tiny.gin", tmp_path, monkeypatch, **settings)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[-1]["reward/pool"] > 0
    assert rows[-1]["reward/pool_pass_rate"] == 0
    assert rows[-1]["reward/valid_proposals"] == pytest.approx(0.5, abs=0.1)
    state = json.loads((tmp_path / "run" / "checkpoints" / "2" / "state.json").read_text())
    assert len(state["rollout"]["workflow"]["problems"]) >= 4
