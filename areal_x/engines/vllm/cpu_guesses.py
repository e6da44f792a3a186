"""Runs inside the vLLM worker on a CPU: the temperatures of guessed positions, and n-grams' threads.

vLLM 0.32 repeats each request's temperature, top-p and top-k for its guessed positions by a kernel
that exists for integers alone on a CPU (`cpu_triton_utils._expand_kernel_impl`): of temperatures it
fills a copy, and the positions' logits are divided by memory that nobody wrote.

Its n-grams are found by numba, whose OpenMP layer changes the number of OpenMP's threads in the
thread that computes the model. oneDNN packs a weight for that number, and keeps its products by
shapes alone: after a swap of weights they would read packed weights in the order of before.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from areal_x.engines.vllm.cpu_sampler import once_made


def install() -> None:
    """Makes workers of this process that compute on a CPU repeat numbers of any kind, and keep their
    threads."""
    once_made(correct_repeats)
    keep_threads()


def keep_threads() -> None:
    """Gives numba threads of its own, on a CPU."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    layer = os.environ.setdefault("NUMBA_THREADING_LAYER", "workqueue")
    if (numba := sys.modules.get("numba")) is not None:  # which read the environment already
        numba.config.THREADING_LAYER = layer


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
