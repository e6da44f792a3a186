"""Faults of one of two tensor-parallel workers, which vLLM's engine has started, and what its proof finds.

python -m tests.engines.two_workers   # prints a line of JSON for each fault
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.engines import families

SETTINGS = {"VLLM_CPU_OMP_THREADS_BIND": "0|0", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
if __name__ == "__main__":
    os.environ.update(families.SETTINGS | SETTINGS)

from areal_x.hf.model_dir import read_tensors
from tests.models import MODELS, write_config

DOWN = "model.layers.1.mlp.down_proj"


def stale(worker: Any, old: str, new: str) -> None:
    """All weights of the second worker are those before."""
    if worker.rank == 1:
        worker.start_weight_update()
        worker.update_weights({"folder": old})
        worker.finish_weight_update()


def other_norm(worker: Any, old: str, new: str) -> None:
    """What both have whole is not the same."""
    if worker.rank == 1:
        worker.get_model().get_submodule("model.norm").weight.data.mul_(1.5)


def stale_slice(worker: Any, old: str, new: str) -> None:
    if worker.rank == 1:
        put_slice(worker, old, 1)


def exchanged_slices(worker: Any, old: str, new: str) -> None:
    put_slice(worker, new, 1 - worker.rank)


def put_slice(worker: Any, folder: str, number: int) -> None:
    """Gives a row-parallel layer a slice of a model's."""
    import torch
    from vllm.config import set_current_vllm_config

    (whole,) = dict(read_tensors(Path(folder), {f"{DOWN}.weight"})).values()
    columns = whole.shape[1] // 2
    module = worker.get_model().get_submodule(DOWN)
    kept = module.weight
    module.weight = torch.nn.Parameter(torch.tensor(whole[:, columns * number : columns * (number + 1)].copy()), False)
    with set_current_vllm_config(worker.vllm_config):
        module.quant_method.process_weights_after_loading(module)
    module.weight = kept


# The faults by name, with the tensors that must be named, None for all.
FAULTS: dict[str, tuple[Callable[[Any, str, str], None], list[str] | None]] = {
    "one of two workers stale": (stale, None),
    "a norm not the same in both": (other_norm, ["model.norm.weight"]),
    "a row-parallel slice stale": (stale_slice, [f"{DOWN}.weight"]),
    "slices exchanged": (exchanged_slices, [f"{DOWN}.weight"]),
}


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        config = families.widened(MODELS["qwen2"])
        old, new = (write_config(config, Path(scratch) / f"{seed}", False, seed) for seed in (1, 2))
        for directory in (old, new):
            families.list_files(directory)
        served = families.Served(old, tensor_parallel_size=2, distributed_executor_backend="mp")
        served.call("init_weight_transfer_engine", {"staging_root": scratch})
        for name, (fault, _) in FAULTS.items():
            served.swap(new)
            false = [words for full in (True, False) for words in served.proof(new, full)["differences"]]
            served.call(fault, str(old), str(new))
            found = {kind: served.proof(new, full)["differences"] for kind, full in (("full", True), ("sample", False))}
            print(json.dumps({"name": name, "false": false, "tensors": len(dict(read_tensors(new))), **found}), flush=True)


if __name__ == "__main__":
    main()
