"""The HTTP client, against scripted sockets and a server of aiohttp."""

from __future__ import annotations

import asyncio
import gc
import json
import ssl
import weakref
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from areal_x.engines.fleet import http
from areal_x.engines.fleet.http import Answer, Disconnected, Pool, Unreachable
from areal_x.engines.vllm.client import VLLMClient
from areal_x.errors import UserError
from areal_x.runtime import open_files
from tests.rollout.fakes import until

T = TypeVar("T")
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@dataclass
class Server:
    """Answers each request with the next of its scripts, piece by piece; None closes the connection, and so does the end of the
    scripts."""

    scripts: list[Sequence[bytes | None]]
    connections: int = 0
    open: int = 0
    received: list[bytes] = field(default_factory=list)
    url: str = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0] or 0)
                self.received.append(head + await reader.readexactly(length))
                for piece in self.scripts.pop(0) if self.scripts else [None]:
                    if piece is None:
                        return
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.open -= 1
            writer.close()


def talk(server: Server, work: Callable[[Pool], Awaitable[T]]) -> T:
    async def main() -> T:
        listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
        server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        try:
            with closing(Pool(server.url, "key")) as pool:
                return await work(pool)
        finally:
            await until(lambda: server.open == 0)
            listening.close()

    return asyncio.run(main())


async def ask(pool: Pool) -> Answer:
    return await pool.request("POST", "/path", b"{}")


def chunked(body: bytes, size: int) -> bytes:
    chunks = [body[i : i + size] for i in range(0, len(body), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in [*chunks, b""])


FRAMINGS: dict[str, Callable[[bytes], bytes]] = {
    "length": lambda body: b"Content-Length: %d\r\n\r\n%s" % (len(body), body),
    "chunks": lambda body: b"transfer-encoding: chunked\r\n\r\n" + chunked(body, 7),
    "chunks and more headers": lambda body: (
        b"Server: x\r\nTransfer-Encoding: chunked\r\nDate: today\r\n\r\n" + chunked(body, 1)
    ),
    "length, then closed": lambda body: b"Connection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body),
    "the end of the connection": lambda body: b"Connection: close\r\n\r\n" + body,
}
KEPT = {name for name in FRAMINGS if "close" not in name and "end" not in name}
BODIES = st.binary(max_size=60)


def pieces(response: bytes, cuts: Sequence[int]) -> list[bytes]:
    places = sorted({0, len(response), *(cut % (len(response) + 1) for cut in cuts)})
    return [response[a:b] for a, b in pairwise(places)]


@given(st.sampled_from(sorted(FRAMINGS)), BODIES, st.lists(st.integers(0, 300), max_size=5), st.booleans())
def test_a_response_is_read_whole_however_it_is_framed_and_wherever_it_is_divided(
    framing: str, body: bytes, cuts: list[int], continues: bool
) -> None:
    before = b"HTTP/1.1 100 Continue\r\n\r\n" if continues else b""
    response = before + b"HTTP/1.1 503 Busy\r\n" + FRAMINGS[framing](body)
    end = [] if framing in KEPT else [None]
    server = Server([[*pieces(response, cuts), *end], [OK]])

    async def twice(pool: Pool) -> tuple[Answer, Answer]:
        first = await ask(pool)
        if end:
            await until(lambda: server.open == 0)
        return first, await ask(pool)

    assert talk(server, twice) == ((503, body), (200, b"ok"))
    assert server.connections == (1 if framing in KEPT else 2)


@given(st.sampled_from(["length", "chunks", "length, then closed"]), st.binary(min_size=1, max_size=30), st.integers(0, 300))
def test_a_response_that_is_cut_short_is_an_error_and_may_be_asked_for_again_only_before_its_body(
    framing: str, body: bytes, cut: int
) -> None:
    response = b"HTTP/1.1 200 OK\r\n" + FRAMINGS[framing](body)
    cut %= len(response)
    with pytest.raises(ConnectionError) as error:
        talk(Server([[response[:cut], None]]), ask)
    assert isinstance(error.value, Disconnected) == (cut < response.index(b"\r\n\r\n") + 4)


@pytest.mark.parametrize(
    "response",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * (http.HEAD_BYTES + 1),
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
    ],
    ids=["another protocol", "two lengths", "an endless head", "another protocol from here on"],
)
def test_what_is_no_http_response_is_an_error_and_its_connection_is_closed(response: bytes) -> None:
    server = Server([[response]])

    async def work(pool: Pool) -> None:
        with pytest.raises(ConnectionError):
            await ask(pool)
        await until(lambda: server.open == 0)

    talk(server, work)


