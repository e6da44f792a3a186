"""A run's servers come and go while requests are in flight: with scripted servers on nodes that the test drains."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from areal_x.engines.fleet import elastic, fleet, server
from areal_x.engines.fleet.scaling import STEPS
from areal_x.engines.vllm.config import VLLMConfig
from areal_x.engines.vllm.engine import VLLMEngine
from areal_x.errors import UserError
from tests.engines.vllm.test_vllm_spread import REQUEST, Told, publish
from tests.rollout.fakes import until


@dataclass
class Started:
    """A started server in place of a process (areal_x.engines.fleet.server.StartedServer)."""

    told: Told
    url: str
    key: str = "key"
    log: Path = Path()
    pid: int = 0

    def poll(self) -> int | None:
        return 1 if self.told.dead else None

    def failure_reason(self) -> str:
        return "its node is gone"

    def last_line(self) -> str:
        return ""

    def release(self) -> None: ...

    def terminate(self) -> None: ...

    def stop(self) -> None:
        self.told.dead = True


@dataclass
class Cloud:
    """Nodes in place of a cluster's (areal_x.engines.fleet.server.Starter). room: how many servers it has room for. told: every
    server that ever was, by its address. at: those that have a place, by their numbers."""

    room: int = 10
    told: dict[str, Told] = field(default_factory=dict)
    at: dict[int, Told] = field(default_factory=dict)
    drained: set[str] = field(default_factory=set)
    vacated: list[str] = field(default_factory=list)
    asked: int = 0
    keeps = False

    async def start(self, number: int, launch: server.Launch) -> Started:
        self.asked += 1
        await until(lambda: len(self.at) < self.room)
        url = f"http://127.0.0.1:{len(self.told) + 1}"
        self.told[url] = self.at[number] = Told(url)
        return Started(self.told[url], url)

    def departing(self) -> set[int]:
        return {number for number, told in list(self.at.items()) if told.url in self.drained}

    def vacate(self, number: int) -> None:
        if number in self.at:
            told = self.at.pop(number)
            assert told.dead, "it ends before its room is given back"
            self.vacated.append(told.url)


Try = Callable[[VLLMEngine, Cloud], Coroutine[Any, Any, None]]


@pytest.fixture
def trying(tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Runs a coroutine with a started engine over a cloud; gives what was reported."""
    monkeypatch.setattr(elastic, "POLL_SECONDS", 0.01)
    lines: list[str] = []

    def run(attempt: Try, **settings: Any) -> list[str]:
        cloud = Cloud()

        async def ready(server: Started, name: str, *_: Any) -> None:
            assert server.poll() is None

        monkeypatch.setattr("areal_x.engines.vllm.server.VLLMClient", lambda url, key, transfer, guesses: cloud.told[url])
        monkeypatch.setattr(server, "wait_until_ready", ready)

        async def main() -> None:
            config = VLLMConfig(staging=str(tmp_path / "staging"), heartbeat_seconds=0.05, **settings)
            engine = VLLMEngine(config, tiny_model_dir, tmp_path, lines.append, starter=cloud)
            await engine.start()
            try:
                await attempt(engine, cloud)
            finally:
                await engine.close()
            assert all(told.dead for told in cloud.told.values())

        asyncio.run(main())
        return lines

    return run


def steps(engine: VLLMEngine, trainer_idle: float, rollout_idle: float) -> None:
    for _ in range(STEPS):
        engine.balance(trainer_idle, rollout_idle)


class Traffic:
    """Requests without end, of which some are always in flight."""

    def __init__(self, engine: VLLMEngine) -> None:
        self.answered = 0
        self.tasks = [asyncio.create_task(self._ask(engine)) for _ in range(20)]
        self.ends = False

    async def _ask(self, engine: VLLMEngine) -> None:
        while not self.ends:
            completion = await engine.generate(REQUEST)
            assert completion.tokens.tolist() == [4, 5, 6, 7]
            self.answered += 1

    async def end(self) -> None:
        self.ends = True
        await asyncio.gather(*self.tasks)


