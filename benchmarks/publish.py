"""Pause of generation for a weight swap, with 64 requests in flight on a real vLLM server.

    python benchmarks/publish.py [--swaps 20] [--requests 64]

Builds the random Qwen3 of benchmarks/model.py, keeps the requests in flight (each one that ends is replaced), publishes its
weights repeatedly and checks that every request got all its tokens, each with a version. Prints a table, then one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from model import write_model

from areal_x.engines.vllm.config import VLLMConfig
from areal_x.engines.vllm.engine import VLLMEngine
from areal_x.hf.model_dir import read_tensors
from areal_x.protocols.engine import Completion, Request, SamplingParams

NEW_TOKENS = 200
BETWEEN_SWAPS_SECONDS = 0.5


@dataclass
class Weights:
    """A stand-in for a trainer: the model's tensors under an increasing version."""

    directory: Path
    version: int = 0

    def weights(self) -> Iterator[tuple[str, np.ndarray]]:
        return read_tensors(self.directory)


@dataclass
class Traffic:
    """Keeps requests in flight until stopped, and collects the results."""

    engine: VLLMEngine
    stopping: bool = False
    completions: list[Completion] = field(default_factory=list)

    async def one_place(self, place: int) -> None:
        for turn in itertools.count():
            prompt = np.arange(2, 10 + (7 * place + turn) % 20, dtype=np.int32)
            self.completions.append(await self.engine.generate(Request(prompt, SamplingParams(max_tokens=NEW_TOKENS))))
            if self.stopping:
                return


async def measure(model: Path, logs: Path, swaps: int, requests: int) -> dict[str, float]:
    engine = VLLMEngine(VLLMConfig(context=256, concurrency=requests), model, logs)
    trainer = Weights(model)
    stages, pauses = [], []
    try:
        began = time.perf_counter()
        await engine.start()
        start = time.perf_counter() - began
        traffic = Traffic(engine)
        began = time.perf_counter()
        places = [asyncio.create_task(traffic.one_place(place)) for place in range(requests)]
        for version in range(1, swaps + 1):
            await asyncio.sleep(BETWEEN_SWAPS_SECONDS)
            trainer.version = version
            staging = time.perf_counter()
            staged = await asyncio.to_thread(engine.stage, trainer)
            stages.append(time.perf_counter() - staging)
            pauses.append(await engine.swap(staged))
        traffic.stopping = True
        await asyncio.gather(*places)
        seconds = time.perf_counter() - began
    finally:
        await engine.close()
    lost = sum(NEW_TOKENS - len(completion.tokens) for completion in traffic.completions)
    crossing = sum(len(np.unique(completion.versions)) > 1 for completion in traffic.completions)
    return {
        "requests_in_flight": requests,
        "swaps": swaps,
        "pause_ms_median": round(1e3 * statistics.median(pauses), 1),
        "pause_ms_max": round(1e3 * max(pauses), 1),
        "stage_ms_median": round(1e3 * statistics.median(stages), 1),
        "completions": len(traffic.completions),
        "completions_across_a_swap": int(crossing),
        "tokens_lost": lost,
        "tokens_per_second": round(NEW_TOKENS * len(traffic.completions) / seconds),
        "start_seconds": round(start, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--swaps", type=int, default=20)
    parser.add_argument("--requests", type=int, default=64)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "model")
        figures = asyncio.run(measure(model, Path(folder) / "logs", chosen.swaps, chosen.requests))
    for name, value in figures.items():
        print(f"{name.replace('_', ' '):>28}  {value}")
    print(json.dumps({"benchmark": "publish", **figures}))


if __name__ == "__main__":
    main()
