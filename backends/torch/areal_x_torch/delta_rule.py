"""Gated delta rule layers, the "linear attention" of Qwen3-Next and Qwen3.5, for flat rows of several
sequences.

Such a layer reads a sequence through a short causal convolution and keeps a state of fixed size, a
matrix S of each head, that every token decays, corrects and reads:

    S ← α S,   S ← S + β k (v − kᵀ S)ᵀ,   output = Sᵀ q        α = exp(g), g < 0, and 0 < β < 1

transformers' own layers treat a row as one sequence unless CUDA kernels are installed. Here
convolution and state begin anew with each sequence, or where the prompt that it continues ends
(areal_x_torch.delta_chunks).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from areal_x_torch.context_parallel import to_heads, to_tokens
from areal_x_torch.delta_chunks import Inputs, gated_delta_rule, saved_of_head, with_blank

if TYPE_CHECKING:
    from areal_x_torch.kv_cache import DecodeCache, PrefillCache, ProbeCache
    from areal_x_torch.segments import Segments

EPSILON = 1e-6  # of the norms of queries and keys, as in transformers
# Functions of transformers' modules that call GPU kernels where these are installed.
KERNELS = ("causal_conv1d_fn", "torch_chunk_gated_delta_rule")


class Mixed(NamedTuple):
    """What a layer's projections make of each token. channels: queries, keys and values side by side, not
    convolved yet. beta, decay: logits of β, and what g is computed from. gate: of the output."""

    channels: Float[Tensor, "*batch tokens channels"]
    beta: Float[Tensor, "*batch tokens value_heads"]
    decay: Float[Tensor, "*batch tokens value_heads"]
    gate: Float[Tensor, "*batch tokens value_heads value_dim"]


class Heads(NamedTuple):
    """Some key heads of a layer, each with its value heads, and the parameters of these."""

    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody calls
    key_dim: int
    value_dim: int
    activation: str
    kernel: Float[Tensor, "channels 1 width"]
    bias: Float[Tensor, " channels"] | None
    a_log: Float[Tensor, " value_heads"]
    dt_bias: Float[Tensor, " value_heads"]

    @staticmethod
    def of(layer: Any) -> Heads:
        return Heads(
            layer.num_k_heads,
            layer.head_k_dim,
            layer.head_v_dim,
            layer.activation,
            layer.conv1d.weight,
            layer.conv1d.bias,
            layer.A_log,
            layer.dt_bias,
        )

    @property
    def width(self) -> int:
        """Tokens that the convolution sees."""
        return self.kernel.shape[-1]

    def channels(self, x: Tensor, dim: int) -> tuple[Tensor, ...]:
        """Splits a dimension of channels into queries, keys and values."""
        keys = self.count * self.key_dim
        return x.split([keys, keys, x.shape[dim] - 2 * keys], dim)

    def share(self, group: ProcessGroup) -> Heads:
        """Returns this process's heads, if a group of processes shares them."""
        size, rank = group.size(), group.rank()

        def own(x: Tensor) -> Tensor:
            return x.unflatten(0, (size, -1))[rank]

        def channels(x: Tensor) -> Tensor:
            return torch.cat([own(part) for part in self.channels(x, 0)])

        return self._replace(
            count=self.count // size,
            kernel=channels(self.kernel),
            bias=None if self.bias is None else channels(self.bias),
            a_log=own(self.a_log),
            dt_bias=own(self.dt_bias),
        )


