"""What older vLLM servers lack: the table against vLLM's own code, refusals by name, and versions where a server tells none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_x.engines.vllm import dialects, installed, server, turns
from areal_x.engines.vllm.client import VLLMClient
from areal_x.engines.vllm.config import VLLMConfig
from areal_x.engines.vllm.dialects import ABILITIES, LATEST, TOKEN_VERSIONS, Dialect
from areal_x.engines.vllm.responses import generated_from, next_from
from areal_x.engines.vllm.server import Launch
from areal_x.engines.vllm.turns import Turns
from areal_x.errors import ConfigError, UserError
from areal_x.protocols.engine import SamplingParams

OLDEST = Dialect(dialects.OLDEST)
DOCS = Path(__file__).parents[3] / "docs" / "rollout.md"


def has_sign(vllm: Path, ability: dialects.Ability) -> bool:
    part = vllm / ability.module
    return any(ability.sign in source.read_text() for source in part.rglob("*.py"))


def test_the_installed_vllm_has_every_ability() -> None:
    found = find_spec("vllm")
    if found is None or found.submodule_search_locations is None:
        pytest.skip("vLLM is not installed")
    assert installed.installed_dialect() == LATEST
    vllm = Path(found.submodule_search_locations[0])
    assert [ability.does for ability in ABILITIES if not has_sign(vllm, ability)] == []


def test_the_table_is_in_the_documentation() -> None:
    text = DOCS.read_text()
    for ability in ABILITIES:
        row = f"| {ability.since[0]}.{ability.since[1]} | {ability.does} | {ability.without} |"
        assert row in text


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("0.23.0", (0, 23)),
        ("0.25.1.dev12+gabcdef", (0, 25)),
        ("0.32.0+cpu", (0, 32)),
        ("0.33.1", (0, 32)),
        ("1", (0, 32)),
    ],
)
def test_a_server_has_the_dialect_of_its_release(version: str, release: tuple[int, int]) -> None:
    assert dialects.of(version, "it") == Dialect(release)


@pytest.mark.parametrize("version", ["0.22.1", "0.9", "dev", ""])
def test_what_is_too_old_or_no_version_is_refused(version: str) -> None:
    with pytest.raises(UserError, match=r"^the server .*0\.23 to 0\.32 are supported$"):
        dialects.of(version, "the server")


def test_an_ability_begins_with_its_release() -> None:
    assert all(LATEST.has(ability) for ability in ABILITIES)
    assert not any(OLDEST.has(ability) for ability in ABILITIES)
    for ability in ABILITIES:
        major, minor = ability.since
        assert Dialect((major, minor)).has(ability)
        assert not Dialect((major, minor - 1)).has(ability)


@pytest.mark.parametrize(
    ("settings", "release", "words"),
    [
        ({"transport": "nccl"}, (0, 31), r"vllm\.transport = 'nccl' .*'files' here: vLLM 0\.31 is older than 0\.32"),
        ({"transport": "rdt"}, (0, 23), r"vllm\.transport = 'rdt' .*'files' here: vLLM 0\.23"),
        ({"data": 2}, (0, 31), r"vllm\.data = 2 .*1 here: vLLM 0\.31 is older than 0\.32, the first that gives each engine"),
        ({"hosts": 2}, (0, 28), r"vllm\.hosts = 2 .*1 here: vLLM 0\.28 is older than 0\.29"),
    ],
)
def test_settings_that_an_older_vllm_does_not_support_are_refused(
    settings: dict[str, Any], release: tuple[int, int], words: str
) -> None:
    config = VLLMConfig(**settings)
    with pytest.raises(ConfigError, match=words):
        dialects.check_started(config, Dialect(release))
    dialects.check_started(config, LATEST)
    dialects.check_started(VLLMConfig(), OLDEST)


LAUNCH = Launch(Path("model"), Path("log"), Path("staging"), context=64, concurrency=4, seed=0)


def test_a_server_is_started_with_the_arguments_that_its_release_knows(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vision_config": {}}')
    launch = replace(LAUNCH, model=tmp_path)
    of = {release: set(server.command(launch, 1, False, Dialect(release))) for release in ((0, 23), (0, 28), (0, 32))}
    assert of[0, 32] - of[0, 28] == {"--enable-scale-out"}
    assert of[0, 28] - of[0, 23] == {"--no-mm-device-do-normalize"}
    assert of[0, 23] < of[0, 32]


def test_the_number_of_a_token_is_read_in_either_form() -> None:
    top = [{"token": "token_id:7", "logprob": -1.0}, {"token": "token_id:9", "logprob": -2.0}]
    answer = {"choices": [{"token_ids": [7], "logprobs": {"content": [{"logprob": -1.0, "top_logprobs": top}]}}]}
    assert next_from(generated_from(msgspec.json.encode(answer)), 9) == -2.0
    top[1] = {"token_id": 9, "logprob": -3.0}
    assert next_from(generated_from(msgspec.json.encode(answer)), 9) == -3.0


# ---- a server that tells no versions


class Old:
    """An old server's generation, as its endpoints show it: a token an event of its own, the number of its weights. A request
    that comes while it is paused waits. `late`: requests that arrive only when the pause has begun."""

    def __init__(self) -> None:
        self.weights, self.paused, self.asked, self.pauses = 0, False, 0, 0
        self.running: list[tuple[list[int], int, asyncio.Future[bytes]]] = []
        self.waiting: list[tuple[int, asyncio.Future[bytes]]] = []
        self.calls: list[str] = []
        self.bodies: dict[str, Any] = {}

    async def send(self, method: str, path: str, body: bytes | None, **_: Any) -> bytes:
        self.calls.append(path.partition("?")[0])
        self.bodies[path] = None if body is None else msgspec.json.decode(body)
        if path == "/inference/v1/generate":
            return await self.generate(self.bodies[path]["sampling_params"]["max_tokens"])
        if path.startswith("/pause"):
            self.paused = True
            if "mode=abort" in path:
                for tokens, _most, answer in self.running:
                    self.answer(answer, tokens, "abort")
                self.running.clear()
        elif path == "/resume":
            self.paused = False
            for most, answer in self.waiting:
                self.running.append(([], most, answer))
            self.waiting.clear()
        elif path == "/finish_weight_update":
            self.weights += 1
        elif path == "/is_paused":
            return msgspec.json.encode({"is_paused": self.paused})
        elif path == "/version":
            return b'{"version": "0.23.0"}'
        return b""

    async def generate(self, most: int) -> bytes:
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.asked += 1
        if self.paused:
            self.waiting.append((most, answer))
        else:
            self.running.append(([], most, answer))
        try:
            return await answer
        finally:
            self.waiting = [x for x in self.waiting if x[1] is not answer]
            self.running = [x for x in self.running if x[2] is not answer]

    def step(self) -> None:
        """Each running request gets a token, whose number is that of the weights."""
        for tokens, most, answer in list(self.running):
            tokens.append(self.weights)
            if len(tokens) == most:
                self.answer(answer, tokens, "length")

    @staticmethod
    def answer(future: asyncio.Future[bytes], tokens: list[int], reason: str) -> None:
        content = [{"logprob": -1.0} for _ in tokens]
        choice = {"token_ids": tokens, "finish_reason": reason, "logprobs": {"content": content}}
        if not future.done():
            future.set_result(msgspec.json.encode({"choices": [choice]}))


@asynccontextmanager
async def client_of(old: Old) -> AsyncIterator[VLLMClient]:
    client = VLLMClient("http://127.0.0.1:1", "key")
    client.calls.send = old.send  # type: ignore[method-assign]
    await client.negotiate(ours=True)
    assert not client.dialect.has(TOKEN_VERSIONS)
    yield client
    await client.close()


async def swap(client: VLLMClient, version: int) -> None:
    await client.pause()
    await client.start_update()
    await client.update_weights({})
    await client.finish_update(str(version))
    await client.resume()


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@given(st.lists(st.sampled_from(["request", "step", "swap"]), max_size=40), st.sampled_from([(), ("stop",)]))
def test_each_token_has_the_version_of_the_weights_that_made_it(events: list[str], stop: tuple[str, ...]) -> None:
    async def play() -> None:
        old = Old()
        async with client_of(old) as client:
            requests = []
            for event in events:
                if event == "request":
                    call = client.generate(np.arange(3, dtype=np.int32), SamplingParams(max_tokens=5), stop=stop)
                    requests.append(asyncio.ensure_future(call))
                elif event == "step":
                    old.step()
                else:
                    await swap(client, old.weights + 1)
                await settled()
            while not all(request.done() for request in requests):
                old.step()
                await settled()
            for request in requests:
                completion = request.result()
                np.testing.assert_array_equal(completion.versions, completion.tokens)
                assert (len(completion.tokens), completion.finish_reason) == (5, "length")
                assert not stop or len(set(completion.tokens.tolist())) == 1  # began anew

    asyncio.run(play())


def test_a_request_that_arrives_during_a_pause_is_withdrawn_and_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        monkeypatch.setattr(turns, "SECONDS_TO_ANSWER", 0.05)
        old = Old()
        async with client_of(old) as client:
            old.paused = True  # the request is on its way when the pause begins
            call = client.generate(np.arange(3, dtype=np.int32), SamplingParams(max_tokens=2))
            request = asyncio.ensure_future(call)
            await settled()
            assert len(old.waiting) == 1
            await swap(client, 1)
            assert old.waiting == []
            await settled()
            assert old.asked == 2
            while not request.done():
                old.step()
                await settled()
            assert (await request).versions.tolist() == [1, 1]

    asyncio.run(play())


def test_a_request_that_is_not_wanted_any_more_leaves_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        held = Turns("url")
        request = asyncio.ensure_future(held.answered(asyncio.Event().wait))
        await settled()
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        monkeypatch.setattr(turns, "SECONDS_TO_ANSWER", 60.0)
        await held.hold(lambda: asyncio.sleep(0))  # waits for nothing

    asyncio.run(play())


def test_an_older_server_is_updated_in_its_own_way() -> None:
    async def play() -> None:
        old = Old()
        async with client_of(old) as client:
            await client.set_version(3)
            assert await client.version() == "3"
            await swap(client, 4)
            assert await client.version() == "4"
            assert old.bodies["/start_weight_update"] == {"is_checkpoint_format": False}
            await client.hand_over()
            assert old.calls[-3:] == ["/is_paused", "/pause", "/resume"]
            with pytest.raises(UserError, match=r"cannot parse chats: vLLM 0\.23 is older than 0\.24"):
                await client.derender([1], {}, [2])
            with pytest.raises(UserError, match=r"cannot be given by its address.*vLLM 0\.23 is older than 0\.32.*vllm\.urls"):
                await client.negotiate(ours=False)

    asyncio.run(play())
