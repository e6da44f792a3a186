"""Runs inside the vLLM worker on a CPU: the temperatures of guessed positions.

vLLM 0.32 repeats each request's temperature, top-p and top-k for its guessed positions by a kernel
that exists for integers alone on a CPU (`cpu_triton_utils._expand_kernel_impl`): of temperatures it
fills a copy, and the positions' logits are divided by memory that nobody wrote.
"""

from __future__ import annotations

from typing import Any

from areal_x.engines.vllm.cpu_sampler import once_made


def install() -> None:
    """Makes workers of this process that compute on a CPU repeat numbers of any kind."""
    once_made(correct_repeats)


def correct_repeats() -> None:
    from vllm.v1.sample import rejection_sampler

    rejection_sampler.expand_batch_to_tokens = repeated


def repeated(
    x: Any, cu_num_tokens: Any, num_tokens: int, replace_from: float = 0, replace_to: float = 0
) -> Any:
    """Returns each request's number for each of its positions, of which `cu_num_tokens` counts those
    up to and including a request's, with one number replaced by another (vLLM's
    `expand_batch_to_tokens`)."""
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    replaced = x.masked_fill(x == replace_from, replace_to)
    return replaced.repeat_interleave(counts, output_size=num_tokens)
