"""Decoding whose numbers do not depend on what else is decoded, bit for bit.

The bits of a product depend on the number of its rows, for which libraries choose kernels, and those of
attention on the number of columns. So a step has the same number of rows each time, with padding for
those that are missing, and a multiple of COLUMNS columns; more rows are several steps. Whether a row's
numbers then depend on nothing but the row is measured when a sampler is built. Where they do not (the
experts of a mixture have other numbers of tokens each time), each row is computed alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from areal_x_torch.decode_step import Step
from areal_x_torch.kv_cache import Cache, Layer, StateLayer
from areal_x_torch.sampling import RowSampling, sample, uniform
from areal_x_torch.slot_adapters import SlotAdapters

if TYPE_CHECKING:
    from areal_x_torch.sampler import Rows

# A step with 16 rows takes 1.6 times as long as one with a single row, on a CPU (measured); with 32,
# 2.2 times.
ROWS = 16
COLUMNS = 64
TRIED_COLUMNS = 1024
TRIED_RANKS = 16, 64


def padded(rows: int, to: int) -> int:
    """Returns the least multiple of a number that is not less."""
    return -(-rows // to) * to


@dataclass
class Block:
    """Rows of a lane that take a step together, and padding."""

    own: slice
    """Where the rows are in the cache."""

    running: Sequence[Tensor]
    """Their adapters (areal_x_torch.slot_adapters.Running); nothing of a model without."""

    token: Int[Tensor, " rows"]
    """The newest, not yet in the cache."""

    column: Int[Tensor, " rows"]
    shift: Int[Tensor, " rows"]
    uniforms: Float[Tensor, "rows steps"]
    sampling: RowSampling
    used: int
    """Columns of the longest row."""

    whole: int
    """Of whose multiple a step has columns."""

    @staticmethod
    def of(
        rows: Rows,
        own: slice,
        size: int,
        steps: int,
        running: Sequence[Tensor],
        device: torch.device,
        exact: bool,
    ) -> Block:
        """size: of rows and padding. steps: of which there are numbers. exact: whether the rows'
        numbers are to depend on nothing else."""

        def tensor(x: np.ndarray) -> Tensor:
            more = [(0, size - len(rows)), *[(0, 0)] * (x.ndim - 1)]
            return torch.from_numpy(np.pad(x, more)).to(device)

        def setting(x: np.ndarray, plain: float) -> np.ndarray:
            return np.pad(x, (0, size - len(rows)), constant_values=plain)

        sampling = RowSampling.of(
            setting(rows.temperature, 1),
            setting(rows.top_p, 1),
            setting(rows.top_k, 0),
            setting(rows.min_p, 0),
            device,
        )
        return Block(
            own=own,
            running=running,
            token=tensor(rows.token),
            column=tensor(rows.column),
            shift=tensor(rows.shift),
            uniforms=tensor(uniform(rows.seed, rows.generated[:, None] + np.arange(steps))),
            sampling=sampling,
            used=int(rows.column.max()) + 1,
            whole=COLUMNS if exact else 1,
        )

    def grow(
        self, step: Step, cache: Cache, number: int
    ) -> tuple[
        Int[np.ndarray, " own"], Float[np.ndarray, " own"], Bool[Tensor, "own words"] | None
    ]:
        """Takes the step of a number. Returns the tokens with their log-probabilities, and what
        `sampling.sample` kept."""
        used = padded(self.used + number, self.whole)
        newest = cache.newest(self.column[:, None], used, self.own.start)
        positions = (self.column + self.shift)[:, None]
        logits = step(*self.running, self.token[:, None], positions, *newest)
        token, logprob, kept = sample(logits, self.uniforms[:, number, None], self.sampling)
        self.token, self.column = token, self.column + 1
        count = self.own.stop - self.own.start
        found = token[:count].cpu().numpy(), logprob[:count].cpu().numpy()
        return *found, None if kept is None else kept[:count]


@torch.inference_mode()
def rows_at_once(
    step: Step,
    layers: Sequence[Layer | StateLayer],
    like: Cache,
    rows: int,
    vocabulary: int,
    slots: SlotAdapters | None,
) -> int:
    """Returns the number of rows of each step: `rows` if a row's numbers then depend on nothing but
    itself, else 1. like: a cache of these layers."""
    keys = like.keys[0]
    random = torch.Generator().manual_seed(0)

    def drawn(most: int) -> Tensor:
        return torch.randint(most, (rows,), generator=random).to(keys.device)

    columns = padded(min(like.columns, TRIED_COLUMNS), COLUMNS)
    cache = Cache(layers, rows, columns, keys.dtype, keys.device)
    for x in (*cache.keys, *cache.values):
        x.copy_(torch.randn(x.shape, generator=random))
    tokens, own = drawn(vocabulary), drawn(COLUMNS)
    plain = np.ones(rows), np.ones(rows), np.zeros(rows, np.int64), np.zeros(rows)
    sampling = RowSampling.of(*plain, keys.device)

    def found(name: str | None, order: Tensor, tokens: Tensor, used: int) -> list[Tensor]:
        given = Cache(layers, rows, columns, keys.dtype, keys.device)
        for x, y in zip((*given.keys, *given.values), (*cache.keys, *cache.values), strict=True):
            x.copy_(y[order])
        running = [] if slots is None else [*slots.running([name] * rows)]
        at = own[order, None]
        logits = step(*running, tokens[order, None], at, *given.newest(at, used))
        uniforms = (torch.arange(rows, device=keys.device) + 0.5)[order, None] / rows
        return [logits, *sample(logits, uniforms, sampling)[:2]]

    adapters: list[str | None] = [None]
    if slots is not None:
        adapters = [f"rank {rank}" for rank in TRIED_RANKS]
        for name, rank in zip(adapters, TRIED_RANKS, strict=True):
            slots.put(str(name), slots.drawn(rank, random))
    same = torch.arange(rows, device=keys.device)
    # The second half becomes other rows, with which the first half changes places.
    others = torch.where(same < rows // 2, tokens, drawn(vocabulary))
    turned = same.flip(0)
    kept = turned < max(rows // 2, 1)
    independent = True
    for name in adapters:
        for _ in range(2):  # a graph is optimised after its first run
            expected = found(name, same, tokens, COLUMNS)
        for used in (COLUMNS, columns):
            for x, y in zip(expected, found(name, turned, others, used), strict=True):
                independent &= torch.equal(y[kept], x[turned[kept]])
    for name in adapters:
        if slots is not None:
            slots.remove(str(name))
    return rows if independent else 1
