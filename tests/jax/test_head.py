from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from areal_x_jax import head

from .conftest import log_softmax

ROWS, LENGTH, FEATURES, VOCAB = 3, 17, 8, 29
SEGMENTS = np.stack([np.repeat([1, 2, 0], [8, 6, 3]), np.full(LENGTH, 1), np.repeat([1, 2, 3], [1, 15, 1])])


def drawn(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(ROWS, LENGTH, FEATURES)).astype(np.float32)
    kernel = rng.normal(size=(FEATURES, VOCAB)).astype(np.float32)
    return hidden, kernel, rng.integers(0, VOCAB, (ROWS, LENGTH)).astype(np.int32)


def by_hand(hidden: np.ndarray, kernel: np.ndarray, tokens: np.ndarray, temperature: float) -> np.ndarray:
    expected = np.zeros((ROWS, LENGTH))
    for row in range(ROWS):
        for t in range(1, LENGTH):
            if SEGMENTS[row, t] == SEGMENTS[row, t - 1] != 0:
                expected[row, t] = log_softmax(hidden[row, t - 1] @ kernel / temperature)[tokens[row, t]]
    return expected


@pytest.mark.parametrize("chunk", [1, 7, 12, 30, 48, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_each_token_is_predicted_from_the_one_before_it_in_its_segment(chunk: int, temperature: float) -> None:
    hidden, kernel, tokens = drawn()
    ours = head.logprobs(hidden, kernel, tokens, SEGMENTS, temperature, chunk)
    np.testing.assert_allclose(ours, by_hand(hidden, kernel, tokens, temperature), atol=1e-5)


@pytest.mark.parametrize("chunk", [7, 1000])
def test_the_gradient_is_that_of_softmax(chunk: int) -> None:
    hidden, kernel, tokens = drawn(1)
    upstream = np.random.default_rng(2).normal(size=(ROWS, LENGTH)).astype(np.float32)

    def total(hidden: Any, kernel: Any) -> Any:
        return jnp.sum(upstream * head.logprobs(hidden, kernel, tokens, SEGMENTS, 0.5, chunk))

    d_hidden, d_kernel = jax.grad(total, argnums=(0, 1))(hidden, kernel)
    expected_hidden, expected_kernel = np.zeros_like(hidden), np.zeros_like(kernel)
    for row in range(ROWS):
        for t in range(1, LENGTH):
            if SEGMENTS[row, t] == SEGMENTS[row, t - 1] != 0:
                softmax = np.exp(log_softmax(hidden[row, t - 1] @ kernel / 0.5))
                d_logits = upstream[row, t] * (np.eye(VOCAB)[tokens[row, t]] - softmax) / 0.5
                expected_hidden[row, t - 1] += kernel @ d_logits
                expected_kernel += np.outer(hidden[row, t - 1], d_logits)
    np.testing.assert_allclose(d_hidden, expected_hidden, atol=1e-4)
    np.testing.assert_allclose(d_kernel, expected_kernel, atol=1e-4)


def arrays_in(jaxpr: Any) -> Iterator[int]:
    """The size of each array that a program computes, its inner programs included."""
    for equation in jaxpr.eqns:
        yield from (v.aval.size for v in equation.outvars if hasattr(v.aval, "size"))
        for inner in jaxprs_in_params(equation.params):
            yield from arrays_in(inner)


@pytest.mark.parametrize("chunk, exists", [(8, False), (1000, True)])
def test_no_array_of_tokens_by_vocabulary_exists_forward_or_backward(chunk: int, exists: bool) -> None:
    hidden, kernel = np.zeros((4, 33, 8), np.float32), np.zeros((8, 999), np.float32)
    ids = np.ones((4, 33), np.int32)

    def total(hidden: Any, kernel: Any) -> Any:
        return jnp.sum(head.logprobs(hidden, kernel, ids, ids, 1.0, chunk))

    program = jax.make_jaxpr(jax.grad(total, argnums=(0, 1)))(hidden, kernel)
    largest = max(arrays_in(program.jaxpr))
    assert (largest >= 4 * 32 * 999) == exists
    assert exists or largest <= 8 * 999
