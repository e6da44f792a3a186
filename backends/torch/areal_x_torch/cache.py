"""Keys and values of the sampler's sequences, and the attention that reads and writes them.

transformers lets an attention function be named in a model's config; every layer then calls it with its own queries, keys and
values, already rotated. `attend` is that function: the only place where the sampler reaches into a model. It takes the place of
a transformers cache.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

ATTENTION = "areal_x_cache"


class Cache:
    """For each layer keys and values `[rows, columns, heads, head_dim]`; column c of a row is its position c.

    One of two things happens at a time: `prefill` chooses rows and a run of columns that all of them get, `grow` chooses the
    first rows and one column for each. The layers' memory is made when they first write.
    """

    def __init__(self, rows: int, columns: int) -> None:
        self.rows, self.columns = rows, columns
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def prefill(self, first: int, rows: int, start: int, length: int) -> None:
        """The next forward pass writes columns start … start + length of rows first … first + rows."""
        self._chosen, self._run = slice(first, first + rows), slice(start, start + length)
        self._grows, self._masks = False, {}

    def grow(self, positions: Int[Tensor, " rows"], used: int) -> None:
        """The next forward pass writes one column of each of the first rows, and sees those up to it. used: most of any row."""
        self._at = torch.arange(0, len(positions) * self.columns, self.columns, device=positions.device) + positions
        self._positions, self._used = positions, used
        self._grows, self._masks = True, {}

    def move(self, source: int, target: int, used: int) -> None:
        """Copies the first `used` columns of a row into another."""
        for pair in self.layers.values():
            for x in pair:
                x[target, :used] = x[source, :used]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None) -> Tensor:
        """[rows, heads, length, head_dim] of the queries, after their keys and values are written."""
        if layer not in self.layers:
            shapes = ((self.rows, self.columns, x.shape[1], x.shape[3]) for x in (key, value))
            keys, values = (key.new_zeros(shape) for shape in shapes)
            self.layers[layer] = keys, values
        keys, values = self.layers[layer]
        if self._grows:
            return self._attend_newest(query, key, value, keys, values, scale, window)
        keys[self._chosen, self._run] = key.transpose(1, 2)
        values[self._chosen, self._run] = value.transpose(1, 2)
        grouped = query.shape[1] != key.shape[1]
        if self._run.start == 0 and (window is None or window >= self._run.stop):
            return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=grouped)
        seen = (x[self._chosen, : self._run.stop].transpose(1, 2) for x in (keys, values))
        mask = self._chunk_mask(window, query.device)
        return scaled_dot_product_attention(query, *seen, attn_mask=mask, scale=scale, enable_gqa=grouped)

    def _attend_newest(
        self, query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, scale: float | None, window: int | None
    ) -> Tensor:
        rows, heads, _, head_dim = query.shape
        kv_heads = key.shape[1]
        for x, new in ((keys, key), (values, value)):
            x.view(-1, kv_heads, x.shape[-1]).index_copy_(0, self._at, new[:, :, 0])
        # The heads that share keys become the queries' length: nothing is repeated.
        grouped = query.reshape(rows, kv_heads, heads // kv_heads, head_dim)
        seen = (x[:rows, : self._used].transpose(1, 2) for x in (keys, values))
        mask = self._newest_mask(window, query.dtype)
        attended = scaled_dot_product_attention(grouped, *seen, attn_mask=mask, scale=scale)
        return attended.reshape(rows, heads, 1, -1)

    def _newest_mask(self, window: int | None, dtype: torch.dtype) -> Float[Tensor, "rows 1 1 used"]:
        """0 at the columns a row sees, else minus infinity: made once a step for all layers of one window."""
        if window not in self._masks:
            columns, positions = torch.arange(self._used, device=self._positions.device), self._positions[:, None]
            hidden = columns > positions
            if window is not None:
                hidden |= columns <= positions - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -math.inf)
            self._masks[window] = mask[:, None, None]
        return self._masks[window]

    def _chunk_mask(self, window: int | None, device: torch.device) -> Tensor:
        if window not in self._masks:
            columns = torch.arange(self._run.stop, device=device)
            own = columns[self._run.start :, None]
            self._masks[window] = (columns <= own) & (columns > own - (window or self._run.stop))
        return self._masks[window]


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    cache: Cache,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in each layer. Raises NotImplementedError for attention that is not a plain softmax."""
    if softcap is not None or s_aux is not None or position_bias is not None:
        raise NotImplementedError(f"{type(module).__name__} caps or biases its attention, which the torch sampler does not do")
    return cache.attend(module.layer_idx, query, key, value, scaling, sliding_window).transpose(1, 2), None


AttentionInterface.register(ATTENTION, attend)
