"""The decoder: Qwen3, Qwen2 and Llama from one description, over packed rows.

`Shape` is read from a Hugging Face config; what differs between families is a field, never a subclass. Layers are stacked on a
leading axis and scanned, so that compile time does not grow with depth. The functions below take one layer's parameters as a
plain dict: the trainer scans them over rows, the sampler calls them for one token a slot.

Kernels are stored [in, out], the transpose of Hugging Face's. A training step of a small model on a CPU is as much memory
traffic as arithmetic: `linear`, `attend`, `rotation_of` and what `hidden_states` keeps are measured choices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from areal_x.errors import UserError
from areal_x.model_dir import CAUSAL, CLASSIFIER

FAMILIES = {"Qwen3ForCausalLM": "qwen3", "Qwen2ForCausalLM": "qwen2", "LlamaForCausalLM": "llama"}
Params = dict[str, Any]
Rotation = tuple[Array, Array]


@dataclass(frozen=True)
class Shape:
    """Sizes and features of a decoder. heads share kv_heads in equal groups; head_dim need not be hidden / heads.

    scores: whether it says one number of each token, and no logits.
    """

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    eps: float
    rope_theta: float
    qkv_bias: bool
    qk_norm: bool
    tied: bool
    scores: bool


def shape_of(config: Mapping[str, Any], head: str = "policy") -> Shape:
    """Reads a Hugging Face config. Raises: UserError naming what this decoder does not do and what would."""
    architecture = (config.get("architectures") or ["none"])[0].replace(CLASSIFIER, CAUSAL)
    if architecture not in FAMILIES:
        raise UserError(
            f"the JAX backend does not know the architecture {architecture}; it knows {', '.join(FAMILIES)} "
            "(the torch backend trains any causal language model of transformers)"
        )
    family = FAMILIES[architecture]
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    unsupported = {
        f"rope scaling {kind!r}": kind != "default",
        "sliding windows": bool(config.get("use_sliding_window")),
        f"the activation {config.get('hidden_act')!r}": config.get("hidden_act", "silu") != "silu",
        "biases in the MLP": bool(config.get("mlp_bias")),
        "a bias of the attention's output": family != "qwen2" and bool(config.get("attention_bias")),
    }
    for feature, asked in unsupported.items():
        if asked:
            raise UserError(
                f"the JAX backend does not do {feature}, which the model's config asks for: use train.backend = 'torch'"
            )
    heads = config["num_attention_heads"]
    return Shape(
        vocab=config["vocab_size"],
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        intermediate=config["intermediate_size"],
        eps=config.get("rms_norm_eps", 1e-6),
        rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        tied=bool(config.get("tie_word_embeddings", False)),
        scores=head != "policy",
    )


class Layers(nnx.Module):
    """The parameters of all layers, stacked: every leaf begins with the axis of layers."""

    def __init__(self, shape: Shape) -> None:
        def zeros(*sizes: int) -> nnx.Param:
            return nnx.Param(jnp.zeros((shape.layers, *sizes), jnp.float32))

        query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.input_norm, self.post_norm = zeros(shape.hidden), zeros(shape.hidden)
        self.q, self.k, self.v = zeros(shape.hidden, query), zeros(shape.hidden, key), zeros(shape.hidden, key)
        self.o = zeros(query, shape.hidden)
        if shape.qkv_bias:
            self.q_bias, self.k_bias, self.v_bias = zeros(query), zeros(key), zeros(key)
        if shape.qk_norm:
            self.q_norm, self.k_norm = zeros(shape.head_dim), zeros(shape.head_dim)
        self.gate, self.up = zeros(shape.hidden, shape.intermediate), zeros(shape.hidden, shape.intermediate)
        self.down = zeros(shape.intermediate, shape.hidden)


class Decoder(nnx.Module):
    """The parameters of a decoder: embed [vocab, hidden], layers, norm [hidden], and score [hidden, 1] or, unless it is tied,
    head [hidden, vocab]."""

    def __init__(self, shape: Shape) -> None:
        self.embed = nnx.Param(jnp.zeros((shape.vocab, shape.hidden), jnp.float32))
        self.layers = Layers(shape)
        self.norm = nnx.Param(jnp.zeros(shape.hidden, jnp.float32))
        if shape.scores:
            self.score = nnx.Param(jnp.zeros((shape.hidden, 1), jnp.float32))
        elif not shape.tied:
            self.head = nnx.Param(jnp.zeros((shape.hidden, shape.vocab), jnp.float32))


def parameter_shapes(shape: Shape) -> Params:
    """The tree of parameters as shapes and dtypes, without allocating any."""
    return nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: Decoder(shape)), nnx.Param))


def hidden_states(
    shape: Shape,
    params: Params,
    tokens: Int[Array, "rows length"],
    positions: Int[Array, "rows length"],
    segment_ids: Int[Array, "rows length"],
    remat: bool,
) -> Float[Array, "rows length hidden"]:
    """What the head reads, for packed rows: a token attends to those before it in its own segment.

    remat: the backward pass computes whole layers again from their inputs. Without it, it keeps the results of products with
    kernels and computes the rest again (scores, all that is elementwise): a fifth faster on a CPU than keeping everything,
    and what is kept grows with the length, not with its square.
    """
    length = tokens.shape[1]
    visible = (segment_ids[:, :, None] == segment_ids[:, None, :]) & jnp.tri(length, dtype=bool)
    bias = jnp.where(visible, 0.0, -1e30)[:, None, :, None]  # [rows, 1, length, 1, length]
    # The barrier keeps the compiler from computing sines again for each head and layer.
    rotation = jax.lax.optimization_barrier(rotation_of(shape, positions))

    def layer(x: Array, weights: Params) -> tuple[Array, None]:
        query, key, value = project_heads(shape, weights, x, rotation)
        return finish_layer(shape, weights, x, attend(shape, query, key, value, bias)), None

    policies = jax.checkpoint_policies
    kept = policies.nothing_saveable if remat else policies.dots_with_no_batch_dims_saveable
    x, _ = jax.lax.scan(jax.checkpoint(layer, policy=kept), params["embed"][tokens], params["layers"])
    return rms_norm(x, params["norm"], shape.eps)


def head_kernel(params: Params) -> Float[Array, "hidden vocab"]:
    return params["head"] if "head" in params else params["embed"].T


def project_qkv(
    shape: Shape, layer: Params, x: Float[Array, "... hidden"], positions: Int[Array, ...]
) -> tuple[Array, Array, Array]:
    """Rotated queries [..., heads, head_dim] and keys, and values [..., kv_heads, head_dim], of one layer's input."""
    return project_heads(shape, layer, x, rotation_of(shape, positions))