def is_delta_rule(module: nn.Module) -> bool:
    """True for a layer of Qwen3-Next or Qwen3.5, by the parts that its files name."""
    names = {"conv1d", "A_log", "dt_bias", "norm", "out_proj"}
    apart = {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"}
    there = {
        name for name, _ in (*module.named_children(), *module.named_parameters(recurse=False))
    }
    return names <= there and (apart <= there or {"in_proj_qkvz", "in_proj_ba"} <= there)


def install(model: PreTrainedModel) -> bool:
    """Lets the model's gated delta rule layers follow the keywords of this backend's attention:
    `segments` in training and `cache` in the sampler. Without either they compute as in
    transformers. Returns whether there are any."""
    layers = [module for module in model.modules() if is_delta_rule(module)]
    for layer in layers:
        layer.forward = partial(forward, layer)
    return bool(layers)


def saved_numbers(model: PreTrainedModel) -> int:
    """Returns how many numbers per token all delta rules of a model save for the backward pass."""
    every = (Heads.of(layer) for layer in model.modules() if is_delta_rule(layer))
    return sum(len(heads.a_log) * saved_of_head(heads.key_dim, heads.value_dim) for heads in every)


@contextmanager
def without_kernels(model: PreTrainedModel) -> Iterator[None]:
    """Lets transformers' own delta rule layers compute on the host, whatever kernels are installed."""
    modules = {type(x).__module__ for x in model.modules() if is_delta_rule(x)}
    installed = [
        (sys.modules[module], name, getattr(sys.modules[module], name))
        for module in modules
        for name in KERNELS
        if hasattr(sys.modules[module], name)
    ]
    for module, name, kernel in installed:
        setattr(module, name, getattr(kernel, "__wrapped__", kernel))
    try:
        yield
    finally:
        for module, name, kernel in installed:
            setattr(module, name, kernel)


def forward(
    layer: Any,
    hidden_states: Float[Tensor, "rows tokens features"],
    cache_params: Any = None,
    attention_mask: Tensor | None = None,
    *,
    segments: Segments | None = None,
    cache: ProbeCache | PrefillCache | DecodeCache | None = None,
    **more: Any,
) -> Float[Tensor, "rows tokens features"]:
    """The function that transformers calls for each such layer, in place of its own."""
    if cache is not None:
        parts = project(layer, hidden_states)
        return output(layer, cache.mix(layer, parts), parts.gate)
    if segments is None:
        plain: Tensor = type(layer).forward(
            layer, hidden_states, cache_params, attention_mask, **more
        )
        return plain
    parts = project(layer, hidden_states[0])
    found = in_segments(Heads.of(layer), parts, segments)
    return output(layer, found, parts.gate)[None]


@torch.compiler.disable  # what is computed depends on the lengths of sequences
def in_segments(
    heads: Heads, parts: Mixed, segments: Segments
) -> Float32[Tensor, "tokens value_heads value_dim"]:
    group = segments.context
    if group is not None:
        parts, heads = exchanged(heads, parts, group), heads.share(group)
    convolved = convolve(heads, parts.channels, segments)
    # Under autocast the products of the rule would be rounded to the compute precision.
    with torch.autocast(convolved.device.type, enabled=False):
        found = gated_delta_rule(rule_inputs(heads, convolved, parts), segments)
    if group is None:
        return found
    own = to_tokens(found.flatten(1), group)
    return own.unflatten(2, found.shape[1:]).flatten(1, 2)


def exchanged(heads: Heads, parts: Mixed, group: ProcessGroup) -> Mixed:
    """Returns what this process's share of the heads reads of all tokens, from what all heads read of
    this process's tokens; the gate stays as it is."""
    each = [*heads.channels(parts.channels, -1), parts.beta, parts.decay]
    by_process = [x.unflatten(-1, (group.size(), -1)) for x in each]
    whole = to_heads(torch.cat(by_process, dim=-1), group)
    *channels, beta, decay = whole.split([x.shape[-1] for x in by_process], dim=-1)
    return Mixed(torch.cat(channels, dim=-1), beta, decay, parts.gate)


def project(layer: Any, hidden: Float[Tensor, "*batch tokens features"]) -> Mixed:
    """Applies a layer's projections. In Qwen3-Next's files those of a key head and of its value heads
    are neighbours."""
    heads = layer.num_v_heads, layer.head_v_dim
    if hasattr(layer, "in_proj_qkv"):
        gate = layer.in_proj_z(hidden).unflatten(-1, heads)
        return Mixed(
            layer.in_proj_qkv(hidden), layer.in_proj_b(hidden), layer.in_proj_a(hidden), gate
        )
    group = layer.num_v_heads // layer.num_k_heads
    values = group * layer.head_v_dim
    by_head = (
        layer.in_proj_qkvz(hidden).unflatten(-1, (layer.num_k_heads, -1)),
        layer.in_proj_ba(hidden).unflatten(-1, (layer.num_k_heads, -1)),
    )
    *channels, gate = by_head[0].split([layer.head_k_dim, layer.head_k_dim, values, values], -1)
    beta, decay = by_head[1].split(group, -1)
    return Mixed(
        torch.cat([x.flatten(-2) for x in channels], dim=-1),
        beta.flatten(-2),
        decay.flatten(-2),
        gate.flatten(-2).unflatten(-1, heads),
    )


def rule_inputs(
    heads: Heads, convolved: Float[Tensor, "*batch tokens channels"], parts: Mixed
) -> Inputs:
    def by_head(x: Tensor, *more: int) -> Tensor:
        return x.float().unflatten(-1, (heads.count, -1, *more))

    query, key, value = heads.channels(convolved, -1)
    step = functional.softplus(parts.decay.float() + heads.dt_bias.float())
    return Inputs(
        normalised(by_head(query)) * heads.key_dim**-0.5,
        normalised(by_head(key)),
        by_head(value, heads.value_dim),
        by_head(-heads.a_log.float().exp() * step),
        by_head(parts.beta.float().sigmoid()),
    )


def normalised(x: Float32[Tensor, "*_ features"]) -> Float32[Tensor, "*_ features"]:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPSILON)


