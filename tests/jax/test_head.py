from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from areal_x.algorithms.distillation import generalized_jsd
from areal_x_jax import head

from .conftest import log_softmax

ROWS, LENGTH, FEATURES, VOCAB = 3, 17, 8, 29
SEGMENTS = np.stack([np.repeat([1, 2, 0], [8, 6, 3]), np.full(LENGTH, 1), np.repeat([1, 2, 3], [1, 15, 1])])


def drawn(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(ROWS, LENGTH, FEATURES)).astype(np.float32)
    kernel = rng.normal(size=(FEATURES, VOCAB)).astype(np.float32)
    return hidden, kernel, rng.integers(0, VOCAB, (ROWS, LENGTH)).astype(np.int32)


def places() -> Iterator[tuple[int, int]]:
    """Row and column of each token that has another before it in its segment."""
    for row in range(ROWS):
        for t in range(1, LENGTH):
            if SEGMENTS[row, t] == SEGMENTS[row, t - 1] != 0:
                yield row, t


def by_hand(hidden: np.ndarray, kernel: np.ndarray, tokens: np.ndarray, temperature: float) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities and entropies."""
    logp, entropy = np.zeros((2, ROWS, LENGTH))
    for row, t in places():
        of_all = log_softmax(hidden[row, t - 1] @ kernel / temperature)
        logp[row, t], entropy[row, t] = of_all[tokens[row, t]], -(np.exp(of_all) * of_all).sum()
    return logp, entropy


@pytest.mark.parametrize("chunk", [1, 7, 12, 30, 48, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_each_token_is_predicted_from_the_one_before_it_in_its_segment(chunk: int, temperature: float) -> None:
    hidden, kernel, tokens = drawn()
    ours, *unasked = head.logprobs(hidden, kernel, tokens, SEGMENTS, temperature, chunk)
    assert unasked == [None, None]
    np.testing.assert_allclose(ours, by_hand(hidden, kernel, tokens, temperature)[0], atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_entropy_is_of_the_distribution_that_the_token_was_drawn_from(chunk: int, temperature: float) -> None:
    hidden, kernel, tokens = drawn()
    ours = head.logprobs(hidden, kernel, tokens, SEGMENTS, temperature, chunk, entropy=True)
    np.testing.assert_allclose(ours[:2], by_hand(hidden, kernel, tokens, temperature), atol=1e-5)


def test_the_entropy_of_equal_logits_is_the_logarithm_of_their_number_and_of_one_sure_token_zero() -> None:
    hidden, kernel, tokens = drawn()
    surest = np.zeros_like(kernel)
    surest[:, 3] = 1e4
    for given, expected in ((0 * kernel, np.log(VOCAB)), (surest, 0.0)):
        _, entropy, _ = head.logprobs(abs(hidden), given, tokens, SEGMENTS, 1.0, 7, entropy=True)
        for row, t in places():
            assert entropy[row, t] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("chunk", [7, 1000])
def test_the_gradient_is_that_of_softmax(chunk: int) -> None:
    hidden, kernel, tokens = drawn(1)
    upstream = np.random.default_rng(2).normal(size=(ROWS, LENGTH)).astype(np.float32)

    def total(hidden: Any, kernel: Any) -> Any:
        logp, _, _ = head.logprobs(hidden, kernel, tokens, SEGMENTS, 0.5, chunk)
        return jnp.sum(upstream * logp)

    d_hidden, d_kernel = jax.grad(total, argnums=(0, 1))(hidden, kernel)
    expected_hidden, expected_kernel = np.zeros_like(hidden), np.zeros_like(kernel)
    for row, t in places():
        softmax = np.exp(log_softmax(hidden[row, t - 1] @ kernel / 0.5))
        d_logits = upstream[row, t] * (np.eye(VOCAB)[tokens[row, t]] - softmax) / 0.5
        expected_hidden[row, t - 1] += kernel @ d_logits
        expected_kernel += np.outer(hidden[row, t - 1], d_logits)
    np.testing.assert_allclose(d_hidden, expected_hidden, atol=1e-4)
    np.testing.assert_allclose(d_kernel, expected_kernel, atol=1e-4)


@pytest.mark.parametrize("chunk", [7, 1000])
def test_the_gradient_of_the_entropy_is_that_of_its_formula(chunk: int) -> None:
    """H = -Σ p log p has the derivative -p_j (log p_j + H) by the logit j."""
    hidden, kernel, tokens = drawn(3)
    upstream = np.random.default_rng(4).normal(size=(ROWS, LENGTH)).astype(np.float32)

    def total(hidden: Any, kernel: Any) -> Any:
        _, entropy, _ = head.logprobs(hidden, kernel, tokens, SEGMENTS, 0.5, chunk, entropy=True)
        return jnp.sum(upstream * entropy)

    d_hidden, d_kernel = jax.grad(total, argnums=(0, 1))(hidden, kernel)
    expected_hidden, expected_kernel = np.zeros_like(hidden), np.zeros_like(kernel)
    for row, t in places():
        logp = log_softmax(hidden[row, t - 1] @ kernel / 0.5)
        entropy = -(np.exp(logp) * logp).sum()
        d_logits = upstream[row, t] * -np.exp(logp) * (logp + entropy) / 0.5
        expected_hidden[row, t - 1] += kernel @ d_logits
        expected_kernel += np.outer(hidden[row, t - 1], d_logits)
    np.testing.assert_allclose(d_hidden, expected_hidden, atol=1e-4)
    np.testing.assert_allclose(d_kernel, expected_kernel, atol=1e-4)


@pytest.mark.parametrize("chunk", [7, 1000])
def test_a_divergence_is_of_both_distributions_before_the_token_and_its_gradient_the_students(chunk: int) -> None:
    """KL(teacher ‖ student) has the derivative p - q by the student's logits, p the student's and q the teacher's."""
    hidden, kernel, tokens = drawn(5)
    rng = np.random.default_rng(6)
    teacher = rng.normal(size=(ROWS, LENGTH, 3)).astype(np.float32), rng.normal(size=(3, VOCAB)).astype(np.float32)
    upstream = rng.normal(size=(ROWS, LENGTH)).astype(np.float32)

    def total(hidden: Any, kernel: Any) -> Any:
        beside = head.Teacher(*teacher, partial(generalized_jsd, beta=0))
        _, _, divergence = head.logprobs(hidden, kernel, tokens, SEGMENTS, 0.5, chunk, teacher=beside)
        return jnp.sum(upstream * divergence), divergence

    (d_hidden, d_kernel), ours = jax.grad(total, argnums=(0, 1), has_aux=True)(hidden, kernel)
    expected, expected_hidden, expected_kernel = np.zeros((ROWS, LENGTH)), np.zeros_like(hidden), np.zeros_like(kernel)
    for row, t in places():
        logp, logq = log_softmax(hidden[row, t - 1] @ kernel / 0.5), log_softmax(teacher[0][row, t - 1] @ teacher[1] / 0.5)
        expected[row, t] = (np.exp(logq) * (logq - logp)).sum()
        d_logits = upstream[row, t] * (np.exp(logp) - np.exp(logq)) / 0.5
        expected_hidden[row, t - 1] += kernel @ d_logits
        expected_kernel += np.outer(hidden[row, t - 1], d_logits)
    np.testing.assert_allclose(ours, expected, atol=1e-5)
    np.testing.assert_allclose(d_hidden, expected_hidden, atol=1e-4)
    np.testing.assert_allclose(d_kernel, expected_kernel, atol=1e-4)


