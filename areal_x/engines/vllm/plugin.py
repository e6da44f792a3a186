"""Runs inside the vLLM server: a weight-transfer backend that reads safetensors from a staging
folder, and one that pulls from the processes that train (areal_x.engines.vllm.rdt_receiver).

vLLM finds `register` through the entry-point group `vllm.general_plugins` and calls it in each of
its processes. Trainer and server need not share a framework or a process group, only a folder
(shared memory on one machine).
"""

from __future__ import annotations

from dataclasses import dataclass

BACKEND = "areal_x"
RDT = "areal_x_rdt"  # vLLM's sharded-RDT engine for workers of any executor


@dataclass
class InitInfo:
    """Configures the transfer, or validates a folder."""

    staging_root: str
    """The only folder below which weights are ever read."""
    folder: str = ""
    """If set, the folder to be read next. It is validated before anything changes, and refused if
    it is outside the root or damaged."""


@dataclass
class UpdateInfo:
    """The weights to load."""

    folder: str
    """Contains the model's complete weights as *.safetensors under their Hugging Face names."""


def register() -> None:
    from vllm.distributed.weight_transfer.base import WeightTransferEngine
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from areal_x.engines.vllm import loading, rdt_receiver

    if BACKEND in WeightTransferEngineFactory._registry:  # vLLM may call a plugin again
        return

    class SafetensorsTransfer(WeightTransferEngine):  # type: ignore[misc]
        init_info_cls = InitInfo
        update_info_cls = UpdateInfo
        staging_root = ""

        def init_transfer_engine(self, init_info: InitInfo) -> None:
            if init_info.folder:
                loading.shards(init_info.staging_root, init_info.folder)
            self.staging_root = init_info.staging_root

        # Loading into the model starts only in `receive_weights`, once the folder is validated.
        def start_weight_update(self) -> None: ...

        def finish_weight_update(self) -> None: ...

        def shutdown(self) -> None: ...

        def receive_weights(self, update_info: UpdateInfo) -> None:
            files = loading.shards(self.staging_root, update_info.folder)
            loading.load(self.model, self.model_config, loading.read(files))

    WeightTransferEngineFactory.register_engine(BACKEND, SafetensorsTransfer)
    WeightTransferEngineFactory.register_engine(RDT, rdt_receiver.__name__, rdt_receiver.NAME)
