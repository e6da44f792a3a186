"""The gateway before real clients, as they are published, each in an environment of its own and without a network.

The model is scripted, so that each test decides what the client is told, and everything between is real: the client's own
requests, its tools, its history, its way to be interrupted. benchmarks/clients.py writes the results as a table.
"""

from __future__ import annotations

import base64
import re
import struct
import time
import zlib

import pytest

from areal_x.agents.chat.merging import merge_calls
from tests.agents.gateway.clients.catalogue import CLIENTS, Client, folder
from tests.agents.gateway.clients.isolated import started
from tests.agents.gateway.scripted import read, tool

pytestmark = pytest.mark.clients
each_client = pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.id)
QUESTION = "What is 1+2, and what is 3+4?"
SUMS = "three and seven"


@pytest.fixture(autouse=True)
def installed():
    folder()


@pytest.fixture
def home(tmp_path):
    made = tmp_path / "home"
    made.mkdir()
    return made


@pytest.fixture
def work(tmp_path):
    made = tmp_path / "work"
    made.mkdir()
    return made


def start(client: Client, one, home, work, prompt=QUESTION):
    how = client.start(prompt, home, one.session.url, one.session.key)
    return how, started(how.command, how.environment, home, one.session.url, work)


def answer_of(client: Client, one, home, work, prompt=QUESTION) -> str:
    how, running = start(client, one, home, work, prompt)
    with running as process:
        printed = process.ended()
    return client.answer(how, printed)


def results(prompt: str) -> list[str]:
    """The results of tools in a prompt of the scripted model. smolagents tells them as the user."""
    return re.findall(r"\0(?:tool:|user:Observation:)([^\0]*)", prompt)


@each_client
def test_an_answer_in_words_is_what_the_client_prints(talk, home, work, client, record_property):
    one = talk(lambda _: client.answers(SUMS))
    assert SUMS in answer_of(client, one, home, work)
    assert any(QUESTION in read(call.prompt) for call in one.calls())
    record_property("ignored", ", ".join(sorted(one.session.ignored)))
    record_property("prompt", max(len(call.prompt) for call in one.calls()))


@each_client
def test_tools_that_are_called_in_parallel_are_run_and_the_conversation_is_one_trajectory(talk, home, work, client):
    """With reasoning before the calls, which clients show, drop or send back."""

    def says(prompt):
        if not prompt.startswith("tools:"):
            return "A title"
        if results(prompt):
            return client.answers(SUMS)
        return "<think>Add.</think>Let me add. " + client.adds(1, 2) + client.adds(3, 4)

    one = talk(says)
    assert SUMS in answer_of(client, one, home, work)
    said = [read(call.completion.tokens) for call in one.calls()]
    calls = [call for call, text in zip(one.calls(), said, strict=True) if "title" not in text]
    assert len(calls) == 2
    shown = " ".join(results(read(calls[1].prompt)))
    assert "3" in shown
    assert "7" in shown
    assert merge_calls(calls).counts["continued"] == (not client.rewrites)


def wait_for(condition) -> None:
    """The test's time limit ends a wait in vain."""
    while not condition():
        time.sleep(0.02)


@each_client
def test_a_client_that_is_interrupted_frees_the_engine(talk, home, work, client):
    one = talk(held=True)
    _, running = start(client, one, home, work)
    with running as process:
        wait_for(lambda: one.engine.waiting > 0 or process.process.poll() is not None)
        assert one.engine.waiting > 0, process.ended()
        process.interrupt()
        wait_for(lambda: one.engine.waiting == 0)
    assert one.engine.cancelled > 0
    assert one.calls() == ()
    assert one.session.outcome is None


def png() -> bytes:
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(b"\0" + b"\x80\x00\x00" * 32 for _ in range(32))
    head = struct.pack(">IIBBBBB", 32, 32, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


@pytest.mark.parametrize("client", [c for c in CLIENTS if c.reads], ids=lambda client: client.id)
def test_an_image_that_a_tool_read_ends_no_conversation(talk, home, work, client):
    (work / "red.png").write_bytes(png())

    def says(prompt):
        if not prompt.startswith("tools:"):
            return "A title"
        return SUMS if results(prompt) else client.reads(str(work / "red.png"))

    one = talk(says)
    assert SUMS in answer_of(client, one, home, work)
    shown = read(one.calls()[-1].prompt)
    assert "[An image that is not shown: the model is given text only.]" in shown
    assert base64.b64encode(png()).decode()[:40] not in shown
    assert any(name.startswith("messages: ") for name in one.session.ignored)


def test_claude_code_goes_on_after_a_server_tool_was_refused(talk, home, work):
    client = CLIENTS[0]

    def says(prompt):
        return SUMS if results(prompt) else tool("WebSearch", query="sums")

    one = talk(says)
    assert SUMS in answer_of(client, one, home, work)
    assert "does not support tool types: web_search" in " ".join(results(read(one.calls()[-1].prompt)))
