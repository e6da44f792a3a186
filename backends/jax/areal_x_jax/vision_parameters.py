"""The parameters of vision towers, as areal_x_jax.parameters describes those of decoders: names here
and at Hugging Face, and the kinds of their axes."""

from __future__ import annotations

from areal_x_jax.leaf import Leaf
from areal_x_jax.vision_architecture import VisionArchitecture

# A vision tower's parameters: path below params["vision"] → axes. Those under "layers" and
# "deepstack" are stacks.
VISION = {
    "patch": ("patch_features", "vision_hidden"),
    "positions": ("vision_positions", "vision_hidden"),
    "layers.attention_norm": ("vision_hidden",),
    "layers.qkv": ("vision_hidden", "vision_qkv"),
    "layers.o": ("vision_attended", "vision_hidden"),
    "layers.mlp_norm": ("vision_hidden",),
    "layers.gate": ("vision_hidden", "vision_intermediate"),
    "layers.up": ("vision_hidden", "vision_intermediate"),
    "layers.down": ("vision_intermediate", "vision_hidden"),
    "merger.norm": ("vision_hidden",),
    "merger.up": ("vision_joined", "vision_wide"),
    "merger.down": ("vision_wide", "vision_out"),
    "deepstack.norm": ("vision_wide",),
    "deepstack.up": ("vision_joined", "vision_wide"),
    "deepstack.down": ("vision_wide", "vision_out"),
    "post_norm": ("vision_hidden",),
    "layers.q": ("vision_hidden", "vision_attended"),
    "layers.k": ("vision_hidden", "vision_key"),
    "layers.v": ("vision_hidden", "vision_key"),
    "merger.projection": ("vision_pooled", "vision_out"),
    "pre_norm": ("vision_hidden",),
    "merger.join": ("vision_joined", "vision_hidden"),
    "merger.first": ("vision_hidden", "vision_out"),
    "merger.second": ("vision_out", "vision_out"),
    "layers.q_norm": ("vision_head_dim",),
    "layers.k_norm": ("vision_head_dim",),
    "layers.attention_out_norm": ("vision_hidden",),
    "layers.mlp_out_norm": ("vision_hidden",),
    "layers.bounds": (),
    "of_axes": ("vision_axes", "vision_positions", "vision_hidden"),
    "on_axes": ("vision_positions", "vision_axes", "vision_hidden"),
    "class": ("vision_hidden",),
    "merger.join_up": ("vision_joined", "vision_adapted"),
    "merger.join_down": ("vision_adapted", "vision_adapted"),
    "merger.project": ("vision_adapted", "vision_out"),
    "std_bias": ("vision_hidden",),
    "std_scale": ("vision_hidden",),
    "patch_norm": ("patch_features",),
    "patch_out_norm": ("vision_hidden",),
    "positions_norm": ("vision_hidden",),
}
# Kernels of layers whose inputs and outputs are clipped, and the four bounds of each; in files a number
# each, here one leaf [layers, kernels · bounds].
CLIPPED = {
    **{x: f"self_attn.{x}_proj" for x in "qkvo"},
    **{x: f"mlp.{x}_proj" for x in ("gate", "up", "down")},
}
BOUNDS = [
    f"{module}.{end}_{side}"
    for module in CLIPPED.values()
    for end in ("input", "output")
    for side in ("min", "max")
]
# Last parts of names that are followed by no ".weight".
BARE = (
    *("mm_input_projection_weight", "position_embedding_table", "pos_embedding"),
    *("positional_embedding_vlm", "class_embedding", "std_bias", "std_scale", "{bound}"),
)
# The same → Hugging Face's module in the tower; {} is the index in a stack.
VISION_NAMES = {
    "qwen2_5_vl": {
        "patch": "patch_embed.proj",
        "layers.attention_norm": "blocks.{}.norm1",
        "layers.qkv": "blocks.{}.attn.qkv",
        "layers.o": "blocks.{}.attn.proj",
        "layers.mlp_norm": "blocks.{}.norm2",
        "layers.gate": "blocks.{}.mlp.gate_proj",
        "layers.up": "blocks.{}.mlp.up_proj",
        "layers.down": "blocks.{}.mlp.down_proj",
        "merger.norm": "merger.ln_q",
        "merger.up": "merger.mlp.0",
        "merger.down": "merger.mlp.2",
    },
    "qwen3_vl": {
        "patch": "patch_embed.proj",
        "positions": "pos_embed",
        "layers.attention_norm": "blocks.{}.norm1",
        "layers.qkv": "blocks.{}.attn.qkv",
        "layers.o": "blocks.{}.attn.proj",
        "layers.mlp_norm": "blocks.{}.norm2",
        "layers.up": "blocks.{}.mlp.linear_fc1",
        "layers.down": "blocks.{}.mlp.linear_fc2",
        "merger.norm": "merger.norm",
        "merger.up": "merger.linear_fc1",
        "merger.down": "merger.linear_fc2",
        "deepstack.norm": "deepstack_merger_list.{}.norm",
        "deepstack.up": "deepstack_merger_list.{}.linear_fc1",
        "deepstack.down": "deepstack_merger_list.{}.linear_fc2",
    },
    "gemma3": {
        "patch": "embeddings.patch_embedding",
        "positions": "embeddings.position_embedding",
        "layers.attention_norm": "encoder.layers.{}.layer_norm1",
        **{f"layers.{x}": f"encoder.layers.{{}}.self_attn.{x}_proj" for x in "qkv"},
        "layers.o": "encoder.layers.{}.self_attn.out_proj",
        "layers.mlp_norm": "encoder.layers.{}.layer_norm2",
        "layers.up": "encoder.layers.{}.mlp.fc1",
        "layers.down": "encoder.layers.{}.mlp.fc2",
        "post_norm": "post_layernorm",
    },
    "mistral3": {
        "patch": "patch_conv",
        "pre_norm": "ln_pre",
        "layers.attention_norm": "transformer.layers.{}.attention_norm",
        **{f"layers.{x}": f"transformer.layers.{{}}.attention.{x}_proj" for x in "qkvo"},
        "layers.mlp_norm": "transformer.layers.{}.ffn_norm",
        **{
            f"layers.{x}": f"transformer.layers.{{}}.feed_forward.{x}_proj"
            for x in ("gate", "up", "down")
        },
    },
    "gemma4": {
        "patch": "patch_embedder.input_proj",
        "of_axes": "patch_embedder.position_embedding_table",
        "layers.attention_norm": "encoder.layers.{}.input_layernorm",
        "layers.attention_out_norm": "encoder.layers.{}.post_attention_layernorm",
        "layers.mlp_norm": "encoder.layers.{}.pre_feedforward_layernorm",
        "layers.mlp_out_norm": "encoder.layers.{}.post_feedforward_layernorm",
        **{f"layers.{x}": f"encoder.layers.{{}}.{name}.linear" for x, name in CLIPPED.items()},
        **{f"layers.{x}_norm": f"encoder.layers.{{}}.self_attn.{x}_norm" for x in "qk"},
        "layers.bounds": "encoder.layers.{}.{bound}",
        "std_bias": "std_bias",
        "std_scale": "std_scale",
    },
    "llama4": {
        **{f"layers.{x}": f"model.layers.{{}}.self_attn.{x}_proj" for x in "qkvo"},
        "layers.up": "model.layers.{}.mlp.fc1",
        "layers.down": "model.layers.{}.mlp.fc2",
        "layers.attention_norm": "model.layers.{}.input_layernorm",
        "layers.mlp_norm": "model.layers.{}.post_attention_layernorm",
        "patch": "patch_embedding.linear",
        "class": "class_embedding",
        "positions": "positional_embedding_vlm",
        "pre_norm": "layernorm_pre",
        "post_norm": "layernorm_post",
        "merger.join_up": "vision_adapter.mlp.fc1",
        "merger.join_down": "vision_adapter.mlp.fc2",
    },
    "gemma4_unified": {
        "patch_norm": "patch_ln1",
        "patch": "patch_dense",
        "patch_out_norm": "patch_ln2",
        "on_axes": "pos_embedding",
        "positions_norm": "pos_norm",
    },
}
# Those beside the tower, by their whole names without ".weight".
PROJECTOR = "multi_modal_projector"
BESIDE_TOWER = {
    "gemma3": {
        "merger.norm": f"{PROJECTOR}.mm_soft_emb_norm",
        "merger.projection": f"{PROJECTOR}.mm_input_projection_weight",
    },
    "gemma4": {"merger.first": "model.embed_vision.embedding_projection"},
    "gemma4_unified": {"merger.first": "model.embed_vision.embedding_projection"},
    "llama4": {"merger.project": f"{PROJECTOR}.linear_1"},
    "mistral3": {
        "merger.norm": f"{PROJECTOR}.norm",
        "merger.join": f"{PROJECTOR}.patch_merger.merging_layer",
        "merger.first": f"{PROJECTOR}.linear_1",
        "merger.second": f"{PROJECTOR}.linear_2",
    },
}


