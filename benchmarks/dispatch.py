"""Cost of one request on the engine's event loop, whatever the number of servers.

    python -m benchmarks.dispatch [--servers 8 64 256 1000] [--requests 8192] [--in-flight 4096] [--limit 1024]

Claims: at most 0.45 ms of CPU a request at 1,000 servers, no turn of the loop above 20 ms, and all requests are answered with
`ulimit -n 1024`.

The unmodified VLLMEngine asks stub HTTP servers, all in one process of their own, which answer each request after a second or
two as vLLM does: 300 tokens with their log-probabilities and versions, to prompts of 200 tokens in groups of eight. CPU seconds
are those of the engine's process during the requests, divided by their number. The longest turn is the most CPU time that one
callback of the loop took, measured in a second pass, because measuring costs time itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import numpy as np

PROMPT, NEW, GROUP = 200, 300, 8
SECONDS = (1.0, 2.0)  # until an answer


# ---- the servers: python -m benchmarks.dispatch --serve COUNT


def answer_of(new: int) -> bytes:
    tokens = [5 + i % 30 for i in range(new)]
    content = [
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
        b"/v1/models": json.dumps({"data": [{"id": "policy", "max_model_len": 4096}]}).encode(),
        b"/is_paused": b'{"is_paused": false}',
    }
    generated = answer_of(NEW)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
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
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        self.transport.write(head % len(body) + body)


async def serve(count: int) -> None:
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(Stub, "127.0.0.1", 0, backlog=4096) for _ in range(count)]
    print(json.dumps([server.sockets[0].getsockname()[1] for server in servers]), flush=True)
    await loop.run_in_executor(None, sys.stdin.read)  # until the parent ends


@contextmanager
def serving(count: int) -> Iterator[list[str]]:
    command = [sys.executable, "-m", "benchmarks.dispatch", "--serve", str(count)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield [f"http://127.0.0.1:{port}" for port in json.loads(process.stdout.readline())]
        process.kill()


# ---- the engine


class Turns:
    """The longest callback of every event loop while it is open, in CPU seconds."""

    def __enter__(self) -> Turns:
        self.longest, self._run = 0.0, asyncio.Handle._run
        run = self._run

        def timed(handle: asyncio.Handle) -> None:
            before = time.thread_time()
            run(handle)
            self.longest = max(self.longest, time.thread_time() - before)

        asyncio.Handle._run = timed  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.Handle._run = self._run  # type: ignore[method-assign]


async def measure(urls: list[str], requests: int, in_flight: int) -> dict[str, float]:
    from areal_x.engines.vllm.config import VLLMConfig
    from areal_x.engines.vllm.engine import VLLMEngine
    from areal_x.protocols.engine import Request, SamplingParams
    from areal_x.runtime.loop import short_collections
    from areal_x.testing.models import write_model

    with tempfile.TemporaryDirectory() as folder:
        each = -(-in_flight // len(urls))
        config = VLLMConfig(urls=tuple(urls), concurrency=each, context=4096, heartbeat_seconds=600.0)
        engine = VLLMEngine(config, write_model(Path(folder, "model")), Path(folder), lambda line: None)
        await engine.start()
        rng = np.random.default_rng(0)
        prompts = rng.integers(2, 40, (requests // GROUP + 1, PROMPT)).astype(np.int32)
        numbers, answered = iter(range(requests)), 0
        sampling = SamplingParams(max_tokens=NEW)

        async def ask() -> None:
            nonlocal answered
            for number in numbers:
                said = await engine.generate(Request(prompts[number // GROUP], sampling))
                assert len(said.tokens) == NEW
                answered += 1

        with short_collections():
            began, cpu = time.perf_counter(), time.process_time()
            await asyncio.gather(*(ask() for _ in range(in_flight)))
            cpu, seconds = time.process_time() - cpu, time.perf_counter() - began
        assert answered == requests
        numbers, answered = iter(range(requests // 2)), 0
        with short_collections(), Turns() as turns:
            await asyncio.gather(*(ask() for _ in range(in_flight)))
        await engine.close()
    return {
        "servers": len(urls),
        "milliseconds": 1000 * cpu / requests,
        "requests_per_second": requests / seconds,
        "longest_turn_milliseconds": 1000 * turns.longest,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, nargs="+", default=[8, 64, 256, 1000])
    parser.add_argument("--requests", type=int, default=8192)
    parser.add_argument("--in-flight", type=int, default=4096)
    parser.add_argument("--limit", type=int, default=0, help="files that the engine's process may have open")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if options.serve:
        asyncio.run(serve(options.serve))
        return
    for count in options.servers:
        with serving(count) as urls:
            if options.limit:
                resource.setrlimit(resource.RLIMIT_NOFILE, (options.limit, hard))
            row = asyncio.run(measure(urls, options.requests, options.in_flight))
        print(json.dumps({name: round(x, 3) for name, x in row.items()}), flush=True)


if __name__ == "__main__":
    main()
