"""Loss of vLLM servers: three real ones under load, one fault after the other.

    python benchmarks/servers.py [--requests 48] [--faults kill stop errors full]

Builds the random Qwen3 of benchmarks/model.py, starts two servers, lets a third join through a proxy, and keeps the requests in
flight (each that ends is replaced) while weights are published repeatedly. Faults: `kill` (SIGKILL to a server's processes),
`stop` (SIGSTOP for 30 s), `errors` (the proxy answers 500 for 15 s), `full` (the file system for staged weights has no room for
10 s; if a tmpfs can be mounted). Every request must get all its tokens, each of a published version, and every publication must
complete. Seconds until recovered: until as many servers serve as before and the tokens of three seconds are 90 % of those
before the fault. Prints a table, then one line of JSON per fault.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil
from aiohttp import web
from model import write_model
from publish import Weights

from areal_x.engines.fleet import server as servers
from areal_x.engines.vllm.config import VLLMConfig
from areal_x.engines.vllm.engine import VLLMEngine
from areal_x.engines.vllm.server import Launch
from areal_x.protocols.engine import Request, SamplingParams

NEW_TOKENS = 200
BETWEEN_SWAPS_SECONDS = 3.0
STEADY_SECONDS = 10.0
WINDOW_SECONDS = 3.0
BACK = 0.9
STAGING_BYTES = 64 * 2**20


@dataclass
class Load:
    """Sends requests and publications until stopped. done: when each request ended, and its tokens."""

    engine: VLLMEngine
    trainer: Weights
    stopping: bool = False
    published: int = 0
    short: int = 0
    wrong: int = 0
    done: list[tuple[float, int]] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=itertools.count)

    async def request(self) -> None:
        while not self.stopping:
            prompt = np.arange(2, 8 + next(self.numbers) % 50, dtype=np.int32)
            said = await self.engine.generate(Request(prompt, SamplingParams(max_tokens=NEW_TOKENS)))
            self.done.append((time.perf_counter(), len(said.tokens)))
            self.short += len(said.tokens) != NEW_TOKENS
            self.wrong += not ((said.versions >= 1) & (said.versions <= self.trainer.version)).all()

    async def publish(self) -> None:
        while not self.stopping:
            self.trainer.version += 1
            await self.engine.swap(await asyncio.to_thread(self.engine.stage, self.trainer))
            self.published += 1
            await asyncio.sleep(BETWEEN_SWAPS_SECONDS)

    def rate(self, until: float, seconds: float) -> float:
        return sum(tokens for when, tokens in self.done if until - seconds < when <= until) / seconds


@dataclass
class Proxy:
    """A proxy in front of its own server; answers 500 while it fails."""

    server: servers.Server
    failing: bool = False
    url: str = ""

    async def start(self) -> web.AppRunner:
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{path:.*}", self.forward)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        self.session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        return runner

    async def forward(self, request: web.Request) -> web.Response:
        if self.failing:
            return web.Response(status=500, text="the proxy fails")
        headers = {k: v for k, v in request.headers.items() if k in ("Authorization", "Content-Type")}
        url, body = self.server.url + request.path_qs, await request.read()
        async with self.session.request(request.method, url, headers=headers, data=body) as answer:
            return web.Response(status=answer.status, body=await answer.read(), content_type=answer.content_type)


@contextmanager
def small_file_system(folder: Path) -> Iterator[bool]:
    """Mounts a tmpfs there for the duration, if possible."""
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", f"size={STAGING_BYTES}", "tmpfs", str(folder)]
    mounted = subprocess.run(words, capture_output=True, check=False).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=False)


def family(server: servers.Server) -> list[psutil.Process]:
    """A server's processes without the guard, which belongs to the run."""
    return psutil.Process(server.process.pid).children(recursive=True)


async def measure(name: str, fault: Callable[[], Coroutine[Any, Any, None]], load: Load) -> dict[str, Any]:
    engine = load.engine
    await asyncio.sleep(STEADY_SECONDS)
    began, served = time.perf_counter(), len(engine.fleet.serving())
    before = load.rate(began, STEADY_SECONDS)
    requests, published = len(load.done), load.published
    work = asyncio.create_task(fault())
    least, seen_less = before, False
    while True:
        await asyncio.sleep(0.1)
        now = time.perf_counter()
        rate = load.rate(now, WINDOW_SECONDS)
        least = min(least, rate)
        serve = len(engine.fleet.serving())
        seen_less |= serve < served
        if work.done() and serve == served and rate >= BACK * before and now - began > WINDOW_SECONDS:
            break
    work.result()
    return {
        "fault": name,
        "tokens_per_second_before": round(before),
        "least_tokens_per_second": round(least),
        "a_server_was_lost": seen_less,
        "seconds_back": round(now - began, 1),
        "requests_answered": len(load.done) - requests,
        "publications": load.published - published,
    }


async def main_with(chosen: argparse.Namespace, folder: Path, mounted: bool) -> None:
    model = write_model(folder / "model")
    staging = folder / "staging"
    config = VLLMConfig(
        context=256, servers=2, concurrency=chosen.requests, slice_tokens=64, heartbeat_seconds=2.0, staging=str(staging)
    )
    engine = VLLMEngine(config, model, folder / "logs")
    third = servers.start(
        launch := Launch(model, folder / "logs" / "third.log", staging, context=256, concurrency=chosen.requests, seed=77)
    )
    os.environ[config.key_variable] = third.key
    proxy, load, runner = Proxy(third), Load(engine, Weights(model)), None
    try:
        await asyncio.gather(engine.start(), servers.wait_until_ready(third, launch, "the third server", 600, print))
        runner = await proxy.start()
        await engine.join(proxy.url)
        load.trainer.version = 1
        await engine.swap(engine.stage(load.trainer))

        async def kill() -> None:
            for process in family(engine._servers[0]):
                process.kill()

        async def stop() -> None:
            stopped = family(engine._servers[0])
            for process in stopped:
                process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(30)
            for process in stopped:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGCONT)

        async def errors() -> None:
            proxy.failing = True
            await asyncio.sleep(15)
            proxy.failing = False

        async def full() -> None:
            filler = staging / "filler"
            with filler.open("wb") as file, suppress(OSError):
                while True:
                    file.write(bytes(2**20))
                    file.flush()
            await asyncio.sleep(10)
            filler.unlink()

        faults = {"kill": kill, "stop": stop, "errors": errors, **({"full": full} if mounted else {})}
        tasks = [asyncio.create_task(load.request()) for _ in range(chosen.requests)]
        tasks.append(asyncio.create_task(load.publish()))
        rows = []
        for name in chosen.faults:
            if name not in faults:
                print(f"{name}: not tried, as no tmpfs can be mounted here")
                continue
            rows.append(await measure(name, faults[name], load))
            print(rows[-1])
        load.stopping = True
        await asyncio.gather(*tasks)  # raises the error of any request or publication
        assert load.published == load.trainer.version - 1, "a publication is missing"
        for row in rows:
            print(json.dumps({"benchmark": "servers", "requests": chosen.requests, **row}))
        print(json.dumps({"answered": len(load.done), "short": load.short, "with_a_wrong_version": load.wrong}))
    finally:
        await engine.close()
        if runner is not None:
            await proxy.session.close()
            await runner.cleanup()
        await asyncio.to_thread(third.stop)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--faults", nargs="+", default=["kill", "stop", "errors", "full"])
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, small_file_system(Path(folder) / "staging") as mounted:
        asyncio.run(main_with(chosen, Path(folder), mounted))


if __name__ == "__main__":
    main()