def vision_leaves(arch: VisionArchitecture) -> dict[tuple[str, ...], Leaf]:
    """Returns the tower's parameters by path below "vision"; a stacked one's name holds {} for its
    index."""
    found: dict[tuple[str, ...], Leaf] = {}
    named = {path: f"{arch.module}.{name}" for path, name in VISION_NAMES[arch.family].items()}
    for path, name in (named | BESIDE_TOWER.get(arch.family, {})).items():
        axes, keys = VISION[path], tuple(path.split("."))
        suffix = "" if name.rpartition(".")[2] in BARE else ".weight"
        found[keys] = Leaf(name + suffix, axes)
        if has_bias(arch, keys):
            found[(*keys[:-1], f"{keys[-1]}_bias")] = Leaf(f"{name}.bias", axes[-1:])
    absent = {
        ("deepstack",): not arch.deepstack,
        ("layers", "bounds"): not arch.clipped,
        ("std_bias",): not arch.standardized,
        ("std_scale",): not arch.standardized,
    }
    return {
        path: leaf
        for path, leaf in found.items()
        if not any(absent.get(path[:n], False) for n in (1, 2))
    }


def tensor_name(leaf: Leaf, index: tuple[int, ...]) -> str:
    """Returns the name of a tensor of a leaf at this index of its stacks."""
    bound = BOUNDS[index[-1]] if "{bound}" in leaf.name else ""
    return leaf.name.format(*index, bound=bound)


