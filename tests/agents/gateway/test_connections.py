"""Connections without a key: silent ones, endless headers, more than there are file descriptors."""

import contextlib
import logging
import os
import socket
import subprocess
import sys
import textwrap

import httpx
import pytest

from areal_x.agents.gateway import Gateway, connections
from tests.agents.gateway.test_gateway import HI, in_background, post


@pytest.fixture
def small(monkeypatch, run):
    """Starts a gateway with at most 8 connections that waits a moment for headers."""
    started = []

    def start(seconds=0.2, most=8):
        monkeypatch.setattr(connections, "REQUEST_SECONDS", seconds)
        monkeypatch.setattr(connections, "most_connections", lambda: most)

        async def begin():
            served = Gateway()
            await served.start()
            return served

        started.append(run(begin()))
        return started[-1]

    yield start
    for served in started:
        run(served.close())


def connected(served):
    return socket.create_connection(("127.0.0.1", served.port), timeout=30)


def rest(connection):
    """Returns everything received until the other side closes."""
    said = b""
    try:
        while more := connection.recv(1 << 16):
            said += more
    except ConnectionError:
        pass
    return said


def test_headers_without_an_end_are_refused_after_16_kb(small):
    with connected(small(seconds=60)) as one:
        sent = one.send(b"GET /v1/models HTTP/1.1\r\n")
        try:
            while sent < 200 << 20:
                sent += one.send(b"x: " + b"y" * 10_000 + b"\r\n")
        except ConnectionError:
            pass
        assert sent < 20 << 20  # what sockets hold
        assert rest(one).startswith((b"HTTP/1.1 400", b""))
    with connected(small(seconds=60)) as one:
        one.sendall(b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 5_000)
        assert rest(one).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize("begun", [b"", b"GET /v1/mod", b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"])
def test_a_connection_whose_request_does_not_come_is_closed(small, begun):
    with connected(small()) as one:
        one.sendall(begun)
        assert rest(one) == b""


def test_bytes_that_trickle_do_not_put_it_off(small):
    with connected(small()) as one:
        one.sendall(b"GET / HTTP/1.1\r\nx: ")
        one.settimeout(0.02)
        while not is_closed(one):
            with contextlib.suppress(ConnectionError):
                one.send(b"y")


def is_closed(connection):
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_silent_connections_keep_nobody_out_and_are_no_news(small, caplog):
    caplog.set_level(logging.INFO)
    served = small(seconds=60)
    silent = [connected(served) for _ in range(40)]
    assert httpx.get(f"{served.url}/v1/models").status_code == 401
    assert sum(rest(one) == b"" for one in silent[:30]) == 30  # the oldest gave way
    for one in silent:
        one.close()
    assert not [record for record in caplog.records if record.name != "httpx"]


def test_nobody_gets_in_while_each_connection_has_a_request(small, talk):
    served = small(most=2)
    one = talk(held=True, on=served)
    busy = [in_background(post, one, "/v1/chat/completions", {"messages": HI}) for _ in range(2)]
    one.until(lambda: one.engine.waiting == 2)
    with connected(served) as refused:
        assert rest(refused) == b""
    one.do(one.engine.gate.set)
    assert [answer.result().status_code for answer in busy] == [200, 200]
    assert httpx.get(f"{served.url}/v1/models").status_code == 401


def test_answers_are_not_held_back_for_an_acknowledgement(small):
    served = small(seconds=60)
    with httpx.Client() as client:
        client.get(f"{served.url}/v1/models")
        (connection,) = served._server.server_state.connections
        of = connection.transport.get_extra_info("socket")
        assert of.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_an_idle_connection_is_kept_for_the_next_request(small):
    served = small()
    with httpx.Client() as client:
        assert [client.get(f"{served.url}/v1/models").status_code for _ in range(3)] == [401] * 3
        assert len(served._server.server_state.connections) == 1


def test_a_body_without_a_key_is_not_read(small):
    """Neither a session's key, nor one that opens sessions."""
    served = small(seconds=60)
    served.on_open = object()
    for path in ("/sessions", "/v1/chat/completions"):
        with connected(served) as one:
            one.sendall(f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 9000\r\n\r\n".encode())
            assert one.recv(1 << 16).startswith(b"HTTP/1.1 401")


WITHOUT_DESCRIPTORS = """
import asyncio, resource, sys
from areal_x.agents.gateway import Gateway, connections

connections.most_connections = lambda: 10**6

async def main():
    served = Gateway()
    await served.start()
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    print(served.port, flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await served.close()

asyncio.run(main())
"""


def test_a_process_without_descriptors_says_so_once_and_goes_on(tmp_path):
    program = [sys.executable, "-c", textwrap.dedent(WITHOUT_DESCRIPTORS)]
    with (tmp_path / "log").open("wb") as log, subprocess.Popen(program, stdin=-1, stdout=-1, stderr=log) as serving:
        port = int(serving.stdout.readline())
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(200)]
        assert httpx.get(f"http://127.0.0.1:{port}/v1/models", timeout=60).status_code == 401
        for one in silent:
            one.close()
        serving.stdin.close()
        serving.wait()
    said = (tmp_path / "log").read_bytes()
    assert said.count(b"cannot accept connections: Too many open files") == 1
    assert len(said) < 2_000, said[:2_000]
    assert serving.returncode == 0, os.strerror(serving.returncode)
