"""Runs inside the vLLM worker on a CPU: releases the memory of caches and weights while the server sleeps.

vLLM's own sleep mode unmaps the memory of a CUDA device and keeps its addresses; its worker on a CPU
ignores the request. Here the pages of the same tensors are released (areal_x.engines.fleet.pages). A
layer's packed copy of its weight, which is no tensor, is dropped; loading makes it again.
"""

from __future__ import annotations

from typing import Any

from areal_x.engines.fleet.pages import release, tensors_in, trim

DROPS_WEIGHTS = 2  # vLLM's sleep level that does not copy the weights to the host


def install() -> None:
    """Makes the workers of this process release memory, if they compute on a CPU."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.v1.worker.cpu_worker import CPUWorker

    CPUWorker.sleep = sleep
    CPUWorker.wake_up = wake_up


def sleep(worker: Any, level: int = 1) -> None:
    """Releases the caches, and at level 2 the weights too, which must be loaded before the server is
    used again. At level 1 weights stay: they are in the host's memory, where a GPU's would go."""
    for cache in tensors_in(worker.model_runner.kv_caches):
        release(cache)
    if level == DROPS_WEIGHTS:
        model = worker.get_model()
        for parameter in model.parameters():
            release(parameter)
        for module in model.modules():
            if "cpu_linear" in vars(module):
                module.cpu_linear = asleep
    trim()


def wake_up(worker: Any, tags: list[str] | None = None) -> None:
    """Does nothing: pages come back when they are written."""


def asleep(*_: Any) -> Any:
    raise RuntimeError("the weights of this layer were released and not loaded again")
