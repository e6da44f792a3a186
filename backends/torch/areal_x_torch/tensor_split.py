"""How the layers of a decoder are split over the processes of a tensor group: attention by heads, an
MLP by its width.

    x ──▶ columns: own heads, own width ──▶ attention, activation ──▶ rows ──sum over the group──▶ x

transformers has plans for most models, as styles by patterns of layers' names. Where it has none, or
one that splits parameters but has every process compute all heads, the plan is here (`GIVEN`). If
there are fewer key heads than processes, each computes the projections to all of them and takes the
one that its queries attend to. Of an attention whose heads are split, a parameter that no plan names
would have the gradient of this process's heads alone: it is found by its place, and summed over the
group if it is a norm of single heads or of an activation, split if it has one sink for each head, and
refused otherwise. Mixtures' experts are split in areal_x_torch.sharding.
"""

from __future__ import annotations

from copy import copy
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import PreTrainedConfig, PreTrainedModel

from areal_x.errors import ConfigError
from areal_x_torch.collectives import CopyToGroup
from areal_x_torch.dtensors import split
from areal_x_torch.dummy_model import inner_decoder
from areal_x_torch.lora import LoRALinear
from areal_x_torch.split_linear import PlainLinear, SplitLinear

# Styles of transformers' plans.
COLUMNS, ROWS = "colwise", "rowwise"
SUMMED = "replicated_with_grad_allreduce"  # a norm of single heads
# Styles of this file.
SHARED_KEY = "latent attention's one rotated key for the heads of all processes"
FUSED_HEADS = "queries, keys and values in one product"
FUSED_WIDTH = "gate and up in one product"
PART_OF_NORM = "a norm over all heads together, or with weights for each head"
SINKS = "an attention with sinks, one for each head"
SHARED_HEADS = "keys or values of fewer heads than there are processes"
KNOWN = {COLUMNS, ROWS, SUMMED, SHARED_KEY, FUSED_HEADS, FUSED_WIDTH, PART_OF_NORM, SINKS}
LINEAR = {COLUMNS: ColwiseParallel, ROWS: RowwiseParallel}

ATTENTION = "layers.*.self_attn."
HEADS = {f"{ATTENTION}{x}_proj": COLUMNS for x in "qkv"} | {f"{ATTENTION}o_proj": ROWS}
LATENT = {f"{ATTENTION}{x}_proj": COLUMNS for x in ("q", "q_b", "kv_b")}
LATENT |= {f"{ATTENTION}kv_a_proj_with_mqa": SHARED_KEY, f"{ATTENTION}o_proj": ROWS}
NORMS = {f"{ATTENTION}{x}_norm": PART_OF_NORM for x in "qk"}
FUSED_MLP = {"layers.*.mlp.gate_up_proj": FUSED_WIDTH, "layers.*.mlp.down_proj": ROWS}
FUSED_ATTENTION = {f"{ATTENTION}qkv_proj": FUSED_HEADS, f"{ATTENTION}o_proj": ROWS}


def _mlp(place: str) -> dict[str, str]:
    into = {f"layers.*.{place}.{x}_proj": COLUMNS for x in ("gate", "up")}
    return into | {f"layers.*.{place}.down_proj": ROWS}


# By model type, what is put in place of entries of transformers' plan, or added to it.
GIVEN = {
    "cohere": NORMS,  # which Command R+ has
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "glm": FUSED_MLP,
    "glm4": FUSED_MLP,
    "glm4_moe_lite": LATENT | _mlp("mlp.shared_experts"),
    "gpt_oss": HEADS,
    "olmo2": HEADS | NORMS,
    "olmo3": HEADS | NORMS,
    "phi3": FUSED_ATTENTION | FUSED_MLP,
    "qwen2_moe": _mlp("mlp.shared_expert"),
    "qwen3_vl_text": HEADS | _mlp("mlp"),
    "solar_open": _mlp("mlp.shared_experts"),
    "youtu": LATENT,
}
# Parts of latent attention that come before its heads, so that every process computes them whole.
BEFORE_HEADS = {"q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm"}