def output(
    layer: Any,
    found: Float32[Tensor, "*batch tokens value_heads value_dim"],
    gate: Float[Tensor, "*batch tokens value_heads value_dim"],
) -> Float[Tensor, "*batch tokens features"]:
    projected: Tensor = layer.out_proj(layer.norm(found.to(gate.dtype), gate).flatten(-2))
    return projected


# ---- the convolution


def convolve(
    heads: Heads, x: Float[Tensor, "tokens channels"], segments: Segments
) -> Float[Tensor, "tokens channels"]:
    """Returns the activated causal convolution of each sequence, which sees zeros, or the end of the
    prompt that it continues, before its first token."""
    of = ("convolution", heads.width)
    if of not in segments.layouts:
        segments.layouts[of] = _convolution_layout(heads.width, segments)
    sources, places = segments.layouts[of]
    convolved = convolved_after(heads, with_blank(x).index_select(0, sources)[None])
    return convolved[0].index_select(0, places)


def convolved_after(
    heads: Heads, x: Float[Tensor, "rows before_and_tokens channels"]
) -> Float[Tensor, "rows tokens channels"]:
    """Returns the activated convolution at all but the first `width` − 1 tokens of rows."""
    rows = x.transpose(1, 2).to(heads.kernel.dtype)
    y = functional.conv1d(rows, heads.kernel, heads.bias, groups=rows.shape[1])
    return ACT2FN[heads.activation](y).to(x.dtype).transpose(1, 2)


def _convolution_layout(
    width: int, segments: Segments
) -> tuple[Int64[Tensor, " sources"], Int64[Tensor, " tokens"]]:
    """Returns the tokens of each sequence behind the `width` − 1 before them, and for each token of the
    row its place in the convolution of these."""
    before, lengths = width - 1, np.array(segments.lengths)
    ends, blank = np.cumsum(lengths), int(lengths.sum())
    sources: list[np.ndarray] = []
    tails: list[np.ndarray] = []  # the last tokens of each sequence and of what it continues
    nothing = np.full(before, blank)
    for end, length, prefix in zip(ends, lengths, segments.prefixes, strict=True):
        tail, own = tails[prefix] if prefix >= 0 else nothing, np.arange(end - length, end)
        sources += [tail, own]
        tails.append(np.concatenate([tail, own])[length:])
    places = np.arange(blank) + np.repeat(before * np.arange(len(lengths)), lengths)
    on_device = segments.bounds.device
    return torch.from_numpy(np.concatenate(sources)).to(on_device), torch.from_numpy(places).to(
        on_device
    )
