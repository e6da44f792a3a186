"""Memory of the head over a large vocabulary, forward and backward, and of attention over a long row.

    python benchmarks/jax_memory.py

Claim: for 8,192 tokens of Qwen2.5-0.5B (896 features) over a vocabulary of 152,000, log-probabilities and their gradients take
at most 400 MB besides inputs and gradients, with or without entropies; all logits at once take 10 GB.

Method: the memory that the compiled program allocates besides its inputs and outputs (the hidden states' and the kernel's
gradients), as XLA reports it for this platform. Nothing is run. On a CPU XLA computes products of bf16 in fp32, and counts
those copies. Attention is that of benchmarks/attention.py, one row of 16,384 tokens.
"""

from __future__ import annotations

import argparse
from typing import Any

import attention
import jax
import jax.numpy as jnp

from areal_x_jax import head

TOKENS, FEATURES, VOCABULARY = 8192, 896, 152_000
AUTOMATIC, ALL_AT_ONCE = 0, TOKENS
TYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16}


def head_megabytes(rows: int, dtype: Any, tied: bool, entropy: bool, chunk: int, vocabulary: int = VOCABULARY) -> float:
    def total(hidden: jax.Array, kernel: jax.Array, tokens: jax.Array, segment_ids: jax.Array) -> jax.Array:
        kernel = kernel.T if tied else kernel
        said = head.logprobs(hidden, kernel, tokens, segment_ids, 1.0, chunk, entropy, tied=tied)
        return sum(jnp.sum(x) for x in jax.tree.leaves(said))

    hidden = jax.ShapeDtypeStruct((rows, TOKENS // rows, FEATURES), dtype)
    kernel = jax.ShapeDtypeStruct((vocabulary, FEATURES) if tied else (FEATURES, vocabulary), jnp.float32)
    ids = jax.ShapeDtypeStruct((rows, TOKENS // rows), jnp.int32)
    program = jax.jit(jax.value_and_grad(total, argnums=(0, 1))).lower(hidden, kernel, ids, ids).compile()
    return program.memory_analysis().temp_size_in_bytes / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    vocabulary = parser.parse_args().vocabulary
    print("| MB of the head | logp | logp and entropy | all logits at once |\n|---|---|---|---|")
    for rows in (8, 1):
        for name, dtype in TYPES.items():
            for tied in (True, False):
                ways = (False, AUTOMATIC), (True, AUTOMATIC), (False, ALL_AT_ONCE)
                found = [head_megabytes(rows, dtype, tied, entropy, chunk, vocabulary) for entropy, chunk in ways]
                kind = f"{rows} × {TOKENS // rows:,}, {name}, {'tied' if tied else 'untied'}"
                print(f"| {kind} | " + " | ".join(f"{megabytes:,.0f}" for megabytes in found) + " |")
    print(f"\n| MB of attention | {' | '.join(attention.WAYS)} |\n|---|---|---|")
    programs = (attention.compiled(how, attention.LONG) for how in attention.WAYS)
    found = [program.memory_analysis().temp_size_in_bytes / 1e6 for program in programs]
    print(f"| 1 × {attention.LONG:,}, fp32 | " + " | ".join(f"{megabytes:,.0f}" for megabytes in found) + " |")


if __name__ == "__main__":
    main()
