"""Keys and values of the sampler's sequences, and the attention that reads and writes them; for gated
delta rule layers (areal_x_torch.delta_rule), states of fixed size in their place.

transformers lets a model's config name an attention function, which every layer then calls with its
own queries, keys and values, already rotated. `attend` is that function: with the delta rule's, the
only place where the sampler reaches into a model. In place of a transformers cache they get one of
three: `ProbeCache`, `PrefillCache` or `DecodeCache`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from areal_x_torch import delta_chunks, masks, temperature
from areal_x_torch.attention import by_formula
from areal_x_torch.delta_rule import Heads, Mixed, convolved_after, rule_inputs
from areal_x_torch.masks import Visible, seen_of
from areal_x_torch.model import decoder, has_vision
from areal_x_torch.segments import Sinks

ATTENTION = "areal_x_cache"
LARGEST = 1e18  # of a key or value, whose products with usual queries are finite
PENDING = 5  # tensors of a layer in `Cache.pending`


class Layer(NamedTuple):
    """The sizes of what a layer caches per token, and which tokens it sees."""

    number: int
    kv_heads: int
    key_dim: int
    value_dim: int
    seen: Visible


class StateLayer(NamedTuple):
    """The sizes of a gated delta rule layer's state: its convolution's last inputs, and a matrix of each
    value head."""

    number: int
    convolution: tuple[int, int]  # tokens, channels
    matrices: tuple[int, ...]  # key heads, value heads of each, key and value features


class ProbeCache:
    """Attends to nothing and records what each layer would cache."""

    def __init__(self) -> None:
        self.layers: dict[int, Layer | StateLayer] = {}

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        seen: Visible,
        softcap: float | None,
        sinks: Sinks | None,
    ) -> Tensor:
        if layer in self.layers:
            raise NotImplementedError("it attends more than once per layer")
        self.layers[layer] = Layer(layer, key.shape[1], key.shape[3], value.shape[3], seen)
        return query.new_zeros(*query.shape[:3], value.shape[3])

    def mix(self, layer: Any, parts: Mixed) -> Tensor:
        heads = Heads.of(layer)
        self.layers[layer.layer_idx] = StateLayer(
            layer.layer_idx,
            (heads.width - 1, parts.channels.shape[-1]),
            (heads.count, len(heads.a_log) // heads.count, heads.key_dim, heads.value_dim),
        )
        return torch.zeros_like(parts.gate)


def attend_to_cache(model: PreTrainedModel) -> None:
    """Lets a model's attention read and write these caches."""
    model.set_attn_implementation({"text_config": ATTENTION} if has_vision(model) else ATTENTION)


@torch.inference_mode()
def layers_of(model: PreTrainedModel) -> list[Layer | StateLayer]:
    probe = ProbeCache()
    decoder(model)(
        input_ids=torch.zeros(1, 1, dtype=torch.int64, device=model.device),
        use_cache=False,
        cache=probe,
    )
    return [probe.layers[number] for number in sorted(probe.layers)]


