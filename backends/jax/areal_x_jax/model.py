"""The decoder of every text family, over packed rows, from one description
(areal_x_jax.architecture).

Layers are stacked on a leading axis and scanned (areal_x_jax.layer_scan), so that compile time does
not grow with depth; what differs between layers (window, rotation) is scanned with them. The
functions below take one layer's parameters as a plain dict: the trainer scans them over rows, the
sampler calls them for one token per slot. Parameters that a family lacks are absent from its dict.

A training step of a small model on a CPU is as much memory traffic as arithmetic: `linear`,
`dense`, `position_rotations` and what `hidden_states` saves are measured choices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from areal_x_jax import (
    attention,
    delta_rule,
    experts,
    fp8,
    latent_attention,
    layer_scan,
    pipeline,
)
from areal_x_jax.architecture import Architecture
from areal_x_jax.blocked_attention import KEPT
from areal_x_jax.delta_rule import Inputs
from areal_x_jax.dense_attention import AttentionMask, Tries
from areal_x_jax.latent_attention import Latent
from areal_x_jax.parameters import Params, adaptable_kernels, adapter_leaves, layer_leaves
from areal_x_jax.rope import Rope
from areal_x_jax.sharding import AXES, ONE_DEVICE, Partitioner


class Rotation(NamedTuple):
    """What the positions of tokens do to queries and keys: cosine and sine of angles [..., 1, rotated
    / 2]; a factor of queries [..., 1, 1] (`Architecture.temperature`); and whether both are divided
    by their RMS (`Architecture.unit_qk`), None where no layer has these."""

    cos: Float[Array, "*_ 1 half"]
    sin: Float[Array, "*_ 1 half"]
    factor: Float[Array, "*_ 1 1"] | None = None
    unit: Bool[Array, ""] | None = None


# Name, for jax.checkpoint_policies.save_only_these_names, of the sum of a kernel's and its adapter's
# products.
PRODUCT = "product"
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
}


def _saves_fused_attention(primitive: Any, *_: Any, **__: Any) -> bool:
    """cuDNN's attention, which jax computes with a primitive that has no name of ours."""
    return str(primitive).startswith("dot_product_attention_fwd")


