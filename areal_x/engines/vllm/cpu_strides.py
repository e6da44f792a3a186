"""Runs inside the vLLM worker on a CPU: products of inputs whose rows are not contiguous.

vLLM 0.32's linear layers on a CPU refuse such inputs, which Llama 4's tower gives them (its patches are
permuted): each image would end the engine.
"""

from __future__ import annotations

from functools import wraps
from typing import Any


def install() -> None:
    """Makes linear layers of this process that compute on a CPU copy such inputs."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm import _custom_ops

    if (multiply := getattr(_custom_ops, "onednn_mm", None)) is None:
        return

    @wraps(multiply)
    def multiply_rows(handler: Any, x: Any, *others: Any, **named: Any) -> Any:
        return multiply(handler, x if x.stride(-1) == 1 else x.contiguous(), *others, **named)

    _custom_ops.onednn_mm = multiply_rows