class Cache:
    """Keys and values of each layer, `[rows, columns, heads, head_dim]`; column c of a row is its
    token c. Of a layer with a state: the inputs of its convolution in place of keys, and its
    matrices, in fp32, in place of values.

    width: most tokens of a row in one pass of decoding. If it is more than one, such a pass changes no
    state: `settle` does, by those of its tokens that count. pending: what it needs, PENDING tensors of
    each layer with a state.
    """

    def __init__(
        self,
        layers: Sequence[Layer | StateLayer],
        rows: int,
        columns: int,
        dtype: torch.dtype,
        device: torch.device,
        width: int = 1,
    ) -> None:
        self.layers = list(layers)
        self.width = width
        self.columns = columns
        self.visible = visible_of(layers)
        make = {"dtype": dtype, "device": device}
        self.keys, self.values = [], []
        self.pending: list[Tensor] = []
        for layer in layers:
            if isinstance(layer, StateLayer):
                self.keys.append(torch.zeros(rows, *layer.convolution, **make))
                self.values.append(torch.zeros(rows, *layer.matrices, device=device))
                if width > 1:
                    self.pending += pending_of(layer, rows, width, **make)
                continue
            for kept, width in ((self.keys, layer.key_dim), (self.values, layer.value_dim)):
                kept.append(torch.zeros(rows, columns, layer.kv_heads, width, **make))

    def like(self, layers: Sequence[Layer | StateLayer]) -> Cache:
        """Returns an empty cache of another model's layers, for the same rows and columns."""
        x = self.keys[0]
        return Cache(layers, len(x), self.columns, x.dtype, x.device)

    def begin(self, rows: slice) -> None:
        """Empties the states of rows. Columns are overwritten before they are read."""
        for layer, *both in zip(self.layers, self.keys, self.values, strict=True):
            for x in both if isinstance(layer, StateLayer) else ():
                x[rows] = 0

    def move(self, source: int, target: int, used: int) -> None:
        """Copies the first `used` columns of a row, and its states, into another."""
        for layer, *both in zip(self.layers, self.keys, self.values, strict=True):
            for x in both:
                if isinstance(layer, StateLayer):
                    x[target] = x[source]
                else:
                    x[target, :used] = x[source, :used]

    def settle(self, counts: Int[Tensor, " rows"]) -> None:
        """Advances the states of the first rows by the first `counts` tokens of the last pass."""
        states = (i for i, layer in enumerate(self.layers) if isinstance(layer, StateLayer))
        for at, index in zip(range(0, len(self.pending), PENDING), states, strict=True):
            seen, key, *others = (x[: len(counts)] for x in self.pending[at : at + PENDING])
            inputs, matrices = (x[index][: len(counts)] for x in (self.keys, self.values))
            last = counts[:, None] + torch.arange(inputs.shape[1], device=counts.device)
            inputs.copy_(seen.gather(1, last[..., None].expand_as(inputs)))
            after = matrices
            for token in range(self.width):
                parts = (x[:, token : token + 1] for x in (key, key, *others))
                _, new = delta_chunks.one_token(delta_chunks.Inputs(*parts), after)
                after = torch.where((token < counts)[:, None, None, None, None], new, after)
            matrices.copy_(after)

    def newest(self, own: Int[Tensor, "rows width"], used: int, begin: int = 0) -> tuple[Any, ...]:
        """Returns the tensors of a `DecodeCache` for the rows from `begin` on, whose newest tokens are
        in the columns `own`. used: columns of the longest row, or more."""
        several = own.shape[1] > 1 and self.pending
        first = torch.arange(0, len(own) * self.columns, self.columns, device=own.device)
        places = (first[:, None] + own).flatten()
        columns, own = torch.arange(used, device=own.device), own[..., None]
        masks = []
        for seen in self.visible:
            hidden = columns > own
            if seen.window is not None:
                hidden |= columns <= own - seen.window
            if seen.chunk is not None:
                hidden |= columns < own - own % seen.chunk
            mask = torch.zeros(
                hidden.shape, dtype=self.keys[0].dtype, device=own.device
            ).masked_fill_(hidden, -math.inf)
            masks.append(mask[:, None])
        both = (
            (self.keys, self.values)
            if not begin
            else ([x[begin:] for x in self.keys], [x[begin:] for x in self.values])
        )
        tensors = places, masks, *both
        return (*tensors, self.pending) if several else tensors


