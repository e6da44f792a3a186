"""Inside the vLLM server: a weight-transfer backend that reads safetensors from a staging folder.

vLLM finds `register` through the entry-point group `vllm.general_plugins` and calls it in each of its processes. Trainer and
server need share no framework and no process group, only a folder (shared memory on one machine).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BACKEND = "areal_x"


@dataclass
class InitInfo:
    """staging_root: the only folder below which weights are ever read."""

    staging_root: str


@dataclass
class UpdateInfo:
    """folder: holds the model's complete weights as *.safetensors under their Hugging Face names."""

    folder: str


def shards(staging_root: str, folder: str) -> list[Path]:
    """The weight files of a staged folder. Raises ValueError for a folder outside the staging root or without weights."""
    root, path = Path(staging_root).resolve(), Path(folder).resolve()
    if root not in path.parents:
        raise ValueError(f"refused to read weights from {folder}: it is outside the staging folder {staging_root}")
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} holds no *.safetensors: it was not staged, or this machine does not see the staging folder")
    return files


def read(files: list[Path]) -> Iterator[tuple[str, Any]]:
    """Every tensor under its name, one at a time."""
    from safetensors import safe_open

    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a dict
                yield name, opened.get_tensor(name)


def register() -> None:
    from vllm.distributed.weight_transfer.base import WeightTransferEngine
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    class SafetensorsTransfer(WeightTransferEngine):  # type: ignore[misc]
        init_info_cls = InitInfo
        update_info_cls = UpdateInfo
        staging_root = ""

        def init_transfer_engine(self, init_info: InitInfo) -> None:
            self.staging_root = init_info.staging_root

        # The model is opened for loading only once the folder is known to be good, in `receive_weights`: after a refused
        # folder the old weights are untouched and generation can resume.
        def start_weight_update(self) -> None: ...

        def finish_weight_update(self) -> None: ...

        def shutdown(self) -> None: ...

        def receive_weights(self, update_info: UpdateInfo) -> None:
            from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

            files = shards(self.staging_root, update_info.folder)
            initialize_layerwise_reload(self.model)
            wanted = {name for name, _ in self.model.named_parameters()}
            try:
                loaded = self.model.load_weights(read(files))
            finally:
                finalize_layerwise_reload(self.model, self.model_config)
            # vLLM only warns about a layer that got no weights, and goes on with the old ones.
            if loaded is not None and wanted - loaded:
                raise ValueError(f"the staged weights lack {', '.join(sorted(wanted - loaded))}")

    WeightTransferEngineFactory.register_engine(BACKEND, SafetensorsTransfer)