def has_bias(arch: VisionArchitecture, path: tuple[str, ...]) -> bool:
    """True if a parameter that is no bias has one beside it."""
    kind = path[-1].rpartition("_")[2]
    if kind == "norm":
        return arch.layer_norm and (path[0] != "merger" or arch.merger == "joined")
    if path in (("merger", "join"), ("merger", "projection"), ("layers", "bounds")):
        return False
    if kind in ("axes", "bias", "scale", "class"):
        return False
    of_kernels = arch.merger_bias if path[0] == "merger" else arch.kernel_bias
    return {"patch": arch.patch_bias, "positions": False}.get(kind, of_kernels)


def stack_of(path: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the leading axes of a tower's leaf, () if it is not stacked."""
    if path[-1] == "bounds":
        return "vision_layers", "vision_bounds"
    return (f"vision_{path[0]}",) if path[0] in ("layers", "deepstack") else ()


def vision_axis_sizes(arch: VisionArchitecture | None) -> dict[str, int]:
    if arch is None:
        return {}
    wide = arch.hidden * arch.merge**2
    return {
        "patch_features": arch.in_features,
        "vision_positions": arch.axis_table or arch.table**2 + arch.classed,
        "vision_adapted": arch.adapted,
        "vision_axes": 2,
        "vision_head_dim": arch.head_dim,
        "vision_bounds": len(BOUNDS),
        "vision_hidden": arch.hidden,
        "vision_qkv": 3 * arch.hidden,
        "vision_attended": arch.heads * arch.head_dim,
        "vision_key": (arch.kv_heads or arch.heads) * arch.head_dim,
        "vision_intermediate": arch.intermediate,
        "vision_pooled": arch.hidden,
        "vision_joined": wide,
        "vision_wide": wide,
        "vision_out": arch.out,
        "vision_layers": arch.layers,
        "vision_deepstack": len(arch.deepstack),
    }
