"""Gated delta rule layers over packed rows: against the recurrence itself, token by token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from areal_x.errors import ConfigError, UserError
from areal_x.protocols.trainer_config import MeshConfig
from areal_x_jax import delta_rule
from areal_x_jax.architecture import check_sharing, read_architecture
from areal_x_jax.delta_rule import NONE, Inputs
from areal_x_jax.sharding import AXES, Partitioner, check_divisible, staged
from tests.model_families import CASES

HEADS, GROUP, KEYS, VALUES = 2, 3, 4, 5
ARCHITECTURES = {"qwen3_next": "Qwen3NextForCausalLM", "qwen3_5_text": "Qwen3_5ForCausalLM"}


def inputs_of(rows: int, length: int, seed: int = 0) -> Inputs:
    """Random, with states that last: a decay of 0.9 or more."""
    rng = np.random.default_rng(seed)
    query, key = (rng.normal(size=(rows, length, HEADS, KEYS)) for _ in range(2))
    value = rng.normal(size=(rows, length, HEADS, GROUP, VALUES))
    g, beta = (rng.uniform(size=(rows, length, HEADS, GROUP)) for _ in range(2))
    query, key = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (query, key))
    return Inputs(*(jnp.asarray(x, jnp.float32) for x in (query, key, value, -0.1 * g, beta)))


def token_by_token(inputs: Inputs, ids: np.ndarray) -> tuple[Any, Any]:
    """The recurrence as the paper writes it; returns its outputs and the states after each token."""

    def step(carry: Any, of: Any) -> Any:
        states, before = carry
        (query, key, value, g, beta), own = of
        states = jnp.where((own == before)[:, None, None, None, None], states, 0) * jnp.exp(g)[..., None, None]
        read = jnp.einsum("rhk,rhgkv->rhgv", key, states)
        states = states + jnp.einsum("rhk,rhgv->rhgkv", key, beta[..., None] * (value - read))
        return (states, own), (jnp.einsum("rhk,rhgkv->rhgv", query, states), states)

    rows = len(ids)
    nothing = jnp.zeros((rows, HEADS, GROUP, KEYS, VALUES)), jnp.full(rows, NONE)
    by_token = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (inputs, jnp.asarray(ids)))
    _, (outputs, states) = jax.lax.scan(step, nothing, by_token)
    return jnp.moveaxis(outputs, 0, 1), jnp.moveaxis(states, 0, 1)


# Segments that end within a chunk, with one, one of a token, several chunks long; padding; rows shorter than a chunk.
ROWS = [
    np.repeat([[1, 2, 3, 4, 5, 0]], [20, 44, 1, 70, 30, 5], axis=1),
    np.stack([np.repeat([1, 2, 0], [7, 3, 2]), np.repeat([1, 0], [11, 1])]),
]


@pytest.mark.parametrize("ids", ROWS, ids=["long", "short"])
def test_chunks_compute_the_recurrence_and_its_gradients(ids: np.ndarray) -> None:
    inputs = inputs_of(*ids.shape)
    slopes = jnp.linspace(-1, 1, ids.size).reshape(*ids.shape, 1, 1, 1)

    def total(rule: Any) -> Any:
        return jax.jit(jax.value_and_grad(lambda inputs: (rule(inputs) * slopes).sum()))(inputs)

    mine = jax.jit(delta_rule.gated_delta_rule)(inputs, jnp.asarray(ids))
    np.testing.assert_allclose(mine, token_by_token(inputs, ids)[0], atol=2e-5)
    of_chunks = total(lambda inputs: delta_rule.gated_delta_rule(inputs, jnp.asarray(ids)))
    of_tokens = total(lambda inputs: token_by_token(inputs, ids)[0])
    for found, expected in zip(jax.tree.leaves(of_chunks), jax.tree.leaves(of_tokens), strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-5 * max(1, float(np.abs(expected).max())))


def test_states_are_those_of_the_recurrence_from_chunk_to_chunk() -> None:
    """As a prefill leaves them after each of its pieces, the first of which continues a sequence."""
    ids, inputs = np.repeat([[0, 1, 2, -1]], [90, 30, 50, 10], axis=1), inputs_of(1, 180)
    _, expected = token_by_token(inputs, ids)
    half, nothing = 40, jnp.zeros((1, HEADS, GROUP, KEYS, VALUES))
    before, rest = (jax.tree.map(lambda x, part=part: x[:, part], inputs) for part in (slice(half), slice(half, None)))
    _, first = delta_rule.scan_chunks(before, jnp.asarray(ids[:, :half]), nothing, NONE)
    carried = delta_rule.state_after(first, jnp.int32(half - 1))
    np.testing.assert_allclose(carried, expected[0, half - 1], atol=1e-5)
    _, second = delta_rule.scan_chunks(rest, jnp.asarray(ids[:, half:]), carried[None], 0)
    for end in (90, 100, 120, 170):  # 100 is within the second
        found = delta_rule.state_after(second, jnp.int32(end - half - 1))
        np.testing.assert_allclose(found, expected[0, end - 1], atol=1e-5)
    token = jax.tree.map(lambda x: x[:, 90], inputs)
    _, after = delta_rule.next_token(token, jnp.zeros_like(expected[:, 0]))
    np.testing.assert_allclose(after[0], expected[0, 90], atol=1e-5)


def architecture(name: str, **changes: Any) -> Any:
    return read_architecture({**CASES[name], "architectures": [ARCHITECTURES[name.rpartition("-")[0]]], **changes})


def test_what_such_layers_cannot_do_is_refused_by_name(tmp_path: Path) -> None:
    arch = architecture("qwen3_next-0", vocab_size=48)
    with pytest.raises(ConfigError, match=r"train\.share_prompts = True .*gated delta rule layers.*torch does"):
        check_sharing(True, tmp_path, arch)
    with pytest.raises(UserError, match="linear_num_key_heads = 3 does not divide linear_num_value_heads = 4"):
        architecture("qwen3_5_text-0", linear_num_key_heads=3)
    for sizes, reason in (
        ({"tensor": 4}, r"mesh\.tensor = 4 does not divide the 2 key heads of the delta rule"),
        ({"stage": 2}, r"mesh\.stage = 2 gives stages different kinds .*layers 0, 1, 2 have a gated delta rule"),
    ):
        mesh: Any = AbstractMesh(tuple(sizes.get(axis, 1) for axis in AXES), AXES)
        with pytest.raises(UserError, match=reason):
            check_divisible(Partitioner(mesh), staged(arch, MeshConfig(**sizes)))
    mesh = AbstractMesh(tuple({"tensor": 2}.get(axis, 1) for axis in AXES), AXES)
    with pytest.raises(UserError, match=r"mesh\.tensor = 2 does not divide the 1 key heads of the delta rule"):
        check_divisible(Partitioner(mesh), architecture("qwen3_5_text-0", linear_num_key_heads=1))
