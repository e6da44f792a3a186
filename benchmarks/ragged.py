"""Products of a mixture's experts on a CPU by blocks of rows, compared with XLA's ragged product: milliseconds.

    python benchmarks/ragged.py

Claim: a product and its gradients take less than half the time of XLA's, which multiplies every row with every expert.

Method: fp32, rows divided among experts at random; one process, both in turns, `--rounds` times; the least time counts. Beside
them, one product of all rows with a single kernel: what the arithmetic alone takes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from areal_x_jax.ragged_products import by_blocks

SHAPES = (  # rows, experts, inputs, outputs
    (8, 16, 384, 288),
    (256, 16, 384, 288),
    (4096, 4, 384, 1152),
    (4096, 16, 384, 288),
    (4096, 64, 384, 96),
    (16384, 16, 384, 288),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    print("| rows, experts, inputs, outputs | XLA | blocks | ratio | XLA, gradients | blocks | ratio | one kernel |")
    print("|---|---|---|---|---|---|---|---|")
    rng = np.random.default_rng(0)
    for rows, experts, inputs, outputs in SHAPES:
        x = jnp.asarray(rng.normal(size=(rows, inputs)), jnp.float32)
        kernels = jnp.asarray(rng.normal(size=(experts, inputs, outputs)), jnp.float32)
        sizes = jnp.asarray(rng.multinomial(rows, rng.dirichlet(np.full(experts, 3.0))), jnp.int32)
        functions = [jax.lax.ragged_dot, by_blocks]
        programs = [*map(jax.jit, functions), *map(gradient, functions), jax.jit(lambda x, kernels, _: x @ kernels[0])]
        of = [1e3 * t for t in in_turns(programs, (x, kernels, sizes), args.rounds)]
        both = f"{of[0]:.1f} | {of[1]:.1f} | {of[1] / of[0]:.2f} | {of[2]:.1f} | {of[3]:.1f} | {of[3] / of[2]:.2f}"
        print(f"| {rows:,}, {experts}, {inputs}, {outputs} | {both} | {of[4]:.1f} |", flush=True)


def gradient(product: Callable[..., jax.Array]) -> Callable[..., object]:
    return jax.jit(jax.grad(lambda x, kernels, sizes: jnp.sum(product(x, kernels, sizes) ** 2), (0, 1)))


def in_turns(programs: list[Callable[..., object]], given: tuple[jax.Array, ...], rounds: int) -> list[float]:
    """Returns the least seconds of each."""
    least = [np.inf] * len(programs)
    for round in range(rounds + 1):
        for which, program in enumerate(programs):
            begin = time.perf_counter()
            jax.block_until_ready(program(*given))
            if round:  # the first one compiles
                least[which] = min(least[which], time.perf_counter() - begin)
    return least


if __name__ == "__main__":
    main()
