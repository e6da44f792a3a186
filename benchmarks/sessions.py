"""Concurrent sessions of one gateway on one core: their number, their cost, and whether any is lost or mixed up.

    python -m benchmarks.sessions [--sessions 1000] [--calls 5]

Claim: 1,000 at once, none lost. The gateway runs in its own process on one core, with an engine that answers after a random
time without computing; the clients, on the other core, keep all sessions open at once, each with a growing conversation that
carries its own markers. A session is lost if a call fails, if its trajectory differs from what its client received, or if its
reward is not the one posted. Memory is the increase of the process once all sessions are open and have made their calls.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import model

ANSWER = 64  # tokens
SECONDS = 0.2  # median time of an answer; lognormal, so that answers overlap in every order


# ---- the gateway, in a process of its own


class Slow:
    """An engine that takes time but no processor."""

    concurrency, context, version = 1 << 20, 1 << 20, 1

    def __init__(self) -> None:
        self._random = np.random.default_rng(0)

    async def generate(self, request: Any) -> Any:
        from areal_x.protocols.engine import Completion

        await asyncio.sleep(SECONDS * self._random.lognormal(0, 0.5))
        tokens = self._random.integers(1, 90, ANSWER).astype(np.int32)
        return Completion(tokens, np.full(ANSWER, -1.0, np.float32), np.ones(ANSWER, np.int32), "stop")


async def serve(directory: Path, count: int) -> None:
    """Opens a session on each request, and writes all outcomes."""
    from transformers import AutoTokenizer

    from areal_x.agents.online import Online, write_address

    workflow = Online().setup(AutoTokenizer.from_pretrained(directory / "model", trust_remote_code=False))
    engine, watching = Slow(), []

    async def watch(session: Any) -> dict[str, Any]:
        with session:
            outcome = await session.ended()
            episode = workflow.episode(session, outcome)
        text = [session.renderer.text(t.tokens) for t in getattr(episode, "trajectories", ())]
        return {"outcome": type(outcome).__name__, "reward": getattr(outcome, "reward", None), "texts": text}

    async def opened(label: str | None) -> Any:
        session = await workflow.open(engine)
        watching.append((label, asyncio.create_task(watch(session))))
        return session

    host = workflow.lazy_gateway()
    host.gateway.on_open = opened
    await host.start()
    write_address(directory / "address.json", host.gateway.url, host.gateway.key)
    while len(watching) < count or not all(task.done() for _, task in watching):
        await asyncio.sleep(0.5)
    (directory / "became.json").write_text(json.dumps({label: task.result() for label, task in watching}))
    await workflow.close()


# ---- the clients


async def use(directory: Path, process: int, count: int, calls: int) -> dict[str, float]:
    import aiohttp
    import psutil

    address = json.loads((directory / "address.json").read_text())
    server, delays = psutil.Process(process), []
    before, at_start = server.memory_info().rss, sum(server.cpu_times()[:2])
    opened, go_on = asyncio.Event(), asyncio.Event()
    told: dict[str, list[str]] = {}
    ready = 0
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=600)) as http:

        async def post(url: str, key: str, **body: Any) -> dict[str, Any]:
            async with http.post(url, json=body, headers={"Authorization": f"Bearer {key}"}) as answer:
                assert answer.status < 300, await answer.text()
                return dict(await answer.json())

        async def session(number: int) -> None:
            nonlocal ready
            name = f"s{number}"
            one = await post(f"{address['url']}/sessions", address["key"], label=name)
            messages: list[dict[str, str]] = []
            for turn in range(calls):
                messages.append({"role": "user", "content": f"[{name} {turn}]"})
                began = time.perf_counter()
                said = await post(f"{one['url']}/chat/completions", one["key"], model="policy", messages=messages)
                delays.append(time.perf_counter() - began)
                messages.append({"role": "assistant", "content": said["choices"][0]["message"]["content"]})
            told[name] = [message["content"] for message in messages]
            ready += 1
            if ready == count:
                opened.set()
            await go_on.wait()
            await post(f"{one['url']}/end", one["key"], reward=number / 7)

        began = time.perf_counter()
        running = [asyncio.create_task(session(number)) for number in range(count)]
        while not opened.is_set() and not any(task.done() for task in running):
            await asyncio.sleep(0.1)
        seconds, held = time.perf_counter() - began, server.memory_info().rss - before
        cpu = sum(server.cpu_times()[:2]) - at_start
        go_on.set()
        ended = await asyncio.gather(*running, return_exceptions=True)
    while not (directory / "became.json").exists():
        await asyncio.sleep(0.1)
    became = json.loads((directory / "became.json").read_text())
    lost = Counter(type(error).__name__ for error in ended if error is not None)
    for number in range(count):
        found = became.get(f"s{number}", {})
        if found.get("reward") != number / 7 or found.get("texts") != ["".join(told.get(f"s{number}", []))]:
            lost["mixed up"] += 1
    return {
        "sessions": count,
        "lost": sum(lost.values()),
        "calls/s": count * calls / seconds,
        "gateway cpu ms/call": 1000 * cpu / (count * calls),
        "answer p50, s": float(np.median(delays)),
        "answer p99, s": float(np.quantile(delays, 0.99)),
        "kB/session": held / count / 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, nargs="+", default=[100, 1000, 3000])
    parser.add_argument("--calls", type=int, default=5)
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        os.sched_setaffinity(0, {0})
        asyncio.run(serve(Path(given.serve[0]), int(given.serve[1])))
        return
    os.sched_setaffinity(0, {1})
    for count in given.sessions:
        with tempfile.TemporaryDirectory() as made:
            directory = Path(made)
            model.write_model(directory / "model")
            command = [sys.executable, "-m", "benchmarks.sessions", "--serve", made, str(count)]
            serving = subprocess.Popen(command)
            try:
                while not (directory / "address.json").exists():
                    time.sleep(0.1)
                found = asyncio.run(use(directory, serving.pid, count, given.calls))
            finally:
                serving.terminate()
                serving.wait()
        print("  ".join(f"{name} {x:.4g}" for name, x in found.items()), flush=True)


if __name__ == "__main__":
    main()
