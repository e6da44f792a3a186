"""Clients whose connection is cut after their response was computed."""

import socket
import threading
from contextlib import contextmanager, suppress

import anthropic
import httpx
import openai
import pytest

from areal_x.agents.gateway.retries import Attempt, SentAnswer, SentAnswers, attempt_at
from tests.agents.gateway.test_gateway import HI


@contextmanager
def cutting(port, cuts):
    """Returns the port of a proxy that reads the first `cuts` responses and forwards none of them."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        left = [cuts]

        def carry(client):
            with client, socket.create_connection(("127.0.0.1", port)) as server:
                sending = threading.Thread(target=pump, args=(client, server), daemon=True)
                sending.start()
                if left[0] > 0:
                    left[0] -= 1
                    said = b""
                    while b"\r\n0\r\n\r\n" not in said:
                        said += server.recv(1 << 16)
                    for one in (server, client):  # the gateway learns of it before the client tries again
                        one.shutdown(socket.SHUT_RDWR)
                else:
                    pump(server, client)
                sending.join()

        def serve():
            while True:
                try:
                    client, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=carry, args=(client,), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


def pump(source, sink):
    """Forwards from one socket to another until either ends; then both do."""
    try:
        while data := source.recv(1 << 16):
            sink.sendall(data)
    except OSError:
        pass
    for one in (source, sink):
        with suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)


def quick(client, monkeypatch):
    monkeypatch.setattr(client, "_calculate_retry_timeout", lambda *_, **__: 0.0)
    return client


@pytest.mark.parametrize("cuts", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_openais_client_that_lost_an_answer_gets_that_one(talk, gateway, monkeypatch, cuts, stream):
    words = iter(["first", "second", "third"])
    one = talk(lambda prompt: next(words))
    with cutting(gateway.port, cuts) as port:
        base = one.session.base_url.replace(str(gateway.port), str(port))
        client = quick(one.client(openai.OpenAI, base_url=base), monkeypatch)
        said = client.chat.completions.create(model="m", messages=HI, stream=stream)
        if stream:
            chunks = list(said)
            id, text = chunks[0].id, "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        else:
            id, text = said.id, said.choices[0].message.content
        assert text == "first"
        assert [call.id for call in one.calls()] == [id]
        assert one.session.state.generated == len("first") + 1
        client.chat.completions.create(model="m", messages=HI)  # the same again, on purpose
        assert len(one.calls()) == 2


def test_so_does_anthropics_and_a_response_can_be_gone_on_with(talk, gateway, monkeypatch):
    words = iter(["first", "second", "third", "fourth"])
    one = talk(lambda prompt: next(words))
    with cutting(gateway.port, 1) as port:
        base = one.session.url.replace(str(gateway.port), str(port))
        client = quick(one.client(anthropic.Anthropic, base_url=base), monkeypatch)
        assert client.messages.create(model="m", messages=HI, max_tokens=9).content[0].text == "first"
    with cutting(gateway.port, 1) as port:
        base = one.session.base_url.replace(str(gateway.port), str(port))
        client = quick(one.client(openai.OpenAI, base_url=base), monkeypatch)
        response = client.responses.create(model="m", input="hi")
        assert response.output_text == "second"
        assert client.responses.create(model="m", input="on", previous_response_id=response.id).output_text == "third"
    assert len(one.calls()) == 3


def test_all_choices_are_given_again(talk, gateway, monkeypatch):
    words = iter("abcdef")
    one = talk(lambda prompt: next(words))
    with cutting(gateway.port, 1) as port:
        base = one.session.base_url.replace(str(gateway.port), str(port))
        client = quick(one.client(openai.OpenAI, base_url=base), monkeypatch)
        said = client.chat.completions.create(model="m", messages=HI, n=3)
    assert [choice.message.content for choice in said.choices] == ["a", "b", "c"]
    assert len(one.calls()) == 3


def test_a_request_that_was_named_has_one_answer(talk):
    words = iter("abcdef")
    one = talk(lambda prompt: next(words))
    said = []
    for name in ("x", "x", "y", "", ""):
        headers = {"authorization": f"Bearer {one.session.key}", "idempotency-key": name}
        answer = httpx.post(f"{one.session.base_url}/chat/completions", json={"messages": HI}, headers=headers)
        said.append(answer.json()["choices"][0]["message"]["content"])
    assert said == ["a", "a", "b", "c", "d"]
    assert len(one.calls()) == 4


def test_an_answer_that_nobody_was_there_to_read_is_no_call(talk, gateway):
    """The client disconnects while its response is written, which is larger than socket buffers."""
    one = talk("x" * 2000)
    gateway._server._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # of what it accepts from now on
    body = b'{"messages":[{"role":"user","content":"hi"}],"n":100,"stream":true}'
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {one.session.key}\r\n"
    with socket.create_connection(("127.0.0.1", gateway.port)) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.sendall(head.encode() + f"content-length: {len(body)}\r\n\r\n".encode() + body)
        assert client.recv(100).startswith(b"HTTP/1.1 200")
    one.until(lambda: not gateway._server.server_state.tasks)
    assert one.calls() == ()
    one.chat()
    assert len(one.calls()) == 1


class Told:
    def __init__(self, id):
        self.id = id


def test_what_is_asked_on_purpose_is_answered_anew():
    first, again = Attempt(b"d", "", 0), Attempt(b"d", "", 1)
    here, there = ("a", 1), ("a", 2)
    answers = SentAnswers()
    assert answers.find_lost(first, here, lambda _: False) is None
    answers.begin(first)
    answers.keep(SentAnswer(first, [Told("1")], here))
    assert answers.find_lost(first, there, lambda _: False) is None  # a first attempt
    assert answers.find_lost(again, there, lambda _: True) is None  # its client is still there
    assert answers.find_lost(Attempt(b"e", "", 1), there, lambda _: False) is None  # another request
    assert answers.find_lost(again, there, lambda client: client == there).answers[0].id == "1"
    assert answers.find_lost(again, here, lambda client: client == there) is None  # it has it now
    answers.begin(first)  # the same for the second time, which failed: its retry is owed an answer of its own
    assert answers.find_lost(again, there, lambda _: False) is None


def test_what_makes_a_request_the_same():
    def at(path="p", body=b"b", **headers):
        return attempt_at(path, headers, body).digest

    assert at() == at()
    assert len({at(), at("q"), at(body=b"c"), at(**{"idempotency-key": "k"})}) == 4
    numbers = ["2", "", "-1", "x", "9" * 5000, "²"]
    assert [attempt_at("p", {"x-stainless-retry-count": n}, b"").number for n in numbers] == [2, 0, 0, 0, 0, 0]