def test_servers_go_from_one_to_three_and_back_to_one_and_no_request_is_lost(
    trying: Callable[..., list[str]], tiny_model_dir: Path
) -> None:
    async def attempt(engine: VLLMEngine, cloud: Cloud) -> None:
        await publish(engine, tiny_model_dir, 1)
        traffic = Traffic(engine)
        for serving in (2, 3):
            steps(engine, 0.5, 0.0)
            await until(lambda serving=serving: len(engine.fleet.serving()) == serving)  # type: ignore[misc]
            assert engine.concurrency == 64 * serving
            assert all(told.holds == 1 for told in cloud.at.values()), "it has the weights before it serves"
        await publish(engine, tiny_model_dir, 2)
        for serving in (2, 1):
            steps(engine, 0.0, 0.9)
            await until(lambda serving=serving: len(engine.supervisor.replicas) == serving)  # type: ignore[misc]
            assert len(cloud.at) == serving
        before = traffic.answered
        await until(lambda: traffic.answered > before + 100)
        await traffic.end()
        assert engine.balance(0.0, 0.0) == {"servers": 1}
        assert engine.fleet.placed == {}

    lines = trying(attempt, least=1, most=3)
    assert [line for line in lines if "servers generate" in line] == [
        "1 servers generate, and the trainer waits 50% of the time: one more is wanted",
        "2 servers generate, and the trainer waits 50% of the time: one more is wanted",
        "3 servers generate, and generation rests 90% of the time: 2 suffice",
        "2 servers generate, and generation rests 90% of the time: 1 suffice",
    ]
    assert not any("lost" in line for line in lines)


def test_one_that_waits_for_room_is_given_up_when_it_is_no_longer_wanted(trying: Callable[..., list[str]]) -> None:
    async def attempt(engine: VLLMEngine, cloud: Cloud) -> None:
        cloud.room = 1
        steps(engine, 0.5, 0.0)
        await until(lambda: cloud.asked == 2)
        assert len((await engine.generate(REQUEST)).tokens) == 4, "the others go on meanwhile"
        steps(engine, 0.0, 0.0)
        await until(lambda: len(engine.supervisor.replicas) == 1)
        assert (len(cloud.told), cloud.vacated) == (1, [])

    trying(attempt, most=2)


