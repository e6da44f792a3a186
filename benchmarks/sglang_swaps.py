"""How long an SGLang server is paused by a swap, with the proof of its weights and without.

    python -m benchmarks.sglang_swaps --python .venv-sglang/bin/python [--swaps 30] [--tensor 1]

Claim: a swap of a tiny model pauses a server on a CPU for some tens of milliseconds, and the proof of a sample of each
tensor is little of it.

The work: one real server of the tests' tiny model, and one of the Qwen3 of benchmarks/update.py (26M parameters in fp32,
105 MB). Two random sets of weights are published in turn, while 8 requests generate; the swaps take turns in being proved in
full, by a sample, and not at all. Printed: medians of the seconds that generation was paused. A proof that fails ends the
benchmark.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np

from areal_x.engines.sglang.config import SGLangConfig
from areal_x.engines.sglang.engine import SGLangEngine
from areal_x.protocols.engine import Request, SamplingParams
from areal_x.testing.models import write_model, write_tokenizer
from tests.servers import Weights

PROMPT = np.arange(2, 14, dtype=np.int32)
KINDS = {"in full": 0, "a sample": 1, "no proof": None}


async def measure(config: SGLangConfig, models: list[Path], folder: Path, swaps: int) -> dict[str, float]:
    engine = SGLangEngine(config, models[0], folder, lambda line: print(line, file=sys.stderr))
    paused: dict[str, list[float]] = {kind: [] for kind in KINDS}
    ended = asyncio.Event()

    async def generate() -> None:
        while not ended.is_set():
            await engine.generate(Request(PROMPT, SamplingParams(max_tokens=100)))

    await engine.start()
    try:
        running = [asyncio.create_task(generate()) for _ in range(8)]
        for number in range(swaps + len(KINDS)):
            kind = list(KINDS)[number % len(KINDS)]
            claimed = KINDS[kind]
            engine.stager._prove_every = 0 if claimed is None else 100
            engine.stager._claimed = claimed or 0
            staged = await asyncio.to_thread(engine.stage, Weights(models[number % 2], number + 1))
            seconds = await engine.swap(staged)
            if number >= len(KINDS):  # the first proof finds which parameter holds what
                paused[kind].append(seconds)
            await engine.generate(Request(PROMPT, SamplingParams(max_tokens=2)))
        ended.set()
        await asyncio.gather(*running)
    finally:
        await engine.close()
    return {kind: round(statistics.median(seconds), 4) for kind, seconds in paused.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True)
    parser.add_argument("--swaps", type=int, default=30)
    parser.add_argument("--tensor", type=int, default=1)
    arguments = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    from update import CONFIG, write_random

    of_tensor = ("--tp-size", str(arguments.tensor)) if arguments.tensor > 1 else ()
    config = SGLangConfig(context=256, concurrency=16, python=arguments.python, arguments=of_tensor)
    with tempfile.TemporaryDirectory() as scratch:
        tiny = [write_model(Path(scratch) / f"tiny{seed}", seed=seed) for seed in (0, 1)]
        larger = [write_random(Path(scratch) / f"larger{seed}", CONFIG, seed=seed) for seed in (0, 1)]
        for model in larger:
            write_tokenizer(model)
        for name, models in (("tiny", tiny), ("26M", larger)):
            found = asyncio.run(measure(config, models, Path(scratch), arguments.swaps))
            print(json.dumps({"model": name, "tensor": arguments.tensor, **found}), flush=True)


if __name__ == "__main__":
    main()
