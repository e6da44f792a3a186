"""Runs inside the vLLM worker on a CPU: the temperatures of guessed positions.

vLLM 0.32 repeats each request's temperature, top-p and top-k for its guessed positions by a kernel
that exists for integers alone on a CPU (`cpu_triton_utils._expand_kernel_impl`): of temperatures it
fills a copy, and the positions' logits are divided by memory that nobody wrote.
"""

from __future__ import annotations

from functools import wraps
from typing import Any


def install() -> None:
    """Makes workers of this process that compute on a CPU repeat numbers of any kind."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.v1.sample.sampler import Sampler

    make = Sampler.__init__

    @wraps(make)
    def make_and_correct(self: Any, *arguments: Any, **named: Any) -> None:
        make(self, *arguments, **named)
        # Imported by now, and not before: its kernels depend on the platform.
        from vllm.v1.sample import rejection_sampler

        rejection_sampler.expand_batch_to_tokens = repeated

    Sampler.__init__ = make_and_correct


def repeated(
    x: Any, cu_num_tokens: Any, num_tokens: int, replace_from: float = 0, replace_to: float = 0
) -> Any:
    """Returns each request's number for each of its positions, of which `cu_num_tokens` counts those
    up to and including a request's, with one number replaced by another (vLLM's
    `expand_batch_to_tokens`)."""
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    replaced = x.masked_fill(x == replace_from, replace_to)
    return replaced.repeat_interleave(counts, output_size=num_tokens)
