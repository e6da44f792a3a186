"""Faults of weights that were published as bugs of other systems, put into the real worker of vLLM's engine, one at a time, and
what its proof finds.

    python -m tests.engines.weight_faults [KIND...]   # prints a line of JSON for each fault

Before each fault the worker has the first weights; the second ones are delivered through vLLM's own loaders. A fault changes
what is delivered, or what the worker makes of it.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.engines import families

if __name__ == "__main__":
    os.environ.update(families.SETTINGS)

import numpy as np

from areal_x.engines.fleet.proof.claims import Claiming
from areal_x.hf.model_dir import read_tensors
from tests.models import MODELS, MORE, write_config

Weights = dict[str, np.ndarray]
Deliver = Callable[[Weights, Weights, Weights], Weights]
Tamper = Callable[[Any, Weights, Weights], Callable[[], None] | None]
KINDS = MODELS | MORE | {"qwen2-untied": MODELS["qwen2"]}


@dataclass(frozen=True)
class Fault:
    """kind: of model. like: the published bug that it is modelled on. deliver: changes the second weights, given the first,
    second and third ones. tamper: changes the worker's model after the delivery, given the first and second weights; may return
    what undoes it. few: concerns so few numbers that a sample need not have them."""

    name: str
    kind: str
    like: str
    deliver: Deliver = lambda old, new, other: new
    tamper: Tamper | None = None
    few: bool = False

    @property
    def names(self) -> tuple[str, ...] | None:
        """The tensors that the report must name, and no others; None for any."""
        return NAMED.get(self.name)


def layer(index: int, part: str) -> str:
    return f"model.layers.{index}.{part}"


Q, K, V, OUT = (layer(1, f"self_attn.{name}_proj.weight") for name in "qkvo")
GATE, UP, DOWN = (layer(1, f"mlp.{name}_proj.weight") for name in ("gate", "up", "down"))
EMBED, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", layer(1, "input_layernorm.weight")


def expert(number: int, part: str) -> str:
    return layer(1, f"mlp.experts.{number}.{part}_proj.weight")


def swapped(x: Weights, one: str, other: str) -> Weights:
    return x | {one: x[other], other: x[one]}


def with_names_swapped(one: str, other_one: str) -> Deliver:
    """What has one of these words in its name, and what has the other, in each other's place."""

    def name_of(name: str) -> str:
        return name.replace(one, other_one) if one in name else name.replace(other_one, one)

    return lambda old, new, other: {name_of(name): tensor for name, tensor in new.items()}


def changed(x: Weights, name: str, change: Callable[[np.ndarray], Any]) -> Weights:
    tensor = x[name].copy()
    returned = change(tensor)
    return x | {name: np.ascontiguousarray(tensor if returned is None else returned)}


def in_bfloat16(x: np.ndarray) -> np.ndarray:
    import torch

    return np.asarray(torch.tensor(x).bfloat16().float())


def stale(*names: str) -> Deliver:
    return lambda old, new, other: new | {name: old[name] for name in names}


def with_change(name: str, change: Callable[[np.ndarray], Any]) -> Deliver:
    return lambda old, new, other: changed(new, name, change)


def with_swap(one: str, other_one: str) -> Deliver:
    return lambda old, new, other: swapped(new, one, other_one)


def merged(times: float) -> Deliver:
    """As if the new weights were the old ones and an adapter's product in the attention."""
    return lambda old, new, other: lora_merged(old, new, times)


def lora_merged(old: Weights, new: Weights, times: float) -> Weights:
    adapted = [name for name in new if "self_attn" in name and name.endswith("proj.weight")]
    return new | {name: old[name] + np.float32(times) * (new[name] - old[name]) for name in adapted}


def set_value(x: np.ndarray, place: int, value: float) -> None:
    x.flat[place] = value


def flip(x: np.ndarray) -> None:
    x.view(np.uint32).flat[77] ^= 1


def permuted_heads(x: np.ndarray) -> np.ndarray:
    """From interleaved rotary halves to consecutive ones."""
    return x.reshape(-1, 2, 16, x.shape[1]).swapaxes(1, 2).reshape(x.shape)


def repack(name: str, *parts: str) -> Callable[[Any, Weights, Weights], None]:
    """What multiplies by a packed copy keeps that of the old weights."""

    def tamper(model: Any, old: Weights, new: Weights) -> None:
        import torch

        module = model.get_submodule(name)
        kept = getattr(module, "weight", None)
        weight = torch.tensor(np.concatenate([old[part] for part in parts]))
        module.weight = torch.nn.Parameter(weight, requires_grad=False)
        module.quant_method.process_weights_after_loading(module)
        module.weight = kept

    return tamper


def stale_lookup(model: Any, old: Weights, new: Weights) -> None:
    import torch

    rows = torch.tensor(old[EMBED])
    model.get_submodule("model.embed_tokens").weight.data[: len(rows)] = rows


def without_bias(model: Any, old: Weights, new: Weights) -> Callable[[], None]:
    module = model.get_submodule("model.layers.1.self_attn.qkv_proj")
    kept, module.bias = module.bias, None
    return lambda: setattr(module, "bias", kept)


