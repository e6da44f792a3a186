"""Drivers of real servers on the nodes of a cluster: `python -m tests.cluster.elastic NAME MODEL FOLDER` answers requests all
the while, and prints what happened as JSON.

    scaled      one to three vLLM servers on nodes that Ray's autoscaler starts, and one of the nodes is drained
    sglang      the same with SGLang servers
    spanning    one server on two nodes, of which the test kills one and adds another when the driver says so
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from areal_x.cluster.config import ClusterConfig
from areal_x.cluster.connection import connected
from areal_x.cluster.places import RayPlaces, places_on_ray, server_room
from areal_x.cluster.surroundings import surroundings
from areal_x.engines.fleet.config import FleetConfig
from areal_x.engines.fleet.engine import FleetEngine
from areal_x.engines.fleet.placed import ClusterStarter, Keeper
from areal_x.engines.fleet.scaling import STEPS
from areal_x.engines.sglang.config import SGLangConfig
from areal_x.engines.sglang.engine import SGLangEngine
from areal_x.engines.vllm.config import VLLMConfig
from areal_x.engines.vllm.engine import VLLMEngine
from areal_x.protocols.engine import Request, SamplingParams
from areal_x.shards.starter import SERVERS_READ
from tests.cluster.cluster import ROLE
from tests.engines.sglang.conftest import PYTHON
from tests.servers import Weights

TOKENS, PROMPTS, ASKING = 96, 6, 12
SECONDS = 400.0


class Traffic:
    """Requests without end, the same few prompts, decoded greedily under weights that never change in value: so each prompt's
    completion is known from its first one."""

    def __init__(self, engine: FleetEngine) -> None:
        self.engine, self.ends = engine, False
        self.counts: Counter[str] = Counter()
        self.known: dict[int, list[int]] = {}

    async def complete(self, prompt: int) -> list[int]:
        request = Request(np.int32([3 + prompt, 4, 5, 6]), SamplingParams(max_tokens=TOKENS, temperature=0.0))
        completion = await self.engine.generate(request)
        assert len(completion.tokens) == len(completion.logprobs) == len(completion.versions) == TOKENS
        assert completion.finish_reason == "length"
        assert (np.diff(completion.versions) >= 0).all()
        return completion.tokens.tolist()

    async def ask(self, prompt: int) -> None:
        while not self.ends:
            tokens = await self.complete(prompt)
            self.counts["answered"] += 1
            self.counts["differ"] += tokens != self.known[prompt]

    async def begin(self) -> None:
        self.known = {prompt: await self.complete(prompt) for prompt in range(PROMPTS)}
        self.tasks = [asyncio.create_task(self.ask(index % PROMPTS)) for index in range(ASKING)]

    async def more(self) -> None:
        """Returns when twice as many requests are answered as are in flight."""
        before = self.counts["answered"]
        await until(lambda: self.counts["answered"] >= before + 2 * ASKING, self)

    async def end(self) -> None:
        self.ends = True
        await asyncio.gather(*self.tasks)


async def until(condition: Callable[[], bool], traffic: Traffic) -> None:
    began = time.monotonic()
    while not condition():
        for task in traffic.tasks:
            if task.done():
                task.result()
        assert time.monotonic() - began < SECONDS, traffic.engine.fleet.members
        await asyncio.sleep(0.1)


def nodes() -> set[str]:
    import ray

    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


# Servers of one core answer no heartbeat while another one starts on it.
SETTINGS = {"context": 256, "concurrency": 8, "threads": 1, "heartbeat_seconds": 60.0}


async def scaled(model: Path, folder: Path, report: Callable[[str], None]) -> dict[str, Any]:
    config = VLLMConfig(least=1, most=3, **SETTINGS)
    with placed(config) as places:
        engine = VLLMEngine(config, model, folder, report, starter=ClusterStarter(places))
        return await serving(engine, model, places)


async def sglang(model: Path, folder: Path, report: Callable[[str], None]) -> dict[str, Any]:
    config = SGLangConfig(least=1, most=3, python=str(Path(PYTHON).absolute()), **SETTINGS)
    with placed(config) as places:
        engine = SGLangEngine(config, model, folder, report, starter=ClusterStarter(places))
        return await serving(engine, model, places)


async def serving(engine: FleetEngine, model: Path, places: RayPlaces) -> dict[str, Any]:
    await engine.start()
    try:
        return await up_and_down(engine, model, places)
    finally:
        await engine.close()


async def up_and_down(engine: FleetEngine, model: Path, places: RayPlaces) -> dict[str, Any]:
    found: dict[str, Any] = {}
    await engine.swap(await asyncio.to_thread(engine.stage, Weights(model, 1)))
    traffic = Traffic(engine)
    await traffic.begin()

    def steps(trainer_idle: float, rollout_idle: float) -> None:
        for _ in range(STEPS):
            engine.balance(trainer_idle, rollout_idle)

    for serving in (2, 3):
        steps(0.5, 0.0)
        await until(lambda serving=serving: len(engine.fleet.serving()) == serving, traffic)  # type: ignore[misc]
    found["nodes of three"] = len(nodes())
    found["answered by three"] = dict(traffic.counts)
    await engine.swap(await asyncio.to_thread(engine.stage, Weights(model, 2)))

    (drained,) = {keeper.node_id for keeper in places._places[1].held}
    words = [str(Path(sys.executable).with_name("ray")), "drain-node", "--address", os.environ["RAY_ADDRESS"]]
    words += ["--node-id", drained, "--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot"]
    await asyncio.to_thread(subprocess.check_call, [*words, "--deadline-remaining-seconds", "600"], stdout=sys.stderr)
    await until(lambda: len(engine.fleet.serving()) == 2, traffic)
    await until(lambda: drained not in nodes(), traffic)
    found["drained"] = dict(traffic.counts)
    await until(lambda: len(engine.fleet.serving()) == 3, traffic)
    found["replaced"] = dict(traffic.counts)

    for serving in (2, 1):
        steps(0.0, 0.9)
        await until(lambda serving=serving: len(engine.supervisor.replicas) == serving, traffic)  # type: ignore[misc]
    await until(lambda: len(nodes()) == 2, traffic)
    await traffic.more()
    await traffic.end()
    return {**found, **traffic.counts, "in flight": len(engine.fleet.placed)}


async def spanning(model: Path, folder: Path, report: Callable[[str], None]) -> dict[str, Any]:
    config = VLLMConfig(hosts=2, tensor=2, **SETTINGS)
    with placed(config) as places:
        engine = VLLMEngine(config, model, folder, report, starter=ClusterStarter(places))
        await engine.start()
        try:
            await engine.swap(await asyncio.to_thread(engine.stage, Weights(model, 1)))
            traffic = Traffic(engine)
            await traffic.begin()
            await traffic.more()
            found = {"first": sorted(keeper.node_id for keeper in places._places[0].held)}
            print("kill", flush=True)
            await until(lambda: not engine.fleet.serving(), traffic)
            lost = traffic.counts["answered"]
            print("add", flush=True)
            await until(lambda: traffic.counts["answered"] > lost, traffic)
            await traffic.end()
            found["second"] = sorted(keeper.node_id for keeper in places._places[0].held)
            return {**found, **traffic.counts, "in flight": len(engine.fleet.placed)}
        finally:
            await engine.close()


@contextmanager
def placed(config: FleetConfig) -> Iterator[RayPlaces]:
    room = server_room(ClusterConfig(server_cpus=2, servers_on=ROLE), width=1)
    with places_on_ray(room, config.hosts, Keeper, surroundings(None, SERVERS_READ), joins=config.most > 0) as places:
        yield places


def main(name: str, model: Path, folder: Path) -> None:
    lines: list[str] = []

    def report(line: str) -> None:
        lines.append(line)
        print(line, file=sys.stderr, flush=True)

    with connected(cpus=1):
        found = asyncio.run({"scaled": scaled, "sglang": sglang, "spanning": spanning}[name](model, folder, report))
        print(json.dumps(found | {"lines": lines}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