def plan_of(config: PreTrainedConfig, tensor: int) -> dict[str, str]:
    """Returns the styles of layers by patterns of names below the base model.

    Raises: ConfigError for models that this backend cannot split by heads, or not by this many.
    """
    plan = dict(config.base_model_tp_plan or {}) | GIVEN.get(config.model_type, {})
    plan.pop("embed_tokens", None)  # which `sharding.split_vocabulary` splits
    for pattern in [pattern for pattern in plan if "experts" in pattern.split(".")]:
        del plan[pattern]  # which `sharding.split_experts` splits
    for pattern in [pattern for pattern in plan if "linear_attn" in pattern.split(".")]:
        del plan[pattern]  # gated delta rule layers, which every process computes whole
    unlike = getattr(config, "is_heterogeneous", False) and FUSED_HEADS in plan.values()
    if not plan or unlike or set(plan.values()) - KNOWN:
        wanted = (
            f"1, as heads and MLPs of a {config.model_type} model cannot be sharded yet: use"
            " mesh.fsdp"
        )
        raise ConfigError("mesh.tensor", tensor, wanted)
    # Keys that are one product with others, or that a norm over all heads follows, are split alone.
    apart = plan.get(f"{ATTENTION}k_proj") == COLUMNS and PART_OF_NORM not in plan.values()
    for layer, where in _layers_of(config):
        heads, kv_heads = layer.num_attention_heads, _kv_heads(layer)
        if heads % tensor:
            wanted = f"a divisor of the model's num_attention_heads = {heads}{where}"
            raise ConfigError("mesh.tensor", tensor, wanted)
        if kv_heads % tensor and not (apart and tensor % kv_heads == 0):
            several = "or a multiple " if apart else ""
            wanted = f"a divisor {several}of the model's num_key_value_heads = {kv_heads}{where}"
            raise ConfigError("mesh.tensor", tensor, wanted)
    # The second is the vocabulary of embeddings for each layer.
    for what in ("vocab_size", "vocab_size_per_layer_input"):
        count = getattr(config, what, None) or 0
        if count % tensor:
            raise ConfigError("mesh.tensor", tensor, f"a divisor of the model's {what} = {count}")
    return plan


def _layers_of(config: PreTrainedConfig) -> list[tuple[Any, str]]:
    """Returns the configs of single layers, with their place for a message, if layers differ (Gemma 4's
    have heads of different numbers and widths), else the one of all."""
    if not getattr(config, "is_heterogeneous", False):
        return [(config, "")]
    return [(layer, f" in layer {i}") for i, layer in enumerate(config.per_layer_config)]


def _kv_heads(layer: Any) -> int:
    return int(getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads)


def styles_of(model: PreTrainedModel, tensor: int) -> dict[str, str]:
    """Returns the style of each layer that is split, or whose gradients are summed, by its name in
    the decoder.

    Raises: ConfigError like `plan_of`, for a layer whose width `tensor` does not divide, and for a
    parameter among split ones that no plan names.
    """
    decoder = inner_decoder(model)
    config = decoder.config
    plan = plan_of(config, tensor)
    styles: dict[str, str] = {}
    for name, module in decoder.named_modules():
        if found := [style for pattern, style in plan.items() if fnmatchcase(name, pattern)]:
            styles[name] = found[-1]
            if shares_heads(config, name, tensor):
                styles[name] = SHARED_HEADS
            _check_width(name, module, styles[name], tensor)
    for whole in [name.rpartition(".")[0] for name, style in styles.items() if style == ROWS]:
        attention = decoder.get_submodule(whole)
        for name, module in attention.named_modules(prefix=whole):
            own = {x: tuple(p.shape) for x, p in module.named_parameters(recurse=False)}
            inside = any(f"{name}.".startswith(f"{layer}.") for layer in styles if layer != whole)
            below = name.removeprefix(f"{whole}.").partition(".")[0]
            if not own or inside or below in BEFORE_HEADS:
                continue
            if name == whole and own == {"sinks": (config.num_attention_heads,)}:
                styles[name] = SINKS
            elif name != whole and (
                below == "act_fn" or set(own.values()) == {(getattr(attention, "head_dim", None),)}
            ):
                styles[name] = SUMMED
            else:
                wanted = (
                    f"1, as no plan names {name} among the split layers of a {config.model_type}"
                    " model: use mesh.fsdp"
                )
                raise ConfigError("mesh.tensor", tensor, wanted)
    return styles


def shares_heads(config: PreTrainedConfig, name: str, tensor: int) -> bool:
    """True if a layer of this name in the decoder gives keys or values of fewer heads than a tensor
    group has processes."""
    parts = name.split(".")
    if parts[-1] not in ("k_proj", "v_proj"):
        return False
    layers = _layers_of(config)
    layer, _ = layers[int(parts[1])] if len(layers) > 1 else layers[0]
    return _kv_heads(layer) < tensor


def _check_width(name: str, module: nn.Module, style: str, tensor: int) -> None:
    if isinstance(module, nn.Linear) and style not in (SUMMED, SHARED_KEY, SHARED_HEADS):
        width = module.in_features if style == ROWS else module.out_features
        parts = tensor * (2 if style == FUSED_WIDTH else 1)
        if width % parts:
            of = "inputs" if style == ROWS else "outputs"
            wanted = f"a divisor of the {width * tensor // parts} {of} of the model's {name}"
            raise ConfigError("mesh.tensor", tensor, wanted)