def experts_of(model: Any) -> Any:
    from areal_x.engines.vllm.loading import is_plain_mixture

    return [module for module in model.modules() if is_plain_mixture(module)][1]


def unpacked_experts(model: Any, old: Weights, new: Weights) -> None:
    import torch

    module = experts_of(model)
    plain = np.stack([np.concatenate([new[expert(e, "gate")], new[expert(e, "up")]]) for e in range(8)])
    padded = np.zeros(tuple(module.w13_weight.shape), np.float32)
    half, inner = padded.shape[1] // 2, plain.shape[1] // 2
    padded[:, :inner], padded[:, half : half + inner] = plain[:, :inner], plain[:, inner:]
    module.w13_weight.data.copy_(torch.tensor(padded))


def stale_experts(model: Any, old: Weights, new: Weights) -> None:
    module = experts_of(model)
    module.w2_weight.data.copy_(module.w2_weight.data.roll(1, 0))


DENSE, TIED, MIXTURE = "qwen2-untied", "qwen3-tied", "qwen3-moe-tied"
FAULTS = [
    Fault(
        "old version answered",
        DENSE,
        "TRL: an engine woken from sleep level 2 has the weights of the checkpoint",
        lambda old, new, other: old,
    ),
    Fault("stale tensor", DENSE, "vLLM: a layer that received nothing keeps its weights and raises no error", stale(DOWN)),
    Fault(
        "wrong tensor",
        DENSE,
        "unsloth: gate_proj was loaded in the place of up_proj too",
        lambda old, new, other: new | {UP: new[GATE]},
    ),
    Fault(
        "queries in the place of keys",
        DENSE,
        "vLLM: a fused qkv_proj was cut in equal chunks, with rows of q in k",
        lambda old, new, other: new | {K: new[Q][: len(new[K])]},
    ),
    Fault("keys and values swapped", DENSE, "converters from Megatron: k and v in each other's place", with_swap(K, V)),
    Fault(
        "queries in another layout",
        DENSE,
        "converters of Llama: rotary halves interleaved and not",
        with_change(Q, permuted_heads),
    ),
    Fault("transposed", DENSE, "vLLM: the fused w3 was transposed twice", with_change(OUT, lambda x: x.T)),
    Fault(
        "half delivered, rows",
        DENSE,
        "transfers in buckets: the last bucket was lost",
        lambda old, new, other: new | {DOWN: np.concatenate([new[DOWN][:32], old[DOWN][32:]])},
    ),
    Fault(
        "half delivered, columns",
        DENSE,
        "a row-parallel slice that was not sent",
        lambda old, new, other: new | {DOWN: np.concatenate([old[DOWN][:, :24], new[DOWN][:, 24:]], 1)},
    ),
    Fault(
        "rounding loses the update",
        DENSE,
        "PEFT: an adapter merged in bf16 changes nothing",
        lambda old, new, other: new | {Q: in_bfloat16(new[Q])},
    ),
    Fault(
        "dtype truncation",
        DENSE,
        "weights cut to their upper 16 bits instead of rounded",
        with_change(GATE, lambda x: (x.view(np.uint32) & 0xFFFF0000).view(np.float32)),
    ),
    Fault("norm not updated", DENSE, "exporters that skip one-dimensional tensors", stale(NORM)),
    Fault(
        "embedding rows shifted",
        DENSE,
        "converters: rows shifted by a padding token",
        with_change(EMBED, lambda x: np.roll(x, 1, 0)),
    ),
    Fault(
        "head not updated",
        DENSE,
        "transformers: an untied head taken for a tied one",
        lambda old, new, other: new | {HEAD: new[EMBED]},
    ),
    Fault("bias dropped", DENSE, "vLLM: the bias of Qwen3's o_proj is left out", tamper=without_bias),
    Fault(
        "bias zeroed",
        DENSE,
        "Megatron: a checkpoint saved without add_qkv_bias",
        with_change(layer(1, "self_attn.k_proj.bias"), lambda x: x * 0),
    ),
    Fault(
        "layer of another checkpoint",
        DENSE,
        "pipelines: an offset of layers from another stage",
        lambda old, new, other: new | {n: x for n, x in other.items() if "layers.1." in n},
    ),
    Fault(
        "layers swapped",
        DENSE,
        "pipelines: stages in the wrong order",
        with_names_swapped("layers.0.", "layers.1."),
    ),
    Fault(
        "zeroed tensor",
        DENSE,
        "vLLM: sleep level 2 discards weights, and a wake without a reload has zeros",
        with_change(HEAD, lambda x: x * 0),
    ),
    Fault(
        "NaN",
        DENSE,
        "uninitialised memory in place of a part that was not loaded",
        with_change(DOWN, lambda x: set_value(x, 99, np.nan)),
        few=True,
    ),
    Fault("one bit flipped", DENSE, "silent corruption in memory or on the wire", with_change(GATE, flip), few=True),
    Fault("adapter merged twice", DENSE, "merge before each publication without an unmerge after", merged(2)),
    Fault("adapter not merged", DENSE, "verl: the base was published in place of the merged policy", merged(0)),
    Fault("adapter merged without its scale", DENSE, "prime-rl: alpha / rank was left out", merged(0.5)),
    Fault("gate and up swapped", DENSE, "SkyRL: [w3; w1] read as [w1; w3] after the first reload", with_swap(GATE, UP)),
    Fault(
        "old memory kept by a kernel",
        DENSE,
        "vLLM: a captured graph reads what a reload replaced",
        tamper=repack("model.layers.1.self_attn.qkv_proj", Q, K, V),
    ),
    Fault(
        "tied head not updated",
        TIED,
        "prime-rl: the head's copy of tied embeddings stays stale",
        tamper=repack("lm_head", EMBED),
    ),
    Fault("tied lookup not updated", TIED, "vLLM: explicit copies of both, of which one is updated", tamper=stale_lookup),
    Fault(
        "head normalisation not updated", TIED, "exporters that do not know q_norm", stale(layer(0, "self_attn.q_norm.weight"))
    ),
    Fault(
        "experts swapped",
        MIXTURE,
        "expert parallelism: a table from local to global experts is off",
        with_names_swapped(".experts.2.", ".experts.3."),
    ),
    Fault(
        "one expert not delivered",
        MIXTURE,
        "vLLM: names of fused experts are skipped without an error",
        stale(expert(5, "down")),
    ),
    Fault(
        "halves of experts swapped",
        MIXTURE,
        "vLLM: [w3; w1] for the kernel is loaded again as [w1; w3]",
        with_swap(expert(1, "gate"), expert(1, "up")),
    ),
    Fault("experts not packed", MIXTURE, "vLLM 0.32 on a CPU: packs at the first load only", tamper=unpacked_experts),
    Fault(
        "experts' packed copy of other experts",
        MIXTURE,
        "a shuffle that replaced what captured graphs read",
        tamper=stale_experts,
    ),
    Fault("router not updated", MIXTURE, "exporters that leave the router out", stale(layer(0, "mlp.gate.weight"))),
]


