"""Receives weights by vllm-ascend's engine in vLLM's workers for a CPU, one model family after the other.

    python -m tests.engines.vllm.hccl_families NAME...

Prints a line of JSON for each family, and for each request that it reads: [method of the worker, its arguments...], ["loaded"]
for a fingerprint of each tensor that vLLM was given to load, ["differences"] of the worker's weights from those in the family's
second directory (experts cannot be proved there), ["distance"] of its log-probabilities from that model's, or [] for the next
family.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from areal_x.engines.vllm import loading
from tests.engines import families
from tests.engines.vllm import hccl_on_cpu
from tests.engines.vllm.receivers import digest

if __name__ == "__main__":
    os.environ.update(families.SETTINGS, VLLM_PLUGINS=hccl_on_cpu.PLUGINS)


def mend_vllm() -> None:
    """vLLM 0.23 on a CPU fails at a mixture's first forward pass: it makes an activation where there is no configuration."""
    import torch
    from vllm.model_executor.layers.fused_moe import cpu_fused_moe

    def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    cpu_fused_moe._CPU_MOE_ACT_FN[cpu_fused_moe.MoEActivation.SILU] = silu_and_mul


def refresh_copies(served: families.Served) -> None:
    """On a CPU alone, a tied head multiplies by a packed copy of the embeddings, which vLLM's own reload leaves as it was."""
    (model,) = served.llm.apply_model(lambda model: model)
    loading.refresh_tied(model, loading.shared(model))


LOADED: dict[str, Any] = {}


def record(served: families.Served) -> None:
    """Fills LOADED with what vLLM's model is given from now on."""
    (model,) = served.llm.apply_model(lambda model: model)
    load = model.load_weights

    def recording(weights: Any) -> Any:
        given = list(weights)
        LOADED.update({name: digest(x) for name, x in given if not x.is_meta})  # as proofs give it
        return load(given)

    model.load_weights = recording
    LOADED.clear()


def answer(served: families.Served, new: Path, tokens: Any, method: str, *arguments: Any) -> Any:
    if method == "differences":
        return served.proof(new, full=True)["differences"]
    if method == "loaded":
        return LOADED
    if method == "distance":
        return families.distance_from(served, new, tokens)
    served.call(method, *arguments)
    if method == "finish_weight_update":
        refresh_copies(served)
    return None


def main(*names: str) -> None:
    mend_vllm()
    for name in names:
        with tempfile.TemporaryDirectory() as scratch:
            old, new, tokens = families.prepare(name, Path(scratch))
            served = families.Served(old, backend="hccl")
            record(served)
            print(json.dumps({"directory": str(new)}), flush=True)
            while request := json.loads(sys.stdin.readline()):
                print(json.dumps({"answer": answer(served, new, tokens, *request)}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
