"""Layers divided among stages: the same numbers as without, on one device. What stages on several devices compute is in
test_sharding, test_processes and test_sharded_checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_x.errors import UserError
from areal_x.hf import model_dir
from areal_x.protocols.trainer_config import LoRAConfig
from areal_x_jax.architecture import Architecture, read_architecture
from areal_x_jax.decode_step import unstack_layers
from areal_x_jax.lora import init_adapters, trained_architecture
from areal_x_jax.model import hidden_states
from areal_x_jax.pipeline import turns
from areal_x_jax.sharding import ONE_DEVICE, Partitioner, check_stages
from areal_x_jax.weights import from_tensors, to_tensors
from tests.experts import recorded
from tests.models import DELTA, DIVISIBLE, EVEN, FULL, RULE, SIZES, write_config
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


def computed(arch: Architecture, params: Any, partitioner: Partitioner, rows: dict[str, Any], remat: str) -> Any:
    """Hidden states, the use of experts, and the gradient of their sums weighted by random numbers."""
    counted = (rows["segment_ids"] > 0)[..., None]
    weights = np.random.default_rng(1).normal(size=(*rows["tokens"].shape, arch.hidden)) * counted

    def total(params: Any) -> Any:
        hidden, use = hidden_states(arch, params, partitioner=partitioner, remat=remat, **rows)
        return jnp.sum(hidden * weights), (hidden * counted, use)

    return jax.jit(jax.value_and_grad(total, has_aux=True))(params)


def deep(name: str, layers: int, directory: Path) -> Path:
    """A random model of these names with so many layers, of the same kinds in turn."""
    hybrid = SIZES | EVEN | DELTA | {"model_type": "qwen3_5_text", "layer_types": [RULE, FULL]}
    config = dict((DIVISIBLE | {"hybrid": hybrid})[name], num_hidden_layers=layers)
    if "layer_types" in config:
        period = config["layer_types"][:2]
        config["layer_types"] = period * (layers // len(period))
    return write_config(config, directory)


@pytest.mark.parametrize(
    ("name", "layers", "stages", "groups", "shares"),
    [
        ("even-gemma3", 4, 2, 1, 1),
        ("even-moe", 8, 2, 2, 2),
        *further(
            ("even-gemma3", 8, 2, 2, 1),
            ("even-gemma3", 6, 2, 3, 4),
            ("even-gemma3", 4, 4, 1, 2),
            ("even-gemma3", 8, 4, 2, 1),
            ("even-gemma3", 8, 4, 2, 2),
            ("even-gemma3", 6, 2, 3, 2),
            ("even-moe", 4, 2, 1, 4),
            ("even-moe", 12, 2, 3, 4),
            ("even-gemma4", 4, 2, 1, 2),
            ("even-gemma4", 8, 2, 2, 2),
            ("even-latent", 4, 2, 2, 1),
            ("hybrid", 8, 2, 2, 1),
        ),
    ],
)
@pytest.mark.parametrize("remat", ["products", *further("layers")])
def test_stages_compute_what_all_layers_do(
    name: str, layers: int, stages: int, groups: int, shares: int, remat: str, tmp_path: Path
) -> None:
    directory = deep(name, layers, tmp_path)
    arch = read_architecture(model_dir.read_config(directory))
    staged = replace(arch, stages=(stages, groups))
    check_stages(staged)
    tensors = dict(model_dir.read_tensors(directory))
    params, of_stages = (from_tensors(one, tensors.items(), str(directory), ONE_DEVICE) for one in (arch, staged))
    rows = rows_of(arch.vocab)
    if arch.experts is not None:
        rows |= {"trained": np.random.default_rng(2).random((ROWS, LENGTH)) < 0.5}
        rows |= {"recorded": np.stack([recorded(LENGTH, seed, 8, arch.layers) for seed in range(ROWS)])}
    if arch.delta is not None:
        rows["until"] = None
    run = partial(computed, remat=remat)
    (_, (expected, whole)), of_expected = run(arch, params, ONE_DEVICE, rows)
    (_, (hidden, use)), gradient = run(staged, of_stages, Staged(stages, shares), rows)
    np.testing.assert_allclose(hidden, expected, atol=1e-5 * np.abs(expected).max())
    found = dict(to_tensors(staged, gradient))
    near = 1e-5 if arch.delta is None else 2e-4  # a recurrence rounds more
    for tensor, x in to_tensors(arch, of_expected):
        np.testing.assert_allclose(found[tensor], x, atol=near * np.abs(x).max(), err_msg=tensor)
    if arch.experts is not None:
        of_turns = [
            (np.count_nonzero(part["segment_ids"]), run(arch, params, ONE_DEVICE, part)[0][1][1].imbalance)
            for part in ({key: x[at] for key, x in rows.items()} for at in turns_of(shares))
        ]
        tokens, of_each = zip(*of_turns, strict=True)
        assert float(use.imbalance) == pytest.approx(np.average(of_each, weights=tokens), rel=1e-5)
        sparse = arch.layers_in("sparse")
        np.testing.assert_array_equal(use.load, whole.load[np.array([sparse.index(x) for x in staged.stacked("sparse")])])
        assert (use.load.sum(-1) == 2 * rows["trained"].sum()).all()


@pytest.mark.parametrize(("stages", "groups"), [(2, 1), (2, 2), (4, 1), (4, 3)])
def test_stages_lose_the_turns_that_the_formula_gives(stages: int, groups: int) -> None:
    for rows in (stages, stages + 1, 5 * stages):
        lost = 1 - rows * groups / turns(rows, stages, groups)
        assert lost == pytest.approx((stages - 1) / (rows * groups + stages - 1))
    assert turns(1, stages, groups) == stages * groups  # of one row, each in its turn


def test_a_group_has_neighbouring_layers_and_a_stage_one_part_of_each_stack(model_dir_of: Callable[[str], Path]) -> None:
    arch = read_architecture(model_dir.read_config(model_dir_of("even-moe")))
    deep = replace(arch, layers=12, stages=(2, 3), experts=replace(arch.experts, dense=(0, 2, 4, 6, 8, 10)))
    assert deep.stacked("layers") == (0, 1, 4, 5, 8, 9, 2, 3, 6, 7, 10, 11)
    assert deep.stacked("sparse") == (1, 5, 9, 3, 7, 11)
    assert replace(deep, stages=(2, 1)).stacked("layers") == tuple(range(12))


def test_layers_of_a_stage_are_those_of_the_model_for_the_sampler_and_for_adapters(model_dir_of: Callable[[str], Path]) -> None:
    directory = model_dir_of("even-moe-deep")
    arch = read_architecture(model_dir.read_config(directory))
    tensors = dict(model_dir.read_tensors(directory))
    of_stages = replace(arch, stages=(2, 2))
    plain, staged = (unstack_layers(from_tensors(one, tensors.items(), "a model"), one) for one in (arch, of_stages))
    jax.tree.map(np.testing.assert_array_equal, staged, plain)
    adapted = [trained_architecture(one, LoRAConfig(rank=2, targets=("q_proj", "down_proj"))) for one in (arch, of_stages)]
    before, after = (dict(to_tensors(one, init_adapters(one, 3, None))) for one in adapted)
    assert before.keys() == after.keys()
    assert all(np.array_equal(after[name], x) for name, x in before.items())
    assert not np.array_equal(
        *[next(x for name, x in before.items() if f".{i}.self_attn.q_proj.lora_A" in name) for i in (1, 2)]
    )


def turns_of(shares: int) -> np.ndarray:
    """The rows of each turn: one of each share's block."""
    return np.arange(ROWS).reshape(shares, -1).T


def test_a_model_with_a_tower_is_refused(model_dir_of: Callable[[str], Path]) -> None:
    arch = read_architecture(model_dir.read_config(model_dir_of("qwen3_vl")))
    with pytest.raises(UserError, match=r"mesh\.stage = 2 cannot divide a model with a vision tower"):
        check_stages(replace(arch, stages=(2, 1)))
