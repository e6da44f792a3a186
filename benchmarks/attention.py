"""Memory and time of attention over one packed row, forward and backward: block by block, and with all scores at once.

    python -m benchmarks.attention

Claim: for a row of 16,384 tokens blocks take at most a hundredth of the memory, and for one of 2,048 at most half the time.

Method: 4 heads of 64 that share 2 key-value heads, in fp32, with sequences of 100 to 1,000 tokens in the row. Memory is what
the compiled program allocates besides its inputs and outputs, as XLA reports it for this platform; the programs for the long
row are compiled and not run. A time is the minimum of `--rounds`, measured alternately.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from areal_x_jax.attention import attend
from areal_x_jax.dense_attention import AttentionMask

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
LONG, SHORT = 16384, 2048
WAYS = ("blocked", "dense")


def packed_row(length: int) -> np.ndarray:
    """Segment ids [1, length]."""
    lengths = np.random.default_rng(0).integers(100, 1001, length // 100)
    return np.repeat(np.arange(1, len(lengths) + 1, dtype=np.int32), lengths)[None, :length]


def compiled(how: str, length: int) -> Any:
    """The compiled program for the gradients of query, key and value."""

    def loss(query: jax.Array, key: jax.Array, value: jax.Array, ids: jax.Array) -> jax.Array:
        return jnp.sum(attend(query, key, value, AttentionMask(ids, ids), scale=HEAD_DIM**-0.5, how=how) ** 2)

    query, key = (jax.ShapeDtypeStruct((1, length, heads, HEAD_DIM), jnp.float32) for heads in (HEADS, KV_HEADS))
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32)
    return jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(query, key, key, ids).compile()


def least_seconds(length: int, rounds: int) -> list[float]:
    """Minimum seconds for each of WAYS."""
    rng = np.random.default_rng(1)
    sizes = ((1, length, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    inputs = [*(jnp.asarray(rng.normal(size=size), jnp.float32) for size in sizes), jnp.asarray(packed_row(length))]
    programs = [compiled(how, length) for how in WAYS]
    seconds = np.full((rounds + 1, len(WAYS)), np.inf)  # the first round warms up
    for turn in range(rounds + 1):
        for i, program in enumerate(programs):
            begun = time.perf_counter()
            jax.block_until_ready(program(*inputs))
            seconds[turn, i] = time.perf_counter() - begun
    return seconds[1:].min(axis=0).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    megabytes = [compiled(how, LONG).memory_analysis().temp_size_in_bytes / 1e6 for how in WAYS]
    milliseconds = [1000 * seconds for seconds in least_seconds(SHORT, rounds)]
    print("| | " + " | ".join(WAYS) + " | dense ÷ blocked |\n|---|---|---|---|")
    for what, (ours, plain) in ((f"MB, {LONG:,} tokens", megabytes), (f"ms, {SHORT:,} tokens", milliseconds)):
        print(f"| {what} | {ours:,.0f} | {plain:,.0f} | {plain / ours:.1f} |")


if __name__ == "__main__":
    main()
