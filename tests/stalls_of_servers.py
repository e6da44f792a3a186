"""Stalls of vLLM servers and of what is between them and a run."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from areal_x.cluster import places
from areal_x.cluster.gang import Room
from areal_x.cluster.surroundings import Surroundings
from areal_x.engines.fleet import server as servers
from areal_x.engines.fleet import stager
from areal_x.engines.fleet.placed import ClusterStarter, Started
from areal_x.engines.fleet.replica import ExternalServer, Prove, Replica
from areal_x.engines.fleet.staging import CopiedWeights, NoRoom, StagedFiles, Staging
from areal_x.engines.fleet.supervisor import Supervisor
from areal_x.engines.vllm import broadcaster
from areal_x.engines.vllm.broadcaster import Broadcaster
from areal_x.engines.vllm.client import VLLMClient
from areal_x.engines.vllm.config import VLLMConfig
from areal_x.engines.vllm.engine import VLLMEngine
from areal_x.engines.vllm.gpu_transfer import GPUSender, TrainerWeights
from areal_x.engines.vllm.server import Launch
from areal_x.errors import UserError
from areal_x.runtime import background
from tests.stalls import EPISODE_PATTERN, Stall, stall

SERVER = "the vLLM server at http://127.0.0.1:9"


@asynccontextmanager
async def silent_server(stall: Stall) -> AsyncIterator[str]:
    """It takes requests, and answers when the stall is released. Gives its address."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            await stall.held()
            body = b'{"weight_version": "3"}'
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n")
            writer.write(f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@stall("the server at {} to answer {}")
async def _(stall: Stall) -> None:
    async with silent_server(stall) as url:
        client = VLLMClient(url, None)
        asked = f"the server at {url} to answer /weight_info"
        version = await stall.through(client.version(), EPISODE_PATTERN, asked)
        assert version == "3"
        await client.close()


@stall("a sign of life from {}")
async def _(stall: Stall) -> None:
    async with silent_server(stall) as url:
        client = VLLMClient(url, None)
        asking = asyncio.create_task(client.is_healthy(100))
        await stall.idle("the run", f"a sign of life from {url}")
        stall.release()
        assert await asking
        await client.close()


def launch_in(folder: Any) -> Launch:
    return Launch(folder, folder, folder, context=1, concurrency=1, seed=0)


def engine_of(stall: Stall) -> VLLMEngine:
    """Over one server, that was not reached yet."""
    model = stall.request.getfixturevalue("tiny_model_dir")
    engine = VLLMEngine(VLLMConfig(urls=("http://127.0.0.1:9",)), model, stall.folder, lambda line: None)
    engine.supervisor.add(Replica(SERVER, ExternalServer("http://127.0.0.1:9", lambda: None), iter(())))
    return engine


@stall("the servers' model to be written")
async def _(stall: Stall) -> None:
    engine = engine_of(stall)

    def write() -> None:
        stall.hold()
        raise UserError("it goes no further")

    engine.stager.write_served = write  # type: ignore[method-assign]
    with pytest.raises(UserError, match="no further"):
        await stall.for_episode(engine.start())
    await engine.close()


@stall("a server to take its request")
async def _(stall: Stall) -> None:
    engine = engine_of(stall)
    engine.fleet.enter(0)

    def reached() -> None:
        engine.fleet.route = lambda *_: SERVER  # type: ignore[method-assign]
        loop.call_soon_threadsafe(engine.dispatcher.notify)

    loop, stall.release = asyncio.get_running_loop(), reached  # type: ignore[method-assign]
    placing = engine.dispatcher._place(0, ())
    assert await stall.for_episode(placing, rf" \({SERVER}: \w+.*\)") == SERVER


@stall("room to stage weights")
async def _(stall: Stall) -> None:
    engine = engine_of(stall)
    engine.stager.staging, engine.stager.current = (
        SimpleNamespace(keep=print),
        StagedFiles(folder=stall.folder, version=1),
    )  # type: ignore[assignment]
    stall.request.getfixturevalue("monkeypatch").setattr(stager, "FULL_SECONDS", 5.0)

    def stage(staging: Any) -> StagedFiles:
        if stall.gate.is_set():
            return StagedFiles(folder=stall.folder, version=2)
        raise NoRoom("no room to stage the weights here")

    def work() -> StagedFiles:
        return engine.stager.with_room(stage)

    staged = await stall.threaded(work, "the publication", r"room to stage weights \(no room to stage the weights here\)")
    assert staged.version == 2


@stall("version {} to be written")
async def _(stall: Stall) -> None:
    engine = engine_of(stall)
    files = background.future(lambda: (stall.hold(), StagedFiles(folder=stall.folder, version=5))[1], name="weights")
    written = engine.stager.written(CopiedWeights(version=5, files=files))
    assert (await stall.through(written, "the publication", "version 5 to be written")).version == 5


@stall("version {} to be written whole")
async def _(stall: Stall) -> None:
    engine = engine_of(stall)
    written = StagedFiles(folder=stall.folder, version=5, digest="1")
    engine.stager._history = SimpleNamespace(stage_whole=lambda staging, staged: (stall.hold(), written)[1])  # type: ignore[assignment]
    engine.stager.staging = SimpleNamespace()  # type: ignore[assignment]
    whole = engine.stager.whole(replace(written, base="0"))
    assert await stall.through(whole, "the publication", "version 5 to be written whole") == written


@stall("version {} to be made in its cache")
async def _(stall: Stall) -> None:
    async def make_version(order: str) -> list[Any]:
        return [{"folder": "/c/1", "root": "/c"} if stall.gate.is_set() else {"working": True}]

    engine = engine_of(stall)
    engine.stager.staging = SimpleNamespace(root=stall.folder)  # type: ignore[assignment]
    replica: Any = SimpleNamespace(name=SERVER, client=SimpleNamespace(make_version=make_version))
    place = engine.publisher._feed.place(replica, StagedFiles(folder=stall.folder, version=5, digest="1"))
    assert await stall.through(place, SERVER, "version 5 to be made in its cache") == (Path("/c"), Path("/c/1"))


@stall("the version before to be written")
async def _(stall: Stall) -> None:
    engine = engine_of(stall)
    engine.stager.staging = Staging(stall.folder)
    engine.stager._writing = background.future(stall.hold, name="weights")
    trainer = SimpleNamespace(weights=lambda: iter([("a", np.zeros(3))]))
    copied = await stall.threaded(lambda: engine.stager.stage(trainer, 5), "the trainer")
    assert (await asyncio.wrap_future(copied.files)).version == 5
    engine.stager.staging.close()


@stall("the writing of weights to end")
async def _(stall: Stall) -> None:
    engine = engine_of(stall)
    engine.stager._writing = background.future(stall.hold, name="weights")
    await stall.for_episode(engine.close())


@stall("the next version to be staged")
async def _(stall: Stall) -> None:
    engine = engine_of(stall)
    engine.stager.current = StagedFiles(folder=stall.folder / "v1", version=1)
    loop = asyncio.get_running_loop()

    async def load(staged: StagedFiles, prove: Prove, place: Any) -> float:
        return 0.0

    def staged() -> None:
        (stall.folder / "v1").mkdir()
        loop.call_soon_threadsafe(engine.dispatcher.notify)

    stall.release = staged  # type: ignore[method-assign]
    replica: Any = SimpleNamespace(name=SERVER, load=load)
    assert await stall.through(engine.publisher.load_current(replica), SERVER)


@stall("the next version to be sent")
async def _(stall: Stall) -> None:
    engine, client = engine_of(stall), object()
    sends = Broadcaster(replace(engine.config, transport="nccl"), engine.supervisor, engine.dispatcher, {SERVER: 1})
    sends._received["another server"] = client, 1  # type: ignore[assignment]
    loop = asyncio.get_running_loop()

    def sent() -> None:
        loop.call_soon_threadsafe(sends._joining[SERVER].set_result, None)

    stall.release = sent  # type: ignore[method-assign]
    replica: Any = SimpleNamespace(name=SERVER, client=client)
    assert await stall.through(sends.joined(replica), SERVER)


@stall("a vLLM server to come back")
async def _(stall: Stall) -> None:
    engine = engine_of(stall)
    sends = Broadcaster(replace(engine.config, transport="nccl"), engine.supervisor, engine.dispatcher, {})
    loop = asyncio.get_running_loop()
    stall.release = lambda: loop.call_soon_threadsafe(engine.dispatcher.notify)  # type: ignore[method-assign,assignment,return-value]
    stall.request.getfixturevalue("monkeypatch").setattr(broadcaster, "LOOK_SECONDS", 60.0)
    await stall.through(sends._one_to_come(time.monotonic()), "the publication")


@stall("the servers to end")
async def _(stall: Stall) -> None:
    engine = engine_of(stall)
    engine._end_processes = stall.hold  # type: ignore[method-assign]
    await stall.for_episode(engine.close())


@stall("the sending of weights to end")
async def _(stall: Stall) -> None:
    engine = engine_of(stall)
    engine.publisher.sender = SimpleNamespace(close=stall.hold)  # type: ignore[assignment]
    await stall.for_episode(engine.close())


@stall("its weights to be sent")
async def _(stall: Stall) -> None:
    import torch

    stall.request.getfixturevalue("monkeypatch").setattr(torch.cuda, "device", lambda index: nullcontext())
    direct = GPUSender(VLLMConfig(transport="nccl", urls=("http://127.0.0.1:9",)), [object()], [1], print)  # type: ignore[list-item,arg-type]
    direct._source = SimpleNamespace()
    work = direct._in_thread(TrainerWeights(trainer=None, version=5, device=0), stall.hold)
    await stall.through(work, "the trainer", r"its weights to be sent \(version 5 to 1 servers\)")


@stall("its process to be ready")
async def _(stall: Stall) -> None:
    log = stall.folder / "server.log"
    log.write_text("an earlier start\nloading weights\n")
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    async with silent_server(stall) as url:
        server = servers.Server(process, url, "key", log, len("an earlier start\n"))
        ready = servers.wait_until_ready(server, launch_in(stall.folder), "vLLM server 1 of 2", 100, lambda line: None)
        await stall.through(ready, "vLLM server 1 of 2", r"its process to be ready \(its log ends: loading weights\)")
    process.communicate(b"\n")


@stall("its process to end")
async def _(stall: Stall) -> None:
    replica = Replica(SERVER, ExternalServer("http://127.0.0.1:9", lambda: None), iter(()))
    replica.server = SimpleNamespace(stop=stall.hold, pid=7)  # type: ignore[assignment]
    await stall.through(replica.close(), SERVER, r"its process to end \(process 7\)")


@stall("the next heartbeat")
async def _(stall: Stall) -> None:
    async def nothing(*_: Any) -> Any: ...

    config = VLLMConfig(heartbeat_seconds=100.0)
    supervisor = Supervisor(config, print, nothing, nothing, nothing, lambda: None)
    supervisor.watch()
    await stall.idle("the watch over servers")
    await supervisor.close()


@stall("the next look at the nodes")
async def _(stall: Stall) -> None:
    engine = engine_of(stall)
    engine.elastic._watched = True
    engine.elastic.settle = lambda: None  # type: ignore[method-assign]
    engine.elastic.watch()
    await stall.idle("the watch over the number of servers")
    await engine.elastic.close()


@stall("servers that are being started")
async def _(stall: Stall) -> None:
    async def nothing(*_: Any) -> Any: ...

    supervisor = Supervisor(VLLMConfig(), print, nothing, nothing, nothing, lambda: None)
    supervisor._tasks[SERVER] = asyncio.ensure_future(stall.held())
    await stall.through(supervisor.still(), ".*", f"servers that are being started.*{re.escape(SERVER)}")


@stall("its requests to be handed over")
async def _(stall: Stall) -> None:
    async def nothing(*_: Any) -> Any: ...

    supervisor = Supervisor(VLLMConfig(), print, nothing, nothing, nothing, lambda: None)
    client = SimpleNamespace(hand_over=nothing)
    supervisor.add(SimpleNamespace(name=SERVER, ours=False, client=client, vacate=nothing))  # type: ignore[arg-type]
    fleet = supervisor.fleet
    fleet.due(1e18)
    fleet.reached(SERVER)
    assert fleet.accepted(SERVER, 0, 0.0)
    fleet.enter(1)
    assert fleet.route(1, {}, 0, 0.0) == SERVER
    stall.release = lambda: fleet.withdraw(1)  # type: ignore[method-assign]
    await stall.through(supervisor.remove(SERVER), SERVER, "its requests to be handed over")
    assert fleet.members == {}


# ---- servers on the nodes of a cluster


@stall("its keeper to start the process")
async def _(stall: Stall) -> None:
    started: Future[Started] = Future()

    def call(method: str, *_: Any) -> Future[Any]:
        if method == "sees":
            shared: Future[bool] = Future()
            shared.set_result(True)
            return shared
        return started if method == "start" else Future()

    keeper: Any = SimpleNamespace(host="10.0.0.7", node="10.0.0.7", call=call)

    async def keepers(number: int) -> Any:
        return [keeper]

    def release() -> None:
        started.set_result(Started("http://10.0.0.7:1", "key", 7, 0))

    stall.release = release  # type: ignore[method-assign]
    launch = launch_in(stall.folder)
    starter = ClusterStarter(SimpleNamespace(keepers=keepers))  # type: ignore[arg-type]
    await stall.for_episode(starter.start(0, launch), r" \(on 10.0.0.7\)")


def place_of(stall: Stall, room: bool, answers: bool) -> places.RayPlace:
    """A place that stalls where it is not given these at once."""
    pytest.importorskip("ray")
    patch = stall.request.getfixturevalue("monkeypatch").setattr

    async def result(*_: Any) -> Any:
        if not answers:
            await stall.held()
        return "a node", "10.0.0.7"

    called = SimpleNamespace(remote=lambda *_: None)
    patch(places, "reserve", lambda room, hosts: SimpleNamespace(ready=object))
    patch(places, "has_ended", lambda ready: room or stall.gate.is_set())
    patch(places, "missing", lambda room, size: "2 CPU wanted, 1 free")
    patch(places, "start_actor", lambda group, room, index: SimpleNamespace(node=called, enter=called, make=called))
    patch(places, "result", result)
    patch(places, "own_node", lambda: "the driver's")
    return places.RayPlace(Room(), 1, object, Surroundings(stall.folder, (), {}), "keeper-3")


@stall("room in the cluster")
async def _(stall: Stall) -> None:
    place = place_of(stall, room=False, answers=True)
    (keeper,) = await stall.for_episode(place.keepers(), r" \(2 CPU wanted, 1 free\)")
    assert keeper.host == "10.0.0.7"


@stall("its keeper to start")
async def _(stall: Stall) -> None:
    place = place_of(stall, room=True, answers=False)
    await stall.for_episode(place.keepers(), r" \(keeper-3\)")
