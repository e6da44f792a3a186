"""The trainer's forward pass over micro-batches, from parameters to what a head outputs: pure
functions that are traced into the compiled programs.

A batch on the devices is [micro-batches, rows, length]; a micro-batch is one index of the first
axis.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import DictKey, tree_map_with_path
from jaxtyping import Array, Float32, Int

from areal_x.protocols.trainer_config import TrainerConfig
from areal_x.types import Batch, Policy
from areal_x_jax import fp8, head, lora, pipeline
from areal_x_jax.architecture import Architecture
from areal_x_jax.experts import Use
from areal_x_jax.model import ImageFeatures, head_kernel, hidden_states
from areal_x_jax.parameters import EXACT, FIXED, Params
from areal_x_jax.row_adapters import RowBlocks
from areal_x_jax.sharding import ROW_AXES, Partitioner
from areal_x_jax.vision import ImageArrays, image_features
from areal_x_jax.vision_architecture import VisionArchitecture


class Rows(NamedTuple):
    """A batch and its images. ends: see `AttentionMask`; None unless a kernel reads them. until: see
    `dense_attention.Tries`; None unless sequences share tokens. adapters: of the rows; None unless
    there are several. computed: the tokens that the model computes, in as many rows; None for all.
    `batch.parents` are indices of these, and `ends` and `until` theirs."""

    batch: Batch
    images: ImageArrays | None
    ends: Int[Array, "rows runs"] | None = None
    until: Int[Array, "rows length"] | None = None
    adapters: RowBlocks | None = None
    computed: Batch | None = None


@dataclass(frozen=True)
class Forward:
    """The forward pass of one model on one mesh, in the compute precision `dtype`. room, logits: see
    `device.room_for_activations` and `device.logits_at_once`."""

    config: TrainerConfig
    arch: Architecture
    teacher_arch: Architecture | None
    partitioner: Partitioner
    dtype: Any
    room: int
    logits: int

    def policy(
        self,
        params: Params,
        base: Params | None,
        rows: Rows,
        entropy: bool = False,
        teacher: Params | None = None,
    ) -> tuple[Policy, Use | None]:
        """Returns the head's outputs for a micro-batch, and how it uses experts (see
        `model.hidden_states`). base: the frozen model, if `params` are adapters."""
        params = self._with_base(params, base)
        batch, images, cast = rows.batch, rows.images, self._cast(params)
        remat = self._remat(batch, images)
        features = self._image_features(self.arch, cast, images, remat)
        hidden, use = self._hidden(
            self.arch, cast, rows, features, remat=remat, recorded=batch.experts
        )
        if self.arch.scores:
            before = self.config.head == "value"
            values = head.values(hidden, params["score"], batch.segment_ids, before, batch.parents)
            return Policy(values=values), use
        beside = None
        if teacher is not None:
            assert self.teacher_arch is not None
            assert self.config.divergence is not None
            # It gets no gradient, so none of its activations are saved.
            features = self._image_features(self.teacher_arch, teacher, images, "products")
            teacher_hidden, _ = self._hidden(
                self.teacher_arch, teacher, rows, features, remat="products"
            )
            beside = head.Teacher(
                teacher_hidden,
                head_kernel(teacher),
                self.config.divergence,
                self.teacher_arch.logit_softcap,
            )
        # The head reads neighbouring positions.
        hidden = self.partitioner.constrain(hidden, "rows", None, None)
        logp, entropies, divergence = head.logprobs(
            hidden,
            head_kernel(params),
            batch.tokens,
            batch.segment_ids,
            self.config.temperature,
            chunk=self.config.head_chunk * self.partitioner.size(*ROW_AXES),
            logits_at_once=self.logits,
            entropy=entropy,
            teacher=beside,
            softcap=self.arch.logit_softcap,
            partitioner=self.partitioner,
            tied=self.arch.tied,
            kept=batch.kept,
            parents=batch.parents,
        )
        return Policy(logp=logp, entropy=entropies, divergence=divergence), use

    def outputs(
        self, params: Params, base: Params | None, rows: Rows, count: Array
    ) -> Float32[Array, "capacity rows length"]:
        """Returns log-probabilities, or the values of a critic or reward model, of the first
        `count` micro-batches."""

        def fill(index: Array, filled: Array) -> Array:
            policy, _ = self.policy(params, base, micro_batch(rows, index))
            return filled.at[index].set(policy.values if self.arch.scores else policy.logp)

        return jax.lax.fori_loop(0, count, fill, jnp.zeros(rows.batch.tokens.shape, jnp.float32))

    def copy_for_sampling(self, params: Params, adapters: Params | None) -> Params:
        """Returns a copy in the compute precision, with adapters merged."""
        if adapters is not None:
            params = lora.merged(params, adapters, self.config.lora.scale)
        fixed = [DictKey(name) for name in FIXED]
        copied: Params = tree_map_with_path(
            lambda path, x: jnp.array(x, None if path[-1] in fixed else self.dtype, copy=True),
            params,
        )
        if self.arch.fp8:
            copied["layers"] = fp8.with_rounded_kernels(copied["layers"])
        return copied

    def _with_base(self, params: Params, base: Params | None) -> Params:
        return params if base is None else lora.with_adapters(base, params, self.config.lora.scale)

    def _cast(self, params: Params) -> Params:
        """Returns parameters in the compute precision, but for EXACT ones."""
        exact = [DictKey(name) for name in EXACT]
        cast: Params = tree_map_with_path(
            lambda path, x: x if path[-1] in exact else x.astype(self.dtype), params
        )
        return cast

    def _remat(self, batch: Batch, images: ImageArrays | None) -> str:
        """Returns what the backward pass recomputes (see `model.hidden_states`): "auto" saves as much
        as there is room for."""
        if self.config.remat != "auto":
            return self.config.remat
        devices = self.partitioner.size(*ROW_AXES)
        tokens = batch.tokens.size // self.partitioner.size(*ROW_AXES, "context")
        attention = tokens * saved_by_attention(self.arch)
        saved = tokens * saved_activations(self.arch)
        stages, groups = self.arch.stages
        if stages > 1:  # turns without rows save as much
            each = len(batch.tokens) // devices
            saved = saved * pipeline.turns(each, stages, groups) // (each * stages * groups)
        if images is not None and self.arch.vision is not None:
            patches = images.patch_layout.rows.size // devices
            saved += patches * saved_activations_per_patch(self.arch.vision)
        needed = {"products": saved, "attention": attention}
        size = jnp.dtype(self.dtype).itemsize
        return next((how for how, x in needed.items() if x * size <= self.room), "layers")

    def _image_features(
        self, arch: Architecture, params: Params, images: ImageArrays | None, remat: str
    ) -> ImageFeatures | None:
        if images is None:
            return None
        implementation = self.config.model.attention
        whole_layers = remat != "products"
        return image_features(arch, params, images, whole_layers, self.partitioner, implementation)

    def _hidden(
        self,
        arch: Architecture,
        params: Params,
        rows: Rows,
        features: ImageFeatures | None,
        *,
        remat: str,
        recorded: Array | None = None,
    ) -> tuple[Array, Use | None]:
        batch = rows.computed or rows.batch
        return hidden_states(
            arch,
            params,
            batch.tokens,
            batch.positions,
            batch.segment_ids,
            remat,
            self.partitioner,
            self.config.model.attention,
            recorded,
            features,
            rows.until,
            rows.ends,
            batch.mask,
            rows.adapters,
        )


def micro_batch(rows: Rows, index: Array | int) -> Rows:
    found: Rows = jax.tree.map(
        lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), rows
    )
    return found


def saved_activations(arch: Architecture) -> int:
    """Numbers per token that the backward pass saves without remat: the layers' inputs and all
    products with kernels."""
    every = arch.layers_in("attention")
    attention = 0
    for layer in every:
        kv_heads, key_dim, value_dim = arch.heads_of(layer)
        attention += (1 + arch.gated) * arch.heads * key_dim
        if layer in arch.with_keys:
            attention += kv_heads * (key_dim + value_dim)
    if (latent := arch.latent) is not None:  # and the vectors that they come from
        attention += len(every) * (latent.query_rank + latent.rank + latent.rotated)
    if arch.delta is not None:
        attention += len(arch.delta.layers) * (arch.delta.channels + arch.delta.values)
    experts, inner = (
        arch.experts,
        (arch.layers + len(arch.layers_in("doubled"))) * arch.intermediate,
    )
    if experts is not None:
        sparse = len(arch.layers_in("sparse"))
        inner = inner if experts.beside else 0
        inner += sparse * (experts.per_token * experts.intermediate + experts.shared)
        inner += len(experts.dense) * arch.intermediate
    if arch.varied is not None and (width := arch.varied.inputs):
        attention += arch.layers * (2 * width + arch.hidden)
    return arch.layers * 3 * arch.hidden + attention + 2 * inner


def saved_by_attention(arch: Architecture) -> int:
    """Numbers per token that the backward pass saves if it recomputes all but attention: the layers'
    inputs and what attention attended to."""
    attended = sum(arch.heads * arch.heads_of(layer)[2] for layer in range(arch.layers))
    return arch.layers * arch.hidden + attended


def saved_activations_per_patch(arch: VisionArchitecture) -> int:
    """The same for each patch of a vision tower."""
    return arch.layers * (5 * arch.hidden + (1 + arch.gated_mlp) * arch.intermediate)
