"""What the engine makes of a publication that breaks off, with stand-ins for the sending side and for the servers."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from areal_x.engines.fleet.failures import ServerFailed, ServerLost
from areal_x.engines.vllm.broadcast import Broadcast, BroadcastFailed, Member
from areal_x.engines.vllm.gpu_transfer import TrainerWeights
from areal_x.protocols.engine import EngineError

STALL = "RDT stall: no progress for 30s"


class Side:
    """The functions of the processes that train. outcome: what `send` returns; waits: once it is told to
    leave."""

    def __init__(self, outcome: str | None = None, waits: bool = False) -> None:
        self.outcome, self.waits = outcome, waits
        self.calls: list[str] = []
        self.left = threading.Event()

    def invite(self, trainer: Any, rank: int, sizes: list[int], here: bool) -> dict[str, Any]:
        self.calls.append(f"invite {sizes}")
        return {"producers": ["a"]}

    def joining(self, invitation: dict[str, Any], sizes: list[int]) -> list[dict[str, Any]]:
        return [{**invitation, "number": number} for number in range(len(sizes))]

    def connect(self, trainer: Any, rank: int, invitation: dict[str, Any]) -> None: ...

    def describe(self, trainer: Any, rank: int) -> dict[str, Any]:
        return {}

    def send(self, trainer: Any, rank: int) -> str | None:
        self.calls.append("send")
        if self.waits:
            assert self.left.wait(60)
        return self.outcome

    def leave(self, trainer: Any, rank: int) -> None:
        self.calls.append("leave")
        self.left.set()


class Gang:
    """A trainer in processes of its own: here the first."""

    def apply(self, function: Any, *arguments: Any, beside: bool = False) -> Any:
        return function(self, 0, *arguments)


class Client:
    """fails: the method that raises. waits: the one that never returns."""

    url = "http://10.0.0.1:8000"

    def __init__(self, fails: str = "", waits: str = "", error: type[EngineError] = EngineError) -> None:
        self.fails, self.waits, self.error = fails, waits, error
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        async def call(*arguments: Any) -> None:
            self.calls.append((name, *arguments))
            if name == self.fails:
                raise self.error("connection reset")
            if name == self.waits:
                await asyncio.Event().wait()

        return call


def member(name: str, client: Client, workers: int = 1) -> Member:
    replica = SimpleNamespace(name=name, client=client, start_update=client.start_update, explained=lambda error: error)
    return Member(replica, workers)  # type: ignore[arg-type]


def send(side: Side, *clients: Client, version: int = 1, broadcast: Broadcast | None = None) -> None:
    broadcast = broadcast or Broadcast(side)
    members = [member(f"server {i}", client, workers=2) for i, client in enumerate(clients)]
    staged = TrainerWeights(trainer=Gang(), version=version, device=None)

    async def publish() -> None:
        await broadcast.connect(staged, members)
        await broadcast.send(staged, members)

    asyncio.run(publish())


def test_each_server_is_told_its_own_part_and_joins_once() -> None:
    side, clients = Side(), (Client(), Client())
    broadcast = Broadcast(side)
    send(side, *clients, broadcast=broadcast)
    send(side, *clients, version=2, broadcast=broadcast)
    assert side.calls == ["invite [2, 2]", "send", "send"]
    for number, client in enumerate(clients):
        assert [name for name, *_ in client.calls].count("init_weight_transfer") == 1
        assert ("init_weight_transfer", {"producers": ["a"], "number": number}) in client.calls
        assert client.calls[-1] == ("finish_update", "2")


def test_a_server_that_fails_is_named_and_the_sending_side_told_to_leave() -> None:
    side = Side("the publication was given up", waits=True)
    clients = Client(fails="update_weights"), Client(waits="update_weights")
    with pytest.raises(BroadcastFailed, match=r"connection reset; all servers .* parts of two policies") as raised:
        send(side, *clients)
    assert (raised.value.torn, raised.value.lost) == (True, ["server 0", "server 1"])
    assert side.calls == ["invite [2, 2]", "send", "leave"]
    assert not any(name == "finish_update" for client in clients for name, *_ in client.calls)


def test_servers_that_the_sending_side_gave_up_are_lost_but_not_twice_for_one_version() -> None:
    side = Side(STALL)
    broadcast = Broadcast(side)

    def outcome(version: int) -> BroadcastFailed:
        with pytest.raises(BroadcastFailed, match=f"the weights could not be sent: {STALL}") as raised:
            send(side, Client(waits="update_weights"), Client(waits="update_weights"), version=version, broadcast=broadcast)
        assert raised.value.torn
        return raised.value

    assert outcome(1).lost == ["server 0", "server 1"]
    assert outcome(1).lost == [], "the run ends"
    assert outcome(2).lost == ["server 0", "server 1"]


@pytest.mark.parametrize("error", [ServerFailed, ServerLost])
def test_a_server_that_refuses_the_first_invitation_is_not_started_again_for_it(error: type[EngineError]) -> None:
    side, refuses = Side(), Client(fails="init_weight_transfer", error=error)
    broadcast = Broadcast(side)

    def lost(version: int) -> list[str]:
        with pytest.raises(BroadcastFailed, match="connection reset") as raised:
            send(side, Client(), refuses, version=version, broadcast=broadcast)
        return list(raised.value.lost)

    assert lost(1) == ([] if error is ServerFailed else ["server 1"])
    send(side, Client(), Client(), version=2, broadcast=broadcast)
    assert lost(3) == ["server 1"]


def test_an_error_of_the_trainer_is_no_servers_fault() -> None:
    class Broken(Side):
        def send(self, trainer: Any, rank: int) -> str | None:
            raise ArithmeticError("out of memory")

    with pytest.raises(BroadcastFailed, match="could not be sent: out of memory") as raised:
        send(Broken(), Client(waits="update_weights"))
    assert raised.value.lost == []
