"""Access to a run's server: none without the key, from another site's page or under another name, on any route."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from areal_x.engines.fleet.server import Server
from areal_x.engines.vllm.engine import VLLMEngine
from areal_x.engines.vllm.gate import refusal

UPGRADE = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
}
# What vLLM mounts or serves over a websocket, which it lists nowhere, and what it does not have.
UNLISTED = {
    ("GET", "/metrics"),
    ("GET", "/metrics/"),
    ("GET", "/v1/realtime"),
    ("GET", "/"),
    ("POST", "/nothing"),
    ("OPTIONS", "/pause"),
}


def asked(server: Server, method: str, path: str, headers: dict[str, str]) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=240)
    try:
        connection.request(method, path, b"{}" if method == "POST" else None, {"Content-Type": "application/json"} | headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def routes(server: Server) -> Iterator[tuple[str, str]]:
    """All routes of the server: from the list that it logs at its start, and from its own description."""
    for path, methods in re.findall(r"Route: (\S+), Methods: ([A-Z, ]+)", server.log.read_text()):
        yield from ((method, path) for method in methods.split(", "))
    status, description = asked(server, "GET", "/openapi.json", {"Authorization": f"Bearer {server.key}"})
    assert status == 200
    for path, operations in json.loads(description)["paths"].items():
        yield from ((method.upper(), path) for method in operations)


@pytest.mark.server
@pytest.mark.xdist_group("vllm")
def test_no_route_of_a_server_answers_a_stranger(vllm_engine: VLLMEngine) -> None:
    (server,) = vllm_engine._servers
    key = {"Authorization": f"Bearer {server.key}"}
    strangers = {
        "without a key": ({}, 401),
        "with another key": ({"Authorization": "Bearer wrong"}, 401),
        "with the key by another scheme": ({"Authorization": f"Basic {server.key}"}, 401),
        "from a page of another site": (key | {"Origin": "http://evil.example"}, 403),
        "from a page of another port": (key | {"Origin": "http://127.0.0.1:1"}, 403),
        "from a page without a site": (key | {"Origin": "null"}, 403),
        "under another name": (key | {"Host": "evil.example"}, 403),
    }
    found = sorted({*routes(server), *UNLISTED})
    assert len({path for _, path in found}) > 40
    assert {"/pause", "/update_weights", "/collective_rpc", "/health", "/inference/v1/generate"} <= {path for _, path in found}
    answered = {
        (method, path, who): status
        for method, path in found
        for who, (headers, expected) in strangers.items()
        if (status := asked(server, method, path.format_map(Anything()), headers)[0]) != expected
    }
    assert answered == {}
    # A handshake is a GET, and its refusal a 403.
    answered = {path: asked(server, "GET", path.format_map(Anything()), UPGRADE)[0] for path in {path for _, path in found}}
    assert set(answered.values()) == {403}
    assert asked(server, "GET", "/health", key)[0] == 200
    assert asked(server, "GET", "/is_paused", key) == (200, b'{"is_paused":false}')
    assert asked(server, "GET", "/is_paused", key | {"Origin": server.url})[0] == 200


class Anything(dict[str, str]):
    def __missing__(self, name: str) -> str:
        return "1"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "127.0.0.1:8000", "authorization": "Bearer the key"}, None),
        ({"host": "localhost", "authorization": "bearer the key"}, None),
        ({"host": "[::1]:8000", "authorization": "Bearer the key", "origin": "http://[::1]:8000"}, None),
        ({"host": "gpu7:8000", "authorization": "Bearer the key"}, None),
        ({"host": "gpu8:8000", "authorization": "Bearer the key"}, 403),
        ({"host": "localhost.evil.example", "authorization": "Bearer the key"}, 403),
        ({"host": "[", "authorization": "Bearer the key"}, 403),
        ({"authorization": "Bearer the key"}, 403),
        ({"host": "localhost", "origin": "http://localhost.evil.example", "authorization": "Bearer the key"}, 403),
        ({"host": "localhost", "authorization": "Bearer the ke"}, 401),
        ({"host": "localhost", "authorization": "Bearer \xff"}, 401),
        ({"host": "localhost", "authorization": "Bearer "}, 401),
        ({"host": "localhost"}, 401),
    ],
)
def test_what_passes_and_what_does_not(headers: dict[str, str], status: int | None) -> None:
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    found = refusal(raw, "the key", {"127.0.0.1", "localhost", "::1", "gpu7"})
    assert (found[0] if found else None) == status


def test_without_a_key_of_its_own_nothing_passes() -> None:
    assert refusal([(b"host", b"localhost"), (b"authorization", b"Bearer ")], "", {"localhost"}) == (401, "Unauthorized")


def test_two_hosts_or_keys_are_refused() -> None:
    key = (b"authorization", b"Bearer the key")
    assert refusal([(b"host", b"localhost"), (b"host", b"evil.example"), key], "the key", {"localhost"}) is not None
