"""Runs inside the vLLM worker on a CPU: requests with seeds.

A prompt may be computed in parts, as may be what a preempted or paused request has so far. After each
part but the last vLLM 0.32 samples a token that it discards, and takes back the random numbers that this
took, by an offset that generators on a CPU lack: the engine dies ("CPU Generator does not use offset").
"""

from __future__ import annotations

from functools import cache, wraps
from typing import Any

from areal_x.engines.vllm.cpu_sampler import once_made


def install() -> None:
    """Gives requests of this process, if it computes on a CPU, generators that can go back."""
    once_made(correct_batches)


def correct_batches() -> None:
    from vllm.v1.worker.gpu_input_batch import InputBatch

    correct(InputBatch)


def correct(batch: Any) -> None:
    """Makes a class of vLLM's batches take requests with generators that can go back to where they
    were when the request came into the batch: what is discarded is sampled before anything else."""
    add = batch.add_request
    if hasattr(add, "goes_back"):
        return

    @wraps(add)
    def add_request(self: Any, request: Any) -> Any:
        if request.generator is not None:
            request.generator = going_back(request.generator)
        return add(self, request)

    add_request.goes_back = True  # type: ignore[attr-defined]
    batch.add_request = add_request


def going_back(generator: Any) -> Any:
    """Returns a generator in the state of this one, to which `set_offset` goes back, whatever the
    offset."""
    made = _class()()
    made.set_state(generator.get_state())
    made.begin = generator.get_state()
    return made


@cache
def _class() -> Any:
    import torch

    class GoingBack(torch.Generator):  # type: ignore[misc]
        begin: torch.Tensor

        def get_offset(self) -> int:
            return 0

        def set_offset(self, offset: int) -> None:
            self.set_state(self.begin)

    return GoingBack
