"""A shop and its policy: what a task wants, what the tools do, and conversations as they were demonstrated."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from areal_x.agents.agent import Agent
from areal_x.agents.tools.toolbox import Toolbox, tool_of
from areal_x.errors import ConfigError
from areal_x.types import Scored
from examples.customer_service import warm_start as module
from examples.customer_service.task import ALLOWED, OVER, POLICY, WISHES, Desk, Scripted, Simulated, serve, tasks
from examples.customer_service.warm_start import PIECES, batches, talk
from examples.tiny.chat import CHAT_TEMPLATE, demonstration
from examples.tiny.model import write_model
from tests.examples.running import ROOT, check_file, conversed, gin_files, same_tokens, trained
from tests.thorough import thorough

pytest.importorskip("openai")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("customer_service")
    write_model(directory, PIECES, 0, CHAT_TEMPLATE)
    return directory


@pytest.mark.parametrize("file", gin_files("customer_service"), ids=lambda file: file.stem)
def test_an_example_can_be_run(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    check_file(file)


def test_a_task_wants_what_the_policy_allows_and_nothing_else() -> None:
    seen = set()
    for task in tasks("test"):
        about = task.metadata
        before = about["orders"][about["order"]]
        own = before["customer"] == about["customer"]
        assert any(order["customer"] == about["customer"] for order in about["orders"].values())
        others = {number: order for number, order in task.answer.items() if number != about["order"]}
        assert others == {number: order for number, order in about["orders"].items() if number != about["order"]}
        after = task.answer[about["order"]]
        if not own or before["status"] != ALLOWED[about["wish"]]:
            assert after == before
        else:
            expected = {"cancel": "cancelled", "refund": "refunded", "move": before["status"]}[about["wish"]]
            assert after["status"] == expected
            assert after["address"] == (about["address"] if about["wish"] == "move" else before["address"])
        seen.add((about["wish"], own, after != before))
    assert len(seen) == 3 * 3  # each wish: allowed, of the wrong status, somebody else's


def test_tasks_are_fixed_by_the_seed_and_held_out_ones_whatever_it_is() -> None:
    train, test = tasks(), tasks("test")
    assert (len(train), len(test)) == (4000, 200)
    assert tasks(seed=0) == train != tasks(seed=1)
    assert tasks("test", seed=1) == test
    for name, value in {"split": "all", "orders": 1}.items():
        with pytest.raises(ConfigError, match=rf"customer_service\.tasks\.{name}"):
            tasks(**{name: value})


def test_the_tools_do_as_they_are_told_and_note_what_nobody_looked_at() -> None:
    orders = {"305": {"customer": "17", "status": "shipped", "address": "4 Elm Road"}}
    desk = Desk(orders)
    toolbox = Toolbox(desk.tools)

    def call(name: str, **arguments: str) -> str:
        return asyncio.run(toolbox.call(name, json.dumps(arguments)))

    assert call("order", id="306") == "There is no order '306'."
    assert json.loads(call("order", id="305")) == orders["305"]
    assert call("change_address", id="305", address="1 Mill Lane") == "Done."
    assert call("cancel", id="305") == "Done."
    assert desk.orders == {"305": {"customer": "17", "status": "cancelled", "address": "1 Mill Lane"}}
    assert orders["305"]["status"] == "shipped"
    assert not desk.unseen
    blind = Desk(orders)
    asyncio.run(blind.refund("305"))
    assert blind.unseen
    assert blind.orders["305"]["status"] == "refunded"


def test_the_tools_show_what_they_need() -> None:
    shown = {tool.name: set(tool.schema["function"]["parameters"]["required"]) for tool in map(tool_of, Desk({}).tools)}
    assert shown == {"order": {"id"}, "cancel": {"id"}, "refund": {"id"}, "change_address": {"id", "address"}}


@pytest.mark.parametrize("looks", [False, True])
def test_a_conversation_is_token_for_token_the_demonstration(model: Path, looks: bool) -> None:
    rewards = set()
    for wish in WISHES:
        for changes in (False, True):
            task = next(t for t in tasks() if t.metadata["wish"] == wish and (t.answer != t.metadata["orders"]) == changes)
            shown = demonstration(PIECES, talk(task, looks), tools=True)
            episode = conversed(Agent(solve=serve), model, task, shown)
            assert isinstance(episode.outcome, Scored)
            rewards.add(episode.outcome.reward)
            same_tokens(episode, shown)
            assert len(shown) < module.ROW_LENGTH
    assert rewards == {float(looks)}


def test_nothing_done_is_right_only_where_the_policy_allows_nothing(model: Path) -> None:
    for changes in (False, True):
        task = next(t for t in tasks() if (t.answer != t.metadata["orders"]) == changes)
        turns = [*talk(task, looks=False)[:3], ("assistant", module.REFUSED)]
        episode = conversed(Agent(solve=serve), model, task, demonstration(PIECES, turns, tools=True))
        assert episode.outcome == Scored(float(not changes), episode.outcome.details)


def test_the_tutor_looks_as_often_as_he_is_told() -> None:
    asking, looking = (PIECES.index(piece) + 2 for piece in (module.ASKS, module.OPENINGS[0]))
    tokens = [token for batch in batches(20, seed=0, careful=0.25) for token in batch.tokens.ravel().tolist()]
    assert tokens.count(looking) / tokens.count(asking) == pytest.approx(0.25, abs=0.04)
    with pytest.raises(ConfigError, match=r"customer_service\.warm_start\.careful"):
        module.warm_start(careful=2)


def test_a_scripted_customer_says_two_things_and_goes() -> None:
    task = next(task for task in tasks() if task.metadata["wish"] == "move")
    customer = Scripted(task)
    assert asyncio.run(customer.say(None)) == "I have moved."
    said = asyncio.run(customer.say("Which order?"))
    about = task.metadata
    assert said == f"I am customer {about['customer']}, the order is {about['order']}. My address is now {about['address']}."
    assert asyncio.run(customer.say("Done.")) is None


@pytest.fixture
def endpoint() -> Iterator[tuple[str, list[Any]]]:
    """An OpenAI-style one that asks twice and then is content: its address, and the messages of each request."""
    asked: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            asked.append(body["messages"])
            content = f"Thank you. {OVER}" if len(asked) > 1 else "I want a refund."
            choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": "stop"}
            answer = json.dumps({"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]})
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.end_headers()
            self.wfile.write(answer.encode())

        def log_message(self, *_: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_simulated_customer_hears_the_agent_as_its_user_and_says_when_it_is_over(endpoint: tuple[str, list[Any]]) -> None:
    url, asked = endpoint
    task = tasks()[0]
    customer = Simulated(task, url, "m")

    async def talk() -> list[str | None]:
        return [await customer.say(None), await customer.say("Done.")]

    assert asyncio.run(talk()) == ["I want a refund.", None]
    told, *said = asked[1]
    assert task.metadata["order"] in told["content"]
    assert [(message["role"], message["content"]) for message in said[1:]] == [
        ("assistant", "I want a refund."),
        ("user", "Done."),
    ]


def test_an_instructed_agent_reads_the_policy_first(endpoint: tuple[str, list[Any]]) -> None:
    url, asked = endpoint
    task = next(task for task in tasks() if task.answer != task.metadata["orders"])
    assert asyncio.run(serve(task, url, "key", customer=Scripted, instructed=True, replies=1)) == 0.0
    assert asked[0] == [{"role": "system", "content": POLICY}, {"role": "user", "content": task.prompt}]


@thorough
def test_two_steps_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"customer_service__warm_start__steps": 2, "customer_service__warm_start__backend": "torch"}
    rows = trained("customer_service/tiny.gin", tmp_path, monkeypatch, **settings)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[-1]["scored"] >= 8
    assert (rows[-1]["failed"], rows[-1]["timed_out"]) == (0, 0)
