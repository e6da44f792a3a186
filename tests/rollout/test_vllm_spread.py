"""How requests are spread over servers, with servers that answer when they are told to."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np

from areal_x.rollout.balance import Balance
from areal_x.rollout.engine import Completion, Request, SamplingParams
from areal_x.rollout.vllm.engine import VLLMConfig, VLLMEngine

REQUEST = Request(np.int32([1, 2, 3]), SamplingParams(max_tokens=4))


class Held:
    """A server that keeps its requests until they are let go."""

    def __init__(self) -> None:
        self.waiting: list[asyncio.Event] = []

    async def generate(self, tokens: np.ndarray, sampling: SamplingParams, model: str, experts: bool) -> Completion:
        self.waiting.append(asyncio.Event())
        await self.waiting[-1].wait()
        return Completion(tokens, np.zeros(3, np.float32), np.zeros(3, np.int32), "stop")


def test_each_request_goes_to_the_server_with_the_fewest_in_flight(tiny_model_dir: Path, tmp_path: Path) -> None:
    async def main() -> None:
        first, second = held = [Held(), Held()]
        engine = VLLMEngine(VLLMConfig(servers=2), tiny_model_dir, tmp_path)
        engine._clients, engine._balance = held, Balance(2)
        tasks = [asyncio.create_task(engine.generate(REQUEST)) for _ in range(6)]
        await asyncio.sleep(0)
        assert [len(server.waiting) for server in held] == [3, 3]
        for event in second.waiting:
            event.set()
        await asyncio.gather(*tasks[1::2])
        assert engine._balance.in_flight == [3, 0]
        tasks += [asyncio.create_task(engine.generate(REQUEST)) for _ in range(4)]
        await asyncio.sleep(0)
        assert [len(first.waiting), len(second.waiting)] == [4, 6]
        for event in first.waiting + second.waiting:
            event.set()
        await asyncio.gather(*tasks)
        assert engine._balance.in_flight == [0, 0]

    asyncio.run(main())