def project_heads(shape: Shape, layer: Params, x: Float[Array, "... hidden"], rotation: Rotation) -> tuple[Array, Array, Array]:
    """`project_qkv` for positions whose rotation is known."""
    x = rms_norm(x, layer["input_norm"], shape.eps)

    def project(name: str, heads: int) -> Array:
        y = linear(x, layer[name])
        if shape.qkv_bias:
            y = y + layer[f"{name}_bias"]
        return y.reshape(*x.shape[:-1], heads, shape.head_dim)

    query, key, value = project("q", shape.heads), project("k", shape.kv_heads), project("v", shape.kv_heads)
    if shape.qk_norm:
        query, key = rms_norm(query, layer["q_norm"], shape.eps), rms_norm(key, layer["k_norm"], shape.eps)
    return rope(query, rotation), rope(key, rotation), value


def attend(shape: Shape, query: Array, key: Array, value: Array, bias: Array) -> Float[Array, "rows length features"]:
    """Attention within rows, scores and softmax in fp32; the queries of a group read their shared key and value in place.

    The scores are [rows, kv_heads, length, group, length], as the product gives them: any other order would copy them.
    """
    rows, length = query.shape[:2]
    query = query.reshape(rows, length, shape.kv_heads, shape.heads // shape.kv_heads, shape.head_dim)
    scores = jnp.einsum("blgrd,bmgd->bglrm", query * shape.head_dim**-0.5, key, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(scores + bias, axis=-1).astype(value.dtype)
    attended = jnp.einsum("bglrm,bmgd->bglrd", weights, value)
    return jnp.moveaxis(attended, 1, 2).reshape(rows, length, -1)


def finish_layer(shape: Shape, layer: Params, x: Array, attended: Float[Array, "... features"]) -> Float[Array, "... hidden"]:
    """A layer after its attention: output projection, residual, gated MLP, residual."""
    x = x + linear(attended.astype(x.dtype), layer["o"])
    y = rms_norm(x, layer["post_norm"], shape.eps)
    return x + linear(jax.nn.silu(linear(y, layer["gate"])) * linear(y, layer["up"]), layer["down"])


@jax.custom_vjp
def linear(x: Float[Array, "... in"], kernel: Float[Array, "in out"]) -> Float[Array, "... out"]:
    """x @ kernel, with a backward pass that computes the incoming gradient once.

    XLA for CPU would fuse that gradient's formula (silu's, the rotation's) into the transposition that one of the two products
    begins with, and compute it twice, in strides: a quarter of a step.
    """
    return x @ kernel


def _linear_forward(x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    return x @ kernel, (x, kernel)


def _linear_backward(saved: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    x, kernel = saved
    gradient = jax.lax.optimization_barrier(gradient)
    tokens = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
    d_kernel = jax.lax.dot_general(*tokens, (((0,), (0,)), ((), ())))  # x.T @ gradient, without an array for x.T
    return gradient @ kernel.T, d_kernel


linear.defvjp(_linear_forward, _linear_backward)


def rms_norm(x: Float[Array, "... features"], scale: Float[Array, " features"], eps: float) -> Float[Array, "... features"]:
    """Computed in fp32 whatever the input."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return y.astype(x.dtype) * scale


def rotation_of(shape: Shape, positions: Int[Array, ...]) -> Rotation:
    """Cosine and sine [..., 1, head_dim / 2] of the angles by which `rope` turns a head at each position."""
    half = shape.head_dim // 2
    frequency = shape.rope_theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions[..., None, None].astype(jnp.float32) * frequency
    return jnp.cos(angle), jnp.sin(angle)


def rope(x: Float[Array, "... heads head_dim"], rotation: Rotation) -> Float[Array, "... heads head_dim"]:
    """Rotary position embedding with the halves of a head as pairs, as Hugging Face stores it. Source: arXiv 2104.09864."""
    cos, sin = (part.astype(x.dtype) for part in rotation)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
