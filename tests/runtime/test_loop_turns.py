"""Nothing that a model, an agent or a dataset says keeps the event loop for long.

Each case is sent through the real gateway or a real workflow, on a loop whose every callback is timed: by the CPU time of the
loop's own thread, so that a busy machine makes no difference.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest

from areal_x.agents.chat.dialogue import ChatEngine, ChatRequest
from areal_x.agents.chat.rendering import TemplateRenderer
from areal_x.agents.environment import Environment
from areal_x.agents.gateway import Gateway
from areal_x.agents.gateway_workflow import GatewayWorkflow
from areal_x.agents.multi_turn import MultiTurn, ToolUse
from areal_x.agents.tools.calculator import Calculator
from areal_x.agents.tools.mcp_tools import McpServer
from areal_x.agents.tools.toolbox import Toolbox, tool_schema
from areal_x.protocols.engine import Completion, SamplingParams
from areal_x.runtime import loop as loops
from areal_x.types import Scored, Task
from areal_x.workflows.single_turn import SingleTurn
from tests.agents.chat.speaking import tokenizer_of
from tests.thorough import further

LONGEST = 0.05  # seconds of a turn
CONTEXT = 32_000
MEGABYTE = 2**20
TOKENIZER = tokenizer_of("qwen3")
SAMPLING = SamplingParams(max_tokens=20_000, stop_token_ids=(TOKENIZER.eos_token_id,))


class Watched(asyncio.SelectorEventLoop):
    """Keeps the longest of its callbacks."""

    longest, what = 0.0, ""

    def call(self, handle, run):
        before = time.thread_time()
        run(handle)
        took = time.thread_time() - before
        if took > self.longest:
            self.longest, self.what = took, repr(handle)


@pytest.fixture(scope="module")
def watched():
    """Runs a coroutine on a watched loop and asserts that no turn was long.

    What makes a coroutine is tried again: a long turn is long each time, one in a cache that another process emptied is not.
    """
    loop = Watched()
    run = asyncio.Handle._run
    patch = pytest.MonkeyPatch()
    patch.setattr(asyncio.Handle, "_run", lambda self: self._loop.call(self, run) if self._loop is loop else run(self))
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    with loops.short_collections():  # as in a run
        thread.start()

        def do(work, bound=LONGEST):
            for _ in range(3 if callable(work) else 1):
                loop.longest = 0.0
                result = asyncio.run_coroutine_threadsafe(work() if callable(work) else work, loop).result(120)
                if loop.longest <= bound:
                    break
            assert loop.longest <= bound, f"{1000 * loop.longest:.0f} ms: {loop.what[:300]}"
            return result

        do(asyncio.sleep(0), 9)
        yield do
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
    patch.undo()
    loop.close()


class Speaks:
    """An engine that says these tokens, whatever it is asked."""

    context, version = CONTEXT, 0

    def __init__(self, *texts):
        self.texts = list(texts)

    async def generate(self, request):
        await asyncio.sleep(0)
        said = self.texts.pop(0) if len(self.texts) > 1 else self.texts[0]
        tokens = np.asarray(said[: request.sampling.max_tokens], np.int32)
        return Completion(tokens, np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.int32), "stop")


def tokens(text):
    return [*TOKENIZER.encode(text, add_special_tokens=False), TOKENIZER.eos_token_id]


WORD = tokens("is ")[0]
LONG = [WORD] * 20_000


@pytest.fixture(scope="module")
def gateway(watched):
    made = Gateway()
    watched(made.start())
    yield made
    watched(made.close())


def doubling(levels):
    refs = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(levels)}
    return {"$defs": refs | {f"d{levels}": {}}, "$ref": "#/$defs/d0", "type": "object"}


def nested(depth):
    return b"[" * depth + b"]" * depth


def chat(content="hi", **more):
    return {"messages": [{"role": "user", "content": content}], **more}


def tool(parameters, name="f"):
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def raw(text):
    return b'{"messages":[{"role":"user","content":"' + text + b'"}]}'


def format_of(schema):
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def called(arguments):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]}


PATTERN = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(a+)+$"}}, "required": ["a"]}
HARD = json.dumps({"a": "a" * 40 + "!"})
CHAT = {
    "a deep body": b'{"messages":[],"metadata":' + nested(10**6) + b"}",
    "a body as deep as allowed": b'{"messages":[{"role":"user","content":"x"}],"metadata":' + nested(60) + b"}",
    "a million values": b'{"messages":[],"metadata":[' + b"1," * 10**6 + b"1]}",
    "as many values as allowed": chat(metadata=[1] * 19_000),
    "a million wrong messages": b'{"messages":[' + b"{}," * 10**6 + b"{}]}",
    "19,000 wrong messages": b'{"messages":[' + b"{}," * 9_000 + b"{}]}",
    "9,000 wrong parts": chat([{}] * 9_000),
    "19,000 unknown parameters": chat(**{f"x{i}": 1 for i in range(19_000)}),
    "a number of a million digits": b'{"messages":[{"role":"user","content":"x"}],"metadata":' + b"9" * 10**6 + b"}",
    "2,000 numbers of 4,000 digits": b'{"messages":[],"metadata":[' + b",".join([b"9" * 4000] * 1900) + b"]}",
    "8 MB of escapes": raw(b"\\n" * (4 * MEGABYTE - 100)),
    "8 MB of quotes": raw(b'\\"' * (4 * MEGABYTE - 100)),
    "8 MB of escaped characters": raw(b"\\u4e00" * (8 * MEGABYTE // 6 - 100)),
    "4 MB of a letter": chat("a" * 4 * MEGABYTE),
    "4 MB of blanks": chat(" " * 4 * MEGABYTE),
    "4 MB of words": chat("is it raining? " * (4 * MEGABYTE // 15)),
    "300 KB of characters": chat("一二三" * 10**5),
    "more than 8 MB": chat("a" * 9 * MEGABYTE),
    "words that mark a place": chat("".join(f"placeholder{i} " for i in range(100_000))),
    "6,000 messages": {"messages": [{"role": "user", "content": "x"}] * 6_000},
    "a call's deep arguments": called("[" * 10**5),
    "a call's many arguments": called("[" + "1," * 10**5 + "1]"),
    "a call's long arguments": called(json.dumps({"a": "\n" * 10**6})),
    "a tool of 100,000 properties": chat(tools=[tool({"type": "object", "properties": {f"p{i}": {} for i in range(100_000)}})]),
    "a tool of 9,000 properties": chat(tools=[tool({"type": "object", "properties": {f"p{i}": {} for i in range(9_000)}})]),
    "200 tools": chat(tools=[tool({"type": "object", "properties": {f"p{i}": {}}}, f"f{i}") for i in range(200)]),
    "a pattern that goes back": chat("x", tools=[tool(PATTERN)]),
    "references that double": chat(tools=[tool(doubling(40))]),
    "a reply and a pattern that goes back": (chat(response_format=format_of(PATTERN)), tokens(HARD)),
    "a reply and references that double": (chat(response_format=format_of(doubling(40))), tokens("{}")),
    "a long reply": (chat(), LONG),
    "a long reply with log-probabilities": (chat(logprobs=True), LONG),
    "a long reply in a stream": (chat(stream=True), LONG),
    "4 long replies with log-probabilities": (chat(n=4, logprobs=True), LONG),
    "a long reply with stops": (chat(stop=["raining", "is is is nothing"]), [*LONG[:-20], *tokens(" it is raining now")]),
    "a reply of calls begun": (chat(tools=[tool({})]), tokens("<tool_call>") [:-1] * 15_000),
    "a reply of deep calls": (chat(tools=[tool({})]), tokens("<tool_call>" + '{"name":"f","arguments":' + "[" * 8_000)),
    "2,000 calls in a reply": (
        chat(tools=[tool({})]),
        tokens('<tool_call>{"name":"f","arguments":{}}</tool_call>')[:-1] * 900,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CHAT)
def test_the_gateway_answers_any_request_in_short_turns(watched, gateway, case):
    body, said = CHAT[case] if isinstance(CHAT[case], tuple) else (CHAT[case], tokens("fine"))
    answer = sent(watched, gateway, "/v1/chat/completions", body, said)
    assert answer.status_code in (200, 400, 413)
    assert len(answer.content) < 1000 or answer.status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/responses", {"input": "x", "include": ["message.output_text.logprobs"]}, LONG),
        ("/v1/responses", {"input": [{"role": "user", "content": [{}] * 9_000}]}, LONG),
        ("/v1/responses", {"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "[" * 10**5}]}, LONG),
        ("/v1/messages", {"max_tokens": 20_000, "stream": True, **chat()}, LONG),
        (
            "/v1/messages",
            {"max_tokens": 9, **chat([{"type": "tool_result", "tool_use_id": "1", "content": "a" * 10**6}])},
            LONG,
        ),
        ("/v1/messages", {"max_tokens": 9, **chat([{"type": "x"}] * 9_000)}, LONG),
        (
            "/v1/messages",
            {"max_tokens": 20_000, **chat(tools=[{"name": "f", "input_schema": {"type": "object"}}])},
            tokens('<tool_call>{"name":"f","arguments":{"a":' + "[" * 9_000),
        ),
        ("/v1/messages/count_tokens", chat("a" * 300_000), LONG),
        ("/v1/messages/count_tokens", chat(tools=[{"name": "f", "input_schema": doubling(40)}]), LONG),
        ("/reward", b'{"reward":' + b"9" * 10**6 + b"}", LONG),
        ("/reward", b'{"reward":' + nested(8_000) + b"}", LONG),
        ("/end", b'{"reward":' + b"[1," * 5_000, LONG),
    ],
)
def test_so_do_the_other_routes(watched, gateway, path, body, said):
    answer = sent(watched, gateway, path, body, said)
    assert answer.status_code in (200, 400, 413)


def sent(watched, gateway, path, body, said):
    """The answer to one request, while the loop is watched."""

    content = body if isinstance(body, bytes) else json.dumps(body).encode()

    async def exchange():
        with gateway.open(Speaks(said), TemplateRenderer(TOKENIZER), SAMPLING) as session:
            headers = {"authorization": f"Bearer {session.key}"}
            return await elsewhere(lambda: httpx.post(session.url + path, content=content, headers=headers, timeout=110))

    return watched(exchange)


FRAGMENTS = (
    "is it raining? ", "a", " ", "\n", "\\", '"', "一二三", "\U0001f600", "\ud800", "<tool_call>", "</tool_call>", "{", "}",
    "[", "]", ",", ":", "</think>", "placeholder1 ", "<|im_end|>", "^(a+)+$", "9", "-", "null", '{"name":"f","arguments":',
)  # fmt: skip
FIELDS = (
    "role", "content", "type", "text", "tool_calls", "function", "name", "arguments", "id", "parameters", "properties", "$ref",
    "$defs", "allOf", "anyOf", "pattern", "enum", "items", "description", "stop", "stream", "n", "logprobs", "max_tokens",
    "temperature", "top_p", "tools", "tool_choice", "response_format", "json_schema", "schema", "strict", "metadata", "input",
    "system", "tool_call_id", "seed", "reward", "user", "stop_sequences", "input_schema", "image_url", "url",
)  # fmt: skip


def random_text(rng, room=100_000):
    text = "".join(FRAGMENTS[i] for i in rng.integers(len(FRAGMENTS), size=int(rng.integers(1, 5))))
    return (text * int(10 ** rng.uniform(0, 4.7)))[:room]


def random_value(rng, room=500_000):
    """A text of about this many characters at most."""
    kind = rng.integers(7)
    if room < 100 or kind < 2:
        return random_text(rng, room)
    if kind == 2:
        return [0, 1, -1, 1.5, 10**400, float("nan"), True, False, None][rng.integers(9)]
    if kind == 3:
        value = random_value(rng, room // 9)
        for _ in range(int(10 ** rng.uniform(0, 2.5))):
            value = [value]
        return value
    if kind == 4:
        value = random_value(rng, room // 9)
        return [value] * int(min(10 ** rng.uniform(0, 4), 1 + room / (1 + len(repr(value)))))
    return {str(rng.choice(FIELDS)): random_value(rng, room // 3) for _ in range(int(rng.integers(1, 6)))}


def random_body(rng):
    """Half of them requests that can be answered, of random texts and schemas; of the others any part may be anything."""
    said = {"role": str(rng.choice(["user", "assistant"])), "content": random_text(rng)}
    body = {"messages": [said, {"role": "user", "content": random_text(rng)}], "max_tokens": 20_000}
    if rng.random() < 0.5:
        optional = {
            "tools": [tool({"type": "object", "properties": {"a": random_value(rng, 2_000)}}, f"f{i}") for i in range(3)],
            "response_format": format_of({"type": "object", "properties": {"a": random_value(rng, 2_000)}}),
            "stop": random_text(rng)[:100] or "a",
            "stream": True,
            "logprobs": True,
            "n": 3,
            "metadata": {"a": random_text(rng)[:400]},
        }
        return body | {name: optional[name] for name in optional if rng.random() < 0.25}
    body["messages"][0]["content"] = random_value(rng)
    for name in rng.choice(FIELDS, size=int(rng.integers(1, 6))):
        body[str(name)] = random_value(rng)
    data = json.dumps(body, ensure_ascii=bool(rng.integers(2))).encode(errors="surrogatepass")[: 4 * MEGABYTE]
    if rng.random() < 0.3:
        at, length = int(rng.integers(len(data))), int(rng.integers(1, 50))
        data = data[:at] + data[at : at + length] * int(rng.integers(0, 3)) + data[at + length :]
    return data


@pytest.mark.parametrize("seed", [0, *further(*range(1, 8))])
def test_random_requests_are_answered_in_short_turns(watched, gateway, seed):
    rng = np.random.default_rng(seed)
    for _ in range(20):
        path = str(
            rng.choice(["/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/messages/count_tokens", "/reward"])
        )
        body, reply = random_body(rng), random_text(rng)[:50_000].encode(errors="replace").decode()
        answer = sent(watched, gateway, path, body, tokens(reply))
        assert answer.status_code in (200, 400, 413), (path, body[:500], answer.text[:500])


def test_a_body_in_chunks_of_a_byte_is_read_in_short_turns(watched, gateway):
    """And so are many headers, with no key."""
    chunks = (
        b"POST /v1/models HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * 40_000 + b"0\r\n\r\n"
    )
    headers = b"GET /v1/models HTTP/1.1\r\n" + b"a:\r\n" * 4_000 + b"\r\n"

    def send(data):
        with socket.create_connection(("127.0.0.1", gateway.port)) as one:
            one.sendall(data)
            return one.recv(100)

    for data in (chunks, headers):
        assert watched(elsewhere(lambda data=data: send(data))).startswith(b"HTTP/1.1 40")


async def elsewhere(function):
    """In a thread, as agents are in other processes."""
    return await asyncio.get_running_loop().run_in_executor(None, function)


class Here:
    async def score(self, task, text):
        return Scored(0.0)

    async def close(self): ...


def nothing(task, text):
    return 0.0


class Echo:
    """A tool that says as much as it is told to."""

    name, schema = "echo", tool_schema("echo", "", {"type": "object", "properties": {"size": {"type": "integer"}}})

    async def call(self, arguments):
        return "is " * arguments.get("size", 1)


class Picky:
    name, schema = "picky", tool_schema("picky", "", PATTERN)

    async def call(self, arguments):
        return ""


def use(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>\n'


def compute(expression):
    return use("calculator", json.dumps({"expression": expression}))


SAID = {
    "a power of ten to round to": compute("round(1, -1000000000)"),
    "a power": compute("9**9**9**9"),
    "long sums": compute("+".join(["gcd(7**1100,3**2000)"] * 90)) * 5,
    "many brackets": compute("(" * 1990),
    "a pattern that goes back": use("picky", HARD),
    "deep arguments": use("echo", "[" * 5_000 + "]" * 5_000),
    "a deep value": use("echo", '{"size":' + "[" * 900 + "]" * 900 + "}"),
    "a large number": use("echo", '{"size":' + "9" * 4_400 + "}"),
    "many arguments": use("echo", "{" + ",".join(f'"p{i}":1' for i in range(3_000)) + "}"),
    "one key often": use("echo", "{" + ",".join(['"size":1'] * 3_000) + "}"),
    "a long name": use("e" * 10_000, "{}"),
    "a long answer": use("echo", '{"size": 10000000}'),
    "many calls": use("echo", "{}") * 700,
    "calls begun": "<tool_call>" * 15_000,
    "no number": use("echo", '{"size": NaN}') + use("echo", '{"size": 1e999}'),
    "half a character": use("echo", '{"size": "\\ud800"}'),
}


@pytest.mark.parametrize("case", SAID)
def test_tools_are_called_in_short_turns(watched, case):
    ready = ToolUse(nothing, tools=(Calculator(), Echo(), Picky()), max_turns=3, sampling=SAMPLING).setup(TOKENIZER)
    ready = replace(ready, pool=Here())
    task = Task("t", [{"role": "user", "content": "x"}])
    watched(lambda: ready.run(task, Speaks(tokens(SAID[case]), tokens("fine"))))


class Game:
    """An environment that shows what it is told to."""

    def __init__(self, shows):
        self.shows = shows

    def reset(self, **_):
        return self.shows(), {}

    def step(self, action):
        return self.shows(), 0.0, False, False, {}


async def failing(work):
    """Parses, whether the text is refused or not."""
    try:
        return await work
    except Exception as error:
        return error


@pytest.mark.parametrize(
    "shows",
    [lambda: "is " * 10**6, lambda: list(range(300_000)), lambda: {"a": ["is "] * 300_000}, lambda: "a" * 4_000_000],
)
def test_an_environment_is_shown_in_short_turns(watched, shows):
    game = Environment(Game, {"shows": shows}, turns=2, sampling=SAMPLING).setup(TOKENIZER)
    watched(failing(game.run(Task("t", ""), Speaks(LONG))))


@pytest.mark.parametrize(
    "prompt",
    ["is it " * 10**6, "a" * 10**6, [{"role": "user", "content": "is it " * 10**6}]],
    ids=["words", "a letter", "messages"],
)
@pytest.mark.parametrize("workflow", [SingleTurn, MultiTurn])
def test_a_datasets_prompt_is_made_tokens_of_in_short_turns(watched, workflow, prompt):
    ready = replace(workflow(nothing, sampling=SAMPLING).setup(TOKENIZER), pool=Here())
    watched(failing(ready.run(Task("t", prompt), Speaks(LONG))))


def test_what_a_try_is_told_is_thought_of_beside_the_loop(watched):
    def tell(task, text, reward):
        end = time.thread_time() + 2 * LONGEST
        while time.thread_time() < end:
            pass
        return "again"

    ready = replace(MultiTurn(nothing, feedback=tell, sampling=SAMPLING).setup(TOKENIZER), pool=Here())
    watched(ready.run(Task("t", "x"), Speaks(LONG)))


def test_a_tree_of_many_branches_becomes_trajectories_in_short_turns(watched):
    class Plays(GatewayWorkflow):
        async def run(self, task, engine):
            with await self.open(engine) as session:
                ask = ChatEngine(session.renderer, session.engine)
                for number in range(100):
                    await ask.answer(branch(number), str(number))
                for call in ask.calls:
                    session.state.begin([call.id], 0)
                    session.state.finish(call, 0)
                return await self.episode(session, Scored(1.0))

    def branch(number):
        return ChatRequest(({"role": "user", "content": f"is it {number}? " + "is it raining? " * 1000},), sampling=SAMPLING)

    ready = Plays(sampling=SAMPLING).setup(TOKENIZER)

    async def play():
        try:
            return await ready.run(Task("t", "x"), Speaks(LONG[:50]))
        finally:
            await ready.close()

    assert len(watched(play()).trajectories) == 100


@pytest.mark.parametrize("kind", ["a text", *further("many", "values", "escapes")])
def test_what_a_tools_server_answers_is_read_in_short_turns(watched, kind):
    pytest.importorskip("mcp")

    async def call():
        toolbox = Toolbox(
            [McpServer((sys.executable, str(Path(__file__).parents[1] / "agents" / "tools" / "mcp_server_script.py")))]
        )
        try:
            await toolbox.setup()
            return await toolbox.call("answers", json.dumps({"kind": kind}))
        finally:
            await toolbox.close()

    watched(call())
