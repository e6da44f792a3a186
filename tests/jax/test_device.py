"""What depends on the memory of a device, and the precision of its products."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from areal_x_jax import device


def gpu(**stats: Any) -> Any:
    return SimpleNamespace(platform="gpu", memory_stats=lambda: stats)


def test_an_unknown_memory_leaves_what_a_cpu_has() -> None:
    assert device.memory_of(jax.devices("cpu")[0]) is None
    assert device.memory_of(gpu()) is None
    assert device.room_for_activations(None, (), jnp.bfloat16) == device.SAVED_BYTES
    assert device.logits_at_once(None) == device.LOGITS


def test_half_of_what_a_trainers_state_leaves_is_for_activations() -> None:
    memory = device.memory_of(gpu(bytes_limit=10**6))
    params, moments = {"w": jnp.zeros((10, 10))}, {"w": jnp.zeros((10, 10))}
    frozen = {"v": jnp.zeros(50, jnp.bfloat16)}
    # Parameters, two gradients and moments in fp32, a copy in bf16; frozen ones are there once.
    taken = 100 * (4 * 4 + 2) + 50 * 2
    assert device.room_for_activations(memory, (params, moments, frozen, None), jnp.bfloat16) == (10**6 - taken) // 2
    assert device.room_for_activations(1000, (params, moments, None, None), jnp.bfloat16) == 0


def test_blocks_of_logits_grow_with_the_memory() -> None:
    assert device.logits_at_once(2**30) == device.LOGITS
    assert device.logits_at_once(2**37) == 2**29


@pytest.mark.parametrize(
    ("platform", "chosen", "wanted"), [("cpu", None, None), ("gpu", None, "highest"), ("gpu", "high", "high")]
)
def test_fp32_is_exact_on_an_accelerator_unless_the_user_chose(platform: str, chosen: str | None, wanted: str | None) -> None:
    before = jax.config.jax_default_matmul_precision
    try:
        jax.config.update("jax_default_matmul_precision", chosen)
        device.compute_in_fp32(platform)
        assert jax.config.jax_default_matmul_precision == wanted
    finally:
        jax.config.update("jax_default_matmul_precision", before)
