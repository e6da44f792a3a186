"""Tasks that nobody wrote by hand: their verifiers are run in the real sandbox, and lies are found out."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from areal_x.agents import synthesis
from areal_x.agents.synthesis import (
    Duplicates,
    Proposal,
    Unverifiable,
    json_object,
    proposals_of,
    refusal,
    synthesize,
    synthetic_tasks,
    verdicts,
    verified,
    write_tasks,
)
from areal_x.errors import UserError
from areal_x.protocols.engine import SamplingParams
from areal_x.sandbox import Sandbox, SandboxLimits
from tests.agents.chat.speaking import Says, tokenizer_of

GOOD = Proposal(
    prompt="Raise a by one.",
    world={"a": 1, "b": 2},
    solved={"a": 2, "b": 2},
    verifier="def verify(before, after):\n    return after == {**before, 'a': before['a'] + 1}",
    unsolved=[{"a": 2, "b": 3}],
)


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def sandbox(loop: asyncio.Runner) -> Iterator[Sandbox]:
    made = Sandbox(SandboxLimits(seconds=2.0), workers=2)
    yield made
    loop.run(made.close())


LIES = [
    ({"verifier": "def verify(before, after): return True"}, "accepts the untouched world"),
    ({"verifier": "def verify(before, after): return after['a'] == 2"}, "accepts a wrong solution"),
    ({"verifier": "def verify(before, after): return False"}, "does not accept the solution"),
    ({"verifier": "def verify(before, after): return 7"}, "neither a bool nor a number from 0 to 1"),
    ({"verifier": "def verify(before, after): return after['c']"}, r"failed \(error\): KeyError: 'c'"),
    ({"verifier": "def verify(before, after)"}, r"failed \(error\): SyntaxError"),
    ({"verifier": "x = 1"}, "KeyError: 'verify'"),
    ({"verifier": "import sys\nsys.exit(0)"}, "failed"),
    ({"verifier": "def verify(before, after):\n    while True: pass"}, r"failed \(timeout\)"),
    ({"verifier": "import urllib.request as r\ndef verify(before, after): return r.urlopen('http://127.0.0.1:9')"}, "failed"),
    ({"unsolved": [{"a": 2, "b": 2}]}, "its solution leaves a world that must not pass"),
    ({"solved": {"a": 1, "b": 2}}, "its solution leaves a world that must not pass"),
    ({"prompt": " "}, "the request is empty"),
    ({"world": {"a": {1}, "b": 2}}, "not JSON"),
    ({"untouched": True, "unsolved": []}, "no change is given that must not pass"),
]


@pytest.mark.parametrize("change, reason", LIES)
def test_a_proposal_that_is_no_task_is_refused_with_the_reason(change: Any, reason: str, loop: Any, sandbox: Any) -> None:
    assert re.search(reason, loop.run(refusal(replace(GOOD, **change), sandbox)))


def test_a_verifier_may_change_what_it_is_given_and_print_what_it_likes(loop: Any, sandbox: Any) -> None:
    noisy = "def verify(before, after):\n    print('verdicts:[1]', end='')\n    before['a'] += 1\n    return before == after"
    assert loop.run(refusal(replace(GOOD, verifier=noisy), sandbox)) == ""
    assert loop.run(verdicts(sandbox, noisy, {"a": 1}, [{"a": 2}, {"a": 1}, {"a": 2}])) == [1.0, 0.0, 1.0]
    with pytest.raises(Unverifiable, match="failed"):
        loop.run(verdicts(sandbox, "def verify(b, a): raise SystemExit", {}, [{}]))


def test_to_do_nothing_can_be_the_solution(loop: Any, sandbox: Any) -> None:
    still = replace(GOOD, untouched=True, solved=GOOD.world, verifier="def verify(b, a): return a == b")
    assert loop.run(refusal(still, sandbox)) == ""
    assert "accepts a wrong solution" in loop.run(refusal(replace(still, verifier="def verify(b, a): return True"), sandbox))


def test_proposals_become_tasks_each_once_and_what_was_refused_is_counted(loop: Any, sandbox: Any, tmp_path: Path) -> None:
    def proposals() -> Iterator[Proposal | str]:
        yield GOOD
        yield replace(GOOD, prompt="raise A by ONE!")  # the same words
        yield "the model's text has no JSON object"
        yield replace(GOOD, verifier="def verify(before, after): return True")
        yield replace(GOOD, prompt="Please add one to a, and leave all else as it is.")
        raise AssertionError("enough were accepted")

    made = loop.run(synthesize(proposals(), sandbox, count=2, most=9))
    assert [task.id for task in made.tasks] == ["synthetic/0", "synthetic/1"]
    assert made.refused == Counter(
        {
            "it is nearly a task that was accepted before": 1,
            "the model's text has no JSON object": 1,
            "the verifier accepts the untouched world": 1,
        }
    )
    assert str(made).startswith("2 tasks, 3 proposals refused\n  1: ")
    write_tasks(tmp_path / "tasks.jsonl", made.tasks)
    assert synthetic_tasks(str(tmp_path / "tasks.jsonl")) == list(made.tasks)
    task = made.tasks[0]
    assert [loop.run(verified(sandbox, task, world)) for world in (task.answer, GOOD.world)] == [1.0, 0.0]
    (tmp_path / "tasks.jsonl").write_text('{"id": "1", "prompt": "a", "answer": 1, "metadata": {"world": 1}}')
    with pytest.raises(UserError, match="'1' has no verifier"):
        synthetic_tasks(str(tmp_path / "tasks.jsonl"))
    few = loop.run(synthesize([GOOD, "a", "a", "a"], sandbox, count=2, most=3))
    assert (len(few.tasks), few.refused.total()) == (1, 2)


def test_the_same_words_with_other_numbers_are_another_task() -> None:
    known = Duplicates(0.8)
    words = "please cancel the order {} that I made on monday because it comes too late for the party of my brother"
    assert [known.has(text) for text in (words.format(17), words.format(17).upper() + "!!", "", "")] == [
        False,
        True,
        False,
        True,
    ]
    one, other = (replace(GOOD, solved={"a": n, "b": 2}) for n in (2, 3))
    assert synthesis.fingerprint(one) != synthesis.fingerprint(other)
    exact = Duplicates(1.0)
    assert [exact.has(text) for text in (words.format(17), words.format(18), words.format(18))] == [False, False, True]


def test_a_model_proposes_and_its_text_is_read_or_counted() -> None:
    tokenizer = tokenizer_of("qwen25")

    def said(text: str) -> list[int]:
        return [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]

    def read(text: str) -> Proposal:
        return replace(GOOD, prompt=json_object(text)["request"])

    texts = ['Here: ```json\n{"request": "b {"}\n``` done', "{no JSON} {", '[{"request": "c"}]']
    questions = [([{"role": "user", "content": "?"}], read)] * 3

    async def collect(engine: Says) -> list[Proposal | str]:
        found = proposals_of(engine, tokenizer, questions, SamplingParams(max_tokens=99), at_once=2)  # type: ignore[arg-type]
        return [one async for one in found]

    first, second, third = asyncio.run(collect(Says(*map(said, texts))))
    assert isinstance(first, Proposal)
    assert first.prompt == "b {"
    assert second == "the model's text has no JSON object"
    assert isinstance(third, Proposal)
    assert third.prompt == "c"
    cut = asyncio.run(collect(Says(*map(said, texts), finish_reason="length")))
    assert cut == ["the model's text ended early (length)"] * 3
