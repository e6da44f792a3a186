"""What the gateway costs over calling vLLM itself: throughput and latency of 64 agents at once.

    python -m benchmarks.gateway [--agents 64] [--calls 20] [--rounds 3]

Claim: at least 95 % of the throughput, at most 3 ms more at the median and 20 ms at the 99th percentile.

The same questions to the same real server, in turns: to its own /v1/chat/completions, and to the gateway, each agent in a
session of its own. Answers have a fixed length, so that both generate the same. The server has one core, gateway and clients
the other. Added latency is the difference of the quantiles. What the client itself costs is in both.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import model

ANSWER = 64  # tokens
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


async def ask(http: Any, url: str, key: str, agents: int, calls: int) -> tuple[float, list[float]]:
    """Answers a second, and how long each took. url, key: of one agent, or of all."""
    delays: list[float] = []
    urls, keys = ([x] * agents if isinstance(x, str) else x for x in (url, key))

    async def agent(number: int) -> None:
        for call in range(calls):
            body = {
                "model": "policy",
                "messages": [{"role": "user", "content": f"agent {number:03d} asks {call:03d} "}],
                "max_tokens": ANSWER,
            }
            began = time.perf_counter()
            async with http.post(
                f"{urls[number]}/chat/completions", json=body, headers={"Authorization": f"Bearer {keys[number]}"}
            ) as answer:
                said = await answer.json()
                assert answer.status == 200, said
            assert said["usage"]["completion_tokens"] == ANSWER, said
            delays.append(time.perf_counter() - began)

    began = time.perf_counter()
    await asyncio.gather(*(agent(number) for number in range(agents)))
    return agents * calls / (time.perf_counter() - began), delays


async def measure(directory: Path, agents: int, calls: int, rounds: int) -> None:
    import aiohttp
    import psutil
    from transformers import AutoTokenizer

    from areal_x.rollout.engine import SamplingParams
    from areal_x.rollout.online import Online
    from areal_x.rollout.vllm.config import VLLMConfig
    from areal_x.rollout.vllm.engine import VLLMEngine

    tokenizer = AutoTokenizer.from_pretrained(directory / "model")
    workflow = Online(sampling=SamplingParams(max_tokens=ANSWER)).setup(tokenizer)
    engine = VLLMEngine(VLLMConfig(threads=1, context=256), directory / "model", directory / "logs")
    os.sched_setaffinity(0, {0})  # which the server takes over
    await engine.start()
    for thread in psutil.Process().threads():
        os.sched_setaffinity(thread.id, {1})
    (replica,) = engine.supervisor.replicas.values()
    sessions = [await workflow.open(engine) for _ in range(agents)]
    doors = {
        "vLLM": (f"{replica.client.url}/v1", replica.client.key),
        "gateway": ([s.base_url for s in sessions], [s.key for s in sessions]),
    }
    speeds: dict[str, list[float]] = {name: [] for name in doors}
    delays: dict[str, list[float]] = {name: [] for name in doors}
    try:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2)) as http:
            for _ in range(rounds + 1):
                for name, (url, key) in doors.items():
                    speed, took = await ask(http, url, key, agents, calls)
                    speeds[name].append(speed)
                    delays[name] += took if len(speeds[name]) > 1 else []  # the first round warms up
    finally:
        for session in sessions:
            session.close()
        await workflow.close()
        await engine.close()
    print("| | answers/s | p50, ms | p99, ms |\n|---|---|---|---|")
    for name in doors:
        p50, p99 = 1000 * np.quantile(delays[name], [0.5, 0.99])
        print(f"| {name} | {np.median(speeds[name][1:]):.1f} | {p50:.1f} | {p99:.1f} |")
    ratios = [b / a for a, b in zip(speeds["vLLM"][1:], speeds["gateway"][1:], strict=True)]
    more = 1000 * (np.quantile(delays["gateway"], [0.5, 0.99]) - np.quantile(delays["vLLM"], [0.5, 0.99]))
    share = np.median(ratios)
    print(f"gateway over vLLM: {share:.1%} of the throughput, {more[0]:+.1f} ms at the median, {more[1]:+.1f} ms at p99")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=64)
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        model.write_model(directory / "model")
        (directory / "model" / "chat_template.jinja").write_text(TEMPLATE)
        asyncio.run(measure(directory, given.agents, given.calls, given.rounds))


if __name__ == "__main__":
    main()
