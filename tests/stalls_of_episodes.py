"""Stalls of what episodes do: rewards, threads, tools, sandboxes, agents, the gateway, the embedded engine."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from areal_x.agents import external_program
from areal_x.agents.agent import Agent, AgentWorkflow
from areal_x.agents.board import Board
from areal_x.agents.calling import BackgroundLoop
from areal_x.agents.external_program import run_program
from areal_x.agents.gateway import gateway
from areal_x.agents.gateway.gateway import Gateway
from areal_x.agents.gateway.work import WorkOver
from areal_x.agents.judge import LLMJudge, unscored
from areal_x.agents.online import Online
from areal_x.agents.tools.mcp_tools import McpConnection, McpServer
from areal_x.agents.tools.toolbox import Toolbox
from areal_x.engines.embedded import EmbeddedEngine
from areal_x.protocols.engine import Completion
from areal_x.rewards.pool import RewardPool
from areal_x.runtime import guard
from areal_x.runtime.hosts import Spread
from areal_x.runtime.thread import OneThread, in_thread
from areal_x.sandbox import pool as sandbox_pool
from areal_x.sandbox.containers import command_line
from areal_x.sandbox.containers.command_line import CommandLineContainers
from areal_x.sandbox.containers.limits import ContainerLimits
from areal_x.sandbox.containers.remote import RemoteContainer
from areal_x.sandbox.pool import ProgramResult, Sandbox
from areal_x.shards import messages
from areal_x.shards.episodes import ShardedEpisodes
from areal_x.shards.seat import result
from areal_x.shards.shards import Shards
from areal_x.types import Group, Scored, Task, Trajectory
from areal_x.workflows.learned_reward import RewardModel
from areal_x.workflows.single_turn import SingleTurn
from tests.agents.chat.speaking import tokenizer_of
from tests.agents.gateway.scripted import RUN, Letters, Scripted
from tests.engines.test_embedded import Counting, Model, request
from tests.rewards.reward_functions import Opened, exits_at_once, waits_for_file
from tests.rollout.fakes import FakeEngine, until
from tests.stalls import EPISODE_PATTERN, Stall, stall

TASK = Task("t", "1+2=", "3")

# ---- rewards


class Judging:
    """A pool of one process, and a reward in it that ends when the stall does."""

    def __init__(self, stall: Stall) -> None:
        self.stall, self.file = stall, stall.folder / "released"
        self.pool = RewardPool(waits_for_file, 1, 100)
        stall.release = self.file.touch  # type: ignore[method-assign]

    def score(self) -> Any:
        return self.pool.score(Task("t", "", metadata={"file": str(self.file)}), "text")


@stall("its reward")
async def _(stall: Stall) -> None:
    judging = Judging(stall)
    detail = r" \(waits_for_file of task t in process \d+\)"
    assert isinstance(await stall.for_episode(judging.score(), detail), Scored)
    await judging.pool.close()


@stall("a free reward process")
async def _(stall: Stall) -> None:
    judging = Judging(stall)
    first = asyncio.create_task(judging.score())
    assert isinstance(await stall.for_episode(judging.score(), r" \(waits_for_file\)"), Scored)
    await first
    await judging.pool.close()


@stall("a reward process to start")
async def _(stall: Stall) -> None:
    file = stall.folder / "released"
    stall.release = file.touch  # type: ignore[method-assign]
    pool = RewardPool(Opened(file), 1)
    assert isinstance(await stall.for_episode(pool.score(TASK, ""), r" \(.* in process \d+\)"), Scored)
    await pool.close()


def slow_to_end(stall: Stall) -> None:
    """Makes guards slow to end."""
    ended = guard.wait_until_ended

    def slowly(process: Any) -> int:
        stall.hold()
        return ended(process)

    stall.request.getfixturevalue("monkeypatch").setattr(guard, "wait_until_ended", slowly)


@stall("its reward processes to end")
async def _(stall: Stall) -> None:
    judging = Judging(stall)
    judging.file.touch()
    await judging.score()
    slow_to_end(stall)
    stall.release = stall.gate.set  # type: ignore[method-assign]
    await stall.through(judging.pool.close(), "the rollout", r"its reward processes to end \(process \d+\)")


@stall("its reward process to end")
async def _(stall: Stall) -> None:
    pool = RewardPool(exits_at_once, 1)
    slow_to_end(stall)
    outcome = await stall.for_episode(pool.score(Task("t", "", 3), ""), r" \(process \d+\)")
    assert "exit status 3" in outcome.error
    await pool.close()


# ---- services on other nodes


class Elsewhere:
    """One other node, whose service is an object of this process. Its calls are answered when the stall ends."""

    node = "10.0.0.7"

    def __init__(self, stall: Stall) -> None:
        self.calls: list[Future[Any]] = []
        self.called = asyncio.Event()
        stall.release = self.answer  # type: ignore[method-assign]

    def there(self) -> list[Any]:
        return [self]

    def call(self, *_: Any) -> Future[Any]:
        self.calls.append(Future())
        self.called.set()
        return self.calls[-1]

    def answer(self) -> None:
        for call in self.calls:
            if not call.done():
                call.set_result("answered")


class Immediate:
    async def work(self) -> str:
        return "here"

    async def close(self) -> None:
        pass


@stall("a call on another node")
async def _(stall: Stall) -> None:
    spread = Spread(Immediate(), Immediate, 1, Elsewhere(stall), "counts")
    assert await stall.for_episode(spread.call("work"), r" \(counts, on 10\.0\.0\.7\)") == "answered"


@stall("a free place on any node")
async def _(stall: Stall) -> None:
    other = Elsewhere(stall)
    own = Elsewhere(stall)  # a service whose calls wait, too
    stall.release = lambda: (other.answer(), own.answer())  # type: ignore[assignment, method-assign]
    busy = SimpleNamespace(work=lambda: asyncio.wrap_future(own.call()))
    spread = Spread(busy, Immediate, 1, other, "counts")  # type: ignore[arg-type]
    first = [asyncio.create_task(spread.call("work")) for _ in range(2)]
    await other.called.wait()
    await own.called.wait()
    release = stall.release

    async def third() -> str:
        answer = asyncio.create_task(spread.call("work"))
        while not answer.done():
            await asyncio.wait([answer], timeout=0.05)
            if all(task.done() for task in first):
                release()
        return str(answer.result())

    assert await stall.for_episode(third(), r" \(counts\)") == "answered"


@stall("the services on other nodes to end")
async def _(stall: Stall) -> None:
    other = Elsewhere(stall)
    spread = Spread(Immediate(), Immediate, 1, other, "counts")
    first = asyncio.create_task(spread.call("work"))
    await other.called.wait()
    other.answer()
    await first
    await stall.through(spread.close(), "the rollout", r"the services on other nodes to end \(counts\)")


@stall("a shard to answer")
async def _(stall: Stall) -> None:
    answer = result(Elsewhere(stall), "shard 2", "open")  # type: ignore[arg-type]
    assert await stall.for_episode(answer, r" \(open, shard 2 on 10\.0\.0\.7\)") == "answered"


@stall("a shard to be opened again")
async def _(stall: Stall) -> None:
    shards = Shards(1, 1, SimpleNamespace(), print)  # type: ignore[arg-type]
    (seat,) = shards.seats
    stall.release = lambda: seat.ready(Elsewhere(stall), messages.Opened(8, 64))  # type: ignore[arg-type, method-assign]
    assert await stall.through(shards.some_ready(), "the rollout") == [seat]


@stall("its shard")
async def _(stall: Stall) -> None:
    shards, group = Shards(1, 1, SimpleNamespace(), print), Group(Task("t", ""), 7, 0)  # type: ignore[arg-type]
    episodes = ShardedEpisodes(shards, SimpleNamespace(), lambda: None)  # type: ignore[arg-type]
    episodes.admit(group)
    ((_, done),) = shards._waiting
    stall.release = lambda: done.set_result(messages.Finished(7, (), 0.5))  # type: ignore[method-assign]
    found = await stall.through(episodes.run(group), "group 7", r"its shard \(no shard is ready\)")
    assert found.greedy_reward == 0.5


@stall("the learned reward")
async def _(stall: Stall) -> None:
    def values(batch: Any) -> Any:
        stall.hold()
        return np.ones(np.shape(batch.tokens), np.float32)

    judge = RewardModel(SimpleNamespace(values=values), 32)  # type: ignore[arg-type]
    answer = np.arange(2, 4, dtype=np.int32)
    trajectory = Trajectory.from_completion(answer, answer, np.zeros(2, np.float32), np.zeros(2, np.int32), 1.0)
    assert await stall.for_episode(judge.score([trajectory])) == [1.0]
    judge.close()


@stall("its judge")
async def _(stall: Stall) -> None:
    class Held:
        version = 0

        async def generate(self, request: Any) -> Completion:
            await stall.held()
            tokens = np.asarray(tokenizer.encode("7", add_special_tokens=False), np.int32)
            return Completion(tokens, np.zeros(1, np.float32), np.zeros(1, np.int32), "stop")

    tokenizer = tokenizer_of("qwen25")
    judge = LLMJudge(SingleTurn(reward=unscored), pattern=r"(\d)", highest=7.0).setup(tokenizer).judge
    assert judge is not None
    asked = judge.score("how good is it?", Held(), tokenizer)  # type: ignore[arg-type]
    assert await stall.for_episode(asked, r" \(engine\)") == 1.0


# ---- threads and tools


@stall("a function on a thread")
async def _(stall: Stall) -> None:
    await stall.for_episode(in_thread(stall.hold), r" \(Stall.hold on areal-x blocking\)")


@stall("something to do")
async def _(stall: Stall) -> None:
    thread = OneThread("of a test")
    await thread.run(str)
    await stall.idle("the thread of a test")
    assert await thread.run(str, 1) == "1"
    thread.close()


@dataclass(frozen=True)
class Search:
    stall: Stall
    name: str = "search"
    schema: Any = field(default_factory=lambda: {"function": {"name": "search", "parameters": {"type": "object"}}})

    async def call(self, arguments: dict[str, Any]) -> str:
        await self.stall.held()
        return "nothing"


@stall("its tool {}")
async def _(stall: Stall) -> None:
    answer = Toolbox([], tool_seconds=100)._answer(Search(stall), {})
    assert await stall.through(answer, EPISODE_PATTERN, "its tool search") == "nothing"


TOLD = {"name": "search", "description": "", "parameters": {}}


class Connected(McpConnection):
    """To a server that is named, through a process that says these lines; before: what it waits for first."""

    def __init__(self, *lines: dict[str, Any], before: Any = None, ends: Any = None) -> None:
        super().__init__(McpServer(command=("the-server",)))
        self.lines, self.before, self.ends = lines, before, ends

    async def _started(self) -> Any:
        if self.before is not None:
            await self.before()
        self.says = asyncio.StreamReader()
        for line in self.lines:
            self.say(line)
        stdin = SimpleNamespace(write=lambda data: None, close=self.says.feed_eof, is_closing=lambda: False)
        return SimpleNamespace(stdin=stdin, stdout=self.says, returncode=None, wait=self.ends or ended)

    def say(self, line: dict[str, Any]) -> None:
        self.says.feed_data(json.dumps(line).encode() + b"\n")


async def ended() -> int:
    return 0


OPEN: tuple[dict[str, Any], ...] = ({"connected": True}, {"tool": TOLD}, {"listed": True})


@stall("the MCP server to list its tools")
async def _(stall: Stall) -> None:
    made = Connected(*OPEN[:2])

    async def listed() -> None:
        await stall.held()
        made.say(OPEN[2])

    later = asyncio.create_task(listed())
    assert await stall.for_episode(made.open(), r" \(the-server\)") == [TOLD]
    await later


@stall("the MCP server to answer")
async def _(stall: Stall) -> None:
    made = Connected(*OPEN)

    async def answered() -> None:
        await stall.held()
        made.say({"call": 0, "text": "the answer", "failed": False})

    later = asyncio.create_task(answered())
    answer = await stall.for_episode(made.call("search", {}), r" \(the-server, tool search\)")
    assert answer["text"] == "the answer"
    await later
    await made.close()


@stall("the MCP server to end")
async def _(stall: Stall) -> None:
    made = Connected(*OPEN, ends=stall.held)
    await made.open()
    await stall.for_episode(made.close(), r" \(the-server\)")


@stall("the MCP server to start")
async def _(stall: Stall) -> None:
    made = Connected(*OPEN, before=stall.held)
    assert await stall.for_episode(made.open(), r" \(the-server\)") == [TOLD]


# ---- the sandbox


@stall("the sandbox to start")
async def _(stall: Stall) -> None:
    first_line = sandbox_pool._first_line

    async def slowly(control: Any) -> Any:
        await stall.held()
        return await first_line(control)

    stall.request.getfixturevalue("monkeypatch").setattr(sandbox_pool, "_first_line", slowly)
    sandbox = Sandbox()
    assert (await stall.for_episode(sandbox.run("print(42)"), r" \(process \d+\)")).output == "42\n"
    await sandbox.close()


class HeldSandbox(Sandbox):
    """Its programs end when the stall does."""

    def __init__(self, stall: Stall) -> None:
        super().__init__(workers=1)
        self.stall = stall

    async def _ready(self) -> Any:
        return SimpleNamespace(confined=True)

    async def _request(self, server: Any, request: dict[str, str]) -> dict[str, Any]:
        await self.stall.held()
        return {"output": ["42\n", ""], "dropped": False, "error": None, "seconds": 1.0, "status": "ok"}


@stall("its program in the sandbox")
async def _(stall: Stall) -> None:
    result: ProgramResult = await stall.for_episode(HeldSandbox(stall).run("print(42)"), r" \(9 characters\)")
    assert result.output == "42\n"


@stall("a free place in the sandbox")
async def _(stall: Stall) -> None:
    sandbox = HeldSandbox(stall)
    first = asyncio.create_task(sandbox.run(""))
    assert (await stall.for_episode(sandbox.run(""), r" \(1 programs run\)")).output == "42\n"
    await first


@stall("the sandbox to end")
async def _(stall: Stall) -> None:
    sandbox = Sandbox()
    await sandbox.start()
    slow_to_end(stall)
    await stall.for_episode(sandbox.close(), r" \(process \d+\)")


# ---- containers


class HeldMachine:
    """It does everything when the stall ends."""

    def __init__(self, stall: Stall) -> None:
        self.held = stall.held

    async def execute(self, words: Sequence[str], seconds: float, most: int) -> bytes:
        await self.held()
        return b"0 3\n42\n"

    async def upload(self, path: str, content: bytes) -> None: ...

    async def download(self, path: str, most: int) -> bytes:
        await self.held()
        return b"42"

    async def remove(self) -> None:
        await self.held()


def held_container(stall: Stall) -> RemoteContainer:
    return RemoteContainer(HeldMachine(stall), seconds=1, output_characters=100, copy_mb=1)


@stall("its container to start")
async def _(stall: Stall) -> None:
    async def slowly(*_: Any) -> bytes:
        await stall.held()
        return b"ok"

    stall.request.getfixturevalue("monkeypatch").setattr(command_line, "run_words", slowly)
    starting = CommandLineContainers("podman", "an/image", ContainerLimits()).start()
    assert isinstance(await stall.for_episode(starting, r" \(an/image\)"), RemoteContainer)


@stall("a command in its container")
async def _(stall: Stall) -> None:
    result = await stall.for_episode(held_container(stall).run(["ls", "a b"]), r" \(ls 'a b'\)")
    assert result.output == "42\n"


@stall("files of its container")
async def _(stall: Stall) -> None:
    assert await stall.for_episode(held_container(stall).copy_out("a.txt"), r" \(a.txt\)") == b"42"


@stall("its container to end")
async def _(stall: Stall) -> None:
    await stall.for_episode(held_container(stall).stop(), "")


# ---- agents and the gateway


class Working(AgentWorkflow):
    """An agent that ends when the stall does."""

    async def work(self, task: Task, session: Any) -> Any:
        await session.held()
        return 0.5


@stall("its agent")
async def _(stall: Stall) -> None:
    calls = [object(), object()]
    session: Any = SimpleNamespace(ended=asyncio.Event().wait, calls=lambda: calls, held=stall.held)
    assert await stall.for_episode(Working().outcome(TASK, session), r" \(task t, 2 calls so far\)") == Scored(0.5)


@stall("the agents' thread to end")
async def _(stall: Stall) -> None:
    async def work() -> None: ...

    agent = Agent(solve=print, background_loop=BackgroundLoop())
    assert agent.background_loop is not None
    await agent.background_loop.run(work())
    assert agent.background_loop._loop is not None
    agent.background_loop._loop.call_soon_threadsafe(stall.hold)
    await stall.through(agent.close(), "the rollout")


@stall("its agent's process to end")
async def _(stall: Stall) -> None:
    ended = external_program.wait_for_exit

    async def slowly(process: Any) -> int:
        await stall.held()
        return await ended(process)

    stall.request.getfixturevalue("monkeypatch").setattr(external_program, "wait_for_exit", slowly)
    program = run_program((sys.executable, "-c", "print(42)"), TASK, {}, ".", 1024, 8)
    assert await stall.for_episode(program, r" \(process \d+\)") == "42\n"


@stall("its session to end")
async def _(stall: Stall) -> None:
    session = Gateway().open(Scripted("hello"), Letters(), RUN)
    ending = asyncio.create_task(session.ended())
    await stall.idle("the run")
    session.end(1.0)
    assert await ending == Scored(1.0)


@stall("somebody to open a session")
async def _(stall: Stall) -> None:
    online = Online(address_file=str(stall.folder / "address"))
    gateway = Gateway()

    async def start(address: Path | None = None) -> None: ...

    host: Any = SimpleNamespace(start=start, gateway=gateway, renderer=Letters())
    object.__setattr__(online, "host", host)
    episode = asyncio.create_task(online.run(TASK, FakeEngine()))
    await stall.idle("the run")
    session = await online.opened(None)
    assert session is not None
    session.end(1.0)
    await episode


@stall("a worker to take it")
async def _(stall: Stall) -> None:
    board = Board()

    async def open_session() -> Any:
        return SimpleNamespace(id="s", key="k", close=lambda: None)

    episode = asyncio.create_task(board.lease_for(b"{}", open_session))
    await stall.idle("the run")
    assert await board.take("a worker", 10) is not None
    board.end(await episode)


@stall("an episode for a worker")
async def _(stall: Stall) -> None:
    board = Board()
    poll = asyncio.create_task(board.take("a worker", 300))
    await stall.idle("the gateway")
    board.close()
    with pytest.raises(WorkOver):
        await poll


def slow_server(stall: Stall, method: str) -> None:
    """A method of the gateway's server takes its time."""
    inner = getattr(gateway.GatewayServer, method)

    async def slowly(*arguments: Any, **named: Any) -> None:
        await stall.held()
        await inner(*arguments, **named)

    stall.request.getfixturevalue("monkeypatch").setattr(gateway.GatewayServer, method, slowly)