NAMED = {
    "stale tensor": (DOWN,),
    "wrong tensor": (UP,),
    "queries in the place of keys": (K,),
    "keys and values swapped": (K, V),
    "transposed": (OUT,),
    "one bit flipped": (GATE,),
    "norm not updated": (NORM,),
    "gate and up swapped": (GATE, UP),
    "bias dropped": tuple(layer(1, f"self_attn.{x}_proj.bias") for x in "qkv"),
    "old memory kept by a kernel": (Q, K, V),
    "tied head not updated": (EMBED,),
    "tied lookup not updated": (EMBED,),
    "one expert not delivered": (expert(5, "down"),),
    "halves of experts swapped": (expert(1, "gate"), expert(1, "up")),
    "experts' packed copy of other experts": tuple(expert(e, "down") for e in range(8)),
    "router not updated": (layer(0, "mlp.gate.weight"),),
}


class Worker(families.Served):
    """vLLM's engine with one worker in this process, that had the first weights and then receives the second ones."""

    def __init__(self, kind: str, scratch: Path) -> None:
        config = families.widened(KINDS[kind])
        self.directories = [write_config(config, scratch / f"{seed}", False, seed) for seed in (1, 2, 3)]
        self.weights = [dict(read_tensors(directory)) for directory in self.directories]
        super().__init__(self.directories[0])
        self.scratch, self.version = scratch, 0
        self.call("init_weight_transfer_engine", {"staging_root": str(scratch)})

    @property
    def model(self) -> Any:
        return self.llm.llm_engine.model_executor.driver_worker.worker.get_model()

    def deliver(self, weights: Weights) -> None:
        import torch

        with families.staged(self.scratch, {name: torch.tensor(x) for name, x in weights.items()}) as folder:
            self.swap(folder)

    def found(self, claimed: Weights, full: bool) -> list[str]:
        return self.differences(Claiming(self.version, full), claimed.items())

    def tried(self, fault: Fault) -> dict[str, Any]:
        """Returns what a proof in full and one of a sample find of a fault, and without it."""
        old, new, other = self.weights
        self.version += 1
        self.deliver(old)
        self.deliver(fault.deliver(old, new, other))
        undo = fault.tamper(self.model, old, new) if fault.tamper is not None else None
        found = {kind: self.found(new, full) for kind, full in (("full", True), ("sample", False))}
        if undo is not None:
            undo()
        self.deliver(new)
        alarms = [words for full in (True, False) for words in self.found(new, full)]
        return {"name": fault.name, "like": fault.like, "few": fault.few, "false": alarms, **found}


def reports(kinds: list[str]) -> Iterator[dict[str, Any]]:
    families.only_once()
    for kind in kinds or dict.fromkeys(fault.kind for fault in FAULTS):
        with tempfile.TemporaryDirectory() as scratch:
            worker = Worker(kind, Path(scratch))
            for fault in FAULTS:
                if fault.kind == kind:
                    yield worker.tried(fault)
            del worker
            import gc

            gc.collect()


if __name__ == "__main__":
    for report in reports(sys.argv[1:]):
        print(json.dumps(report), flush=True)
