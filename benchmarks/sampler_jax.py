"""Tokens per second of the JAX sampler behind the embedded engine, for tuning it (benchmarks/sampler.py compares it with
others).

    python benchmarks/sampler_jax.py                  # 64 requests, equal and unequal lengths, 16, 32 and 64 slots
    python benchmarks/sampler_jax.py --cpu-seconds    # the same in processor seconds of one core, on a busy machine

A random Qwen3 of 0.6M parameters in fp32; equal: prompts of 16 and 64 new tokens; unequal: prompts of 8 to 32 and 16 to
256 new tokens, both uniform. No stop tokens, so lengths are exact. The best and the median of the repetitions after the first.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from areal_x.engines.embedded import EmbeddedEngine
from areal_x.protocols.engine import Request, SamplingParams

VOCABULARY = 99
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
}


@dataclass(frozen=True)
class Weights:
    """The part of a trainer that the engine's `stage` needs."""

    params: Any
    version: int = 0

    def snapshot(self) -> Any:
        return self.params


def requests(unequal: bool, count: int) -> list[Request]:
    rng = np.random.default_rng(0)
    lengths = [(int(rng.integers(8, 33)), int(rng.integers(16, 257))) if unequal else (16, 64) for _ in range(count)]
    prompts = [rng.integers(2, VOCABULARY, prompt).astype(np.int32) for prompt, _ in lengths]
    return [
        Request(prompt, SamplingParams(max_tokens=new), seed=i)
        for i, (prompt, (_, new)) in enumerate(zip(prompts, lengths, strict=True))
    ]


async def seconds_each(
    sampler: Any, weights: Weights, work: list[Request], repetitions: int, clock: Callable[[], float]
) -> list[float]:
    engine = EmbeddedEngine(sampler)
    await engine.start()
    await engine.swap(engine.stage(weights))
    seconds = []
    for _ in range(repetitions):
        started = clock()
        await asyncio.gather(*(engine.generate(request) for request in work))
        seconds.append(clock() - started)
    await engine.close()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--slots", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--repetitions", type=int, default=8)
    parser.add_argument("--cpu-seconds", action="store_true")
    arguments = parser.parse_args()
    if arguments.cpu_seconds:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # before jax creates its threads: idle ones would spin

    import jax

    from areal_x_jax.architecture import read_architecture
    from areal_x_jax.parameters import parameter_shapes
    from areal_x_jax.sampler import Sampler

    shape = read_architecture(CONFIG)
    rng = np.random.default_rng(0)
    weights = Weights(jax.tree.map(lambda leaf: rng.normal(0, 0.05, leaf.shape).astype(np.float32), parameter_shapes(shape)))
    clock = time.process_time if arguments.cpu_seconds else time.perf_counter
    for unequal in (False, True):
        for slots in arguments.slots:
            sampler = Sampler(shape, slots, context=288 if unequal else 80)
            work = requests(unequal, arguments.requests)
            tokens = sum(request.sampling.max_tokens for request in work)
            first, *rest = asyncio.run(seconds_each(sampler, weights, work, arguments.repetitions, clock))
            print(
                f"{'unequal' if unequal else 'equal  '} {slots:3} slots: best {tokens / min(rest):7.0f} tokens/s, "
                f"median {tokens / statistics.median(rest):7.0f}, the first {first:.1f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
