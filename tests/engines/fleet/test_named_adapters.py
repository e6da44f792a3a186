"""Adapters that requests name: when servers load them, again after a restart, and never for another's name. No server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from areal_x.engines.fleet import slices
from areal_x.engines.fleet.failures import ServerFailed, ServerLost, ServerRefused, ServerRestarted
from areal_x.engines.fleet.named_adapters import AdapterRoom, NamedAdapters
from areal_x.engines.vllm import adapters
from areal_x.engines.vllm.config import VLLMConfig
from areal_x.engines.vllm.engine import VLLMEngine
from areal_x.engines.vllm.plugin import BACKEND
from areal_x.engines.vllm.refusals import explained
from areal_x.engines.vllm.turns import GENERATE
from areal_x.errors import ConfigError, UserError
from areal_x.hf.adapters import CONFIG, WEIGHTS
from areal_x.protocols.engine import EngineError


class Server:
    """The client of a server that holds names."""

    def __init__(self) -> None:
        self.held: dict[str, Path] = {}
        self.loads, self.healthy = 0, True
        self.error: Exception | None = None
        self.door = asyncio.Event()
        self.door.set()

    async def load_adapter(self, name: str, folder: Path) -> None:
        self.loads += 1
        await self.door.wait()
        if self.error is not None:
            raise self.error
        assert (folder / WEIGHTS).is_file()
        self.held[name] = folder

    async def unload_adapter(self, name: str) -> None:
        del self.held[name]

    async def adapters(self) -> list[str]:
        return [*self.held]

    async def is_healthy(self) -> bool:
        return self.healthy


class Replica:
    """What is used of areal_x.engines.fleet.replica.Replica."""

    name = "a server"

    def __init__(self) -> None:
        self.client = Server()

    def asked(self, name: str) -> Callable[[], Coroutine[Any, Any, bytes]]:
        """Returns a request that is answered with the weights of its model."""

        async def request() -> bytes:
            if name not in self.client.held:
                raise ServerRefused(f"The model `{name}` does not exist.")
            return (self.client.held[name] / WEIGHTS).read_bytes()

        return request


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    write(tmp_path / "state", b"first")
    return tmp_path


def write(directory: Path, weights: bytes) -> None:
    """Replaces the files of an adapter, as checkpoints are."""
    directory.mkdir(exist_ok=True)
    for name, content in ((CONFIG, b"{}"), (WEIGHTS, weights)):
        (directory / "new").write_bytes(content)
        (directory / "new").rename(directory / name)


def attempt(work: Callable[[NamedAdapters, Any], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        await asyncio.wait_for(work(NamedAdapters(), Replica()), 10)

    asyncio.run(run())


def test_a_name_stands_for_what_was_there_at_first_and_no_name_comes_twice(place: Path) -> None:
    async def work(named: NamedAdapters, replica: Any) -> None:
        names = [named.add(place / "root", place / "state")]
        write(place / "state", b"second")
        names += [named.add(place / "root", place / "state") for _ in range(2)]
        assert len(set(names)) == 3
        found = [await named.answer(replica, x, replica.asked(x)) for x in names]
        assert found == [b"first", b"second", b"second"]
        with pytest.raises(FileNotFoundError):
            named.add(place / "root", place / "nothing")
        assert len([*(place / "root").iterdir()]) == 3

    attempt(work)


def test_an_adapter_is_loaded_once_for_requests_at_once_and_again_by_a_server_that_was_started_again(place: Path) -> None:
    async def work(named: NamedAdapters, replica: Any) -> None:
        name = named.add(place / "root", place / "state")
        replica.client.door.clear()
        tasks = [asyncio.create_task(named.answer(replica, name, replica.asked(name))) for _ in range(3)]
        await asyncio.sleep(0)
        tasks[0].cancel()  # whose request made it load
        await asyncio.wait(tasks[:1])
        replica.client.door.set()
        assert await asyncio.gather(*tasks[1:]) == [b"first", b"first"]
        assert replica.client.loads == 1
        replica.client = Server()
        assert await named.answer(replica, name, replica.asked(name)) == b"first"
        assert replica.client.loads == 1

    attempt(work)


def test_a_server_that_has_lost_its_adapters_was_started_again_by_somebody_else(place: Path) -> None:
    async def work(named: NamedAdapters, replica: Any) -> None:
        name = named.add(place / "root", place / "state")
        await named.answer(replica, name, replica.asked(name))

        async def wrong() -> None:
            raise ServerRefused("a wrong parameter")

        with pytest.raises(ServerRefused, match="a wrong parameter"):
            await named.answer(replica, name, wrong)
        replica.client.held.clear()
        with pytest.raises(ServerRestarted, match="lost its adapters"):
            await named.answer(replica, name, replica.asked(name))

    attempt(work)


def test_what_a_server_cannot_load_is_its_requests_error_and_the_next_one_tries_again(place: Path) -> None:
    async def work(named: NamedAdapters, replica: Any) -> None:
        name, client = named.add(place / "root", place / "state"), replica.client
        client.error = ServerFailed("no such module")
        with pytest.raises(EngineError, match="a server cannot load the adapter: no such module") as failure:
            await named.answer(replica, name, replica.asked(name))
        assert not isinstance(failure.value, ServerFailed)  # or ten servers would be asked
        client.healthy = False
        with pytest.raises(ServerLost):
            await named.answer(replica, name, replica.asked(name))
        client.error = ServerRefused("has already been loaded")  # the answer before was lost
        with pytest.raises(ServerRefused):
            await named.answer(replica, name, replica.asked(name))
        client.held[name] = place / "state"
        assert await named.answer(replica, name, replica.asked(name)) == b"first"
        assert client.loads == 4

    attempt(work)


def test_a_removed_adapter_is_unloaded_and_its_files_go(place: Path) -> None:
    async def work(named: NamedAdapters, replica: Any) -> None:
        name, idle = (named.add(place / "root", place / "state") for _ in range(2))
        other: Any = Replica()
        await named.answer(replica, name, replica.asked(name))
        for gone in (name, idle, "unknown"):
            await named.remove(gone, [replica, other])
        assert replica.client.held == {}
        assert [*(place / "root").iterdir()] == []
        assert (place / "state" / WEIGHTS).read_bytes() == b"first"
        assert name not in named

    attempt(work)


def test_servers_get_room_for_a_batch_of_adapters() -> None:
    words = adapters.arguments(64, 32)
    given = dict(zip(words[1::2], words[2::2], strict=True))
    assert given == {"--max-lora-rank": "64", "--max-loras": "32", "--max-cpu-loras": "32"}


def test_an_unknown_adapter_is_told_from_a_server_without_the_endpoint() -> None:
    assert explained(BACKEND, "it", GENERATE, 404, "The model `adapter-1` does not exist.") is None
    assert isinstance(explained(BACKEND, "it", GENERATE, 404, "Not Found"), UserError)


def test_only_files_reach_servers_with_adapters(tiny_model_dir: Path, tmp_path: Path) -> None:
    room, config = AdapterRoom(8), VLLMConfig(context=64, transport="nccl", urls=("http://127.0.0.1:9",))
    with pytest.raises(ConfigError, match=r"vllm\.transport = 'nccl' cannot work: it must be 'files' with adapters"):
        VLLMEngine(config, tiny_model_dir, tmp_path, room=room)
    with pytest.raises(ConfigError, match="at most 512"):
        VLLMEngine(VLLMConfig(context=64), tiny_model_dir, tmp_path, room=AdapterRoom(513))


def test_slices_of_a_request_have_seeds_of_their_own() -> None:
    seeds = [slices.seed_of(seed, drawn) for seed in range(20) for drawn in (0, 1, 5)]
    assert len(set(seeds)) == 60
    assert seeds[::3] == [*range(20)]
    assert seeds == [slices.seed_of(seed, drawn) for seed in range(20) for drawn in (0, 1, 5)]
    assert all(0 <= seed < 2**31 for seed in seeds)
