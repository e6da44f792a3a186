"""Faults of adapters that were published as bugs of other systems, put into the slots of a real worker of vLLM's engine, one at
a time, and what its proof finds.

    python -m tests.engines.adapter_faults   # prints a line of JSON for each fault
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.engines import families

if __name__ == "__main__":
    os.environ.update(families.SETTINGS)

import numpy as np

from areal_x.engines.fleet.proof.claims import Claiming
from areal_x.hf import adapters
from areal_x.protocols.trainer_config import LoRAConfig
from tests.engines.weight_faults import Weights, in_bfloat16, layer
from tests.models import MODELS, write_config

LORA = LoRAConfig(rank=4, alpha=8.0, targets=("q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"))
Change = Callable[[str, Any, int, int], None]


@dataclass(frozen=True)
class Fault:
    """like: the published bug that it is modelled on. change: changes a layer's slot of an adapter, given the layer's name, the
    slot and that of the adapter before."""

    name: str
    like: str
    change: Change


def times(factor: float) -> Change:
    """B multiplied by a factor."""

    def change(name: str, layer: Any, slot: int, before: int) -> None:
        for stacked in layer.lora_b_stacked:
            stacked[slot] *= factor

    return change


def no_adapter(name: str, layer: Any, slot: int, before: int) -> None:
    layer.reset_lora(slot)


def older_adapter(name: str, layer: Any, slot: int, before: int) -> None:
    for stacked in (*layer.lora_a_stacked, *layer.lora_b_stacked):
        stacked[slot] = stacked[before]


def older_half(name: str, layer: Any, slot: int, before: int) -> None:
    for stacked in layer.lora_a_stacked:
        stacked[slot] = stacked[before]


def gate_twice(name: str, layer: Any, slot: int, before: int) -> None:
    if name.endswith("gate_up_proj"):
        for stacked in (layer.lora_a_stacked, layer.lora_b_stacked):
            stacked[1][slot] = stacked[0][slot]


def part_dropped(name: str, layer: Any, slot: int, before: int) -> None:
    if name.endswith("1.self_attn.qkv_proj"):
        layer.lora_b_stacked[2][slot] = 0


def unpublished_part(name: str, layer: Any, slot: int, before: int) -> None:
    if name.endswith("1.self_attn.qkv_proj"):
        layer.lora_b_stacked[1][slot, 0, 3, 2] = 1


def rest_of_larger_rank(name: str, layer: Any, slot: int, before: int) -> None:
    if name.endswith("0.mlp.down_proj"):
        layer.lora_b_stacked[0][slot, 0, :, LORA.rank] = 1


def rounded(name: str, layer: Any, slot: int, before: int) -> None:
    import torch

    for stacked in layer.lora_b_stacked:
        stacked[slot] = torch.tensor(in_bfloat16(stacked[slot].numpy()))


FAULTS = [
    Fault("adapter missing", "a server that serves the base under the adapter's name", no_adapter),
    Fault("adapter scaled by tensor-parallel size", "a sum over workers of what each has whole", times(2)),
    Fault("adapter's scale applied thrice", "unsloth: B is scaled in place at each load", times(LORA.scale**2)),
    Fault("adapter's scale left out", "prime-rl: MultiLoRALinear without scaling", times(1 / LORA.scale)),
    Fault("older adapter answered", "a cache by name that a new version does not invalidate", older_adapter),
    Fault("one matrix of the adapter stale", "a transfer that broke off between A and B", older_half),
    Fault("adapter of gate in up", "unsloth: gate_proj was appended twice, up_proj never", gate_twice),
    Fault("part of the adapter dropped", "vLLM: fused layers with an adapter of some parts only", part_dropped),
    Fault("adapter of a part that has none", "a slot that was not emptied before", unpublished_part),
    Fault("rest of an adapter of larger rank", "a slot of which only the new rank was written", rest_of_larger_rank),
    Fault("rounded adapter", "adapters kept in bf16", rounded),
]


class AdapterWorker(families.Served):
    """vLLM's engine with one worker in this process and two adapters, each in its own slot; the second one is published."""

    def __init__(self, scratch: Path) -> None:
        base = write_config(families.widened(MODELS["qwen3"]), scratch / "base", False, 1)
        super().__init__(base, enable_lora=True, max_lora_rank=8, max_loras=4)
        self.scratch, self.base, self.count = scratch, base, 0

    def load(self, tensors: Weights) -> int:
        """Loads an adapter as a trainer publishes it, and returns its slot."""
        from vllm.lora.request import LoRARequest

        self.count += 1
        folder = self.scratch / f"v{self.count}"
        adapters.write(folder, tensors.items(), config=LORA, base=self.base)
        self.llm.llm_engine.add_lora(LoRARequest(f"policy-{self.count}", self.count, str(folder)))
        return int(self.manager.lora_index_to_id.index(self.count))

    @property
    def manager(self) -> Any:
        return self.llm.llm_engine.model_executor.driver_worker.worker.model_runner.lora_manager._adapter_manager

    def found(self, tensors: Weights, full: bool) -> list[str]:
        return self.differences(Claiming(self.count, full, scale=LORA.scale), tensors.items())

    def tried(self, fault: Fault) -> dict[str, Any]:
        old, new = adapter(1), adapter(2)
        before, slot = self.load(old), self.load(new)
        alarms = [words for full in (True, False) for words in self.found(new, full)]
        for name, module in self.manager.modules.items():
            if isinstance(getattr(module, "lora_a_stacked", None), tuple):
                fault.change(name, module, slot, before)
        found = {kind: self.found(new, full) for kind, full in (("full", True), ("sample", False))}
        return {"name": fault.name, "like": fault.like, "false": alarms, **found}


def adapter(seed: int) -> Weights:
    """The tensors of a random adapter under PEFT's names."""
    rng = np.random.default_rng(seed)
    sizes = {"q_proj": (64, 64), "v_proj": (64, 32), "gate_proj": (64, 48), "up_proj": (64, 48), "down_proj": (48, 64)}
    found = {}
    for index in range(2):
        for name, (inputs, outputs) in sizes.items():
            module = layer(index, f"{'self_attn' if name in ('q_proj', 'v_proj') else 'mlp'}.{name}")
            for matrix, shape in (("lora_A", (LORA.rank, inputs)), ("lora_B", (outputs, LORA.rank))):
                found[f"{adapters.PEFT_PREFIX}{module}.{matrix}.weight"] = rng.normal(size=shape).astype(np.float32)
    return found


if __name__ == "__main__":
    families.only_once()
    with tempfile.TemporaryDirectory() as scratch:
        worker = AdapterWorker(Path(scratch))
        for fault in FAULTS:
            print(json.dumps(worker.tried(fault)), flush=True)