def pending_of(
    layer: StateLayer, rows: int, width: int, dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """Returns empty tensors for the inputs of a layer's convolution in a pass, those before it first, and
    for keys, values, g and beta of its rule."""
    (behind, channels), (heads, group, key_dim, value_dim) = layer.convolution, layer.matrices
    of_rule = ((heads, key_dim), (heads, group, value_dim), (heads, group), (heads, group))
    return [
        torch.zeros(rows, behind + width, channels, dtype=dtype, device=device),
        *(torch.zeros(rows, width, *shape, device=device) for shape in of_rule),
    ]


def visible_of(layers: Sequence[Layer | StateLayer]) -> list[Visible]:
    """Returns the different rules of what layers with attention see."""
    return list(dict.fromkeys(layer.seen for layer in layers if isinstance(layer, Layer)))


@dataclass
class PrefillCache:
    """A forward pass that writes columns start … start + length of rows first … first + rows.

    real: of each row, its tokens in these columns, at least one; the rest is padding. Rows are
    ordered by it, most first. images: of each row, where the tokens begin and end of images that see
    themselves whole; these columns have all of an image, or none.
    """

    cache: Cache
    first: int
    rows: int
    start: int
    length: int
    real: tuple[int, ...]
    images: Sequence[Sequence[tuple[int, int]]] = ()
    near: bool = False  # images see themselves in layers with a window only
    masks: dict[Visible, Tensor] = field(default_factory=dict)

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        seen: Visible,
        softcap: float | None,
        sinks: Sinks | None,
    ) -> Tensor:
        """Returns [rows, heads, length, head_dim] for the queries, after writing their keys and
        values."""
        index = index_of(self.cache.layers, layer)
        rows, stop = slice(self.first, self.first + self.rows), self.start + self.length
        both = self.cache.keys[index], self.cache.values[index]
        for x, new in zip(both, (key, value), strict=True):
            x[rows, self.start : stop] = finite(new).transpose(1, 2)
        grouped = query.shape[1] != key.shape[1]
        plain = softcap is None and sinks is None
        causal = not any(self.own_images(seen))
        if plain and causal and self.start == 0 and not seen.hides(stop):
            return scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=scale, enable_gqa=grouped
            )
        keys, values = (x[rows, :stop].transpose(1, 2) for x in both)
        mask = self._mask(seen, query.device)
        if not plain:
            by_group = mask if causal else mask[:, :, None]
            return by_formula(query, keys, values, by_group, scale, softcap, sinks)
        return scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, scale=scale, enable_gqa=grouped
        )

    def mix(self, layer: Any, parts: Mixed) -> Tensor:
        """Returns the outputs of a delta rule layer, `[rows, length, heads, features]`, after
        advancing its states; 0 for padding."""
        index = index_of(self.cache.layers, layer.layer_idx)
        rows = slice(self.first, self.first + self.rows)
        inputs, matrices = self.cache.keys[index], self.cache.values[index]
        seen = torch.cat([inputs[rows], parts.channels], dim=1)
        heads = Heads.of(layer)
        convolved = convolved_after(heads, seen)
        width = inputs.shape[1]
        last = [x[n : n + width] for x, n in zip(seen, self.real, strict=True)]
        inputs[rows] = torch.stack(last)
        found, matrices[rows] = delta_chunks.padded(
            rule_inputs(heads, convolved, parts), self.real, matrices[rows]
        )
        return found

    def positions(self, layer: int) -> Int[Tensor, " length"]:
        """Returns the positions of the tokens of a pass."""
        device = self.cache.keys[index_of(self.cache.layers, layer)].device
        return torch.arange(self.start, self.start + self.length, device=device)

    def own_images(self, seen: Visible) -> list[list[tuple[int, int]]]:
        """Those in these columns that see themselves whole in a layer."""
        if self.near and seen.window is None:
            return []
        stop = self.start + self.length
        return [[(a, b) for a, b in row if self.start <= a < stop] for row in self.images]

    def _mask(self, seen: Visible, device: torch.device) -> Tensor:
        """Returns which columns each token sees: [length, columns], or [rows, 1, length, columns] if
        rows have images."""
        if seen not in self.masks:
            stop = self.start + self.length
            columns = torch.arange(stop, device=device)
            own = columns[self.start :, None]
            last = own
            if any(self.own_images(seen)):
                last = own.repeat(self.rows, 1, 1, 1)
                for row, images in zip(last, self.own_images(seen), strict=True):
                    for first, end in images:
                        row[0, first - self.start : end - self.start] = end - 1
            mask = (columns <= last) & (columns > own - (seen.window or stop))
            if seen.chunk is not None:
                mask &= columns >= own - own % seen.chunk
            self.masks[seen] = mask
        return self.masks[seen]


