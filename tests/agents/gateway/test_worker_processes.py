"""A gateway that two processes of its own serve, over TLS: what each of them answers, and what a killed one takes with it."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import ssl
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import anthropic
import httpx
import httpx2
import numpy as np
import openai
import pytest

from areal_x.agents.agent import Agent
from areal_x.agents.chat.merging import merge_calls
from areal_x.agents.chat.parsing import Reply, ToolCall
from areal_x.agents.chat.rendering import PlainRenderer, TemplateRenderer
from areal_x.agents.gateway import Gateway, wire
from areal_x.agents.gateway.exchange import RequestedSampling
from areal_x.agents.gateway.retries import Attempt
from areal_x.agents.gateway.session import StoredResponse
from areal_x.agents.gateway.work import Assignment, WorkOver
from areal_x.agents.gateway.worker import described, load_renderer
from areal_x.agents.gateway.workers import Worker
from areal_x.errors import ConfigError, UserError
from areal_x.hf.tokenizer import load_tokenizer
from areal_x.protocols.engine import Completion, Request, SamplingParams
from areal_x.types import Images, Kept
from tests.agents.certificates import certificate, needs_openssl
from tests.agents.chat.speaking import Says, tokenizer_of
from tests.agents.gateway.scripted import Letters, Scripted, Talk
from tests.agents.gateway.test_gateway import HI, in_background
from tests.agents.gateway.test_network import everything
from tests.agents.gateway.test_over_a_tokenizer import FAMILY, TURNS, WAYS, spelled
from tests.thorough import thorough

pytestmark = needs_openssl


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return certificate(tmp_path_factory.mktemp("certificate"))


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    tokenizer_of(FAMILY).save_pretrained(directory)
    return TemplateRenderer(load_tokenizer(directory))


@pytest.fixture(scope="module")
def served(run, files, renderer):
    """Two worker processes, started once for all tests of this module."""
    gateway = Gateway(certificate=files.file, certificate_key=files.key, workers=2, beat_seconds=0.2)
    run(gateway.start(renderer))
    pids = pids_of(gateway)
    yield gateway
    pids |= pids_of(gateway)
    run(gateway.close())
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def pids_of(gateway):
    return {worker.pid for worker in gateway._workers.workers}


class Both(Talk):
    """A session whose clients speak to both workers in turn, each over a connection that it keeps."""

    def __init__(self, session, engine, run, connections):
        super().__init__(session, engine, run)
        self.connections = connections
        self.turn = 0

    def client(self, kind, **how):
        self.turn += 1
        http = self.connections[self.turn % len(self.connections)]
        http = http.anthropics if kind is anthropic.Anthropic else http
        return kind(**{"base_url": self.session.base_url, "api_key": self.session.key, "http_client": http, **how})

    def close(self):
        self.do(self.session.close)


@contextmanager
def connected(gateway, worker, files):
    """A client whose connection is this worker's: the others are stopped while it begins."""
    others = [pid for pid in pids_of(gateway) if pid != worker.pid]
    how = {"verify": ssl.create_default_context(cafile=files.file), "timeout": 60}
    # Anthropic's client takes none but this package's
    with httpx.Client(**how) as client, httpx2.Client(**how) as client.anthropics:
        for pid in others:
            os.kill(pid, signal.SIGSTOP)
        try:
            for one in (client, client.anthropics):
                assert one.get(f"{gateway.url}/nothing").status_code == 404
        finally:
            for pid in others:
                os.kill(pid, signal.SIGCONT)
        yield client


@pytest.fixture
def clients(served, files):
    """A connection to each of the two."""
    first, second = served._workers.workers
    with connected(served, first, files) as one, connected(served, second, files) as other:
        yield one, other


@pytest.fixture
def talk(served, run, renderer, clients):
    opened = []
    sampling = SamplingParams(max_tokens=500, stop_token_ids=(tokenizer_of(FAMILY).eos_token_id,))

    def begin(*texts, engine=None, limits=None):
        async def open_one():
            says = engine or Says(*(spelled(text, seed) for seed, text in enumerate(texts)))
            return Both(served.open(says, renderer, sampling, limits), says, run, clients)

        opened.append(run(open_one()))
        return opened[-1]

    yield begin
    for one in opened:
        one.close()


