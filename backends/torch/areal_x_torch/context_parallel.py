"""Rows longer than one device has room for: every flat row's tokens are split over the processes of
the mesh's axis "context".

Each process has equally many, one after the other, for every layer that sees tokens alone.
Attention sees the others, but no head sees another: before it the processes exchange tokens for
heads, so that each has all tokens of its share of the heads and attends as one process does, and
after it heads for tokens (DeepSpeed-Ulysses, arXiv 2309.14509).
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
from areal_x_torch.attention import Attend, Attended, Keys, Queries, Segments
from areal_x_torch.collectives import AllToAll


def check_context(model: PreTrainedConfig, mesh: MeshConfig) -> None:
    """Raises: ConfigError for a model whose tokens cannot be split over so many processes."""

    def wants(what: str) -> ConfigError:
        return ConfigError("mesh.context", mesh.context, what)

    if mesh.context == 1:
        return
    if hasattr(model, "vision_config"):
        raise wants("1, as torch does not split the rows of a model that sees yet: use mesh.fsdp")
    if model.num_attention_heads % (mesh.context * mesh.tensor):
        over = (
            f" / mesh.tensor = {model.num_attention_heads // mesh.tensor}"
            if mesh.tensor > 1
            else ""
        )
        raise wants(
            f"a divisor of the model's num_attention_heads = {model.num_attention_heads}{over}"
        )


def token_range(tokens: int, group: ProcessGroup | None) -> slice:
    """Which tokens of a row are this process's; all where no others share it."""
    if group is None:
        return slice(0, tokens)
    each = tokens // group.size()
    return slice(group.rank() * each, (group.rank() + 1) * each)


def ulysses(attend: Attend, group: ProcessGroup | None) -> Attend:
    """Attention by `attend` to and from this process's tokens alone, of rows whose segments are
    given whole."""
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
    ) -> Attended:
        key, value = (repeated(x, processes) for x in (key, value))
        parts = [x[0].transpose(0, 1).unflatten(1, (processes, -1)) for x in (query, key, value)]
        # One exchange of all three, as a message costs more than its size where a row's part is
        # short.
        whole = to_heads(torch.cat([x.flatten(2) for x in parts], dim=2), group)
        shares = whole.split([x.shape[2] * x.shape[3] for x in parts], dim=1)
        query, key, value = (
            x.unflatten(1, of.shape[2:]).transpose(0, 1)[None]
            for x, of in zip(shares, parts, strict=True)
        )
        attended = attend(query, key, value, segments, scale, window, softcap)
        own = to_tokens(attended[0].flatten(1), group)
        return own.unflatten(2, attended.shape[2:]).flatten(1, 2)[None]

    return exchanged


def repeated(x: Keys, processes: int) -> Keys:
    """Heads of keys or values, each so often that every process has the heads which its share of
    the queries reads, and no oftener: `processes` divides the heads of queries, of which as many
    read each of these."""
    times = processes // gcd(processes, x.shape[1])
    return x if times == 1 else x.repeat_interleave(times, dim=1)


def to_heads(
    x: Float[Tensor, "own_tokens processes features"], group: ProcessGroup
) -> Float[Tensor, "tokens features"]:
    """From what all processes need of a process's tokens to what it needs of all tokens."""
    return _exchanged(x.transpose(0, 1).flatten(0, 1), group)


def to_tokens(
    x: Float[Tensor, "tokens features"], group: ProcessGroup
) -> Float[Tensor, "own_tokens processes features"]:
    """The way back."""
    return _exchanged(x, group).unflatten(0, (group.size(), -1)).transpose(0, 1)


def _exchanged(
    x: Float[Tensor, "rows features"], group: ProcessGroup
) -> Float[Tensor, "rows features"]:
    """As many rows for each process."""
    each = [len(x) // group.size()] * group.size()
    received: Tensor = AllToAll.apply(x, each, each, group)
    return received