def split_heads(model: PreTrainedModel, mesh: DeviceMesh, tokens_apart: bool = False) -> None:
    """Splits the layers of a decoder over a tensor group. tokens_apart: so that
    areal_x_torch.sequence_parallel can exchange tokens. Raises: like `styles_of`."""
    decoder, group = inner_decoder(model), mesh.get_group()
    for name, style in styles_of(model, mesh.size()).items():
        layer, above = decoder.get_submodule(name), decoder.get_submodule(name.rpartition(".")[0])
        fused = style in (FUSED_HEADS, FUSED_WIDTH)
        if (fused or (tokens_apart and style in LINEAR)) and not isinstance(layer, SplitLinear):
            layer = PlainLinear(layer)
            decoder.set_submodule(name, layer)
        if fused:
            if style == FUSED_WIDTH:
                layer.split(mesh, by_rows=True, fused=(layer.out_features // 2,) * 2)
            else:
                layer.split(mesh, by_rows=True, fused=_count_own_heads(above, mesh.size()))
        elif style in LINEAR and isinstance(layer, SplitLinear):
            # Its outputs are columns: it computes x Wᵀ.
            layer.split(mesh, by_rows=style == COLUMNS)
        elif style in LINEAR:
            parallelize_module(layer, mesh, LINEAR[style]())
        elif style == PART_OF_NORM:
            _split_norm(layer, mesh)
        elif style == SINKS:
            layer.sinks = split(layer.sinks, mesh, 0)
        elif style == SHARED_KEY:
            width = decoder.config.qk_rope_head_dim
            layer.register_forward_hook(partial(_shared_key, width, group))
        elif style == SHARED_HEADS:
            layer.register_forward_hook(partial(_own_head, above.head_dim, group))


def _count_own_heads(attention: Any, tensor: int) -> tuple[int, ...]:
    """Has an attention, whose forward takes apart its one product by numbers of heads, count those
    of this process. Returns the widths of all queries, keys and values."""
    config, width = attention.config, attention.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    attention.config = copy(config)
    attention.config.num_attention_heads = heads // tensor
    attention.num_key_value_heads = kv_heads // tensor
    return heads * width, kv_heads * width, kv_heads * width


def _split_norm(norm: nn.Module, mesh: DeviceMesh) -> None:
    """Leaves on each process the weights of its heads. Sums over all heads are then DTensor's."""

    def part(_: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for name, x in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, split(x, mesh, 0))

    def as_part(module: Any, inputs: tuple[Tensor, ...], mesh: DeviceMesh) -> DTensor:
        (x,) = inputs
        return DTensor.from_local(x, mesh, [Shard(x.ndim - module.weight.ndim)])

    def own(_: nn.Module, outputs: DTensor, __: DeviceMesh) -> Tensor:
        found: Tensor = outputs.to_local()
        return found

    distribute_module(norm, mesh, part, as_part, own)


def _shared_key(width: int, group: ProcessGroup, _: nn.Module, __: Any, outputs: Tensor) -> Tensor:
    """Runs after the layer whose last `width` outputs go to the heads without another layer, which
    would sum the gradients of all processes' heads."""
    latent, key = outputs.split([outputs.shape[-1] - width, width], dim=-1)
    return torch.cat([latent, CopyToGroup.apply(key, group)], dim=-1)


def _own_head(width: int, group: ProcessGroup, _: nn.Module, __: Any, outputs: Tensor) -> Tensor:
    """Runs after a layer that gives all heads, one after another, of fewer than there are processes."""
    heads = outputs.shape[-1] // width
    own = group.rank() * heads // group.size()
    return CopyToGroup.apply(outputs, group).narrow(-1, own * width, width)


def replicated_in_tensor_group(
    model: PreTrainedModel, mesh: DeviceMesh | None
) -> list[nn.Parameter]:
    """Returns the parameters for which each process of a tensor group has only the gradient of its
    own heads or columns."""
    if mesh is None or mesh["tensor"].size() == 1:
        return []
    decoder = inner_decoder(model)
    styles = styles_of(model, mesh["tensor"].size())
    found = [model.get_parameter(name) for name in getattr(model, "own_token_parameters", ())]
    for name, module in decoder.named_modules():
        if styles.get(name) == SUMMED:
            found += [p for p in module.parameters() if all(p is not x for x in found)]
        if isinstance(module, LoRALinear) and module.others is not None:
            found.append(module.whole)
    return found
