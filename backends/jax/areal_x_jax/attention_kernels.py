"""The attention kernels that jax offers for one platform each, and whether they can be trusted.

None is used before it has agreed with `dense` on a small packed example in this process.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from areal_x_jax.dense_attention import (
    Attend,
    AttentionMask,
    attention_bias,
    dense,
    is_statically_zero,
)

MASK_BYTES = 2**27  # the largest mask [rows, queries, keys] in bf16 that cuDNN is given


class Candidate(NamedTuple):
    """takes: whether it computes such a call, with such a softcap. needs: the same in words."""

    platform: str
    attend: Attend
    takes: Callable[[Array, Array, AttentionMask, float], bool]
    needs: str


def cudnn(
    query: Array, key: Array, value: Array, seen: AttentionMask, scale: float, softcap: float = 0.0
) -> Array:
    """NVIDIA's fused attention through jax's public function, which knows the lengths of rows and
    windows but no segments.

    Those need a mask [rows, queries, keys], which is cheap for rows of a few thousand tokens:
    longer ones are not taken. jax's packed layout would need none, but is not public and has given
    wrong results with grouped queries (jax 0.10.2).
    """
    bias = attention_bias(seen)[:, :, :, 0].astype(query.dtype)
    # then it skips the upper half, whatever the mask says
    square = is_statically_zero(seen.start) and query.shape[1] == key.shape[1]
    return jax.nn.dot_product_attention(
        query, key, value, bias, scale=scale, is_causal=square, implementation="cudnn"
    )


def _cudnn_takes(query: Array, key: Array, seen: AttentionMask, softcap: float) -> bool:
    even = query.shape[1] % 2 == key.shape[1] % 2 == 0
    heads = query.shape[3] % 8 == 0 and query.shape[3] <= 128
    return (
        query.dtype == jnp.bfloat16
        and not softcap
        and even
        and heads
        and mask_bytes(seen) <= MASK_BYTES
    )


def mask_bytes(seen: AttentionMask) -> int:
    return 2 * seen.queries.size * seen.keys.shape[1]


def splash(
    query: Array,
    key: Array,
    value: Array,
    seen: AttentionMask,
    scale: float,
    softcap: float = 0.0,
    interpret: bool = False,
) -> Array:
    """jax's Pallas kernel for TPU, which knows segments, grouped queries, windows and soft caps.

    interpret: emulate it on any platform, slowly.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as kernels

    heads, length = query.shape[2], query.shape[1]
    whole = (length, length)
    mask = (
        kernels.LocalMask(whole, (seen.window - 1, 0), 0)
        if seen.window
        else kernels.CausalMask(whole)
    )
    block = next(size for size in (512, 256, 128) if length % size == 0)
    names = (
        "block_q",
        "block_kv",
        "block_kv_compute",
        "block_q_dkv",
        "block_kv_dkv",
        "block_kv_dkv_compute",
    )
    sizes = kernels.BlockSizes(**dict.fromkeys((*names, "block_q_dq", "block_kv_dq"), block))
    cap = {"attn_logits_soft_cap": softcap or None, "interpret": interpret}
    kernel = kernels.make_splash_mha_single_device(
        kernels.MultiHeadMask([mask] * heads), block_sizes=sizes, **cap
    )
    heads_first = (jnp.moveaxis(x, 2, 1) for x in (query * scale, key, value))
    return jnp.moveaxis(
        jax.vmap(kernel)(*heads_first, kernels.SegmentIds(seen.queries, seen.keys)), 1, 2
    )


def _splash_takes(query: Array, key: Array, seen: AttentionMask, softcap: float) -> bool:
    """On one device only: XLA cannot split a Pallas kernel over the devices that rows are sharded
    on."""
    square = (
        is_statically_zero(seen.start)
        and query.shape[1] == key.shape[1]
        and query.shape[1] % 128 == 0
    )
    return (
        square
        and isinstance(seen.window, int)
        and seen.prefixes is None
        and jax.device_count() == 1
    )


CANDIDATES = {
    "cudnn": Candidate(
        "gpu",
        cudnn,
        _cudnn_takes,
        "an NVIDIA GPU, bf16, even lengths, a head_dim of at most 128 that 8 divides, no soft cap,"
        f" and rows short enough for a mask of {MASK_BYTES // 2**20} MiB",
    ),
    "splash": Candidate(
        "tpu",
        splash,
        _splash_takes,
        "one TPU device, whole rows whose length 128 divides, windows known when it is compiled,"
        " and no shared prompts",
    ),
}


@functools.cache
def trusted(
    name: str, candidate: Candidate, group: int, head_dim: int, dtype: str, softcap: float
) -> bool:
    """Whether it agrees with `dense` on a small packed example. Else a warning says why not."""
    # In a thread of its own, where no program is being traced: the first to ask is a program that
    # is.
    with ThreadPoolExecutor(1) as thread:
        try:
            deviation = thread.submit(
                _deviation, candidate, group, head_dim, dtype, softcap
            ).result()
            problem = f"deviates by {deviation:.1%}"
        except Exception as error:  # kernels refuse with errors of all kinds, the compiler's too
            deviation, problem = np.inf, f"raises {type(error).__name__}: {error}"
    # A wrong mask or a wrong head is off by the values' own size; rounding in bf16 by a hundredth
    # of it.
    trusted = bool(deviation < 0.05)
    if not trusted:
        warnings.warn(
            f"the attention kernel {name!r} {problem} where it is compared with the plain formula,"
            " so it is not used",
            stacklevel=2,
        )
    return trusted


def _deviation(
    candidate: Candidate, group: int, head_dim: int, dtype: str, softcap: float
) -> float:
    """The largest of output and gradients from those of `dense` in fp32, relative to the largest
    value of each."""
    rng = np.random.default_rng(0)
    ids = np.repeat([[1, 2, 3, 4, 0], [1, 2, 3, 4, 5]], [100, 61, 1, 70, 24], axis=1).astype(
        np.int32
    )
    sizes = [(2, 256, heads, head_dim) for heads in (2 * group, 2, 2, 2 * group)]
    *inputs, gradient = (jnp.asarray(rng.normal(size=size), dtype) for size in sizes)
    gradient *= (ids > 0)[..., None, None]

    def results(attend: Attend, seen: AttentionMask, *inputs: Array) -> list[np.ndarray]:
        def loss(*inputs: Array) -> tuple[Array, Array]:
            query, key, value = inputs
            attended = attend(query, key, value, seen, head_dim**-0.5, softcap).astype(jnp.float32)
            return jnp.sum(attended * gradient), attended * (ids > 0)[..., None, None]

        (_, attended), gradients = jax.jit(
            jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)
        )(*inputs)
        return [np.asarray(x, np.float32) for x in (attended, *gradients)]

    worst = 0.0
    for window in (0, 50):
        seen = AttentionMask(jnp.asarray(ids), jnp.asarray(ids), 0, window)
        found = results(candidate.attend, seen, *inputs)
        wanted = results(dense, seen, *(x.astype(jnp.float32) for x in inputs))
        for x, y in zip(found, wanted, strict=True):
            # np.maximum keeps a NaN
            worst = float(np.maximum(worst, np.max(np.abs(x - y)) / np.max(np.abs(y))))
    return worst
