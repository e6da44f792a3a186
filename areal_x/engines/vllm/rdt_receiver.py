"""Runs inside the vLLM server: the receiving side of `vllm.transport = 'rdt'`
(areal_x.engines.vllm.rdt_sender), vLLM's sharded-RDT engine.

vLLM's class insists on workers that are Ray actors, which would have Ray place a server's workers a
second time. It pulls with `ray.get`, which any process can that has joined the cluster: here every
worker joins it, whatever executor started it, so that a server is placed, watched and ended as with
other transports.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

from areal_x.engines.fleet.proof.regions import shared
from areal_x.engines.vllm import loading
from areal_x.engines.vllm.rdt_sender import NAMESPACE
from areal_x.runtime.interrupts import same_signals

ADDRESS = "RAY_ADDRESS"
NAME = "RDTTransfer"


def __getattr__(name: str) -> Any:
    """Makes the class when vLLM's registry looks it up, as only servers that use it import what it
    needs."""
    if name != NAME:
        raise AttributeError(name)
    return receiver()


def receiver() -> Any:
    """Returns the class of the worker's side."""
    from vllm.distributed.weight_transfer.sharded_rdt_engine import ShardedRDTWeightTransferEngine

    class RDTTransfer(ShardedRDTWeightTransferEngine):  # type: ignore[misc]
        """Pulls weights, completely or not at all as far as names show it."""

        _dest_buffers: list[Any]

        def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
            any_executor = SimpleNamespace(distributed_executor_backend=None)
            view = SimpleNamespace(
                parallel_config=any_executor, model_config=vllm_config.model_config
            )
            super().__init__(config, view, device, model)
            self.vllm_config, self.parallel_config = vllm_config, vllm_config.parallel_config
            self._kept: list[Any] = []
            self._tied: list[set[str]] = []
            self._missing: set[str] = set()

        def init_transfer_engine(self, init_info: Any) -> None:
            """Raises: ValueError if the weights to come lack a parameter, or what vLLM's does."""
            join_cluster()
            self._completed_syncs = 0  # the producers are new
            self._name_to_plan.clear()
            self._tied = shared(self.model)
            leave_out_padding(self.model)
            record_detached()
            super().init_transfer_engine(init_info)
            if self._missing:
                raise ValueError(f"the weights to pull lack {', '.join(sorted(self._missing))}")

        def start_weight_update(self) -> None:
            self._tied = shared(self.model)
            loading.forget_packing(self.model)
            super().start_weight_update()

        def finish_weight_update(self) -> None:
            super().finish_weight_update()
            loading.refresh_tied(self.model, self._tied)

        def _configure_ring(self, init_info: Any) -> None:
            """Keeps the buffers of the time before: NIXL's registration of their memory outlives
            them."""
            super()._configure_ring(init_info)
            if len(self._kept) == len(self._dest_buffers):
                self._dest_buffers = self._kept
            self._kept = self._dest_buffers

        def _restore_after_dry_run(self, model: Any) -> None:
            """Looks for parameters that no pull fills, while the model has those that are loaded."""
            planned = {
                id(copy.layer): set[str]() for x in self._name_to_plan.values() for copy in x
            }
            for copies in self._name_to_plan.values():
                for copy in copies:
                    planned[id(copy.layer)].add(copy.param_name)
            names = {
                f"{path}.{name}" if path else name
                for path, module in model.named_modules()
                for name in planned.get(id(module), ())
            }
            self._missing = loading.needed(model) - loading.add_tied(names, self._tied)
            super()._restore_after_dry_run(model)

    return RDTTransfer


def leave_out_padding(model: Any) -> None:
    """Lets a vocabulary that vLLM pads count as whole without the padding: no tensor fills it, and
    logits are cut to the vocabulary. vLLM's plan refuses layers of which a part is not loaded."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for layer in model.modules():
        if isinstance(layer, VocabParallelEmbedding):
            parameters, _ = get_layerwise_info(layer).restore_metadata
            for tensor in parameters.values():
                rows = layer.shard_indices.num_org_elements
                tensor.weight_loader_numel = rows * tensor[0].numel()


def record_detached() -> None:
    """Lets loaders take a tensor twice. vLLM's mapping of names gives keys that are values too
    (Gemma 4's full layers) as the tensor and its `detach`, which its record of loaders refuses."""
    from vllm.distributed.weight_transfer.sharded_rdt_fake import FakeRDTTensor

    FakeRDTTensor.detach = lambda fake: fake._make_child(fake.shape, fake.dtype)


def join_cluster() -> None:
    """Joins the Ray cluster of this server's node, once. A request cannot choose the cluster: whoever
    directs a process to one can run code in it.

    Raises: ValueError if the server was started without the address.
    """
    import ray

    if ray.is_initialized():
        return
    if not os.environ.get(ADDRESS):
        raise ValueError(
            f"the server was started without {ADDRESS}, the address of the Ray cluster that the"
            " weights come from"
        )
    with same_signals():
        ray.init(
            address=os.environ[ADDRESS],
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level="error",
        )
