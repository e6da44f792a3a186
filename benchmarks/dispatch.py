"""Cost of one request on the engine's event loop, whatever the number of servers, and of its parts.

    python -m benchmarks.dispatch [--servers 8 64 256 1000] [--requests 8192] [--in-flight 4096] [--limit 1024]
        [--parts sockets http aiohttp client engine rollout]

Claims: at most 0.45 ms of CPU a request at 1,000 servers, no turn of the loop above 20 ms, started with `ulimit -Sn 1024`; and
all requests are answered where no more than that may be open (--limit 1024).

The unmodified VLLMEngine asks stub HTTP servers, all in one process of their own, which answer each request after a second or
two as vLLM does: 300 tokens with their log-probabilities and versions, to prompts of 200 tokens in groups of eight. CPU seconds
are those of the engine's process during the requests, divided by their number; those of the stubs are given beside them. The
longest turn is the most CPU time that one callback of the loop took, and the longest collection that of Python's collector,
measured in a second pass, because measuring costs time itself.

--parts: the rollout (runner and queue over the engine, no trainer); the engine; its client alone, without the dispatcher;
the HTTP client below that, with a body made in advance and no parsing of the answer; aiohttp's in its place; and bare
connections of the loop, which only count bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import psutil

from areal_x.runtime.open_files import raise_limit

if TYPE_CHECKING:
    from areal_x.protocols.engine import Engine

PROMPT, NEW, GROUP = 200, 300, 8
SECONDS = (1.0, 2.0)  # until an answer
PARTS = ("rollout", "engine", "client", "http", "aiohttp", "sockets")


# ---- the servers: python -m benchmarks.dispatch --serve COUNT


def answer_of(new: int) -> bytes:
    tokens = [5 + i % 30 for i in range(new)]
    content: list[dict[str, Any]] = [
        {"token": f"token_id:{token}", "logprob": -0.1234567 - token / 100, "bytes": None, "top_logprobs": []}
        for token in tokens
    ]
    choice = {
        "index": 0,
        "logprobs": {"content": content},
        "finish_reason": "stop",
        "token_ids": tokens,
        "weight_versions": [{"version": "0", "start": 0, "end": new}],
    }
    return json.dumps({"request_id": "0", "choices": [choice], "prompt_logprobs": None}).encode()


class Stub(asyncio.Protocol):
    """One connection to a stub server."""

    answers: ClassVar[dict[bytes, bytes]] = {
        b"/version": b'{"version": "0.32.0"}',
        b"/v1/models": json.dumps({"data": [{"id": "policy", "max_model_len": 4096}]}).encode(),
        b"/is_paused": b'{"is_paused": false}',
    }
    generated = answer_of(NEW)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        self.received = b""

    def data_received(self, data: bytes) -> None:
        self.received += data
        while (end := self.received.find(b"\r\n\r\n")) >= 0:
            head = self.received[:end]
            found = re.search(rb"content-length: *(\d+)", head, re.IGNORECASE)
            length = int(found[1]) if found else 0
            if len(self.received) < end + 4 + length:
                return
            self.received = self.received[end + 4 + length :]
            path = head.split(b" ", 2)[1].partition(b"?")[0]
            if path == b"/inference/v1/generate":
                asyncio.get_running_loop().call_later(random.uniform(*SECONDS), self.respond, self.generated)
            else:
                self.respond(self.answers.get(path, b"{}"))

    def respond(self, body: bytes) -> None:
        self.transport.write(self.response(body))

    @staticmethod
    def response(body: bytes) -> bytes:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        return head % len(body) + body


async def serve(count: int) -> None:
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(Stub, "127.0.0.1", 0, backlog=4096) for _ in range(count)]
    print(json.dumps([server.sockets[0].getsockname()[1] for server in servers]), flush=True)
    await loop.run_in_executor(None, sys.stdin.read)  # until the parent ends


@contextmanager
def serving(count: int) -> Iterator[tuple[list[str], psutil.Process]]:
    command = [sys.executable, "-m", "benchmarks.dispatch", "--serve", str(count)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        urls = [f"http://127.0.0.1:{port}" for port in json.loads(process.stdout.readline())]
        yield urls, psutil.Process(process.pid)
        process.kill()


# ---- the engine


class Turns:
    """The longest callback of every event loop while it is open, in CPU seconds."""

    def __enter__(self) -> Turns:
        self.longest, self.collected, self._run = 0.0, 0.0, asyncio.Handle._run
        gc.callbacks.append(self._collecting)
        run = self._run

        def timed(handle: asyncio.Handle) -> None:
            before = time.thread_time()
            run(handle)
            self.longest = max(self.longest, time.thread_time() - before)

        asyncio.Handle._run = timed  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.Handle._run = self._run  # type: ignore[method-assign]
        gc.callbacks.remove(self._collecting)

    def _collecting(self, phase: str, about: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.thread_time()
        else:
            self.collected = max(self.collected, time.thread_time() - self._began)


class Bare(asyncio.Protocol):
    """A connection that counts the bytes of responses whose length is known: what loop and kernel cost."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport

    def ask(self, message: bytes, length: int) -> asyncio.Future[None]:
        self.left, self.answered = length, asyncio.get_running_loop().create_future()
        self.transport.write(message)
        return self.answered

    def data_received(self, data: bytes) -> None:
        self.left -= len(data)
        if not self.left:
            self.answered.set_result(None)


