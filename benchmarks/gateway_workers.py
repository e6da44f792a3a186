"""A gateway served by worker processes relative to one served by the run's own: requests per second, and where the processor
time goes.

    python -m benchmarks.gateway_workers [--workers 0 1 2] [--turns 24] [--agents 16] [--result 2000]

Claim: with two workers, the run's process does at most a fifth of the work of a call in a conversation as coding agents have,
and no call differs. An engine that answers at once, so that the gateway is all that is measured; agents with tools, a system
prompt of 8 kB and a tool's result of `--result` characters per turn, each of which sends its next request when it has the
answer to the last. Clients read and write bytes and nothing more, since they share the machine's cores with what is measured.

`lag`: how late the loop of the run's process wakes up, which everything else of a rollout waits for too. `apart`: trajectories
beyond one per conversation, and conversations whose number of calls differs; both are 0 if every prompt begins with the
recorded tokens. `--profile FILE` writes cProfile's statistics of the run's process.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

FAMILY = "qwen3"
ANSWER = "I look at the next file."
SYSTEM = 8000  # characters
TOOLS = 12
LAG_SECONDS = 0.02


# ---- the gateway, in a process of its own


class AtOnce:
    """An engine that answers every prompt with a call of a tool."""

    concurrency, context, version = 1 << 20, 1 << 20, 1

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = np.asarray(tokens, np.int32)

    async def generate(self, request: Any) -> Any:
        from areal_x.protocols.engine import Completion

        await asyncio.sleep(0)
        count = len(self._tokens)
        return Completion(self._tokens, np.full(count, -1.0, np.float32), np.ones(count, np.int32), "stop")


async def lags(found: list[float]) -> None:
    while True:
        began = time.perf_counter()
        await asyncio.sleep(LAG_SECONDS)
        found.append(time.perf_counter() - began - LAG_SECONDS)


async def serve(directory: Path, workers: int, count: int, profile: cProfile.Profile | None) -> None:
    from areal_x.agents import Gateway
    from areal_x.agents.chat.merging import merge_calls
    from areal_x.agents.gateway_workflow import GatewayWorkflow
    from areal_x.hf.tokenizer import load_tokenizer
    from areal_x.protocols.engine import SamplingParams
    from areal_x.runtime.credentials import write_address

    tokenizer = load_tokenizer(directory / "model")
    call = '<tool_call>\n{"name": "read_0", "arguments": {"path": "src/main.py"}}\n</tool_call>'
    engine = AtOnce([*tokenizer.encode(f"{ANSWER}\n{call}", add_special_tokens=False), tokenizer.eos_token_id])
    workflow = GatewayWorkflow(sampling=SamplingParams(max_tokens=500), gateway=Gateway(workers=workers)).setup(tokenizer)
    watching: list[asyncio.Task[tuple[int, int]]] = []
    late: list[float] = []

    async def watch(session: Any) -> tuple[int, int]:
        with session:
            await session.ended()
            calls = session.calls()
        return len(calls), len(merge_calls(calls).trajectories)

    async def opened(label: str | None) -> Any:
        session = await workflow.open(engine)  # type: ignore[arg-type]
        watching.append(asyncio.create_task(watch(session)))
        return session

    host = workflow.lazy_gateway()
    host.gateway.on_open = opened
    await host.start()
    write_address(directory / "address.json", host.gateway.url, host.gateway.key)
    lagging = asyncio.create_task(lags(late))
    if profile is not None:
        profile.enable()
    while len(watching) < count or not all(task.done() for task in watching):
        await asyncio.sleep(0.2)
    lagging.cancel()
    if profile is not None:
        profile.disable()
    results = [task.result() for task in watching]
    (directory / "became.json").write_text(json.dumps({"sessions": results, "lag": float(np.quantile(late, 0.99))}))
    await workflow.close()


# ---- the clients


class Client:
    """One connection, over which an agent sends one request after the other."""

    def __init__(self, url: str) -> None:
        self._host, _, port = url.removeprefix("http://").partition(":")
        self._port = int(port)

    async def __aenter__(self) -> Client:
        self._reader, self._writer = await asyncio.open_connection(self._host, self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()

    async def post(self, path: str, key: str, body: bytes) -> dict[str, Any]:
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ncontent-length: {len(body)}\r\n\r\n"
        self._writer.write(head.encode() + body)
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode().lower()
        assert head.split(" ")[1] in ("200", "201"), head
        if "content-length: " in head:
            size = int(head.partition("content-length: ")[2].partition("\r\n")[0])
            return dict(json.loads(await self._reader.readexactly(size)))
        parts = []
        while size := int((await self._reader.readuntil(b"\r\n"))[:-2], 16):
            parts.append((await self._reader.readexactly(size + 2))[:-2])
        await self._reader.readexactly(2)
        return dict(json.loads(b"".join(parts)))


async def agent(address: dict[str, str], turns: int, result: str, head: bytes, delays: list[float]) -> None:
    async with Client(address["url"]) as client:
        one = await client.post("/sessions", address["key"], b"{}")
        path = f"/sessions/{one['id']}"
        body = head
        for turn in range(turns):
            began = time.perf_counter()
            said = await client.post(f"{path}/v1/chat/completions", one["key"], body + b"]}")
            delays.append(time.perf_counter() - began)
            message = said["choices"][0]["message"]
            message = {name: message[name] for name in ("role", "content", "tool_calls")}
            shown = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": f"{turn}: {result}"}
            body += b"," + json.dumps(message).encode() + b"," + json.dumps(shown).encode()
        await client.post(f"{path}/end", one["key"], b'{"reward": 1}')


def beginning() -> bytes:
    """The start of every request: the tools, and the messages up to the first answer."""
    tools = [
        {
            "type": "function",
            "function": {
                "name": f"read_{i}",
                "description": "Reads a file of the repository, as text with the numbers of its lines. " * 4,
                "parameters": {"type": "object", "properties": {"path": {"type": "string"}, "first": {"type": "integer"}}},
            },
        }
        for i in range(TOOLS)
    ]
    text = ("You are an agent that edits programs. Read before you write, and run the tests. " * (SYSTEM // 80))[:SYSTEM]
    messages = [{"role": "system", "content": text}, {"role": "user", "content": "Fix the failing test."}]
    return json.dumps({"model": "policy", "tools": tools, "messages": messages})[:-2].encode()


def cpu(processes: Iterable[Any]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


async def use(directory: Path, process: int, agents: int, turns: int, result: str) -> dict[str, float]:
    import psutil

    address = json.loads((directory / "address.json").read_text())
    run = psutil.Process(process)
    workers = [child for child in run.children() if "gateway.worker" in " ".join(child.cmdline())]
    before, before_workers, own = cpu([run]), cpu(workers), time.process_time()
    delays: list[float] = []
    began = time.perf_counter()
    await asyncio.gather(*(agent(address, turns, result, beginning(), delays) for _ in range(agents)))
    seconds = time.perf_counter() - began
    calls = agents * turns
    spent, spent_workers, own = cpu([run]) - before, cpu(workers) - before_workers, time.process_time() - own
    megabytes = max((worker.memory_info().rss / 2**20 for worker in workers), default=0.0)
    while not (directory / "became.json").exists():
        await asyncio.sleep(0.1)
    became = json.loads((directory / "became.json").read_text())
    apart = sum(found - 1 for _, found in became["sessions"]) + sum(made != turns for made, _ in became["sessions"])
    return {
        "workers": len(workers),
        "calls/s": calls / seconds,
        "ms: run": 1000 * spent / calls,
        "workers, together": 1000 * spent_workers / calls,
        "clients": 1000 * own / calls,
        "p50": 1000 * float(np.median(delays)),
        "lag p99": 1000 * became["lag"],
        "MB a worker": megabytes,
        "apart": apart,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--agents", type=int, default=16)
    parser.add_argument("--turns", type=int, default=24)
    parser.add_argument("--result", type=int, default=2000, help="characters of a tool's result")
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        profile = cProfile.Profile() if given.profile else None
        asyncio.run(serve(Path(given.serve[0]), int(given.serve[1]), int(given.serve[2]), profile))
        if profile is not None:
            profile.dump_stats(given.profile)
        return
    from tests.agents.chat.speaking import tokenizer_of

    result = ("def test_it(): the sum of 12 and 30 is 42, in the city of Paris.\n" * (given.result // 60 + 1))[: given.result]
    for workers in given.workers:
        with tempfile.TemporaryDirectory() as made:
            directory = Path(made)
            tokenizer_of(FAMILY).save_pretrained(directory / "model")
            more = ["--profile", str(given.profile)] if given.profile else []
            command = [
                sys.executable,
                "-m",
                "benchmarks.gateway_workers",
                *more,
                "--serve",
                made,
                str(workers),
                str(given.agents),
            ]
            serving = subprocess.Popen(command)
            try:
                while not (directory / "address.json").exists():
                    time.sleep(0.1)
                found = asyncio.run(use(directory, serving.pid, given.agents, given.turns, result))
                serving.wait(60)
            finally:
                serving.kill()
                serving.wait()
        print("  ".join(f"{name} {x:.4g}" for name, x in found.items()), flush=True)


if __name__ == "__main__":
    main()