def _with_attention(*policies: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the policy that saves attention's results and what any of these save."""
    both = jax.checkpoint_policies.save_from_both_policies
    policy = both(jax.checkpoint_policies.save_only_these_names(KEPT), _saves_fused_attention)
    for other in policies:
        policy = both(policy, other)
    return policy


# What the backward pass saves: see `hidden_states`.
PRODUCTS = _with_attention(jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
SAVED = {
    "products": PRODUCTS,
    "attention": _with_attention(),
    "layers": jax.checkpoint_policies.nothing_saveable,
}
# Each adapter's products would be saved beside its kernel's: their sum is enough.
PRODUCTS_WITH_ADAPTERS = _with_attention(jax.checkpoint_policies.save_only_these_names(PRODUCT))


class ImageFeatures(NamedTuple):
    """What a vision tower computes for the images of packed rows (see areal_x_jax.vision).

    places: index of each token's image embedding in its row, −1 for text. deepstack: what is added
    to the outputs of each of the first layers there. rotation: replaces that of plain positions.
    """

    places: Int[Array, "rows length"]
    embeddings: Float[Array, "rows tokens hidden"]
    deepstack: Float[Array, "layers rows tokens hidden"] | None
    rotation: Rotation


def hidden_states(
    arch: Architecture,
    params: Params,
    tokens: Int[Array, "rows length"],
    positions: Int[Array, "rows length"],
    segment_ids: Int[Array, "rows length"],
    remat: str = "products",
    partitioner: Partitioner = ONE_DEVICE,
    implementation: str = "auto",
    recorded: Int[Array, "rows length layers per_token"] | None = None,
    images: ImageFeatures | None = None,
    until: Int[Array, "rows length"] | None = None,
    ends: Int[Array, "rows runs"] | None = None,
) -> tuple[Float[Array, "rows length hidden"], Float[Array, ""] | None]:
    """Returns the head's input for packed rows, and the mean over layers of `experts.imbalance`, or
    None without experts.

    A token attends to those before it in its own segment, or, if sequences share tokens, to those
    whose subtrees it is in. until: where these end (see `dense_attention.Tries`). images: None if no
    row has any. implementation: of attention (see areal_x_jax.attention). recorded: the experts that
    each token goes through (see `experts.route`). ends: see `AttentionMask`.

    remat: what the backward pass recomputes. "products": all but the results of products with
    kernels and of attention (scores, everything elementwise): a fifth faster on a CPU than saving
    everything, and memory grows linearly with the length; "attention": all but those of attention;
    "layers": whole layers, from their inputs.
    """
    axes = {
        name: leaf.axes
        for name, leaf in (
            layer_leaves(arch) | adapter_leaves(arch, adaptable_kernels(arch))
        ).items()
    }
    adapted = any(name.endswith("_lora_a") for name in params["layers"])
    policy = PRODUCTS_WITH_ADAPTERS if adapted and remat == "products" else SAVED[remat]

    def through(
        scanned: Architecture,
        layers: Params,
        x: Array,
        of_rows: tuple[Array, Array, Array | None],
        per_layer: Any,
        chosen: Array | None,
    ) -> tuple[Array, list[Array]]:
        """Applies the layers of `scanned`, all or those of a stage."""
        positions, segment_ids, until = of_rows
        # The barrier keeps the compiler from recomputing sines for each head and layer.
        rotations = jax.lax.optimization_barrier(
            position_rotations(arch, positions) if images is None else (images.rotation,)
        )
        tries = None if until is None else (until, positions)
        attend = attention_of(
            arch, positions, segment_ids, tries, implementation, partitioner, ends
        )

        def layer(x: Array, of_layer: tuple[Any, ...]) -> tuple[Array, Array | None]:
            weights, ((window, rope_index, depth), chosen) = of_layer
            weights = partitioner.gathered(weights, axes)
            weights = fp8.marked(weights) if scanned.fp8 else weights
            if "a_log" in weights:
                attended = recur(arch, weights, x, segment_ids, partitioner)
            else:
                rotation = _select(rotations, rope_index)
                query, key, value, gate = project_qkv(arch, weights, x, rotation)
                attended = gated(attend(query, key, value, window, weights.get("sinks")), gate)
            x, routing = finish_layer(arch, weights, x, attended, partitioner, chosen)
            if images is not None and depth is not None:
                x = add_deepstack(x, images, depth)
            imbalance = None if routing is None else experts.imbalance(routing, segment_ids > 0)
            return partitioner.constrain(x, "rows", "length", None), imbalance

        layer = jax.checkpoint(layer, policy=policy)
        return layer_scan.scan(scanned, layer, x, layers, (per_layer, chosen))

    x = embed(arch, params, tokens)
    if images is not None:
        x = jnp.where(
            images.places[..., None] < 0, x, gather_places(images.embeddings, images.places)
        )
    x = partitioner.constrain(x, "rows", "length", None)
    if until is not None:  # Padding sees itself, so that no softmax is over nothing.
        until = jnp.where(segment_ids > 0, until, jnp.arange(until.shape[1]) + 1)
    of_rows = positions, segment_ids, until
    depth = None if images is None or images.deepstack is None else np.arange(arch.layers)
    per_layer = np.array(arch.windows), np.array(arch.layer_ropes), depth
    chosen = None if recorded is None else jnp.moveaxis(recorded, 2, 0)
    of = params["layers"], x, of_rows, per_layer, chosen
    if partitioner.size("stage") == 1:
        x, imbalance = through(arch, *of)
    else:
        x, imbalance = pipeline.in_turns(arch, partitioner, through, *of)
    return head_input(arch, params, x), jnp.concatenate(imbalance).mean() if imbalance else None


def head_input(arch: Architecture, params: Params, x: Float[Array, "... hidden"]) -> Array:
    """Normalises the last layer's output, and scales it as the logits are to be."""
    x = norm(x, params["norm"], arch)
    return x if arch.logit_scale == 1 else x * jnp.asarray(arch.logit_scale, x.dtype)


# query, key, value, the layer's window, its sinks
Attend: TypeAlias = Callable[
    [Array, Array, Array, Array, "Array | None"], Float[Array, "rows length features"]
]


def attention_of(
    arch: Architecture,
    positions: Int[Array, "rows length"],
    segment_ids: Int[Array, "rows length"],
    tries: tuple[Array, Array] | None,
    implementation: str,
    partitioner: Partitioner,
    ends: Int[Array, "rows runs"] | None = None,
) -> Attend:
    """Returns attention within the segments of these rows; on a mesh each device computes its rows,
    its heads and, against the keys and values of whole rows, its part of their length. tries: until
    which index each token is seen, and positions, if sequences share tokens."""
    attend = partial(
        attention.attend,
        scale=arch.scale,
        softcap=arch.attention_softcap,
        implementation=implementation,
    )
    (window, *others), devices = set(arch.windows), partitioner.size(*AXES)
    of_tries = None if tries is None else Tries(*tries, tries[1])
    chunk = max(arch.windows) if arch.chunked else 0
    cuts = 0 < chunk < segment_ids.shape[1]
    chunk_ids = segment_ids
    if arch.chunked:  # chunks are segments of their own
        window, others = 0, []
    if cuts:
        chunk_ids, ends = ids_of_chunks(segment_ids, positions, chunk), None
    seen = AttentionMask(segment_ids, segment_ids, tries=of_tries, ends=ends)
    within = AttentionMask(chunk_ids, chunk_ids)
    if devices == 1:
        seen = attention.prepare(seen, implementation)
        within = attention.prepare(within, implementation) if cuts else within

    def attend_whole_rows(
        query: Array, key: Array, value: Array, of_layer: Array, sinks: Array | None
    ) -> Array:
        own = seen._replace(window=of_layer if others else window)
        if cuts:
            parts = ("queries", "keys", *(("bias",) if seen.bias is not None else ()))
            own = own._replace(
                **{x: jnp.where(of_layer > 0, getattr(within, x), getattr(own, x)) for x in parts}
            )
        return attend(query, key, value, own, sinks=sinks)

    def part(
        query: Array,
        key: Array,
        value: Array,
        queries: Array,
        of_layer: Array,
        sinks: Array | None,
        tries: tuple[Array, Array] | None,
    ) -> Array:
        def whole(x: Array) -> Array:
            return jax.lax.all_gather(x, "context", axis=1, tiled=True)

        key, value, keys = map(whole, (key, value, queries))
        start = jax.lax.axis_index("context") * query.shape[1]
        of_tries = None if tries is None else Tries(whole(tries[0]), tries[1], whole(tries[1]))
        own = AttentionMask(queries, keys, start, of_layer if others else window, None, of_tries)
        return attend(query, key, value, own, sinks=sinks)

    heads, ids = (
        partitioner.spec("rows", "length", "heads", None),
        partitioner.spec("rows", "length"),
    )
    inputs = heads, heads, heads, ids, partitioner.spec(), partitioner.spec("heads"), ids
    on_mesh = (
        partitioner.shard_map(part, inputs, partitioner.spec("rows", "length", "heads"))
        if devices > 1
        else None
    )

    if on_mesh is None:
        return attend_whole_rows

    def attend_on_mesh(
        query: Array, key: Array, value: Array, of_layer: Array, sinks: Array | None
    ) -> Array:
        ids = jnp.where(of_layer > 0, chunk_ids, segment_ids) if cuts else segment_ids
        attended: Array = on_mesh(query, key, value, ids, of_layer, sinks, tries)
        return attended

    return attend_on_mesh


def ids_of_chunks(
    segment_ids: Int[Array, "rows length"], positions: Int[Array, "rows length"], chunk: int
) -> Int[Array, "rows length"]:
    """Returns other segment ids, in the same order, that differ in each chunk of a segment."""
    most = -(-segment_ids.shape[1] // chunk)
    ids = segment_ids * most + jnp.minimum(positions // chunk, most - 1)
    return jnp.where(segment_ids > 0, ids, 0)


def embed(
    arch: Architecture, params: Params, tokens: Int[Array, ...]
) -> Float[Array, "... hidden"]:
    x = params["embed"][tokens]
    return x if arch.embed_scale == 1 else x * jnp.asarray(arch.embed_scale, x.dtype)


def gather_places(
    features: Float[Array, "rows tokens hidden"], places: Int[Array, "rows length"]
) -> Float[Array, "rows length hidden"]:
    """Returns each token's image feature; for text, any."""
    return jnp.take_along_axis(features, jnp.maximum(places, 0)[..., None], axis=1)


def add_deepstack(
    x: Float[Array, "rows length hidden"], images: ImageFeatures, depth: Int[Array, ""]
) -> Array:
    """Adds the features of layer `depth` to its output at images, if it has any."""
    assert images.deepstack is not None
    layers = len(images.deepstack)
    features = images.deepstack[jnp.minimum(depth, layers - 1)]
    here = (images.places >= 0) & (depth < layers)
    return x + jnp.where(here[..., None], gather_places(features, images.places), 0)


def head_kernel(params: Params) -> Float[Array, "hidden vocab"]:
    return params["head"] if "head" in params else params["embed"].T


def project_qkv(
    arch: Architecture, layer: Params, x: Float[Array, "... hidden"], rotation: Rotation
) -> tuple[Array, Array, Array, Array | None]:
    """Returns rotated queries [..., heads, head_dim] and keys, values [..., kv_heads, value_dim], and
    logits of the output's gates, if it has any, [..., heads · head_dim], of one layer's input."""
    if "input_norm" in layer:
        x = norm(x, layer["input_norm"], arch)
    if arch.latent is not None:
        return *project_latent(arch, arch.latent, layer, x, rotation), None
    if "qkv" in layer:
        ends = np.cumsum([arch.heads, arch.kv_heads]) * arch.head_dim
        query, key, value = jnp.split(affine(layer, "qkv", x), ends, axis=-1)
    else:
        query, key, value = (affine(layer, name, x) for name in "qkv")

    gate = None
    if arch.gated:  # each head's query and gate are neighbours
        query, gate = jnp.split(query.reshape(*query.shape[:-1], arch.heads, -1), 2, axis=-1)
        query, gate = (part.reshape(*x.shape[:-1], -1) for part in (query, gate))

    def normalised(x: Array, name: str) -> Array:
        return norm(x, layer[name], arch) if name in layer else x

    def by_head(x: Array) -> Array:
        return x.reshape(*x.shape[:-1], -1, arch.head_dim)

    if arch.wide_qk_norm:
        query, key = by_head(normalised(query, "q_norm")), by_head(normalised(key, "k_norm"))
    else:
        query, key = normalised(by_head(query), "q_norm"), normalised(by_head(key), "k_norm")
    query, key = (rope(x, rotation, arch.interleaved) for x in (query, key))
    if rotation.unit is not None:
        query, key = (jnp.where(rotation.unit, unit_rms(x, arch.eps), x) for x in (query, key))
    if rotation.factor is not None:
        query = (query * rotation.factor).astype(query.dtype)
    return query, key, by_head(value), gate


def unit_rms(x: Float[Array, "... features"], eps: float) -> Float[Array, "... features"]:
    """Divides by the RMS of the features, computed in fp32."""
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)).astype(x.dtype)


def gated(attended: Float[Array, "... features"], gate: Array | None) -> Array:
    """Multiplies attention's output with its gates."""
    return attended if gate is None else attended.astype(gate.dtype) * jax.nn.sigmoid(gate)


def recur(
    arch: Architecture,
    layer: Params,
    x: Float[Array, "rows length hidden"],
    segment_ids: Int[Array, "rows length"],
    partitioner: Partitioner = ONE_DEVICE,
) -> Float[Array, "rows length values"]:
    """Returns the output of a gated delta rule, in the place of attention's. On a mesh each device
    computes its heads of its rows, which are whole."""
    mixed = project_mixed(arch, layer, x)
    mixed = mixed._replace(channels=partitioner.constrain(mixed.channels, "rows", None, None))
    convolved = delta_rule.convolve(mixed.channels, layer["convolution"], segment_ids)
    inputs = recurrent_inputs(arch, layer, convolved, mixed)
    run: Any = delta_rule.gated_delta_rule
    if partitioner.size(*AXES) > 1:
        heads = partitioner.spec("rows", None, "heads")
        ids = partitioner.spec("rows", None)
        run = partitioner.shard_map(run, (Inputs(*[heads] * 5), ids), heads)
    return recurrent_output(arch, layer, run(inputs, segment_ids), mixed.gate)


def project_mixed(
    arch: Architecture, layer: Params, x: Float[Array, "... hidden"]
) -> delta_rule.Mixed:
    assert arch.delta is not None
    x = norm(x, layer["input_norm"], arch)
    if arch.delta.joined:
        both = (affine(layer, f"delta_{name}", x) for name in ("qkvz", "ba"))
        return delta_rule.separated(arch.delta, *both)
    return delta_rule.Mixed(*(affine(layer, f"delta_{name}", x) for name in ("qkv", "b", "a", "z")))


def recurrent_inputs(
    arch: Architecture, layer: Params, convolved: Array, mixed: delta_rule.Mixed
) -> Inputs:
    assert arch.delta is not None
    active = ACTIVATIONS[arch.activation](convolved)
    return delta_rule.rule_inputs(arch.delta, active, mixed, layer["a_log"], layer["dt_bias"])


def recurrent_output(
    arch: Architecture,
    layer: Params,
    found: Float[Array, "... key_heads group value_dim"],
    gate: Float[Array, "... values"],
) -> Float[Array, "... values"]:
    by_head = gate.reshape(found.shape)
    return delta_rule.gated_norm(found, by_head, layer["delta_norm"], arch.eps).reshape(gate.shape)


def project_latent(
    arch: Architecture,
    latent: Latent,
    layer: Params,
    x: Float[Array, "... hidden"],
    rotation: Rotation,
) -> tuple[Array, Array, Array]:
    """Returns queries, keys and values of latent attention (areal_x_jax.latent_attention), of a
    normalised input. The products of queries and keys do not depend on the order of features: rotated ones are the last."""
    of_vectors = replace(arch, eps=latent_attention.EPS)

    def by_head(x: Array, *widths: int) -> list[Array]:
        return jnp.split(x.reshape(*x.shape[:-1], arch.heads, -1), np.cumsum(widths), axis=-1)

    if "q_a" in layer:
        query = affine(layer, "q_b", norm(affine(layer, "q_a", x), layer["q_a_norm"], of_vectors))
    else:
        query = affine(layer, "q", x)
    vector, shared_key = jnp.split(affine(layer, "kv_a", x), [latent.rank], axis=-1)
    both = affine(layer, "kv_b", norm(vector, layer["kv_a_norm"], of_vectors))
    query, turned = by_head(query, latent.plain)
    key, value = by_head(both, latent.plain)
    turned, shared_key = (
        rope(x, rotation, arch.interleaved) for x in (turned, shared_key[..., None, :])
    )
    shared_key = jnp.broadcast_to(shared_key, (*key.shape[:-1], latent.rotated))
    query, key = (jnp.concatenate(parts, axis=-1) for parts in ((query, turned), (key, shared_key)))
    return query, key, value


def finish_layer(
    arch: Architecture,
    layer: Params,
    x: Array,
    attended: Float[Array, "... features"],
    partitioner: Partitioner = ONE_DEVICE,
    recorded: Int[Array, "... per_token"] | None = None,
) -> tuple[Float[Array, "... hidden"], experts.Routing | None]:
    """The part of a layer after attention: output projection, residual, gated MLP or experts,
    residual. Returns its output and how experts were chosen."""

    def add(x: Array, y: Array, out_norm: str) -> Array:
        y = norm(y, layer[out_norm], arch) if out_norm in layer else y
        return x + (y if arch.residual_scale == 1 else y * arch.residual_scale)

    before = x
    kernel = "o" if "o" in layer else "delta_o"
    x = add(x, affine(layer, kernel, attended.astype(x.dtype)), "attention_out_norm")
    if arch.parallel:
        y = norm(before, layer["input_norm"], arch)
    else:
        y = norm(x, layer["mlp_norm"], arch) if "mlp_norm" in layer else x
    activation, routing = ACTIVATIONS[arch.activation], None
    if arch.experts is None or "router" not in layer:
        y = gated_mlp(layer, "", y, activation)
    else:
        biases = layer.get("router_bias"), layer.get("router_correction")
        routing = experts.route(arch.experts, layer["router"], y, recorded, *biases)
        shared = 0
        if arch.experts.shared:
            shared = gated_mlp(layer, "shared_", y, activation)
            if "shared_router" in layer:
                shared = jax.nn.sigmoid(y @ layer["shared_router"]) * shared
        rule = arch.experts.clamp, arch.experts.weighs_inputs
        y = experts.mixture(layer, y, routing, activation, partitioner, *rule) + shared
    return add(x, y, "mlp_out_norm"), routing


def gated_mlp(layer: Params, prefix: str, x: Array, activation: Callable[[Array], Array]) -> Array:
    if f"{prefix}gate_up" in layer:
        gate, up = jnp.split(affine(layer, f"{prefix}gate_up", x), 2, axis=-1)
    else:
        gate, up = affine(layer, f"{prefix}gate", x), affine(layer, f"{prefix}up", x)
    return affine(layer, f"{prefix}down", activation(gate) * up)


def affine(layer: Params, name: str, x: Array) -> Array:
    """Applies a kernel, with its adapter and bias if the layer has them (an adapter's scale is in
    its lora_b)."""
    kernel = layer[name]
    y = fp8.linear(x, kernel) if isinstance(kernel, fp8.Kernel) else linear(x, kernel)
    if f"{name}_lora_a" in layer:
        y = y + linear(linear(x, layer[f"{name}_lora_a"]), layer[f"{name}_lora_b"])
    y = checkpoint_name(y, PRODUCT)
    return y + layer[f"{name}_bias"] if f"{name}_bias" in layer else y


@jax.custom_vjp
def linear(x: Float[Array, "... in"], kernel: Float[Array, "in out"]) -> Float[Array, "... out"]:
    """x @ kernel, with a backward pass that computes the incoming gradient once.

    XLA for CPU would fuse that gradient's formula (silu's, the rotation's) into the transposition
    with which one of the two products begins, and compute it twice, with strides: a quarter of a
    step.
    """
    return x @ kernel


def _linear_forward(x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    return x @ kernel, (x, kernel)


def _linear_backward(saved: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    x, kernel = saved
    gradient = jax.lax.optimization_barrier(gradient)
    tokens = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
    # x.T @ gradient, without an array for x.T
    d_kernel = jax.lax.dot_general(*tokens, (((0,), (0,)), ((), ())))
    return gradient @ kernel.T, d_kernel


linear.defvjp(_linear_forward, _linear_backward)


def norm(
    x: Float[Array, "... features"], scale: Float[Array, " features"], arch: Architecture
) -> Float[Array, "... features"]:
    """RMS norm, or layer norm without bias, computed in fp32 whatever the input."""
    y = x.astype(jnp.float32)
    if arch.centred:
        y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + arch.eps)
    if arch.norm_offset:
        return (y * (1.0 + scale.astype(jnp.float32))).astype(x.dtype)
    return y.astype(x.dtype) * scale


def position_rotations(arch: Architecture, positions: Int[Array, ...]) -> tuple[Rotation, ...]:
    """Returns, for each of the architecture's ropes, what it does at each position."""
    at = positions[..., None, None].astype(jnp.float32)

    def rotation(rope: Rope) -> Rotation:
        angle = at * rope.frequencies(arch.rotary_dim)
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        if rope.scale != 1:
            cos, sin = cos * rope.scale, sin * rope.scale
        factor, turns = None, rope.kind != "none"
        if arch.temperature is not None:
            slope, length = arch.temperature
            factor = 1 + slope * jnp.log1p(jnp.floor((at + 1) / length))
            factor = jnp.ones_like(factor) if turns else factor
        return Rotation(cos, sin, factor, jnp.asarray(turns) if arch.unit_qk else None)

    return tuple(map(rotation, arch.ropes))


def rope(
    x: Float[Array, "... heads head_dim"], rotation: Rotation, interleaved: bool = False
) -> Float[Array, "... heads head_dim"]:
    """Rotary position embedding of the first features, as many as the rotation has, with their
    halves as pairs. Source: arXiv 2104.09864.

    interleaved: neighbouring features are pairs. They are returned as halves: queries and keys in
    the same order have the same products in any.
    """
    cos, sin = (part.astype(x.dtype) for part in rotation[:2])
    turned, rest = jnp.split(x, [2 * cos.shape[-1]], axis=-1)
    if interleaved:
        first, second = turned[..., ::2], turned[..., 1::2]
    else:
        first, second = jnp.split(turned, 2, axis=-1)
    parts = first * cos - second * sin, second * cos + first * sin
    return jnp.concatenate([*parts, rest] if rest.shape[-1] else parts, axis=-1)


def _select(of_kinds: tuple[Any, ...], index: Array) -> Any:
    """Returns the variant of a layer, given its scanned index."""
    if len(of_kinds) == 1:
        return of_kinds[0]
    return jax.tree.map(
        lambda *kinds: jax.lax.dynamic_index_in_dim(jnp.stack(kinds), index, keepdims=False),
        *of_kinds,
    )