def held(says="hello"):
    """An engine that waits for the test. Its text is in tokens that no tokenizer would choose."""
    engine = Scripted(held=True)

    async def generate(request):
        engine.requests.append(request)
        engine.waiting += 1
        try:
            await engine.gate.wait()
        except asyncio.CancelledError:
            engine.cancelled += 1
            raise
        finally:
            engine.waiting -= 1
        tokens = np.asarray(spelled(says, len(engine.requests)), np.int32)
        return Completion(tokens, -np.ones(len(tokens), np.float32), np.full(len(tokens), 7, np.int32), "stop")

    engine.generate = generate
    return engine


# ---- what they serve


@pytest.mark.parametrize("way", WAYS)
def test_a_conversation_that_both_serve_is_one_line_of_the_very_tokens_that_were_generated(talk, way):
    """Each request goes to the other worker than the one before it."""
    one = talk(*TURNS[:2])
    assert WAYS[way](one, 2) == ["Let me see.", "It is raining in Rome, and fine in Paris."]
    assert one.turn == 2
    (item,) = merge_calls(one.calls()).trajectories
    trained = item.trajectory.tokens[item.trajectory.mask].tolist()
    assert trained == [*spelled(TURNS[0], 0), *spelled(TURNS[1], 1)]
    assert item.trajectory.logprobs[item.trajectory.mask].tolist() == [-1.0 - n for n in range(len(trained))]
    prompts = [call.prompt.tolist() for call in one.calls()]
    assert [prompt.tolist() for prompt in one.engine.prompts] == prompts
    assert prompts[1][: len(prompts[0]) + len(spelled(TURNS[0], 0))] == [*prompts[0], *spelled(TURNS[0], 0)]


def test_several_choices_rewards_and_the_end_are_in_one_record(talk, clients):
    one = talk("one", "two", "three")
    said = one.chat(n=2)
    assert sorted(choice.message.content for choice in said.choices) == ["one", "two"]
    later = one.chat()
    key = {"authorization": f"Bearer {one.session.key}"}
    for client, call in zip(clients, (said.id, later.id), strict=True):
        answer = client.post(f"{one.session.url}/reward", json={"reward": 0.5, "call": call}, headers=key)
        assert answer.json() == {"call": call, "reward": 0.5}
        twice = client.post(f"{one.session.url}/reward", json={"reward": 0.5, "call": call}, headers=key)
        assert (twice.status_code, twice.json()["error"]["code"]) == (409, "already_rewarded")
    seen = [client.get(one.session.url, headers=key).json() for client in clients]
    assert [(x["calls"], x["running"], x["rewards"]) for x in seen] == [(3, 0, {said.id: 0.5, later.id: 0.5})] * 2
    assert clients[0].post(f"{one.session.url}/end", headers=key).json()["reward"] == 1.0
    with pytest.raises(openai.ConflictError, match="the session is over"):
        one.chat()
    assert [call.reward for call in one.calls()] == [0.5, None, 0.5]


def test_a_stored_response_is_retrieved_and_deleted_by_either(talk):
    one = talk("4", "5")
    said = one.openai.responses.create(model="m", input="2+2?")
    assert one.openai.responses.retrieve(said.id).output_text == one.openai.responses.retrieve(said.id).output_text == "4"
    one.openai.responses.delete(said.id)
    for _ in range(2):
        with pytest.raises(openai.NotFoundError, match="not found"):
            one.openai.responses.retrieve(said.id)
        with pytest.raises(openai.BadRequestError, match="keeps no response"):
            one.openai.responses.create(model="m", input="and?", previous_response_id=said.id)


def test_tokens_are_counted_and_mistakes_of_clients_are_theirs(talk):
    one = talk("x")
    for _ in range(2):
        assert one.anthropic.messages.count_tokens(model="m", messages=HI).input_tokens > 5
        with pytest.raises(openai.BadRequestError, match="logit_bias"):
            one.chat(logit_bias={"5": 1})
        with pytest.raises(openai.BadRequestError, match="'tokenize'"):
            one.chat(extra_body={"chat_template_kwargs": {"tokenize": "x"}})
    assert one.calls() == ()


def test_no_route_of_either_answers_without_the_key_that_it_needs(served, talk, clients):
    one, other = talk(), talk()
    for client in clients:
        for method, path in everything(served, one.session):
            own = path.startswith(("/work", "/sessions")) and not path.startswith("/sessions/")
            keys = ["", "wrong", one.session.key if own else served.key]
            keys += [other.session.key] if path.startswith("/sessions/") else []
            for key in keys:
                headers = {"authorization": f"Bearer {key}"} if key else {}
                answer = client.request(method, served.url + path, headers=headers, content=b"{}")
                assert answer.status_code == 401, (method, path, key, answer.text)
    served.on_open = served.on_work = None
    assert not one.calls()


