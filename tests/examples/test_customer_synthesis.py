"""More tasks for the shop: the program's proposals hold, a model's are believed in nothing."""

from __future__ import annotations

import asyncio
import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from areal_x.agents.synthesis import refusal, synthesize, synthetic_tasks
from areal_x.sandbox import Sandbox
from areal_x.synthesize import main
from areal_x.types import Task
from examples.customer_service.synthesis import Requesting, proposed, questions, read_proposal
from examples.customer_service.task import Desk, orders_of, reward_of, sandbox_here

ORDERS = {
    "101": {"customer": "7", "status": "pending", "address": "1 Elm Road"},
    "102": {"customer": "7", "status": "delivered", "address": "1 Elm Road"},
    "103": {"customer": "8", "status": "pending", "address": "2 Elm Road"},
}
GIVEN = {
    "request": "Cancel what you can.",
    "solution": [{"tool": "order", "arguments": {"id": "101"}}, {"tool": "cancel", "arguments": {"id": "101"}}],
    "verifier": "def verify(before, after):\n    before['101']['status'] = 'cancelled'\n    return before == after",
}


def test_every_proposal_of_the_program_holds_and_catches_steps_left_out_and_one_too_many() -> None:
    async def look() -> list[str]:
        sandbox = Sandbox(workers=2)
        try:
            return [await refusal(one, sandbox) for one in islice(proposed(3), 24)]
        finally:
            await sandbox.close()

    assert asyncio.run(look()) == [""] * 24
    made = list(islice(proposed(3), 200))
    assert {one.untouched for one in made} == {True, False}
    assert max(one.metadata["steps"] for one in made) >= 3
    assert [one.prompt for one in islice(proposed(3), 9)] == [one.prompt for one in made[:9]]
    assert [one.prompt for one in islice(proposed(4), 9)] != [one.prompt for one in made[:9]]


def test_the_command_writes_tasks_whose_reward_is_their_own_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["examples.customer_service.synthesis", "--tasks", "5", "--out", str(tmp_path / "tasks.jsonl")]) == 0
    assert capsys.readouterr().out.startswith("5 tasks, ")
    tasks = synthetic_tasks(str(tmp_path / "tasks.jsonl"))
    task = next(task for task in tasks if task.answer != task.metadata["world"])

    async def rewards(task: Task) -> list[float]:
        found = []
        for orders, looked in ((task.answer, True), (task.metadata["world"], True), (task.answer, False)):
            desk = Desk(orders_of(task))
            desk.orders, desk.unseen = dict(orders), not looked
            found.append(await reward_of(task, desk))
        await sandbox_here().close()
        return found

    assert asyncio.run(rewards(task)) == [1.0, 0.0, 0.0]
    customer = Requesting(task)
    said = [asyncio.run(customer.say(None)) for _ in range(3)]
    assert said == [task.prompt, f"I am customer {task.metadata['customer']}.", None]


def test_a_module_that_proposes_nothing_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for module, reason in (
        ("nowhere.at.all", "cannot be imported"),
        ("examples.customer_service.task", r"no function proposed(seed)"),
    ):
        assert main([module, "--tasks", "1", "--out", str(tmp_path / "t.jsonl")]) == 1
        assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    "change, reason",
    [
        ({}, ""),
        ({"verifier": "def verify(before, after): return after['101']['status'] == 'cancelled'"}, "accepts a wrong solution"),
        ({"verifier": "def verify(before, after): return before == after"}, "does not accept the solution"),
        ({"solution": [{"tool": "burn", "arguments": {"id": "101"}}]}, "call of burn fails: There is no tool"),
        ({"solution": [{"tool": "cancel", "arguments": {"id": "999"}}]}, "somebody else"),
        ({"solution": [{"tool": "cancel", "arguments": {"id": "103"}}]}, "somebody else"),
        ({"solution": [{"tool": "cancel"}]}, "no list of calls"),
        ({"solution": [{"tool": "cancel", "arguments": {}}]}, "somebody else"),
        ({"request": None}, "lacks a request"),
    ],
)
def test_a_models_proposal_is_run_before_it_is_believed(change: dict[str, Any], reason: str) -> None:
    text = f"Sure!\n```json\n{json.dumps(GIVEN | change)}\n```"

    async def look() -> str:
        sandbox = Sandbox(workers=1)
        try:
            made = await synthesize([read(text)], sandbox, 1, 1)
            return "" if made.tasks else next(iter(made.refused))
        finally:
            await sandbox.close()

    def read(text: str) -> Any:
        try:
            return read_proposal(text, ORDERS, "7")
        except ValueError as error:
            return f"{error}"

    assert reason in asyncio.run(look())
    assert bool(asyncio.run(look())) == bool(reason)


def test_a_model_is_shown_the_shop_that_its_proposal_is_about() -> None:
    (first, read), (second, _) = islice(questions(0), 2)
    orders, customer = read.keywords["orders"], read.keywords["customer"]  # type: ignore[attr-defined]
    shown = first[0]["content"]  # type: ignore[index]
    assert json.dumps(orders, indent=1) in shown
    assert f"customer {customer} " in shown
    assert first != second