def test_one_that_starts_is_not_given_up_when_the_trainer_waits_no_longer(
    trying: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def attempt(engine: VLLMEngine, cloud: Cloud) -> None:
        is_ready = asyncio.Event()

        async def ready(server: Started, name: str, *_: Any) -> None:
            await is_ready.wait()

        monkeypatch.setattr(server, "wait_until_ready", ready)
        steps(engine, 0.5, 0.0)
        replicas = engine.supervisor.replicas
        await until(lambda: len(replicas) == 2 and all(replica.server is not None for replica in replicas.values()))
        assert len(engine.fleet.serving()) == 1
        for _ in range(3):
            steps(engine, 0.0, 0.7)
        is_ready.set()
        await until(lambda: len(engine.fleet.serving()) == 2)
        assert (cloud.asked, cloud.vacated) == (2, [])

    lines = trying(attempt, most=2)
    assert not any("suffice" in line for line in lines)


def test_a_server_on_a_drained_node_is_replaced_hands_over_and_ends(
    trying: Callable[..., list[str]], tiny_model_dir: Path
) -> None:
    async def attempt(engine: VLLMEngine, cloud: Cloud) -> None:
        await publish(engine, tiny_model_dir, 7)
        (first, second) = cloud.told.values()
        first.held = True
        tasks = [asyncio.create_task(engine.generate(REQUEST)) for _ in range(6)]
        await until(lambda: len(first.waiting) == 3)
        cloud.drained.add(first.url)
        await until(lambda: cloud.vacated == [first.url])
        assert [completion.tokens.tolist() for completion in await asyncio.gather(*tasks)] == [[4, 5, 6, 7]] * 6
        assert ([1, 2, 3, 4, 5], 2) in second.served, "what it had is continued"
        await until(lambda: len(engine.fleet.serving()) == 2)
        third = list(cloud.told.values())[2]
        assert (third.holds, third.dead) == (7, False)

    lines = trying(attempt, servers=2)
    assert "the node of vLLM server 1 of 2 is being drained: it is placed elsewhere" in lines
    assert not any("lost" in line for line in lines)


def test_the_only_server_goes_on_until_another_one_serves_or_its_node_is_gone(trying: Callable[..., list[str]]) -> None:
    async def attempt(engine: VLLMEngine, cloud: Cloud) -> None:
        (only,) = cloud.told.values()
        cloud.room = 1
        cloud.drained.add(only.url)
        await until(lambda: cloud.asked == 2)  # another place is asked for
        assert len((await engine.generate(REQUEST)).tokens) == 4
        assert not only.dead
        cloud.room = 2
        await until(lambda: cloud.vacated == [only.url])
        assert len((await engine.generate(REQUEST)).tokens) == 4

    trying(attempt, servers=1)


@pytest.mark.loses(r"vLLM server 1 of 1 is lost \(")
def test_a_node_that_is_gone_before_another_one_serves_costs_no_request(trying: Callable[..., list[str]]) -> None:
    async def attempt(engine: VLLMEngine, cloud: Cloud) -> None:
        (only,) = cloud.told.values()
        cloud.room, only.held = 1, True
        task = asyncio.create_task(engine.generate(REQUEST))
        await until(lambda: only.waiting)
        cloud.drained.add(only.url)
        await until(lambda: cloud.asked == 2)
        only.dead = True
        await until(lambda: cloud.vacated == [only.url])
        assert (await task).tokens.tolist() == [4, 5, 6, 7]

    trying(attempt, servers=1)


def test_a_server_that_is_taken_away_does_not_come_back(trying: Callable[..., list[str]]) -> None:
    async def attempt(engine: VLLMEngine, cloud: Cloud) -> None:
        await engine.leave(next(iter(cloud.told)))
        steps(engine, 0.9, 0.0)
        engine.elastic.settle()
        assert len(engine.supervisor.replicas) == 1
        assert (cloud.asked, len(cloud.vacated)) == (2, 1)

    trying(attempt, servers=2)


@pytest.mark.loses(r"vLLM server 2 .*(does not come back|given up)")
def test_another_server_is_wanted_in_place_of_one_that_was_given_up(
    trying: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "FIRST_RETRY_SECONDS", 0.001)
    monkeypatch.setattr(fleet, "LONGEST_RETRY_SECONDS", 0.001)

    async def attempt(engine: VLLMEngine, cloud: Cloud) -> None:
        start = cloud.start

        async def refused(number: int, launch: server.Launch) -> Started:
            if number == 1:
                raise UserError("its node has no vLLM")
            return await start(number, launch)

        cloud.start = refused  # type: ignore[method-assign]
        steps(engine, 0.5, 0.0)
        await until(lambda: any(member.state is fleet.State.GIVEN_UP for member in engine.fleet.members.values()))
        steps(engine, 0.5, 0.0)
        await until(lambda: len(engine.fleet.serving()) == 2)
        assert sorted(cloud.at) == [0, 2]

    trying(attempt, most=3)


def test_all_nodes_may_be_drained_one_after_the_other(trying: Callable[..., list[str]]) -> None:
    async def attempt(engine: VLLMEngine, cloud: Cloud) -> None:
        traffic = Traffic(engine)
        for drained in range(1, 6):
            cloud.drained.add(next(url for url in cloud.told if url not in cloud.drained))
            await until(lambda drained=drained: len(cloud.vacated) == drained)  # type: ignore[misc]
        await until(lambda: len(engine.fleet.serving()) == 2)
        await traffic.end()
        assert set(cloud.vacated) == cloud.drained
        assert {replica.number for replica in engine.supervisor.replicas.values()} <= {0, 1, 2}

    lines = trying(attempt, servers=2)
    assert not any("lost" in line for line in lines)
