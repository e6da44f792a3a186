"""Context parallelism for rows longer than one device has room for: every flat row's tokens are
split over the processes of the mesh axis "context".

Each process has equally many consecutive tokens in every layer that treats tokens separately. In
attention tokens see each other, but heads do not: before it the processes exchange tokens for
heads, so that each has all tokens of its share of the heads, and after it heads for tokens
(DeepSpeed-Ulysses, arXiv 2309.14509).
"""

from __future__ import annotations

from math import gcd

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributed import ProcessGroup
from transformers import PreTrainedConfig

from areal_x.errors import ConfigError
from areal_x.protocols.trainer_config import MeshConfig
from areal_x_torch.collectives import AllToAll
from areal_x_torch.images import counts_in_three
from areal_x_torch.segments import Attend, Attended, Keys, Queries, Segments, Sinks


def check_context(model: PreTrainedConfig, mesh: MeshConfig) -> None:
    """Raises: ConfigError for a model whose tokens cannot be split over this many processes."""

    def wants(what: str) -> ConfigError:
        return ConfigError("mesh.context", mesh.context, what)

    if mesh.context == 1:
        return
    if counts_in_three(model):
        raise wants("1, as torch does not split rows with images yet: use mesh.fsdp")
    text = model.get_text_config()
    if text.num_attention_heads % (mesh.context * mesh.tensor):
        over = (
            f" / mesh.tensor = {text.num_attention_heads // mesh.tensor}" if mesh.tensor > 1 else ""
        )
        raise wants(
            f"a divisor of the model's num_attention_heads = {text.num_attention_heads}{over}"
        )
    heads = getattr(text, "linear_num_key_heads", None)  # of gated delta rule layers
    if heads and heads % mesh.context:
        raise wants(f"a divisor of the model's linear_num_key_heads = {heads}")


def token_range(tokens: int, group: ProcessGroup | None) -> slice:
    """Returns this process's tokens of a row; all of them if no other process shares it."""
    if group is None:
        return slice(0, tokens)
    each = tokens // group.size()
    return slice(group.rank() * each, (group.rank() + 1) * each)


def ulysses(attend: Attend, group: ProcessGroup | None) -> Attend:
    """Wraps an attention function for queries, keys and values of this process's tokens, in rows
    whose segments are given whole."""
    if group is None:
        return attend
    processes = group.size()

    def exchanged(
        query: Queries,
        key: Keys,
        value: Keys,
        segments: Segments,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Sinks | None = None,
    ) -> Attended:
        key, value = (repeated(x, processes) for x in (key, value))
        parts = [x[0].transpose(0, 1).unflatten(1, (processes, -1)) for x in (query, key, value)]
        # One exchange for all three: for a short part of a row, latency costs more than volume.
        whole = to_heads(torch.cat([x.flatten(2) for x in parts], dim=2), group)
        shares = whole.split([x.shape[2] * x.shape[3] for x in parts], dim=1)
        query, key, value = (
            x.unflatten(1, of.shape[2:]).transpose(0, 1)[None]
            for x, of in zip(shares, parts, strict=True)
        )
        if sinks is not None:
            sinks = sinks.unflatten(0, (processes, -1))[group.rank()]
        attended = attend(query, key, value, segments, scale, window, softcap, sinks)
        own = to_tokens(attended[0].flatten(1), group)
        return own.unflatten(2, attended.shape[2:]).flatten(1, 2)[None]

    return exchanged


def repeated(x: Keys, processes: int) -> Keys:
    """Repeats heads of keys or values so that every process has those that its share of the
    queries reads, and no more: `processes` divides the heads of queries, which share them in
    equal groups."""
    times = processes // gcd(processes, x.shape[1])
    return x if times == 1 else x.repeat_interleave(times, dim=1)


def to_heads(
    x: Float[Tensor, "own_tokens processes features"], group: ProcessGroup
) -> Float[Tensor, "tokens features"]:
    """Exchanges what all processes need of this process's tokens for what it needs of all
    tokens."""
    return _exchanged(x.transpose(0, 1).flatten(0, 1), group)


def to_tokens(
    x: Float[Tensor, "tokens features"], group: ProcessGroup
) -> Float[Tensor, "own_tokens processes features"]:
    """The inverse of `to_heads`."""
    return _exchanged(x, group).unflatten(0, (group.size(), -1)).transpose(0, 1)


def _exchanged(
    x: Float[Tensor, "rows features"], group: ProcessGroup
) -> Float[Tensor, "rows features"]:
    """Exchanges equally many rows with each process."""
    each = [len(x) // group.size()] * group.size()
    received: Tensor = AllToAll.apply(x, each, each, group)
    return received
