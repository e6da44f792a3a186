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
    "layers.k": ("vision_hidden", "vision_attended"),
    "layers.v": ("vision_hidden", "vision_attended"),
    "merger.projection": ("vision_pooled", "vision_out"),
    "pre_norm": ("vision_hidden",),
    "merger.join": ("vision_joined", "vision_hidden"),
    "merger.first": ("vision_hidden", "vision_out"),
    "merger.second": ("vision_out", "vision_out"),
}
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
}
# Those beside the tower, by their whole names without ".weight".
PROJECTOR = "multi_modal_projector"
BESIDE_TOWER = {
    "gemma3": {"merger.norm": f"{PROJECTOR}.mm_soft_emb_norm"},
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
        found[keys] = Leaf(f"{name}.weight", axes)
        if has_bias(arch, keys):
            found[(*keys[:-1], f"{keys[-1]}_bias")] = Leaf(f"{name}.bias", axes[-1:])
    if arch.merger == "mean":
        name = f"{PROJECTOR}.mm_input_projection_weight"
        found["merger", "projection"] = Leaf(name, VISION["merger.projection"])
    return {path: leaf for path, leaf in found.items() if path[0] != "deepstack" or arch.deepstack}


def has_bias(arch: VisionArchitecture, path: tuple[str, ...]) -> bool:
    """True if a parameter that is no bias has one beside it."""
    kind = path[-1].rpartition("_")[2]
    if kind == "norm":
        return arch.layer_norm and (path[0] != "merger" or arch.merger == "joined")
    if path == ("merger", "join"):
        return False
    of_kernels = arch.merger_bias if path[0] == "merger" else arch.kernel_bias
    return {"patch": arch.patch_bias, "positions": False}.get(kind, of_kernels)


def stack_of(path: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the leading axis of a tower's leaf, () if it is not stacked."""
    return (f"vision_{path[0]}",) if path[0] in ("layers", "deepstack") else ()


def vision_axis_sizes(arch: VisionArchitecture | None) -> dict[str, int]:
    if arch is None:
        return {}
    wide = arch.hidden * arch.merge**2
    return {
        "patch_features": arch.in_features,
        "vision_positions": arch.table**2,
        "vision_hidden": arch.hidden,
        "vision_qkv": 3 * arch.hidden,
        "vision_attended": arch.hidden,
        "vision_intermediate": arch.intermediate,
        "vision_pooled": arch.hidden,
        "vision_joined": wide,
        "vision_wide": wide,
        "vision_out": arch.out,
        "vision_layers": arch.layers,
        "vision_deepstack": len(arch.deepstack),
    }
