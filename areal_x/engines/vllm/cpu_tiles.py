"""Runs inside the vLLM worker on a CPU: the kernel's permission to use AMX.

A process on Linux must ask for AMX's tile registers before its first instruction on them, else it dies
of an illegal instruction. vLLM 0.32's own kernels (attention in bfloat16) do not ask. oneDNN does when
it first multiplies in bfloat16, which comes earlier unless a model's linear layers are in fp8.
"""

from __future__ import annotations


def install() -> None:
    """Asks for them, if this process computes on a CPU that has them."""
    import torch
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()
