"""Layers divided among stages: the same numbers as without, on one device. What stages on several devices compute is in
test_sharding, test_processes and test_sharded_checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_x.errors import UserError
from areal_x.hf import model_dir
from areal_x_jax.architecture import Architecture, read_architecture
from areal_x_jax.model import hidden_states
from areal_x_jax.sharding import ONE_DEVICE, Partitioner, check_divisible
from areal_x_jax.weights import from_tensors
from tests.experts import recorded
from tests.thorough import further

ROWS, LENGTH = 4, 12


class Staged(Partitioner):
    """Stages on one device. shares: of the rows, as that many devices would have them."""

    def __init__(self, stages: int, shares: int) -> None:
        super().__init__()
        object.__setattr__(self, "sizes", {("stage",): stages, ("data", "fsdp", "expert"): shares})

    def size(self, *axes: str) -> int:
        sizes: dict[tuple[str, ...], int] = self.sizes  # type: ignore[attr-defined]
        return sizes.get(axes, 1)


def rows_of(vocab: int) -> dict[str, Any]:
    """Rows of three segments, the second of which continues the first; the last row has padding."""
    rng = np.random.default_rng(0)
    segments = np.repeat([[1, 2, 3]], [4, 4, 4], axis=1) * np.ones((ROWS, 1), int)
    segments[-1, 7:] = 0
    at = np.concatenate([np.arange(4), np.arange(4, 8), np.arange(4)]) * np.ones((ROWS, 1), int)
    until = np.repeat([8, 8, 12], 4) * np.ones((ROWS, 1), int)
    until[-1] = np.where(segments[-1] > 0, 7, 0)
    tokens = rng.integers(0, vocab, (ROWS, LENGTH))
    return {"tokens": tokens, "positions": at, "segment_ids": segments, "until": until}


def computed(arch: Architecture, params: Any, partitioner: Partitioner, rows: dict[str, Any]) -> Any:
    """Hidden states, the use of experts, and the gradient of their sums weighted by random numbers."""
    counted = (rows["segment_ids"] > 0)[..., None]
    weights = np.random.default_rng(1).normal(size=(*rows["tokens"].shape, arch.hidden)) * counted

    def total(params: Any) -> Any:
        hidden, use = hidden_states(arch, params, partitioner=partitioner, **rows)
        return jnp.sum(hidden * weights), (hidden * counted, use)

    return jax.jit(jax.value_and_grad(total, has_aux=True))(params)


@pytest.mark.parametrize(("stages", "shares"), [(2, 1), *further((4, 1), (2, 4), (4, 2))])
@pytest.mark.parametrize("name", ["even-gemma3", "even-moe", *further("even-gemma4")])
def test_stages_compute_what_all_layers_do(name: str, stages: int, shares: int, model_dir_of: Callable[[str], Path]) -> None:
    directory = model_dir_of(name)
    arch = read_architecture(model_dir.read_config(directory))
    if name in ("even-moe", "even-gemma4") and stages == 4:
        pytest.skip("its layers are of two kinds in turn")
    params = from_tensors(arch, model_dir.read_tensors(directory), str(directory), ONE_DEVICE, jnp.float32)
    rows = rows_of(arch.vocab)
    if arch.experts is not None:
        rows |= {"trained": np.random.default_rng(2).random((ROWS, LENGTH)) < 0.5}
        rows |= {"recorded": np.stack([recorded(LENGTH, seed, 8, arch.layers) for seed in range(ROWS)])}
    run = partial(computed, arch, params)
    (_, (expected, whole)), of_expected = run(ONE_DEVICE, rows)
    (_, (hidden, use)), gradient = run(Staged(stages, shares), rows)
    np.testing.assert_allclose(hidden, expected, atol=1e-5)
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-4, rtol=1e-4), gradient, of_expected)
    if arch.experts is not None:
        of_turns = [
            (np.count_nonzero(part["segment_ids"]), run(ONE_DEVICE, part)[0][1][1].imbalance)
            for part in ({key: x[at] for key, x in rows.items()} for at in turns_of(shares))
        ]
        tokens, of_each = zip(*of_turns, strict=True)
        assert float(use.imbalance) == pytest.approx(np.average(of_each, weights=tokens), rel=1e-5)
        np.testing.assert_array_equal(use.load, whole.load)
        assert (use.load.sum(-1) == 2 * rows["trained"].sum()).all()


def turns_of(shares: int) -> np.ndarray:
    """The rows of each turn: one of each share's block."""
    return np.arange(ROWS).reshape(shares, -1).T


def test_a_model_with_a_tower_is_refused(model_dir_of: Callable[[str], Path]) -> None:
    arch = read_architecture(model_dir.read_config(model_dir_of("qwen3_vl")))
    with pytest.raises(UserError, match=r"mesh\.stage = 2 cannot divide a model with a vision tower"):
        check_divisible(Staged(2, 1), arch)
