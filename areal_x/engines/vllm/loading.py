"""Runs inside the vLLM server: loads new weights into the served model, completely or not at all.

vLLM loads layer by layer: it buffers what a layer's loaders receive and copies it into the kernels'
tensors once the layer is complete. An incomplete layer raises no error: one that received nothing
keeps its old weights, and one that received a part (an attention's keys and values but no queries)
is filled up with uninitialised memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from areal_x.engines.fleet.proof.regions import shared

# The correction of a router's choice is a parameter of vLLM's own models, and a buffer of those that
# transformers' layers make; Gemma 4's factor of a layer's output is a buffer of both.
FILLED_BUFFERS = (".e_score_correction_bias", ".layer_scalar")
# Scales of a quantised cache, parameters of every attention of a model in fp8: files may have none.
OF_CACHE = (".attn.k_scale", ".attn.v_scale", ".attn.q_scale", ".attn.prob_scale")


def read(files: Iterable[Path]) -> Iterator[tuple[str, Any]]:
    """Yields every tensor with its name, one at a time, mapped from its file: vLLM's loaders narrow
    it to their rank's part before they copy it, so only the pages of that part are read."""
    from safetensors import safe_open

    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a dict
                yield name, opened.get_tensor(name)


def load(model: Any, model_config: Any, weights: Iterable[tuple[str, Any]]) -> None:
    """Replaces all weights of the model. After an error the model contains parts of two policies,
    and can be loaded again.

    Raises: ValueError if the weights lack a parameter or a part of one, and whatever vLLM's loaders
    raise.
    """
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    # During a reload every layer has its own tensors, so that nothing shows that a head is tied to
    # the embeddings.
    tied = shared(model)
    forget_packing(model)
    initialize_layerwise_reload(model)
    wanted = needed(model)
    try:
        loaded = model.load_weights(weights)
        missing = incomplete(model) | (set() if loaded is None else wanted - add_tied(loaded, tied))
    finally:
        finalize_layerwise_reload(model, model_config)
    if missing:
        raise ValueError(f"the staged weights lack {', '.join(sorted(missing))}")
    refresh_tied(model, tied)


def needed(model: Any) -> set[str]:
    """Returns what each version of the weights must fill: parameters, and buffers that files have. Other
    buffers are computed or scale quantised keys."""
    buffers = (name for name, _ in model.named_buffers() if name.endswith(FILLED_BUFFERS))
    parameters = (name for name, _ in model.named_parameters() if not name.endswith(OF_CACHE))
    return set(parameters).union(buffers)


def add_tied(loaded: Collection[str], tied: Iterable[set[str]]) -> set[str]:
    """Returns the loaded names and those tied to them."""
    return set(loaded).union(*(alike for alike in tied if not alike.isdisjoint(loaded)))


def incomplete(model: Any) -> set[str]:
    """Returns the layers that received a part of what they need. (Before the reload is finished.)

    Counts only layers whose size is known exactly: those quantised otherwise than in blocks of fp8, and
    vocabularies, may be padded.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    found = set()
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if is_exact(layer) and info.can_load() and 0 < info.load_numel < info.load_numel_total:
            found.add(f"a part of {name}")
    return found


def is_exact(layer: Any) -> bool:
    """True if what a layer loads has as many numbers as its parameters."""
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod, Fp8MoEMethod

    method = getattr(layer, "quant_method", None)
    if isinstance(layer, LinearBase) and isinstance(method, UnquantizedLinearMethod):
        return True
    in_blocks = isinstance(method, Fp8LinearMethod | Fp8MoEMethod) and method.block_quant
    return in_blocks or is_plain_mixture(layer)


def is_plain_mixture(layer: Any) -> bool:
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
        UnquantizedFusedMoEMethod,
    )

    return isinstance(getattr(layer, "quant_method", None), UnquantizedFusedMoEMethod)


def refresh_tied(model: Any, tied: Iterable[set[str]]) -> None:
    """Recomputes what layers derive from a tensor that they share: on a CPU a tied head multiplies
    by a packed copy of it."""
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    for name in set[str]().union(*tied):
        layer = model.get_submodule(name.rpartition(".")[0])
        method = getattr(layer, "quant_method", None)
        if isinstance(method, UnquantizedEmbeddingMethod):
            method.process_weights_after_loading(layer)


def forget_packing(model: Any) -> None:
    """Makes mixtures of experts and latent attention on a CPU pack their new weights too: vLLM 0.32 packs experts once, when
    it builds the kernel, and would pass plain weights to a kernel that reads packed ones (3 nats per token off)."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        for layer in filter(is_plain_mixture, model.modules()):
            layer.quant_method.moe_kernel = None
        for layer in model.modules():
            if getattr(layer, "is_amx_bmm_enabled", False):
                make_room(layer.kv_b_proj)


def make_room(layer: Any) -> None:
    """Gives a linear layer a weight again. Latent attention on a CPU packs its own copies of one and drops it; vLLM's reload
    copies the new weight into the old one's memory, and fails where there is none."""
    import torch

    if layer.weight.numel() == 0:
        shape = layer.output_size_per_partition, layer.input_size_per_partition
        layer.weight = torch.nn.Parameter(layer.weight.new_empty(shape), requires_grad=False)