def test_a_value_is_of_the_token_itself_or_of_the_one_before_it_in_its_segment() -> None:
    hidden, kernel, _ = drawn()
    own, before = np.zeros((2, ROWS, LENGTH))
    for row, t in np.argwhere(SEGMENTS):
        own[row, t] = hidden[row, t] @ kernel[:, 0]
    for row, t in places():
        before[row, t] = hidden[row, t - 1] @ kernel[:, 0]
    np.testing.assert_allclose(head.values(hidden, kernel[:, :1], SEGMENTS, before=False), own, atol=1e-5)
    np.testing.assert_allclose(head.values(hidden, kernel[:, :1], SEGMENTS, before=True), before, atol=1e-5)


def arrays_in(jaxpr: Any) -> Iterator[int]:
    """The size of each array that a program computes, its inner programs included."""
    for equation in jaxpr.eqns:
        yield from (v.aval.size for v in equation.outvars if hasattr(v.aval, "size"))
        for inner in jaxprs_in_params(equation.params):
            yield from arrays_in(inner)


@pytest.mark.parametrize("entropy, teacher", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("chunk, exists", [(8, False), (1000, True)])
def test_no_array_of_tokens_by_vocabulary_exists_forward_or_backward(
    chunk: int, exists: bool, entropy: bool, teacher: bool
) -> None:
    hidden, kernel = np.zeros((4, 33, 8), np.float32), np.zeros((8, 999), np.float32)
    ids = np.ones((4, 33), np.int32)
    beside = head.Teacher(hidden, kernel, partial(generalized_jsd, beta=0.5)) if teacher else None

    def total(hidden: Any, kernel: Any) -> Any:
        given = head.logprobs(hidden, kernel, ids, ids, 1.0, chunk, entropy, beside)
        return sum(jnp.sum(x) for x in jax.tree.leaves(given))

    program = jax.make_jaxpr(jax.grad(total, argnums=(0, 1)))(hidden, kernel)
    largest = max(arrays_in(program.jaxpr))
    assert (largest >= 4 * 32 * 999) == exists
    assert exists or largest <= 8 * 999
