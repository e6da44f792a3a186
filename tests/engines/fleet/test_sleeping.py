"""One server that sleeps: what it is asked for, in which order, and what an update that breaks off leaves."""

from __future__ import annotations

import asyncio
import itertools
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from areal_x.engines.fleet.client import CACHES, WEIGHTS
from areal_x.engines.fleet.failures import ServerFailed, ServerRefused, ServerTorn
from areal_x.engines.fleet.publisher import Publisher
from areal_x.engines.fleet.replica import ExternalServer, Place, Replica
from areal_x.engines.fleet.staging import StagedFiles
from areal_x.engines.fleet.supervisor import Supervisor
from areal_x.engines.vllm.config import VLLMConfig
from areal_x.protocols.engine import EngineError

STAGED = StagedFiles(folder=Path("/staged/3"), version=3)
LOADED = ["validate", "update", "update weights", "finish 3", "prove"]


class Client:
    """Records the calls. failing: the call that fails, with an error."""

    def __init__(self, failing: str = "", error: Exception | None = None) -> None:
        self.calls: list[str] = []
        self.failing, self.error = failing, error

    def call(self, name: str) -> Any:
        async def called(*_: Any) -> None:
            if name == self.failing and self.error is not None:
                raise self.error
            self.calls.append(name)

        return called()

    def validate_folder(self, *_: Any) -> Any:
        return self.call("validate")

    def pause(self) -> Any:
        return self.call("pause")

    def start_update(self) -> Any:
        return self.call("update")

    def abandon_update(self) -> Any:
        return self.call("abandon")

    def update_weights(self, _: Any) -> Any:
        return self.call("update weights")

    def finish_update(self, version: str) -> Any:
        return self.call(f"finish {version}")

    def sleep(self, keep_weights: bool) -> Any:
        return self.call(f"sleep, {'keep' if keep_weights else 'drop'}")

    def wake(self, memory: str) -> Any:
        return self.call(f"wake {memory}")

    def resume(self, *_: Any) -> Any:
        return self.call("resume")

    def close(self) -> Any:
        return self.call("closed")


def replica_of(client: Client) -> Replica:
    replica = Replica("a", ExternalServer("http://127.0.0.1:9", lambda: client), itertools.count())  # type: ignore[arg-type]
    asyncio.run(replica.open(1.0, print))
    return replica


async def load(replica: Replica, client: Client) -> float:
    async def place(_: Replica, staged: StagedFiles) -> Place:
        return staged.folder.parent, staged.folder

    return await replica.load(STAGED, lambda *_: client.call("prove"), place)


def test_a_sleeping_server_gets_memory_for_weights_then_loads_and_proves_them_and_only_then_goes_on() -> None:
    client = Client()
    replica = replica_of(client)
    asyncio.run(load(replica, client))
    assert client.calls == [LOADED[0], "pause", *LOADED[1:], "resume"]
    client.calls.clear()
    asyncio.run(replica.sleep(keep_weights=False))
    asyncio.run(replica.sleep(keep_weights=False))
    asyncio.run(load(replica, client))
    assert client.calls == ["sleep, drop", LOADED[0], f"wake {WEIGHTS}", *LOADED[1:], f"wake {CACHES}", "resume"]
    client.calls.clear()
    asyncio.run(replica.wake())
    assert client.calls == []  # it is awake


def test_a_server_that_kept_its_weights_wakes_without_others() -> None:
    client = Client()
    replica = replica_of(client)
    asyncio.run(replica.sleep(keep_weights=True))
    asyncio.run(replica.wake())
    assert client.calls == ["sleep, keep", f"wake {WEIGHTS}", f"wake {CACHES}", "resume"]


@pytest.mark.parametrize("failing", [f"wake {WEIGHTS}", "update weights", "finish 3"])
def test_a_server_whose_weights_were_dropped_and_not_replaced_does_not_go_on(failing: str) -> None:
    client = Client(failing, ServerFailed("it broke off"))
    replica = replica_of(client)
    asyncio.run(replica.sleep(keep_weights=False))
    with pytest.raises(ServerTorn, match="it stays paused until it has whole weights"):
        asyncio.run(load(replica, client))
    assert "resume" not in client.calls
    assert replica.asleep


def test_a_server_that_refuses_the_folder_sleeps_on() -> None:
    client = Client("validate", ServerRefused("it is damaged", "damaged"))
    replica = replica_of(client)
    asyncio.run(replica.sleep(keep_weights=False))
    with pytest.raises(ServerRefused):
        asyncio.run(load(replica, client))
    assert client.calls == ["sleep, drop"]


# ---- all servers


async def nothing(*_: Any) -> None:
    pass


async def published_to(clients: dict[str, Client], lora: bool, reported: list[str]) -> Publisher:
    """A publisher to these servers, all of which serve."""
    supervisor = Supervisor(VLLMConfig(), reported.append, nothing, nothing, nothing, lambda: None)  # type: ignore[arg-type]
    for name, client in clients.items():
        supervisor.add(Replica(name, ExternalServer(f"http://{name}", lambda made=client: made), itertools.count()))  # type: ignore[arg-type, misc]
        await supervisor.replicas[name].open(1.0, print)
    for name in supervisor.fleet.due(float("inf")):
        supervisor.fleet.reached(name)
        assert supervisor.fleet.accepted(name, 0, 0.0)
    stager = SimpleNamespace(dtypes={}, whole=None, current=STAGED)
    return Publisher(
        VLLMConfig(),
        stager,  # type: ignore[arg-type]
        supervisor,
        SimpleNamespace(),  # type: ignore[arg-type]
        lora=lora,
        probe_prompt=lambda: np.zeros(1, np.int32),
        published=lambda _: None,
        report=print,
    )


@pytest.mark.loses("b is lost")
@pytest.mark.parametrize("lora", [False, True])
def test_all_servers_sleep_and_those_of_adapters_keep_the_weights_that_they_wake_with(lora: bool) -> None:
    async def sleep_and_wake() -> None:
        clients, reported = {name: Client() for name in "abc"}, list[str]()
        clients["b"].failing, clients["b"].error = f"sleep, {'keep' if lora else 'drop'}", ServerFailed("it is awake")
        publisher = await published_to(clients, lora, reported)
        await publisher.wake()  # they are awake
        await publisher.sleep()
        slept = ["sleep, keep" if lora else "sleep, drop"]
        assert [clients[name].calls for name in "abc"] == [slept, ["closed"], slept]
        assert len(reported) == 1
        assert re.search(r"^b is lost \(it is awake\)", reported[0])
        if lora:
            await publisher.wake()
            awake = [*slept, f"wake {WEIGHTS}", f"wake {CACHES}", "resume"]
            assert [clients[name].calls for name in "abc"] == [awake, ["closed"], awake]

    asyncio.run(sleep_and_wake())


def test_servers_that_dropped_their_weights_do_not_wake_while_there_are_none() -> None:
    async def wake() -> None:
        publisher = await published_to({"a": Client()}, lora=False, reported=[])
        publisher._stager.current = None
        await publisher.sleep()
        await publisher.wake()

    with pytest.raises(EngineError, match="need weights to wake, and none were published"):
        asyncio.run(wake())
