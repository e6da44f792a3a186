"""A gateway on a network: encrypted, to the networks it is told of, and to nobody without a key on any route."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
from pathlib import Path

import httpx
import pytest

from areal_x.agents.board import Board
from areal_x.agents.gateway import Gateway, connections, network
from areal_x.agents.gateway.app import application
from areal_x.agents.gateway.network import Network
from areal_x.agents.gateway.record import OwnHost
from areal_x.errors import ConfigError, UserError
from tests.agents.certificates import certificate, needs_openssl
from tests.agents.gateway.test_gateway import HI, gateway_of  # noqa: F401  (a fixture)
from tests.rollout.fakes import until

OWN_KEY = "k" * 32


# ---- settings


@pytest.mark.parametrize(
    ("settings", "binding", "wanted"),
    [
        ({"host": "10.0.0.5"}, "gateway.host", "unless gateway.certificate encrypts"),
        ({"host": "0.0.0.0", "url": "https://a.example"}, "gateway.host", "unless gateway.certificate encrypts"),
        ({"host": "::", "url": "https://a.example"}, "gateway.host", "unless gateway.certificate encrypts"),
        ({"host": "::ffff:127.0.0.1"}, "gateway.host", "unless gateway.certificate encrypts"),
        ({"host": "run.example.com"}, "gateway.host", "in numbers"),
        ({"host": "10.0.0.5", "tls_by_proxy": True}, "gateway.networks", "the addresses of the proxy"),
        ({"host": "0.0.0.0", "certificate": "a.pem"}, "gateway.url", "the address that agents call"),
        ({"certificate_key": "a.key"}, "gateway.certificate", "the certificate of"),
        ({"url": "http://run.example.com"}, "gateway.url", "begins with https"),
        ({"url": "http://10.0.0.5:80", "tls_by_proxy": True}, "gateway.url", "begins with https"),
        ({"url": "run.example.com"}, "gateway.url", "an address such as"),
        ({"url": "https://run.example.com/v1/"}, "gateway.url", "without /v1"),
        ({"url": "https://run.example.com:port"}, "gateway.url", "an address such as"),
        ({"networks": "10.0.0.0/8"}, "gateway.networks", "a tuple"),
        ({"networks": ("10.0.0.5/8",)}, "gateway.networks", "host bits"),
    ],
)
def test_what_would_be_reachable_or_sent_without_protection_is_refused(settings, binding, wanted):
    with pytest.raises(ConfigError, match=wanted) as refused:
        Network(**settings)
    assert refused.value.binding == binding


def test_a_key_in_an_address_is_not_repeated():
    with pytest.raises(ConfigError, match="without a user name") as refused:
        Network(url="https://me:secret@run.example.com")
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "url"),
    [
        ({}, "http://127.0.0.1:7"),
        ({"host": "::1"}, "http://[::1]:7"),
        ({"host": "10.0.0.5", "certificate": "a.pem"}, "https://10.0.0.5:7"),
        ({"url": "https://run.example.com/areal/"}, "https://run.example.com/areal"),
        ({"url": "http://127.0.0.1:9000"}, "http://127.0.0.1:9000"),
    ],
)
def test_the_address_that_agents_are_told(settings, url):
    assert Network(**settings).told_url(7) == url


def test_networks_are_those_of_the_client_in_either_family():
    some = Network(networks=("10.0.0.0/8", "fd00::/8", "192.168.7.3/32"))
    admitted = ["10.9.8.7", "::ffff:10.9.8.7", "192.168.7.3", "fd00::1", "fd00::1%eth0"]
    refused = ["11.0.0.1", "192.168.7.4", "::ffff:11.0.0.1", "127.0.0.1", "::1", "fe80::1%eth0"]
    assert [a for a in admitted + refused if some.admits(a)] == admitted


def test_a_key_of_the_users_own_is_read_before_anything_is_served_and_must_be_long(monkeypatch):
    named = Gateway(key_variable="KEY_OF_A_TEST")
    for value, why in ((None, "is not set"), ("", "is not set"), ("short", "has 5 characters")):
        monkeypatch.delenv("KEY_OF_A_TEST", raising=False)
        if value is not None:
            monkeypatch.setenv("KEY_OF_A_TEST", value)
        with pytest.raises(UserError, match=why):
            named.prepare()
    monkeypatch.setenv("KEY_OF_A_TEST", OWN_KEY)
    named.prepare()
    assert named.key == OWN_KEY


@needs_openssl
def test_files_that_are_no_certificate_are_named(tmp_path):
    made = certificate(tmp_path)
    (tmp_path / "other").mkdir()
    other = certificate(tmp_path / "other")
    for file, key, why in (
        (str(tmp_path / "none.pem"), "", r"gateway\.certificate = .*none\.pem.*No such file"),
        (made.file, str(tmp_path / "none.key"), r"gateway\.certificate_key = .*none\.key.*No such file"),
        (made.file, other.key, "cannot be used together"),
        (made.key, "", "cannot be used together"),
    ):
        with pytest.raises(UserError, match=why):
            Gateway(certificate=file, certificate_key=key).prepare()


# ---- what is served


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return certificate(tmp_path_factory.mktemp("certificate"))


@pytest.fixture
def secure(gateway_of, files):  # noqa: F811
    """Starts gateways that serve HTTPS."""
    return lambda **settings: gateway_of(certificate=files.file, certificate_key=files.key, **settings)


@pytest.fixture
def trusting(files):
    return ssl.create_default_context(cafile=files.file)


def everything(served, session):
    """Every route of a gateway that offers all of them, as (method, path)."""
    served.on_open, served.on_work = object(), Board()
    routes = application(OwnHost(served)).routes
    parts = {"{session}": session.id, "{model:path}": "policy", "{lease}": session.id}
    for route in routes:
        path = route.path
        for name, value in parts.items():
            path = path.replace(name, value)
        for method in route.methods - {"HEAD"}:
            yield method, path
    assert len(routes) > 50


@needs_openssl
def test_unmodified_clients_speak_through_tls(secure, talk, files, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", files.file)
    one = talk(on=secure())
    assert one.session.url.startswith("https://127.0.0.1:")
    assert one.chat().choices[0].message.content == "hello"
    pieces = list(one.chat(stream=True))
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == "hello"
    assert one.anthropic.messages.create(model="m", messages=HI, max_tokens=9).content[0].text == "hello"
    assert len(one.calls()) == 3


@needs_openssl
def test_no_route_answers_without_the_key_that_it_needs(secure, talk, trusting):
    """Neither to nobody's key, nor to a session's on the gateway's own routes, nor to the gateway's on a session's."""
    served = secure()
    one, other = talk(on=served), talk(on=served)
    of_gateway = ("/work", "/sessions")
    with httpx.Client(verify=trusting, base_url=served.url) as client:
        for method, path in everything(served, one.session):
            own = path.startswith(of_gateway) and not path.startswith("/sessions/")
            keys = ["", "wrong", f"{served.key}x", other.session.key] + ([one.session.key] if own else [served.key])
            if not path.startswith("/sessions/"):
                keys.remove(other.session.key)  # opens its own session
            for key in keys:
                headers = {"authorization": f"Bearer {key}"} if key else {}
                answer = client.request(method, path, headers=headers, content=b"{}")
                assert answer.status_code == 401, (method, path, key, answer.text)
    assert not one.calls()


