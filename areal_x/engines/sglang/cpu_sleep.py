"""Runs inside the SGLang server's workers on a CPU: releases the memory of caches and weights while the server sleeps.

SGLang's own memory saver (--enable-memory-saver) unmaps memory of CUDA; without it the server
answers a release with success and releases nothing. Here the pages of the same tensors are released
(areal_x.engines.fleet.pages).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import wraps
from typing import Any

from areal_x.engines.fleet.pages import release, tensors_in, trim


def install(updater: Any) -> None:
    """Patches the class of sglang.srt.managers.scheduler_components.weight_updater."""
    manager = updater.SchedulerWeightUpdaterManager
    release_memory = manager.release_memory_occupation

    @wraps(release_memory)
    def release_memory_and_pages(self: Any, request: Any) -> Any:
        from sglang.srt import constants
        from sglang.srt.runtime_context import get_exec

        answer = release_memory(self, request)
        runner, tags = self.tp_worker.model_runner, request.tags or constants.GPU_MEMORY_ALL_TYPES
        if runner.device == "cpu":
            # with a backup the weights stay: they are in the host's memory, where a GPU's would go
            kept = get_exec().features.enable_weights_cpu_backup
            release_pages(
                runner,
                caches=constants.GPU_MEMORY_TYPE_KV_CACHE in tags,
                weights=constants.GPU_MEMORY_TYPE_WEIGHTS in tags and not kept,
            )
        return answer

    manager.release_memory_occupation = release_memory_and_pages


def release_pages(runner: Any, *, caches: bool, weights: bool) -> None:
    """Releases the caches and the weights, which must be loaded before the server is used again."""
    if caches:
        for cache in caches_of(runner.token_to_kv_pool):
            release(cache)
    if weights:
        for parameter in runner.model.parameters():
            release(parameter)
    trim()


def caches_of(pool: Any) -> Iterator[Any]:
    """Yields the tensors of one of SGLang's pools for keys and values, and of those that it is made of."""
    for name, value in vars(pool).items():
        if name.endswith("_kv_pool"):
            yield from caches_of(value)
        elif name.endswith("_buffer"):
            yield from tensors_in(value)
