"""Swaps the weights of families that vLLM's kernels for a CPU take in bfloat16 alone, one after the other.

python -m tests.engines.half_families [NAME...]   # prints a line of JSON for each
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from tests.engines.families import (
    SETTINGS,
    TIED,
    UNTIED,
    Served,
    is_noticed,
    last_of_each_kind,
    list_files,
    log_probs,
    report_each,
)

if __name__ == "__main__":
    os.environ.update(SETTINGS)

import numpy as np

from tests.model_families import FAMILY_MODELS
from tests.models import reference_model, sequences, write_config

# The widths for which the kernels are written.
RULE = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "head_dim": 32, "num_key_value_heads": 1}
WIDTHS = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "kv_lora_rank": 512, "head_dim": 64}
LATENT = {**WIDTHS, "moe_intermediate_size": 32, "num_key_value_heads": 2}
WIDE: dict[str, Any] = {
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), RULE),
    "deepseek_v2": LATENT,
    # As in the hub's files: vLLM has no other place for a correction, and does not read mlp_layer_types.
    "deepseek_v3": LATENT | {"topk_method": "noaux_tc"},
    "glm4_moe_lite": LATENT | {"topk_method": "noaux_tc", "first_k_dense_replace": 1},
}
SIZES = {"hidden_size": 64, "num_attention_heads": 2}
HALF_FAMILIES: dict[str, Any] = {name: FAMILY_MODELS[name][0] | SIZES | wide | UNTIED for name, wide in WIDE.items()}
# vLLM ties no head of the others: it has a place for one that no file fills, and a swap without it is refused.
HALF_FAMILIES |= {f"{name}-tied": HALF_FAMILIES[name] | TIED for name in ("qwen3_5_text", "qwen3_5_moe_text")}
# What this vLLM's latent attention for a CPU computes is another function: of tiny random models, up to 3 nats a token away.
AS_TRANSFORMERS = [name for name in HALF_FAMILIES if name.startswith("qwen3")]


def tried(name: str, scratch: Path) -> dict[str, Any]:
    """Runs one family and returns the measurements.

    before: mean difference from transformers in a prompt's log-probabilities, over that of transformers itself in bfloat16.
    after: largest difference, after a swap, from an engine that began with the new weights. changed: by how much those differ
    from the first ones'. unnoticed: tensors without which weights are taken for whole. again: as after, after all those
    refusals. proof: what the worker proves of the new weights.
    """
    from safetensors.torch import load_file

    old, new, tokens = scratch / "old", scratch / "new", sequences(20, seed=3)[0]
    for seed, directory in enumerate((old, new), 1):
        write_config(HALF_FAMILIES[name], directory, seed=seed)
        reference_model(directory).bfloat16().save_pretrained(directory)
        list_files(directory)
    begun = Served(new, dtype="bfloat16").score(tokens)
    served = Served(old, dtype="bfloat16")
    served.call("init_weight_transfer_engine", {"staging_root": str(scratch)})
    first = served.score(tokens)
    exact, rounded = (log_probs(old, tokens, half) for half in (False, True))
    served.swap(new)
    report = {
        "name": name,
        "before": float(np.abs(first - exact).mean() / np.abs(rounded - exact).mean()),
        "after": float(np.abs(served.score(tokens) - begun).max()),
        "changed": float(np.abs(begun - first).max()),
        "proof": served.proof(new, full=True),
    }
    tensors = load_file(new / "model.safetensors")
    report["unnoticed"] = [x for x in last_of_each_kind(tensors) if not is_noticed(served, scratch, tensors, x)]
    served.swap(new)
    report["again"] = float(np.abs(served.score(tokens) - begun).max())
    return report


if __name__ == "__main__":
    report_each(sys.argv[1:] or list(HALF_FAMILIES), tried)