@needs_openssl
def test_plain_http_gets_no_answer_on_any_route(secure, talk):
    served = secure()
    one = talk(on=served)
    paths = list(everything(served, one.session))
    for method, path in paths:
        with socket.create_connection(("127.0.0.1", served.port), timeout=30) as plain:
            key = served.key if path.startswith("/work") else one.session.key
            with contextlib.suppress(ConnectionError):
                plain.sendall(f"{method} {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n\r\n".encode())
            with contextlib.suppress(ConnectionError):
                assert not plain.recv(1 << 16).startswith(b"HTTP")
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://127.0.0.1:{served.port}/v1/models")


@needs_openssl
def test_an_address_outside_the_networks_is_refused_before_it_says_anything(secure, talk, trusting, caplog):
    served = secure(networks=("127.0.0.1/32",))
    one = talk(on=served)
    headers = {"authorization": f"Bearer {one.session.key}"}
    stranger = httpx.HTTPTransport(local_address="127.0.0.2", verify=trusting)
    with httpx.Client(transport=stranger, base_url=served.url, headers=headers) as client:
        for method, path in everything(served, one.session):
            with pytest.raises(httpx.TransportError):
                client.request(method, path)
    assert httpx.get(one.session.url, headers=headers, verify=trusting).status_code == 200
    said = [record.message for record in caplog.records if "gateway" in record.message]
    assert said == ["the gateway refused a connection from 127.0.0.2, which is in none of gateway.networks"]


def test_a_header_changes_no_address(gateway_of, talk):  # noqa: F811
    """A proxy's header names an address that the gateway has no reason to believe: retries are known by the connection."""
    one = talk(on=gateway_of())
    seen = []
    found = one.session.sent.find_lost
    one.session.sent.find_lost = lambda attempt, client, is_open: seen.append(client) or found(attempt, client, is_open)
    for address in ("10.1.2.3", "10.1.2.4"):
        headers = {"authorization": f"Bearer {one.session.key}", "x-forwarded-for": address, "x-forwarded-proto": "https"}
        body = {"model": "m", "messages": HI}
        assert httpx.post(f"{one.session.base_url}/chat/completions", json=body, headers=headers).status_code == 200
    assert [client[0] for client in seen] == ["127.0.0.1"] * 2


