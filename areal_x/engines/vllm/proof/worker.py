"""Runs inside the vLLM worker: proves what the worker uses.

vLLM's route /collective_rpc calls `PROVE` of each worker with a string, of JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal_x.engines.fleet.proof.regions import Shape
from areal_x.engines.fleet.proof.worker import answer, report
from areal_x.engines.vllm.proof import adapter
from areal_x.engines.vllm.proof.content import without_content
from areal_x.engines.vllm.proof.readers import readers_of

PROVE = "areal_x_prove"


def register() -> None:
    """Gives the workers of this process the method."""
    from vllm.v1.worker.worker_base import WorkerBase

    setattr(WorkerBase, PROVE, prove)


def prove(worker: Any, question: str) -> dict[str, Any]:
    """Returns the answer to a question (areal_x.engines.fleet.proof.worker.answer) about this worker's weights."""
    from vllm.config import set_current_vllm_config

    def found(
        shapes: Mapping[str, Shape], version: int, full: bool, of_adapter: bool
    ) -> dict[str, Any]:
        with set_current_vllm_config(worker.vllm_config):
            if of_adapter:
                return adapter.report(worker, shapes, version, full)
            model = worker.get_model()
            return report(model, shapes, version, full, readers_of, without_content)

    return answer(question, found)