def test_plain_http_gets_no_answer(served):
    for _ in range(4):
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://127.0.0.1:{served.port}/v1/models")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_cancels_its_generation(talk, clients, stream):
    one = talk(engine=held())
    headers = {"authorization": f"Bearer {one.session.key}"}
    for count, client in enumerate(clients, 1):
        body = {"messages": HI, "stream": stream}
        if stream:
            with client.stream("POST", f"{one.session.base_url}/chat/completions", json=body, headers=headers) as answer:
                assert next(answer.iter_lines()) == ": waiting"
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post(f"{one.session.base_url}/chat/completions", json=body, headers=headers, timeout=0.5)
        one.until(lambda count=count: one.engine.cancelled == count and one.session.state.running == 0)
    assert one.calls() == ()
    one.do(one.engine.gate.set)
    assert one.chat().choices[0].message.content == "hello"


def test_the_end_cancels_what_still_runs(talk, clients):
    one = talk(engine=held())
    answer = in_background(one.chat)
    one.until(lambda: one.engine.waiting == 1)
    clients[0].post(f"{one.session.url}/end", json={"reward": 1}, headers={"x-api-key": one.session.key})
    with pytest.raises(openai.ConflictError, match="the session is over"):
        answer.result(60)
    assert one.engine.cancelled == 1
    assert one.calls() == ()


def test_an_answer_that_a_client_lost_is_sent_again_by_the_other(talk, clients, monkeypatch):
    """The connection to one worker is cut once it was answered; the next attempt is at the other worker."""
    one = talk("first", "second")
    headers = {"authorization": f"Bearer {one.session.key}"}
    url = f"{one.session.base_url}/chat/completions"
    first = clients[0].post(url, json={"messages": HI}, headers=headers).json()
    numbered = {**headers, "x-stainless-retry-count": "1"}
    assert clients[1].post(url, json={"messages": HI}, headers=numbered).json()["id"] != first["id"]  # it was not lost
    one = talk("first", "second")
    headers["authorization"] = numbered["authorization"] = f"Bearer {one.session.key}"
    url = f"{one.session.base_url}/chat/completions"
    first = clients[0].post(url, json={"messages": HI}, headers=headers).json()
    clients[0].close()
    again = clients[1].post(url, json={"messages": HI}, headers=numbered).json()
    assert (again["id"], again["choices"], again["usage"]) == (first["id"], first["choices"], first["usage"])
    assert [call.id for call in one.calls()] == [first["id"]]


def test_sessions_and_episodes_are_given_out_by_either(served, talk, clients):
    one = talk()
    leases = iter(["a" * 16, "b" * 16])
    took, returned = [], []

    class Source:
        async def take(self, worker, seconds):
            took.append((worker, seconds))
            if (lease := next(leases, None)) is None:
                raise WorkOver
            return Assignment(lease, "key", b'{"id": "7"}', 9.0)

        def renew(self, ids):
            return ids[1:]

        def answer(self, id, answer):
            return (id, answer.result) == ("a" * 16, 1.0)

        def give_back(self, id):
            returned.append(id)
            return True

    async def opened(label):
        return one.session if label == "mine" else None

    served.on_open, served.on_work = opened, Source()
    key = {"authorization": f"Bearer {served.key}"}
    for client, lease in zip(clients, ("a", "b"), strict=True):
        made = client.post(f"{served.url}/sessions", json={"label": "mine"}, headers=key)
        assert (made.status_code, made.json()) == (201, one.session.about())
        assert client.post(f"{served.url}/sessions", headers=key).status_code == 503
        answer = client.post(f"{served.url}/work", json={"worker": "w", "wait_seconds": 3}, headers=key).json()
        assert answer == {"lease": lease * 16, "key": "key", "lease_seconds": 9.0, "task": {"id": "7"}}
        assert client.post(f"{served.url}/work/alive", json={"leases": ["a", "c"]}, headers=key).json() == {"lost": ["c"]}
        counts = client.post(f"{served.url}/work/{lease * 16}/answer", json={"result": 1.0}, headers=key).json()
        assert counts == {"counts": lease == "a"}
        assert client.post(f"{served.url}/work/{lease}/return", headers=key).json() == {"counts": True}
    assert client.post(f"{served.url}/work", headers=key).json() == {"over": True}
    assert took == [("w", 3.0), ("w", 3.0), ("", 20.0)]
    assert returned == ["a", "b"]
    served.on_open = served.on_work = None