def test_what_a_server_sends_unasked_answers_no_later_request() -> None:
    stale = b"HTTP/1.1 200 OK\r\nContent-Length: 40\r\n\r\n"  # a body as long as the next response
    server = Server([[OK + stale], [OK]])

    async def work(pool: Pool) -> list[Answer]:
        return [await ask(pool) for _ in range(2)]

    assert len(OK) == 40
    assert talk(server, work) == [(200, b"ok")] * 2


def test_requests_in_flight_have_a_connection_each_and_later_ones_use_them_again() -> None:
    server = Server([[OK]] * 12)

    async def work(pool: Pool) -> None:
        for _ in range(3):
            await asyncio.gather(*(ask(pool) for _ in range(4)))

    talk(server, work)
    assert server.connections == 4


def test_an_idle_connection_is_closed_after_a_time_and_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "KEEP_ALIVE_SECONDS", 0.01)
    server = Server([[OK]] * 2)

    async def work(pool: Pool) -> None:
        await ask(pool)
        await until(lambda: server.open == 0)
        await ask(pool)

    talk(server, work)
    assert server.connections == 2


def test_a_connection_that_is_idle_for_too_long_is_not_used_where_its_time_was_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server([[OK]] * 2)

    async def work(pool: Pool) -> None:
        await ask(pool)
        monkeypatch.setattr(http, "KEEP_ALIVE_SECONDS", 0.0)
        await ask(pool)

    talk(server, work)
    assert server.connections == 2


