"""Servers that outlive an engine."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from areal_x.engines.fleet.kept import KeptServers
from areal_x.engines.vllm.server import Launch

LAUNCH = Launch(Path("model"), Path("log"), Path("staged-1"), context=256, concurrency=8, seed=3, arguments=("-tp", "2"))


@dataclass
class Started:
    """A server."""

    launch: Launch
    pid: int = 7
    calls: list[str] = field(default_factory=list)

    def poll(self) -> int | None:
        return 1 if "stop" in self.calls else None

    def terminate(self) -> None:
        self.calls.append("terminate")

    def stop(self) -> None:
        self.calls.append("stop")


class Starter:
    keeps = False

    def __init__(self) -> None:
        self.vacated: list[int] = []

    async def start(self, number: int, launch: Launch) -> Started:
        return Started(launch)

    def departing(self) -> set[int]:
        return {7}

    def vacate(self, number: int) -> None:
        self.vacated.append(number)


def started(servers: KeptServers, number: int, launch: Launch) -> Started:
    return asyncio.run(servers.start(number, launch))  # type: ignore[return-value]


def test_the_next_engine_goes_on_with_a_server_that_runs() -> None:
    servers = KeptServers(Starter())  # type: ignore[arg-type]
    first, other = started(servers, 0, LAUNCH), started(servers, 1, replace(LAUNCH, seed=4))
    assert first is not other
    again = replace(LAUNCH, seed=0, staging=Path("staged-2"))
    assert started(servers, 0, again) is first
    assert started(servers, 1, again) is other
    servers.end()
    assert first.calls == other.calls == ["terminate", "stop"]


@pytest.mark.parametrize("change", [{"context": 512}, {"arguments": ()}, {"model": Path("another")}, {"lora_rank": 8}])
def test_a_server_of_another_kind_is_started_anew(change: dict[str, object]) -> None:
    servers = KeptServers(Starter())  # type: ignore[arg-type]
    first = started(servers, 0, LAUNCH)
    assert started(servers, 0, replace(LAUNCH, **change)) is not first  # type: ignore[arg-type]
    assert first.calls == ["stop"]


def test_a_server_that_has_ended_is_started_anew_and_one_that_left_is_forgotten() -> None:
    servers = KeptServers(starter := Starter())  # type: ignore[arg-type]
    first = started(servers, 0, LAUNCH)
    first.stop()
    second = started(servers, 0, LAUNCH)
    assert second is not first
    servers.vacate(0)
    assert starter.vacated == [0]
    assert started(servers, 0, LAUNCH) is not second
    servers.end()
    assert second.calls == []  # whoever removed it has ended it
    assert servers.departing() == {7}