def test_connections_are_spread_over_both(served, files):
    """Of many that are open at once, each serves some."""
    trusting = ssl.create_default_context(cafile=files.file)

    async def open_many():
        writers = [(await asyncio.open_connection("127.0.0.1", served.port, ssl=trusting))[1] for _ in range(40)]
        found = [len(await worker.clients()) for worker in served._workers.workers]
        for writer in writers:
            writer.close()
        return found

    counts = asyncio.run_coroutine_threadsafe(open_many(), served_loop(served)).result(60)
    assert min(counts) >= 4, counts


def served_loop(gateway):
    return gateway._workers._keeping[0].get_loop()


# ---- what a killed one takes with it


def test_a_killed_worker_takes_its_requests_and_no_session_and_another_starts(served, talk, files, clients, caplog):
    one, other = talk(engine=held()), talk("still here", "and now")
    url = f"{one.session.base_url}/chat/completions"
    headers = {"authorization": f"Bearer {one.session.key}"}
    first = served._workers.workers[0]
    before = first.pid
    answer = in_background(lambda: clients[0].post(url, json={"messages": HI}, headers=headers))
    one.until(lambda: one.engine.waiting == 1)
    os.kill(before, signal.SIGKILL)
    with pytest.raises(httpx.TransportError):
        answer.result(60)
    one.until(lambda: one.engine.cancelled == 1 and one.session.state.running == 0)
    other.connections = [clients[1]]
    assert other.chat().choices[0].message.content == "still here"
    one.do(one.engine.gate.set)
    again = clients[1].post(url, json={"messages": HI}, headers={**headers, "x-stainless-retry-count": "1"}).json()
    assert again["choices"][0]["message"]["content"] == "hello"
    assert [call.id for call in one.calls()] == [again["id"]]
    one.until(lambda: first.pid != before and first.serves)
    with connected(served, first, files) as client:
        other.connections = [client]
        assert other.chat().choices[0].message.content == "and now"
    assert len(other.calls()) == 2
    said = [record.message for record in caplog.records if "worker of the gateway" in record.message]
    assert len(said) == 1
    assert "was killed by SIGKILL" in said[0]


def test_an_answer_that_a_killed_worker_may_not_have_sent_counts_only_if_somebody_has_it(served, talk, run):
    one = talk("first", "second", "third")
    worker = Worker(served._workers)

    async def answered(id):
        attempt = Attempt(id.encode(), "", 0)
        worker._serve("begin", one.session.id, [id], attempt, RequestedSampling(), [])
        request = Request(np.arange(4, dtype=np.int32), SamplingParams())
        await worker._serve("generate", one.session.id, id, request)
        worker._serve("finish", one.session.id, [[id, Reply("x"), None]], attempt, ("127.0.0.1", 5), None)
        return attempt

    attempt = run(answered("a"))
    one.do(worker._serve, "sent", one.session.id, ["a"])
    lost = run(answered("b"))
    assert [call.id for call in one.calls()] == ["a", "b"]
    one.do(worker._end)
    assert [call.id for call in one.calls()] == ["a"]
    again = Attempt(lost.digest, "", 1)
    found = run(worker._serve("find_lost", one.session.id, again, ("127.0.0.1", 6)))
    assert [(x.id, x.answer.reply.content) for x in found.answers] == [("b", "x")]
    assert [call.id for call in one.calls()] == ["a", "b"]
    assert attempt != lost


