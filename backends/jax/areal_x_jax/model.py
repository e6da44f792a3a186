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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from areal_x_jax import experts, fp8, layer_scan, pipeline
from areal_x_jax.architecture import Architecture
from areal_x_jax.blocked_attention import KEPT
from areal_x_jax.feed_forward import feed_forward
from areal_x_jax.layer_inputs import add_input, layer_inputs
from areal_x_jax.layer_parts import PRODUCT, affine, norm
from areal_x_jax.leaf import local_name
from areal_x_jax.parameters import Params, adaptable_kernels, adapter_leaves, layer_leaves
from areal_x_jax.projections import gated, project_qkv
from areal_x_jax.recurrent_layers import recur
from areal_x_jax.rotations import Rotation, position_rotations
from areal_x_jax.row_adapters import RowBlocks
from areal_x_jax.row_attention import attention_of
from areal_x_jax.sharding import ONE_DEVICE, Partitioner


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


INPUT = "layer input"


def with_inputs(policy: Callable[..., bool]) -> Callable[..., bool]:
    """Returns the policy for several layers, whose inputs are saved too."""
    inputs = jax.checkpoint_policies.save_only_these_names(INPUT)
    return jax.checkpoint_policies.save_from_both_policies(policy, inputs)


def of_stages(policy: Callable[..., bool]) -> Callable[..., bool]:
    """Returns the policy for layers of stages, which are one axis more in every product."""

    def saves(primitive: Any, *avals: Any, **params: Any) -> bool:
        if "dimension_numbers" in params and str(primitive) == "dot_general":
            contracted, (left, right) = params["dimension_numbers"]
            params["dimension_numbers"] = contracted, (left[1:], right[1:])
        return policy(primitive, *avals, **params)

    return saves


