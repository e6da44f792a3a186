"""Platform-specific attention kernels that jax offers, and the test each must pass before it is
used.

No kernel is used before it has agreed with `dense` on a small packed example in this process. Both
of cuDNN's ran on an H200 (jax 0.11.2), where they deviate by up to 0.5 %, the rounding of bf16;
"splash" was only emulated, not run on a TPU.
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
from areal_x_jax.packed_cudnn import packed_cudnn, packed_cudnn_takes, run_ends

MASK_BYTES = 2**27  # largest mask [rows, queries, keys] in bf16 that is passed to cuDNN


class Candidate(NamedTuple):
    """An attention kernel. takes: True if it supports a call with this softcap. needs: the same
    condition in words. windows: False if it supports none."""

    platform: str
    attend: Attend
    takes: Callable[[Array, Array, AttentionMask, float], bool]
    needs: str
    windows: bool = True


def cudnn(
    query: Array, key: Array, value: Array, mask: AttentionMask, scale: float, softcap: float = 0.0
) -> Array:
    """NVIDIA's fused attention through jax's public function, which supports row lengths and
    windows but no segments.

    Segments need a mask [rows, queries, keys], which is cheap for rows of a few thousand tokens;
    longer rows are refused. `packed_cudnn` needs none and takes half the time on an H200.
    """
    bias = attention_bias(mask)[:, :, :, 0].astype(query.dtype)
    # The kernel then skips the upper triangle, whatever the mask.
    square = is_statically_zero(mask.start) and query.shape[1] == key.shape[1]
    return jax.nn.dot_product_attention(
        query, key, value, bias, scale=scale, is_causal=square, implementation="cudnn"
    )


def _cudnn_takes(query: Array, key: Array, mask: AttentionMask, softcap: float) -> bool:
    even = query.shape[1] % 2 == key.shape[1] % 2 == 0
    heads = query.shape[3] % 8 == 0 and query.shape[3] <= 128
    return (
        query.dtype == jnp.bfloat16
        and not softcap
        and even
        and heads
        and mask_bytes(mask) <= MASK_BYTES
    )


def mask_bytes(mask: AttentionMask) -> int:
    return 2 * mask.queries.size * mask.keys.shape[1]


def splash(
    query: Array,
    key: Array,
    value: Array,
    mask: AttentionMask,
    scale: float,
    softcap: float = 0.0,
    interpret: bool = False,
) -> Array:
    """jax's Pallas kernel for TPU, with segments, grouped queries, windows and soft caps.
    Experimental: tested in emulation only.

    interpret: emulate it on any platform, slowly.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as kernels

    heads, length = query.shape[2], query.shape[1]
    whole = (length, length)
    pattern = (
        kernels.LocalMask(whole, (mask.window - 1, 0), 0)
        if mask.window
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
        kernels.MultiHeadMask([pattern] * heads), block_sizes=sizes, **cap
    )
    heads_first = (jnp.moveaxis(x, 2, 1) for x in (query * scale, key, value))
    return jnp.moveaxis(
        jax.vmap(kernel)(*heads_first, kernels.SegmentIds(mask.queries, mask.keys)), 1, 2
    )


def _splash_takes(query: Array, key: Array, mask: AttentionMask, softcap: float) -> bool:
    """One device only: XLA cannot split a Pallas kernel over the devices that rows are sharded
    over."""
    square = (
        is_statically_zero(mask.start)
        and query.shape[1] == key.shape[1]
        and query.shape[1] % 128 == 0
    )
    return (
        square and isinstance(mask.window, int) and mask.tries is None and jax.device_count() == 1
    )


CANDIDATES = {
    "packed_cudnn": Candidate(
        "gpu",
        packed_cudnn,
        packed_cudnn_takes,
        "one NVIDIA GPU of the Hopper generation or later, bf16, whole rows, a head_dim of at most 128"
        " that 8 divides, and no window, soft cap or shared tokens",
        windows=False,
    ),
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
        " and no shared tokens",
    ),
}


@functools.cache
def trusted(
    name: str, candidate: Candidate, group: int, head_dim: int, dtype: str, softcap: float
) -> bool:
    """True if the kernel agrees with `dense` on a small packed example; otherwise warns why not."""
    # In a thread of its own: the caller is a program that is being traced, and that thread's is not.
    with ThreadPoolExecutor(1) as thread:
        try:
            deviation = thread.submit(
                _deviation, candidate, group, head_dim, dtype, softcap
            ).result()
            problem = f"deviates by {deviation:.1%}"
        except Exception as error:  # kernels and the compiler raise errors of many types
            deviation, problem = np.inf, f"raises {type(error).__name__}: {error}"
    # A wrong mask or head is off by the size of the values themselves, rounding to bf16 by a
    # hundredth of it.
    trusted = bool(deviation < 0.05)
    if not trusted:
        warnings.warn(
            f"the attention kernel {name!r} {problem} compared with the plain formula, so it is not"
            " used",
            stacklevel=2,
        )
    return trusted


def _deviation(
    candidate: Candidate, group: int, head_dim: int, dtype: str, softcap: float
) -> float:
    """Returns the largest deviation of output and gradients from those of `dense` in fp32, relative
    to the largest value of each."""
    rng = np.random.default_rng(0)
    packed = np.repeat([[1, 2, 3, 4, 0], [1, 2, 3, 4, 5]], [100, 61, 1, 70, 24], axis=1)
    whole = np.repeat([[1, 1], [1, 0]], [156, 100], axis=1)
    tried = [(packed, 0), (packed, 50)] if candidate.windows else [(packed, 0), (whole, 0)]
    sizes = [(2, 256, heads, head_dim) for heads in (2 * group, 2, 2, 2 * group)]
    *inputs, gradient = (jnp.asarray(rng.normal(size=size), dtype) for size in sizes)

    def results(attend: Attend, mask: AttentionMask, *inputs: Array) -> list[np.ndarray]:
        real = (mask.queries > 0)[..., None, None]

        def loss(*inputs: Array) -> tuple[Array, Array]:
            query, key, value = inputs
            attended = attend(query, key, value, mask, head_dim**-0.5, softcap).astype(jnp.float32)
            attended = attended * real
            return jnp.sum(attended * gradient), attended

        (_, attended), gradients = jax.jit(
            jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)
        )(*inputs)
        return [np.asarray(x, np.float32) for x in (attended, *gradients)]

    worst = 0.0
    for ids, window in tried:
        on_device, ends = jnp.asarray(ids, jnp.int32), run_ends(ids)
        assert ends is not None
        mask = AttentionMask(on_device, on_device, 0, window, ends=jnp.asarray(ends))
        found = results(candidate.attend, mask, *inputs)
        wanted = results(dense, mask, *(x.astype(jnp.float32) for x in inputs))
        for x, y in zip(found, wanted, strict=True):
            # np.maximum keeps a NaN
            worst = float(np.maximum(worst, np.max(np.abs(x - y)) / np.max(np.abs(y))))
    return worst
