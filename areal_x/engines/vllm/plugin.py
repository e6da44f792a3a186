"""Runs inside the vLLM server: a weight-transfer backend that reads safetensors from a staging
folder, one that pulls from the processes that train (areal_x.engines.vllm.rdt_receiver), the
report of what truncated sampling kept (areal_x.engines.vllm.kept_tokens), the proof of the weights
that workers use (areal_x.engines.vllm.proof.worker), the versions that are made from deltas beside
the server (areal_x.engines.vllm.versions), the sleep of a server on a CPU
(areal_x.engines.vllm.cpu_sleep), the temperatures of guessed positions there
(areal_x.engines.vllm.cpu_guesses), seeds of requests (areal_x.engines.vllm.cpu_seeds), the permission
to use AMX (areal_x.engines.vllm.cpu_tiles), inputs that its linear layers would refuse
(areal_x.engines.vllm.cpu_strides),
what servers of several workers lack (areal_x.engines.vllm.wide), and the tokens of text between an
image's (areal_x.engines.vllm.image_rows).

vLLM finds `register` through the entry-point group `vllm.general_plugins` and calls it in each of
its processes. Trainer and server need not share a framework or a process group, only a folder
(shared memory on one machine).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

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

    update_kind: ClassVar[str] = "dense"  # vLLM 0.23 looks at it


def computed_in(model: Any) -> SimpleNamespace:
    """Returns the part of vLLM's ModelConfig that loading into a model needs: the type that it
    computes in, which is that of its embeddings."""
    return SimpleNamespace(dtype=next(x.dtype for x in model.parameters() if x.is_floating_point()))


def register() -> None:
    from vllm.distributed.weight_transfer.base import WeightTransferEngine
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from areal_x.engines.fleet import manifest
    from areal_x.engines.vllm import (
        cpu_guesses,
        cpu_seeds,
        cpu_sleep,
        cpu_strides,
        cpu_tiles,
        image_rows,
        kept_tokens,
        loading,
        rdt_receiver,
        versions,
        wide,
    )
    from areal_x.engines.vllm.proof import worker

    if BACKEND in WeightTransferEngineFactory._registry:  # vLLM may call a plugin again
        return

    class SafetensorsTransfer(WeightTransferEngine):  # type: ignore[misc]
        init_info_cls = InitInfo
        update_info_cls = UpdateInfo
        staging_root = ""

        def init_transfer_engine(self, init_info: InitInfo) -> None:
            if init_info.folder:
                manifest.shards(init_info.staging_root, init_info.folder)
            self.staging_root = init_info.staging_root

        # Loading into the model starts only in `receive_weights`, once the folder is validated.
        def start_weight_update(self) -> None: ...

        def finish_weight_update(self) -> None: ...

        def shutdown(self) -> None: ...

        # Before vLLM 0.25 (areal_x.engines.vllm.dialects.OWN_LOADING) an engine has no model_config,
        # gets a function that loads, and must be able to send.
        def receive_weights(self, update_info: UpdateInfo, load_weights: Any = None) -> None:
            files = manifest.shards(self.staging_root, update_info.folder)
            config = getattr(self, "model_config", None) or computed_in(self.model)
            loading.load(self.model, config, loading.read(files))

        @staticmethod
        def trainer_send_weights(*_: Any) -> None:
            raise NotImplementedError("weights are staged in files")

    worker.register()
    versions.register()
    WeightTransferEngineFactory.register_engine(BACKEND, SafetensorsTransfer)
    WeightTransferEngineFactory.register_engine(RDT, rdt_receiver.__name__, rdt_receiver.NAME)
    kept_tokens.install()
    cpu_sleep.install()
    cpu_guesses.install()
    cpu_seeds.install()
    cpu_tiles.install()
    cpu_strides.install()
    wide.install()
    image_rows.install()