def test_the_connection_idle_for_longest_is_closed_where_no_more_may_be_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_files, "connections", lambda: 2)
    first, second = Server([[OK]] * 4), Server([[OK]] * 4)

    async def with_both(pool: Pool) -> None:
        listening = await asyncio.start_server(second.serve, "127.0.0.1", 0)
        with closing(Pool(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", None)) as other:
            await asyncio.gather(ask(pool), ask(pool))
            await ask(other)
            await until(lambda: (first.open, second.open) == (1, 1))
            await ask(pool)
            await ask(other)
        listening.close()

    talk(first, with_both)
    assert (first.connections, second.connections) == (2, 1)


def test_a_cancelled_request_and_a_closed_pool_close_their_connections() -> None:
    server = Server([[], [], []])

    async def work(pool: Pool) -> None:
        running = [asyncio.create_task(ask(pool)) for _ in range(3)]
        await until(lambda: len(server.received) == 3)
        running[0].cancel()
        await until(lambda: server.open == 2)
        pool.close()
        ended = await asyncio.gather(*running, return_exceptions=True)
        assert [type(error) for error in ended] == [asyncio.CancelledError, Disconnected, Disconnected]
        await until(lambda: server.open == 0)

    talk(server, work)


def test_a_request_whose_pool_is_closed_while_it_connects_ends() -> None:
    async def work(pool: Pool) -> None:
        connecting = asyncio.create_task(ask(pool))
        await asyncio.sleep(0)
        pool.close()
        with pytest.raises(Disconnected):
            await connecting

    talk(Server([]), work)


def test_a_loop_is_forgotten_with_its_connections() -> None:
    def use() -> weakref.ref[asyncio.AbstractEventLoop]:
        async def work(pool: Pool) -> Any:
            await ask(pool)
            return weakref.ref(asyncio.get_running_loop())

        return talk(Server([[OK]]), work)

    loop = use()
    gc.collect()
    assert loop() is None


def test_a_server_of_another_make_reads_what_is_sent() -> None:
    async def echo(request: web.Request) -> web.Response:
        said = {name: request.headers.get(name) for name in ("Host", "Authorization", "Content-Type", "Content-Length")}
        return web.json_response([request.method, request.raw_path, said, (await request.read()).decode()])

    async def main() -> tuple[list[Any], str]:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", echo)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host = f"127.0.0.1:{runner.addresses[0][1]}"
        keyed, named = Pool(f"http://{host}/a b", "key"), Pool(f"http://me:p%40ss@{host}", None)
        with closing(keyed), closing(named):
            asked = [
                await keyed.request("POST", "/x?y=1", b'{"a": 1}'),
                await named.request("GET", "/x", None),
                await named.request("POST", "/x", None),
            ]
        await runner.cleanup()
        return [json.loads(body) for _, body in asked], host

    (keyed, got, posted), host = asyncio.run(main())
    sent = {"Host": host, "Authorization": "Bearer key", "Content-Type": "application/json", "Content-Length": "8"}
    assert keyed == ["POST", "/a%20b/x?y=1", sent, '{"a": 1}']
    basic = {"Host": host, "Authorization": "Basic bWU6cEBzcw==", "Content-Type": None}
    assert got == ["GET", "/x", {**basic, "Content-Length": None}, ""]
    assert posted == ["POST", "/x", {**basic, "Content-Length": "0"}, ""]


def test_a_name_with_several_addresses_is_asked_where_something_listens() -> None:
    async def main() -> Answer:
        server = Server([[OK], [OK]])
        listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
        with closing(Pool(f"http://localhost:{listening.sockets[0].getsockname()[1]}", None)) as pool:
            answers = await asyncio.gather(ask(pool), ask(pool))
        listening.close()
        return answers[1]

    assert asyncio.run(main()) == (200, b"ok")


def test_a_certificate_that_nobody_vouches_for_is_refused(tmp_path: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*self_signed(tmp_path))

    async def main(trusts: bool) -> Answer:
        server = Server([[OK]])
        listening = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=context)
        pool = Pool(f"https://localhost:{listening.sockets[0].getsockname()[1]}", None)
        if trusts:
            pool._ssl = ssl.create_default_context(cafile=tmp_path / "certificate.pem")
        with closing(pool):
            try:
                return await ask(pool)
            finally:
                listening.close()

    with pytest.raises(Unreachable, match="certificate"):
        asyncio.run(main(trusts=False))
    assert asyncio.run(main(trusts=True)) == (200, b"ok")


def self_signed(folder: Path) -> tuple[Path, Path]:
    """Writes a certificate for localhost and its key."""
    from datetime import UTC, datetime, timedelta

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    made = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    now = datetime.now(UTC)
    made = made.not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=1))
    made = made.add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
    certificate, secret = folder / "certificate.pem", folder / "key.pem"
    certificate.write_bytes(made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    plain = serialization.NoEncryption()
    secret.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain))
    return certificate, secret


@pytest.mark.parametrize("url", ["http://", "http://host:port", "http://a..b", "http://a b:8000"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    async def make() -> None:
        Pool(url, None)

    with pytest.raises(UserError, match="is no address of a server"):
        asyncio.run(make())


def test_a_key_cannot_add_headers() -> None:
    async def make() -> None:
        Pool("http://host", "key\r\nX: y")

    with pytest.raises(UserError, match="line break"):
        asyncio.run(make())


def test_a_redirect_is_reported_and_not_followed() -> None:
    server = Server([[b"HTTP/1.1 307 Moved\r\nLocation: http://elsewhere/\r\nContent-Length: 0\r\n\r\n"]])

    async def work(_: Pool) -> None:
        client = VLLMClient(server.url, "key")
        try:
            with pytest.raises(UserError, match="redirects /weight_info"):
                await client.version()
        finally:
            await client.close()

    talk(server, work)
