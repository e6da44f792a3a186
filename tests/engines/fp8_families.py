"""Serves models in block-scaled fp8 in vLLM's own engine, and swaps their weights, one after the other.

python -m tests.engines.fp8_families [NAME...]   # prints a line of JSON for each
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

from tests.engines.families import SETTINGS, Served, is_noticed, last_of_each_kind, list_files, log_probs, report_each

if __name__ == "__main__":
    os.environ.update(SETTINGS)

import numpy as np

from areal_x.engines.fleet.stager import _write_quantised
from areal_x.hf import fp8_weights
from areal_x.hf.fp8_weights import SCALES
from areal_x.hf.model_dir import read_tensors
from tests.hf.test_fp8_weights import FP8_MODELS
from tests.models import sequences, write_config


def rounded(source: Path, directory: Path) -> Path:
    """Writes the model whose numbers those in fp8 stand for."""
    from safetensors.numpy import save_file

    shutil.copytree(source, directory)
    tensors: dict[str, np.ndarray] = {}
    for name, x in read_tensors(source):
        tensors[name] = x
        if fp8_weights.is_kernel(name, x.shape):
            numbers, scales = fp8_weights.round_blocks(x)
            each = np.kron(scales, np.ones((fp8_weights.BLOCK, fp8_weights.BLOCK), np.float32))
            tensors[name] = numbers.astype(np.float32) * each[: x.shape[0], : x.shape[1]]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def quantised_in(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in tensors.items() if name + SCALES in tensors}


def tried(name: str, scratch: Path) -> dict[str, Any]:
    """Runs one family and returns the measurements.

    before, after: mean difference of an engine, with the first weights and after a swap, from transformers with the rounded
    weights, over that of transformers itself in bfloat16. rounding: the difference that rounding makes, likewise. begun: the
    largest difference from an engine that began with the swapped weights. unnoticed: what was left out unnoticed.
    """
    from safetensors.torch import load_file

    (tokens,) = sequences(20, seed=3)
    at: dict[str, Path] = {}
    for seed, side in enumerate(("old", "new"), 1):
        source = write_config(FP8_MODELS[name], scratch / side, seed=seed)
        at[side] = rounded(source, scratch / f"{side}-rounded")
        staged = scratch / f"{side}-staged"
        staged.mkdir()
        _write_quantised(staged, read_tensors(source))
        list_files(staged)
    fp8_weights.write_model(scratch / "served", scratch / "old")
    fp8_weights.write_model(scratch / "begun", scratch / "new")
    begun = Served(scratch / "begun", dtype="bfloat16").score(tokens)
    served = Served(scratch / "served", dtype="bfloat16")
    served.call("init_weight_transfer_engine", {"staging_root": str(scratch)})

    def distance(found: np.ndarray, side: str) -> float:
        exact, low = (log_probs(at[side], tokens, half) for half in (False, True))
        return float(np.abs(found - exact).mean() / np.abs(low - exact).mean())

    report = {"name": name, "before": distance(served.score(tokens), "old")}
    report["rounding"] = distance(log_probs(scratch / "old", tokens), "old")
    served.swap(scratch / "new-staged")
    found = served.score(tokens)
    report |= {"after": distance(found, "new"), "begun": float(np.abs(found - begun).max())}
    tensors = {key: x for file in (scratch / "new-staged").glob("*.safetensors") for key, x in load_file(file).items()}
    left_outs = [f"{last}{more}" for last in last_of_each_kind(quantised_in(tensors)) for more in ("", SCALES)]
    report["unnoticed"] = [left_out for left_out in left_outs if not is_noticed(served, scratch, tensors, left_out)]
    return report


if __name__ == "__main__":
    report_each(sys.argv[1:] or list(FP8_MODELS), tried)