@needs_openssl
def test_behind_a_proxy_agents_are_told_its_address_and_nobody_else_speaks_to_the_gateway(
    gateway_of,  # noqa: F811
    talk,
    files,
    monkeypatch,
    run,
):
    """The proxy ends the encryption and passes bytes on, from the one address that the gateway admits."""
    monkeypatch.setenv("SSL_CERT_FILE", files.file)
    served = None

    async def copied(reader, writer):
        with contextlib.suppress(ConnectionError):
            while more := await reader.read(1 << 16):
                writer.write(more)
                await writer.drain()
        writer.close()

    async def passed_on(reader, writer):
        inside = await asyncio.open_connection("127.0.0.1", served.port, local_addr=("127.0.0.3", 0))
        await asyncio.gather(copied(reader, inside[1]), copied(inside[0], writer))

    async def proxied():
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(files.file, files.key)
        return await asyncio.start_server(passed_on, "127.0.0.1", 0, ssl=context)

    proxy = run(proxied())
    url = f"https://127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
    served = gateway_of(url=url, tls_by_proxy=True, networks=("127.0.0.3/32",))
    one = talk(on=served)
    assert one.session.base_url == f"{url}/sessions/{one.session.id}/v1"
    assert one.chat().choices[0].message.content == "hello"
    assert one.anthropic.messages.create(model="m", messages=HI, max_tokens=9).content[0].text == "hello"
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://127.0.0.1:{served.port}/v1/models")
    for client in one.clients:
        client.close()

    async def close():
        proxy.close()

    run(close())


@needs_openssl
def test_a_renewed_certificate_is_used_and_a_broken_one_is_not(gateway_of, tmp_path, monkeypatch, caplog):  # noqa: F811
    monkeypatch.setattr(network, "RENEWED_SECONDS", 0.0)
    used = certificate(tmp_path)
    served = gateway_of(certificate=used.file, certificate_key=used.key)

    def shown():
        return ssl.get_server_certificate(("127.0.0.1", served.port), timeout=30)

    first = shown()
    Path(used.file).write_text("half of a certi")
    os.utime(used.file, ns=(1, 1))
    assert shown() == first
    assert "the certificate cannot be renewed: gateway.certificate = " in caplog.text
    certificate(tmp_path)
    os.utime(used.file, ns=(2, 2))
    assert shown() == Path(used.file).read_text() != first


# ---- handshakes


@needs_openssl
def test_silent_handshakes_hold_up_nobody_and_are_few(secure, trusting, monkeypatch, run):
    monkeypatch.setattr(connections, "HANDSHAKES", 4)
    monkeypatch.setattr(connections, "REQUEST_SECONDS", 300.0)  # else they would end by themselves
    served = secure()
    silent = [socket.create_connection(("127.0.0.1", served.port), timeout=30) for _ in range(20)]
    assert httpx.get(f"{served.url}/v1/models", verify=trusting).status_code == 401
    for one in silent[:16]:  # they gave way
        with contextlib.suppress(ConnectionError):
            assert one.recv(1) == b""

    async def few():
        await until(lambda: len(served._server._handshakes) <= 4)

    run(few())
    for one in silent:
        one.close()

    async def none():
        await until(lambda: not served._server._handshakes and not served._server._connections())

    run(none())


@needs_openssl
def test_a_handshake_that_does_not_come_ends_in_time(secure, monkeypatch):
    monkeypatch.setattr(connections, "REQUEST_SECONDS", 0.2)
    served = secure()
    with socket.create_connection(("127.0.0.1", served.port), timeout=30) as silent:
        assert silent.recv(1) == b""


@needs_openssl
def test_handshakes_count_as_connections(secure, trusting, monkeypatch):
    monkeypatch.setattr(connections, "most_connections", lambda: 8)
    served = secure()
    silent = [socket.create_connection(("127.0.0.1", served.port), timeout=30) for _ in range(30)]
    assert httpx.get(f"{served.url}/v1/models", verify=trusting).status_code == 401
    with contextlib.suppress(ConnectionError):
        assert silent[0].recv(1) == b""
    assert len(served._server._open) <= 8
    for one in silent:
        one.close()


@needs_openssl
def test_a_gateway_closes_while_a_handshake_waits(files):
    async def main():
        served = Gateway(certificate=files.file, certificate_key=files.key)
        await served.start()
        _, writer = await asyncio.open_connection("127.0.0.1", served.port)
        await until(lambda: served._server._handshakes)
        async with asyncio.timeout(20):
            await served.close()
        writer.close()

    logging.getLogger("asyncio").setLevel(logging.WARNING)
    asyncio.run(main())