@stall("the gateway to serve")
async def _(stall: Stall) -> None:
    slow_server(stall, "startup")
    gateway = Gateway()
    await stall.for_episode(gateway.start())
    await gateway.close()


@stall("the gateway to end")
async def _(stall: Stall) -> None:
    slow_server(stall, "shutdown")
    gateway = Gateway()
    await gateway.start()
    await stall.through(gateway.close(), "the rollout")


@stall("the body of a request")
async def _(stall: Stall) -> None:
    gateway = Gateway()
    await gateway.start()
    session = gateway.open(Scripted("hello"), Letters(), RUN)
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    body = b'{"model": "policy", "messages": [{"role": "user", "content": "hello"}]}'
    path = f"/sessions/{session.id}/v1/chat/completions"
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{gateway.port}\r\nAuthorization: Bearer {session.key}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode())
    await stall.idle("the gateway")
    writer.write(body)
    assert b"200" in await reader.readline()
    writer.close()
    await gateway.close()


# ---- the embedded engine


async def embedded(sampler: Counting) -> EmbeddedEngine:
    engine = EmbeddedEngine(sampler)
    await engine.start()
    await engine.swap(engine.stage(Model(1)))
    return engine


@stall("its sampler")
async def _(stall: Stall) -> None:
    sampler = Counting(2)
    sampler.free_running = False
    engine = await embedded(sampler)
    drawing = asyncio.create_task(engine.generate(request(3, 3)))
    await stall.said("the embedded engine", r"its sampler \(\d+ sequences run\)")
    sampler.free_running = True
    sampler.decodes.release()
    assert len((await drawing).tokens) == 3
    await engine.close()


@stall("requests")
async def _(stall: Stall) -> None:
    engine = await embedded(Counting(2))
    await stall.idle("the embedded engine")
    assert len((await engine.generate(request(3, 3))).tokens) == 3
    await engine.close()


@stall("the embedded engine to end")
async def _(stall: Stall) -> None:
    sampler = Counting(2)
    engine = await embedded(sampler)
    begun = threading.Event()

    def load(snapshot: float) -> None:
        begun.set()
        stall.hold()

    sampler.load = load  # type: ignore[method-assign]
    swap = asyncio.create_task(engine.swap(engine.stage(Model(2))))
    await until(begun.is_set)
    await stall.through(engine.close(), "the rollout")
    await asyncio.gather(swap, return_exceptions=True)