ALONE = """
import asyncio, sys
from areal_x.agents.chat.rendering import TemplateRenderer
from areal_x.agents.gateway import Gateway
from areal_x.hf.tokenizer import load_tokenizer

async def main():
    gateway = Gateway(workers=1)
    await gateway.start(TemplateRenderer(load_tokenizer(sys.argv[1])))
    print(gateway._workers.workers[0].pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@thorough  # imports of two processes, one after the other
def test_workers_end_with_the_run_however_it_ends(renderer):
    command = [sys.executable, "-c", ALONE, renderer.tokenizer.name_or_path]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as alone:
        pid = int(alone.stdout.readline())
        os.kill(pid, signal.SIGSTOP)  # it cannot notice by itself
        alone.kill()
        alone.wait()
    while lives(pid):
        pass


def lives(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] != "Z"
    except OSError:
        return False


# ---- settings, and the renderer


def test_what_workers_cannot_render_is_refused_at_the_start(run, renderer, tmp_path):
    with pytest.raises(UserError, match="needs the renderer"):
        run(Gateway(workers=1).start())
    for other in (Letters(), TemplateRenderer(tokenizer_of(FAMILY)), PlainRenderer(tokenizer_of(FAMILY))):
        with pytest.raises(UserError, match=r"rendering = 'transformers', or gateway\.workers = 0"):
            run(Gateway(workers=1).start(other))
    with pytest.raises(ConfigError, match="rendering = 'server'"):
        Agent(solve=print, gateway=Gateway(workers=1), rendering="server").setup(renderer.tokenizer)
    with pytest.raises(UserError, match=r"gateway\.workers"):
        Gateway(workers=-1)


def test_a_session_has_the_renderer_that_the_workers_have(served, run):
    async def opened():
        served.open(Scripted(), Letters(), SamplingParams())

    with pytest.raises(UserError, match="the one renderer"):
        run(opened())


def test_a_tokenizer_that_changed_meanwhile_is_refused(renderer, tmp_path):
    tokenizer = tokenizer_of(FAMILY)
    tokenizer.save_pretrained(tmp_path)
    about = described(TemplateRenderer(load_tokenizer(tmp_path)))
    loaded = load_tokenizer(tmp_path)
    loaded(["a", "b c d e f g"], truncation=True, max_length=4)  # which changes nothing
    assert described(TemplateRenderer(loaded)) == about
    assert load_renderer(about).tokenizer.chat_template == tokenizer.chat_template
    (tmp_path / "chat_template.jinja").write_text(tokenizer.chat_template + " ")
    with pytest.raises(UserError, match="is not the run's"):
        load_renderer(about)


# ---- the channel


def test_what_is_sent_arrives_as_it_was():
    arrays = [np.arange(6, dtype=kind).reshape(2, 3) for kind in (np.int32, np.float32, np.int16)]
    reply = Reply("é\ud800" * wire.LONG, "é\ud800", (ToolCall("id", "add", '{"a": 1}'),))
    sampling = SamplingParams(stop_token_ids=(3, 4))
    completion = Completion(arrays[0][0], arrays[1][0], arrays[0][1], "stop", arrays[2], Kept(np.ones(2, int), np.arange(2)))
    request = Request(arrays[0][0], sampling, images=Images(arrays[1], np.asarray([[1, 1, 2]], np.int32)), stop=("\n",))
    value = [None, True, 1.5, "x", b"\0bytes", ("a", ["b"]), {"k": (1,)}, reply, sampling, StoredResponse("i", b"{}", [])]
    assert wire.loads(wire.dumps(value)) == value
    found, asked = wire.loads(wire.dumps([completion, request]))
    for name in ("tokens", "logprobs", "versions", "experts"):
        one, other = getattr(found, name), getattr(completion, name)
        assert one.dtype == other.dtype
        assert one.tolist() == other.tolist()
        assert one.flags.writeable
    assert (found.finish_reason, found.kept.counts.tolist()) == ("stop", [1, 1])
    assert (asked.sampling, asked.stop, asked.images.patches.tolist()) == (sampling, ("\n",), arrays[1].tolist())


def test_nothing_but_known_classes_and_numbers_is_sent_or_made():
    for value in (object(), {1, 2}, np.asarray([object()]), np.asarray(["x"])):
        with pytest.raises(TypeError, match="cannot be sent"):
            wire.dumps([value])

    def message(plain, rest=b""):
        header = str(plain).encode()
        return wire.HEADER.pack(len(header)) + header + rest

    pickled = pickle.dumps(print)
    for plain in ([wire.OBJECT, "Popen", 1], [wire.ARRAY, len(pickled), "|O", [1]], [9, 1]):
        with pytest.raises(ValueError, match="received"):
            wire.loads(message(plain, pickled).replace(b"'", b'"'))
    for size in (-1, 3):
        with pytest.raises(ValueError, match="shorter"):
            wire.loads(message([wire.BYTES, size], b"ab"))
