"""Runs inside the vLLM server: what servers of several workers lack in vLLM 0.32.

Of the engines of a data-parallel server, vLLM returns what the workers of the first answer; a proof
needs all (areal_x.engines.vllm.proof). A stage of a pipeline on CPUs allocates the place for what the
stage before it sends while it compiles, so never in eager mode: the first token would end the server.
"""

from __future__ import annotations

import asyncio
from functools import wraps
from typing import Any


def install() -> None:
    """Changes nothing for a server of one worker."""
    from vllm.platforms import current_platform
    from vllm.v1.engine.core_client import DPLBAsyncMPClient
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    DPLBAsyncMPClient.collective_rpc_async = ask_all
    if current_platform.is_cpu():
        initialize = WorkerWrapperBase.initialize_from_config

        @wraps(initialize)
        def initialize_stage(self: Any, *arguments: Any, **named: Any) -> Any:
            result = initialize(self, *arguments, **named)
            allocate_input(self.worker.model_runner)
            return result

        WorkerWrapperBase.initialize_from_config = initialize_stage


async def ask_all(
    client: Any,
    method: Any,
    timeout: float | None = None,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> list[Any]:
    """Returns what the workers of all engines answer to a call, engine by engine."""
    call = ("collective_rpc", method, timeout, args, kwargs)
    asked = (client._call_utility_async(*call, engine=engine) for engine in client.core_engines)
    return [answer for answers in await asyncio.gather(*asked) for answer in answers]


def allocate_input(runner: Any) -> None:
    """Allocates the input of a stage, unless it is the first or has it."""
    from vllm.distributed.parallel_state import get_pp_group

    if runner.intermediate_tensors is None and not get_pp_group().is_first_rank:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens,
            dtype=runner.model_config.dtype,
            device=runner.device,
        )