class ImageFeatures(NamedTuple):
    """What a vision tower computes for the images of packed rows (see areal_x_jax.vision).

    places: index of each token's image embedding in its row, −1 for text. deepstack: what is added
    to the outputs of each of the first layers there. rotation: replaces that of plain positions, None
    if those count. blocks: see `vision.ImageArrays`.
    """

    places: Int[Array, "rows length"]
    embeddings: Float[Array, "rows tokens hidden"]
    deepstack: Float[Array, "layers rows tokens hidden"] | None
    rotation: Rotation | None
    blocks: Int[Array, "rows length"] | None = None


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
    trained: Bool[Array, "rows length"] | None = None,
    adapters: RowBlocks | None = None,
) -> tuple[Float[Array, "rows length hidden"], experts.Use | None]:
    """Returns the head's input for packed rows, and how they use experts, None without any: the mean
    over layers of `experts.imbalance`, and the load of each layer with experts by the `trained`
    tokens (all but padding for None).

    A token attends to those before it in its own segment, or, if sequences share tokens, to those
    whose subtrees it is in. until: where these end (see `dense_attention.Tries`). images: None if no
    row has any. implementation: of attention (see areal_x_jax.attention). recorded: the experts that
    each token goes through (see `experts.route`). ends: see `AttentionMask`. adapters: of the
    rows, if layers have blocks of several of them ([blocks, in, columns]).

    remat: what the backward pass recomputes. "products": all but the results of products with
    kernels and of attention (scores, everything elementwise): a fifth faster on a CPU than saving
    everything, and memory grows linearly with the length; "attention": all but those of attention;
    "layers": whole layers, from their inputs.
    """
    axes = {
        local_name(name): leaf.axes
        for name, leaf in (
            layer_leaves(arch) | adapter_leaves(arch, adaptable_kernels(arch))
        ).items()
    }
    adapted = any(name.endswith("_lora_a") for name in params["layers"])
    policy = PRODUCTS_WITH_ADAPTERS if adapted and remat == "products" else SAVED[remat]
    stages, groups = arch.stages
    policy = of_stages(policy) if stages > 1 else policy

    def through(
        scanned: Architecture,
        layers: Params,
        x: Array,
        of_rows: tuple[Array, Array, Array | None, Array],
        per_layer: Any,
        of_tokens: tuple[Array | None, Array | None],
    ) -> tuple[Array, experts.Use | None]:
        """Applies the layers of `scanned`, all or those of a group."""
        positions, segment_ids, until, trained = of_rows
        # The barrier keeps the compiler from recomputing sines for each head and layer.
        rotations = jax.lax.optimization_barrier(
            position_rotations(arch, positions)
            if images is None or images.rotation is None
            else (images.rotation,)
        )
        tries = None if until is None else (until, positions)
        blocks = None if images is None else images.blocks
        of_layers = arch, positions, segment_ids, tries, implementation, partitioner, ends
        attend = attend_far = attention_of(*of_layers, blocks)
        if blocks is not None and arch.vision is not None and arch.vision.form.near:
            attend_far = attention_of(*of_layers)

        def layer(number: int, x: Array, of_layer: tuple[Any, ...], kept: Any) -> layer_scan.Passed:
            x = checkpoint_name(x, INPUT)
            weights, ((window, rope_index, depth), (chosen, own)) = of_layer
            if scanned.varied is not None:  # their shapes differ, so that they are chosen here
                window, rope_index = scanned.windows[number], scanned.layer_ropes[number]
            weights = partitioner.gathered(weights, axes)
            if adapters is not None:
                weights = weights | {"adapters": adapters}
            weights = fp8.marked(weights) if scanned.fp8 else weights
            keys = None
            if "a_log" in weights:
                attended = recur(arch, weights, x, segment_ids, partitioner)
            else:
                rotation = _select(rotations, rope_index)
                query, keys, gate = project_qkv(arch, weights, x, rotation)
                key, value = kept if keys is None else keys
                of_kind = attend_far if isinstance(window, int) and not window else attend
                attended = gated(of_kind(query, key, value, window, weights.get("sinks")), gate)
            x, routing = finish_layer(arch, weights, x, attended, partitioner, chosen, own)
            if images is not None and depth is not None:
                x = add_deepstack(x, images, depth)
            use = None if routing is None else experts.use(routing, segment_ids > 0, trained)
            x = partitioner.constrain(x, "rows", "length", None)
            return x, use, keys if scanned.is_shared(number) else None

        step: layer_scan.Step = layer
        if groups == 1:  # else the pipeline's turns are recomputed as a whole
            step = jax.checkpoint(layer, policy=policy, static_argnums=0)
        return layer_scan.scan(scanned, step, x, layers, (per_layer, of_tokens))

    x = embed(arch, params, tokens)
    if images is not None:
        x = jnp.where(
            images.places[..., None] < 0, x, gather_places(images.embeddings, images.places)
        )
    own = layer_inputs(arch, params, tokens, x, None if images is None else images.places >= 0)
    x = partitioner.constrain(x, "rows", "length", None)
    if until is not None:  # Padding sees itself, so that no softmax is over nothing.
        until = jnp.where(segment_ids > 0, until, jnp.arange(until.shape[1]) + 1)
    of_rows = positions, segment_ids, until, segment_ids > 0 if trained is None else trained
    depth = None if images is None or images.deepstack is None else np.arange(arch.layers)
    per_layer = np.array(arch.windows), np.array(arch.layer_ropes), depth
    of_tokens = jax.tree.map(lambda a: jnp.moveaxis(a, 2, 0), (recorded, own))
    of = params["layers"], x, of_rows, per_layer, of_tokens
    if stages > 1:
        x, use = pipeline.in_turns(arch, partitioner, through, with_inputs(policy), *of)
    else:
        x, use = through(arch, *of)
    if use is not None:
        use = use._replace(imbalance=use.imbalance.mean())
    return head_input(arch, params, x), use


def head_input(arch: Architecture, params: Params, x: Float[Array, "... hidden"]) -> Array:
    """Normalises the last layer's output, and scales it as the logits are to be."""
    x = norm(x, params["norm"], arch)
    return x if arch.logit_scale == 1 else x * jnp.asarray(arch.logit_scale, x.dtype)


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


def finish_layer(
    arch: Architecture,
    layer: Params,
    x: Array,
    attended: Float[Array, "... features"],
    partitioner: Partitioner = ONE_DEVICE,
    recorded: Int[Array, "... per_token"] | None = None,
    own: Float[Array, "... width"] | None = None,
) -> tuple[Float[Array, "... hidden"], experts.Routing | None]:
    """The part of a layer after attention: output projection, residual, gated MLP or experts,
    residual. own: the layer's of `layer_inputs`. Returns its output and how experts were chosen."""

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
    y, routing = feed_forward(arch, layer, x, y, partitioner, recorded)
    x = add(x, y, "mlp_out_norm")
    if own is not None:
        x = add_input(arch, layer, x, own)
    if "layer_scalar" in layer:  # a buffer, which is not trained
        x = x * jax.lax.stop_gradient(layer["layer_scalar"]).astype(x.dtype)
    return x, routing


def _select(of_kinds: tuple[Any, ...], index: Array | int) -> Any:
    """Returns the variant of a layer, given its index, which is scanned if they have one shape."""
    if len(of_kinds) == 1 or isinstance(index, int):
        return of_kinds[index if isinstance(index, int) else 0]
    return jax.tree.map(
        lambda *kinds: jax.lax.dynamic_index_in_dim(jnp.stack(kinds), index, keepdims=False),
        *of_kinds,
    )