@dataclass(frozen=True)
class DecodeCache:
    """A forward pass of the newest `width` tokens of each of the first rows, which see all before
    them.

    places: their columns in the flattened rows. masks: for each rule in `visible`, 0 at visible
    columns and minus infinity elsewhere.
    """

    layers: Sequence[Layer | StateLayer]
    visible: Sequence[Visible]
    places: Int[Tensor, " fed"]
    masks: Sequence[Float[Tensor, "rows 1 width used"]]
    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    width: int = 1
    pending: Sequence[Tensor] = ()

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        seen: Visible,
        softcap: float | None,
        sinks: Sinks | None,
    ) -> Tensor:
        index = index_of(self.layers, layer)
        mask = self.masks[self.visible.index(seen)]
        rows, heads = query.shape[:2]
        kv_heads = key.shape[1]
        both: list[Tensor] = []
        for x, new in ((self.keys[index], key), (self.values[index], value)):
            tokens = finite(new).transpose(1, 2).flatten(0, 1)
            x.view(-1, kv_heads, x.shape[-1]).index_copy_(0, self.places, tokens)
            both.append(x[:rows, : mask.shape[-1]].transpose(1, 2))
        keys, values = both
        if softcap is not None or sinks is not None:
            return by_formula(query, keys, values, mask[:, :, None], scale, softcap, sinks)
        # Heads that share keys become the length of the queries: no key is repeated.
        group = heads // kv_heads
        grouped = query.reshape(rows, kv_heads, group * self.width, query.shape[-1])
        if self.width > 1:
            mask = mask.repeat(1, 1, group, 1)
        attended = scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale)
        return attended.reshape(rows, heads, self.width, -1)

    def positions(self, layer: int) -> Int[Tensor, "rows width"]:
        """Returns the positions of the tokens of a pass."""
        columns = self.keys[index_of(self.layers, layer)].shape[1]
        return (self.places % columns).view(-1, self.width)

    def mix(self, layer: Any, parts: Mixed) -> Tensor:
        index, rows = index_of(self.layers, layer.layer_idx), parts.channels.shape[0]
        inputs, matrices = self.keys[index][:rows], self.values[index][:rows]
        seen = torch.cat([inputs, parts.channels], dim=1)
        heads = Heads.of(layer)
        of_rule = rule_inputs(heads, convolved_after(heads, seen), parts)
        if self.width > 1:
            earlier = sum(isinstance(x, StateLayer) for x in self.layers[:index])
            own = self.pending[earlier * PENDING : (earlier + 1) * PENDING]
            for kept, new in zip(own, (seen, *of_rule[1:]), strict=True):
                kept[:rows].copy_(new)
            outputs, after = [], matrices
            for token in range(self.width):
                one = delta_chunks.Inputs(*(x[:, token : token + 1] for x in of_rule))
                found, after = delta_chunks.one_token(one, after)
                outputs.append(found)
            return torch.cat(outputs, dim=1)
        found, after = delta_chunks.one_token(of_rule, matrices)
        inputs.copy_(seen[:, 1:])
        matrices.copy_(after)
        return found


def finite(x: Tensor) -> Tensor:
    """Returns keys or values of which sums with a weight of 0 are 0: a row that gets another sequence
    still has those of the last one, perhaps of weights that diverged, in columns that are hidden."""
    return x.nan_to_num(0.0).clamp(-LARGEST, LARGEST)


def index_of(layers: Sequence[Layer | StateLayer], number: int) -> int:
    return next(i for i, kept in enumerate(layers) if kept.number == number)


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Visible | None,
    *,
    cache: ProbeCache | PrefillCache | DecodeCache,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls in each layer.

    Raises: NotImplementedError for attention with a bias.
    """
    if position_bias is not None:
        raise NotImplementedError(
            f"{type(module).__name__} biases its attention, which the torch sampler does not support"
        )
    seen = seen_of(module, attention_mask, sliding_window)
    if temperature.tempers(module) and not isinstance(cache, ProbeCache):
        query = temperature.retempered(module, query, cache.positions(module.layer_idx))
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    own = scale, seen, softcap, s_aux
    return cache.attend(module.layer_idx, query, key, value, *own).transpose(1, 2), None


AttentionInterface.register(ATTENTION, attend)
masks.register(ATTENTION)