class Idle(dict[int, list[Any]]):
    """Connections that wait for the next request, by server."""

    def __missing__(self, key: int) -> list[Any]:
        return self.setdefault(key, [])


AskAll = Callable[[int], Awaitable[None]]  # sends so many requests


async def roll_out(engine: Engine, prompts: np.ndarray, requests: int, in_flight: int) -> None:
    """Runs groups of episodes of one request each until so many requests were consumed."""
    from areal_x.protocols.engine import Request, SamplingParams
    from areal_x.protocols.workflow import Generator, Workflow
    from areal_x.rollout.queue import TrajectoryQueue
    from areal_x.rollout.runner import Runner
    from areal_x.tasks.stream import TaskStream
    from areal_x.types import Task, Trajectory

    class Attempt(Workflow):
        async def run(self, task: Task, engine: Generator) -> list[Trajectory]:
            prompt = prompts[int(task.id)]
            said = await engine.generate(Request(prompt, SamplingParams(max_tokens=NEW)))
            arrays = said.tokens, said.logprobs, said.versions
            return [Trajectory.from_completion(prompt, *arrays, reward=1.0, finish_reason=said.finish_reason)]

    step = in_flight // GROUP // 2
    tasks = TaskStream([Task(f"{i}", "") for i in range(len(prompts))])
    runner = Runner(engine, Attempt(), tasks, TrajectoryQueue(step, 3, step), group_size=GROUP)
    runner.begin(0)
    running = asyncio.create_task(runner.run())
    for version in range(1, requests // GROUP // step + 1):
        await runner.take()
        runner.published(version)
    running.cancel()
    await asyncio.wait([running])


@asynccontextmanager
async def asking(part: str, urls: list[str], folder: Path, in_flight: int, prompts: np.ndarray) -> AsyncIterator[AskAll]:
    from areal_x.engines.fleet.http import Pool
    from areal_x.engines.vllm.client import VLLMClient
    from areal_x.engines.vllm.config import VLLMConfig
    from areal_x.engines.vllm.engine import VLLMEngine
    from areal_x.engines.vllm.requests import generate_body
    from areal_x.protocols.engine import Request, SamplingParams
    from areal_x.testing.models import write_model

    sampling, path = SamplingParams(max_tokens=NEW), "/inference/v1/generate"
    body = generate_body(prompts[0], sampling, "policy", (), None)
    async with AsyncExitStack() as stack:
        if part in ("rollout", "engine"):
            config = VLLMConfig(urls=tuple(urls), concurrency=-(-in_flight // len(urls)), context=4096, heartbeat_seconds=600.0)
            engine = VLLMEngine(config, write_model(folder / "model"), folder, lambda line: None)
            stack.push_async_callback(engine.close)
            await engine.start()
            if part == "rollout":
                yield partial(roll_out, engine, prompts, in_flight=in_flight)
                return

            async def ask(number: int) -> None:
                said = await engine.generate(Request(prompts[number // GROUP], sampling))
                assert len(said.tokens) == NEW

        elif part == "client":
            clients = [VLLMClient(url, None) for url in urls]
            for client in clients:
                stack.push_async_callback(client.close)

            async def ask(number: int) -> None:
                said = await clients[number % len(clients)].generate(prompts[number // GROUP], sampling)
                assert len(said.tokens) == NEW

        elif part == "http":
            pools = [Pool(url, None) for url in urls]
            for pool in pools:
                stack.callback(pool.close)

            async def ask(number: int) -> None:
                status, _ = await pools[number % len(pools)].request("POST", path, body)
                assert status == 200

        elif part == "aiohttp":
            import aiohttp

            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)
            jar, timeout = aiohttp.DummyCookieJar(), aiohttp.ClientTimeout(total=None, sock_connect=30.0)
            session = await stack.enter_async_context(
                aiohttp.ClientSession(connector=connector, cookie_jar=jar, timeout=timeout)
            )
            headers = {"Content-Type": "application/json"}

            async def ask(number: int) -> None:
                async with session.post(urls[number % len(urls)] + path, data=body, headers=headers) as answer:
                    await answer.read()
                    assert answer.status == 200

        else:
            idle, loop = Idle(), asyncio.get_running_loop()
            message = f"POST {path} HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body

            async def ask(number: int) -> None:
                free = idle[number % len(urls)]
                if not free:
                    port = int(urls[number % len(urls)].rpartition(":")[2])
                    free.append((await loop.create_connection(Bare, "127.0.0.1", port))[1])
                    stack.callback(free[-1].transport.abort)
                connection = free.pop()
                await connection.ask(message, len(Stub.response(Stub.generated)))
                free.append(connection)

        async def ask_all(requests: int) -> None:
            numbers = iter(range(requests))

            async def one_after_the_other() -> None:
                for number in numbers:
                    await ask(number)

            async with asyncio.TaskGroup() as running:
                for number in range(in_flight):
                    running.create_task(one_after_the_other())
                    if number % 64 == 0:  # else this would be the longest turn
                        await asyncio.sleep(0)

        yield ask_all


async def measure(part: str, urls: list[str], requests: int, in_flight: int, stubs: psutil.Process) -> dict[str, Any]:
    from areal_x.runtime.loop import short_collections

    rng = np.random.default_rng(0)
    prompts = rng.integers(2, 40, (requests // GROUP + 1, PROMPT)).astype(np.int32)
    with tempfile.TemporaryDirectory() as folder:
        async with asking(part, urls, Path(folder), in_flight, prompts) as ask_all:
            with short_collections():
                began, cpu, theirs = time.perf_counter(), time.process_time(), sum(stubs.cpu_times()[:2])
                await ask_all(requests)
                cpu, seconds = time.process_time() - cpu, time.perf_counter() - began
                theirs = sum(stubs.cpu_times()[:2]) - theirs
            with short_collections(), Turns() as turns:
                await ask_all(requests // 2)
    return {
        "part": part,
        "servers": len(urls),
        "milliseconds": 1000 * cpu / requests,
        "of_the_stubs": 1000 * theirs / requests,
        "requests_per_second": requests / seconds,
        "longest_turn_milliseconds": 1000 * turns.longest,
        "longest_collection_milliseconds": 1000 * turns.collected,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, nargs="+", default=[8, 64, 256, 1000])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["engine"])
    parser.add_argument("--requests", type=int, default=8192)
    parser.add_argument("--in-flight", type=int, default=4096)
    parser.add_argument("--limit", type=int, default=0, help="files that the engine's process may have open")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    raise_limit()  # as every command does
    raised, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if options.serve:
        asyncio.run(serve(options.serve))
        return
    for count in options.servers:
        for part in options.parts:
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
            with serving(count) as (urls, stubs):
                if options.limit:
                    resource.setrlimit(resource.RLIMIT_NOFILE, (options.limit, hard))
                row = asyncio.run(measure(part, urls, options.requests, options.in_flight, stubs))
            print(json.dumps({name: x if isinstance(x, str) else round(x, 3) for name, x in row.items()}), flush=True)


if __name__ == "__main__":
    main()
