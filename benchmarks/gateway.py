"""Overhead of the gateway relative to direct calls of vLLM: throughput and latency of 64 agents at once.

    python -m benchmarks.gateway [--agents 64] [--calls 20] [--rounds 3] [--pause 1.5]

Claim: at least 95 % of the throughput, at most 3 ms more at the median and 20 ms at the 99th percentile.

The same questions to the same real server, alternately: to its own /v1/chat/completions, to the same with the log-probabilities
and token ids that training needs, and to the gateway, each agent in its own session. Answers have 32 to 96 tokens, the same
number at every endpoint. The server has one core, gateway and clients the other.

Throughput: every agent sends its next request at once. Latency: it pauses between calls, like an agent that runs a tool, for
`--pause` seconds on average, sampled identically for every endpoint; the server is then busy for about half of the time, and a
call waits for its own answer instead of for a full server. Added latency is the difference of the quantiles over all rounds.
The cost of the client itself is included everywhere.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import model

SHORTEST, LONGEST = 32, 96  # tokens per answer
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
PLAIN, LIKE, GATEWAY = "vLLM", "vLLM with log-probabilities", "gateway"


@dataclass
class Endpoint:
    """One endpoint and its measurements.

    urls, keys: one per agent. more: additional fields of a body. speeds, delays, paused: answers per second, and seconds per
    answer without and with pauses. costs: processor seconds per answer, here and in the server.
    """

    urls: list[str]
    keys: list[str]
    more: dict[str, Any] = field(default_factory=dict)
    speeds: list[float] = field(default_factory=list)
    delays: list[float] = field(default_factory=list)
    paused: list[float] = field(default_factory=list)
    costs: list[Any] = field(default_factory=list)

    async def ask(self, http: Any, calls: int, pause: float = 0.0) -> list[float]:
        """Latency of each answer to all agents' calls. pause: mean seconds before a call."""
        delays: list[float] = []

        async def agent(number: int) -> None:
            drawn = np.random.default_rng(number)
            headers = {"Authorization": f"Bearer {self.keys[number]}"}
            for call in range(calls):
                length = int(drawn.integers(SHORTEST, LONGEST + 1))
                if pause:
                    await asyncio.sleep(drawn.exponential(pause))
                question = [{"role": "user", "content": f"agent {number:03d} asks {call:03d} "}]
                body = {"model": "policy", "messages": question, "max_tokens": length, **self.more}
                began = time.perf_counter()
                async with http.post(f"{self.urls[number]}/chat/completions", json=body, headers=headers) as answer:
                    said = await answer.json()
                    assert answer.status == 200, said
                delays.append(time.perf_counter() - began)
                assert said["usage"]["completion_tokens"] == length, said

        await asyncio.gather(*(agent(number) for number in range(len(self.urls))))
        return delays


async def measure(directory: Path, given: argparse.Namespace) -> dict[str, Endpoint]:
    import aiohttp
    import psutil
    from transformers import AutoTokenizer

    from areal_x.agents.online import Online
    from areal_x.engines.vllm.config import VLLMConfig
    from areal_x.engines.vllm.engine import VLLMEngine
    from areal_x.protocols.engine import SamplingParams
    from areal_x.runtime.loop import short_collections

    tokenizer = AutoTokenizer.from_pretrained(directory / "model", trust_remote_code=False)
    # Without the end token that setup adds: this model has none, and vLLM refuses ids outside its vocabulary.
    workflow = replace(Online().setup(tokenizer), sampling=SamplingParams(max_tokens=LONGEST))
    engine = VLLMEngine(VLLMConfig(threads=1, context=256), directory / "model", directory / "logs")
    os.sched_setaffinity(0, {0})  # inherited by the server
    await engine.start()
    for thread in psutil.Process().threads():
        os.sched_setaffinity(thread.id, {1})
    (replica,) = engine.supervisor.replicas.values()
    assert replica.server is not None
    server = psutil.Process(replica.server.process.pid)
    everyone = [[psutil.Process()], [server, *server.children(recursive=True)]]
    sessions = [await workflow.open(engine) for _ in range(given.agents)]
    of_server = [f"{replica.client.url}/v1"] * given.agents, [replica.server.key] * given.agents
    endpoints = {
        PLAIN: Endpoint(*of_server),
        LIKE: Endpoint(*of_server, {"logprobs": True, "return_token_ids": True}),
        GATEWAY: Endpoint([session.base_url for session in sessions], [session.key for session in sessions]),
    }
    try:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
        with short_collections():  # as in a run
            async with aiohttp.ClientSession(connector=connector) as http:
                for endpoint in endpoints.values():
                    await endpoint.ask(http, calls=5)
                for _ in range(given.rounds):
                    for endpoint in endpoints.values():
                        before, began = used(everyone), time.perf_counter()
                        delays = await endpoint.ask(http, given.calls)
                        endpoint.speeds.append(len(delays) / (time.perf_counter() - began))
                        endpoint.costs.append((used(everyone) - before) / len(delays))
                        endpoint.delays += delays
                    for endpoint in endpoints.values():
                        endpoint.paused += await endpoint.ask(http, given.calls, given.pause)
    finally:
        for session in sessions:
            session.close()
        await workflow.close()
        await engine.close()
    return endpoints


def used(everyone: list[list[Any]]) -> Any:
    """Processor seconds used by the processes of each list."""
    return np.array([sum(sum(process.cpu_times()[:2]) for process in processes) for processes in everyone])


def show(endpoints: dict[str, Endpoint]) -> None:
    head = "answers/s | p50, ms | p99, ms | p50 with pauses, ms | p99 with pauses, ms | processor, ms an answer: here | server"
    print(f"| | {head} |\n|---|---|---|---|---|---|---|---|")
    for name, endpoint in endpoints.items():
        delays = 1000 * np.concatenate([np.quantile(x, [0.5, 0.99]) for x in (endpoint.delays, endpoint.paused)])
        costs = 1000 * np.median(endpoint.costs, axis=0)
        numbers = [np.median(endpoint.speeds), *delays, *costs]
        print(f"| {name} | {' | '.join(f'{number:.1f}' for number in numbers)} |")
    gateway = endpoints[GATEWAY]
    for name in (PLAIN, LIKE):
        share = np.median([b / a for a, b in zip(endpoints[name].speeds, gateway.speeds, strict=True)])
        p50, p99 = 1000 * (np.quantile(gateway.paused, [0.5, 0.99]) - np.quantile(endpoints[name].paused, [0.5, 0.99]))
        print(f"gateway over {name}: {share:.1%} of the throughput; with pauses {p50:+.1f} ms (p50), {p99:+.1f} ms (p99)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=64)
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pause", type=float, default=1.5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        model.write_model(directory / "model")
        (directory / "model" / "chat_template.jinja").write_text(TEMPLATE)
        show(asyncio.run(measure(directory, given)))


if __name__ == "__main__":
    main()
