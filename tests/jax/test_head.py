from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from areal_x.algorithms.distillation import generalized_jsd
from areal_x_jax import head
from areal_x_jax.sharding import ONE_DEVICE, Partitioner
from tests.conftest import python_with
from tests.models import log_softmax
from tests.thorough import further

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
        adapter_leaves = head.Teacher(*teacher, partial(generalized_jsd, beta=0))
        _, _, divergence = head.logprobs(hidden, kernel, tokens, SEGMENTS, 0.5, chunk, teacher=adapter_leaves)
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


def kept_tokens(tokens: np.ndarray, seed: int = 7) -> tuple[dict[tuple[int, int], np.ndarray], np.ndarray]:
    """The kept tokens of about two thirds of the places, the token itself among them, and the pairs of each row."""
    rng = np.random.default_rng(seed)
    kept = {
        place: np.unique([tokens[place], *rng.integers(0, VOCAB, rng.integers(0, 12))])
        for place in places()
        if rng.random() < 0.7
    }
    of_rows = [[(t, token) for (r, t), ids in kept.items() if r == row for token in ids] for row in range(ROWS)]
    pairs = np.full((ROWS, 256, 2), -1, np.int32)
    for row, found in enumerate(of_rows):
        pairs[row, : len(found)] = rng.permutation(found)
    pairs[0, 200] = 0  # as in a row of padding
    return kept, pairs


@pytest.mark.parametrize("chunk", [1, 7, 12, 30, 48, 1000])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_a_truncated_softmax_is_over_the_kept_tokens_alone(chunk: int, softcap: float) -> None:
    hidden, kernel, tokens = drawn(3)
    kept, pairs = kept_tokens(tokens)
    ours = head.logprobs(hidden, kernel, tokens, SEGMENTS, 0.7, chunk, entropy=True, softcap=softcap, kept=pairs)
    logp, entropy = np.zeros((2, ROWS, LENGTH))
    for row, t in places():
        logits = hidden[row, t - 1].astype(np.float64) @ kernel
        logits = (softcap * np.tanh(logits / softcap) if softcap else logits) / 0.7
        own = logits[kept.get((row, t), np.arange(VOCAB))]
        total = np.log(np.exp(own).sum())
        logp[row, t] = logits[tokens[row, t]] - total
        entropy[row, t] = -(np.exp(own - total) * (own - total)).sum()
    np.testing.assert_allclose(ours[:2], (logp, entropy), atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 7, 48, 1000])
@pytest.mark.parametrize("teacher", [False, True])
def test_the_gradient_of_a_truncated_softmax_is_that_of_the_sum_over_the_kept_tokens(chunk: int, teacher: bool) -> None:
    hidden, kernel, tokens = drawn(4)
    kept, pairs = kept_tokens(tokens)
    rng = np.random.default_rng(8)
    upstream = rng.normal(size=(2, ROWS, LENGTH)).astype(np.float32)
    other = rng.normal(size=(ROWS, LENGTH, 3)).astype(np.float32), rng.normal(size=(3, VOCAB)).astype(np.float32)
    beside = head.Teacher(*other, partial(generalized_jsd, beta=0)) if teacher else None

    def ours(hidden: Any, kernel: Any) -> Any:
        found = head.logprobs(hidden, kernel, tokens, SEGMENTS, 0.5, chunk, True, beside, 1.5, kept=pairs)
        return jnp.sum(upstream * jnp.stack(found[:2]))

    rows, at = np.array(list(places())).T
    out = np.zeros((len(at), VOCAB), bool)  # the tokens that are left out at each place
    for place, (row, t) in enumerate(zip(rows, at, strict=True)):
        out[place] = ~np.isin(np.arange(VOCAB), kept.get((row, t), np.arange(VOCAB)))

    def plain(hidden: Any, kernel: Any) -> Any:
        logits = 1.5 * jnp.tanh(hidden[rows, at - 1] @ kernel / 1.5) / 0.5
        own = jax.nn.log_softmax(jnp.where(out, -1e9, logits))
        chosen = own[np.arange(len(at)), tokens[rows, at]]
        return jnp.sum(upstream[0, rows, at] * chosen - upstream[1, rows, at] * jnp.sum(jnp.exp(own) * own, axis=-1))

    expected = jax.grad(plain, argnums=(0, 1))(hidden, kernel)
    for mine, theirs in zip(jax.grad(ours, argnums=(0, 1))(hidden, kernel), expected, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-4)


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


@pytest.mark.parametrize("entropy, teacher, truncated", [(False, False, True), (True, False, False), (True, True, True)])
@pytest.mark.parametrize("chunk, exists", [(8, False), (1000, True)])
def test_no_array_of_tokens_by_vocabulary_exists_forward_or_backward(
    chunk: int, exists: bool, entropy: bool, teacher: bool, truncated: bool
) -> None:
    hidden, kernel = np.zeros((4, 33, 8), np.float32), np.zeros((8, 999), np.float32)
    ids = np.ones((4, 33), np.int32)
    kept = np.ones((4, 64, 2), np.int32) if truncated else None
    adapter_leaves = head.Teacher(hidden, kernel, partial(generalized_jsd, beta=0.5)) if teacher else None

    def total(hidden: Any, kernel: Any) -> Any:
        given = head.logprobs(hidden, kernel, ids, ids, 1.0, chunk, entropy, adapter_leaves, kept=kept)
        return sum(jnp.sum(x) for x in jax.tree.leaves(given))

    program = jax.make_jaxpr(jax.grad(total, argnums=(0, 1)))(hidden, kernel)
    largest = max(arrays_in(program.jaxpr))
    assert (largest >= 4 * 32 * 999) == exists
    assert exists or largest <= 1.1 * 8 * 999  # the last word of a block's bits may be half full


Total = Callable[[Any, Any], Any]


def total_of(
    chunk: int,
    tied: bool = False,
    entropy: bool = True,
    softcap: float = 0.0,
    partitioner: Partitioner = ONE_DEVICE,
    truncated: bool = False,
) -> Total:
    """A weighted sum of all that is said of drawn(7)'s tokens, by hidden and kernel, the latter transposed if tied."""
    tokens = drawn(7)[2]
    weights = np.random.default_rng(8).normal(size=(2, ROWS, LENGTH)).astype(np.float32)
    kept = kept_tokens(tokens)[1] if truncated else None

    def total(hidden: Any, kernel: Any) -> Any:
        kernel = kernel.T if tied else kernel
        said = head.logprobs(hidden, kernel, tokens, SEGMENTS, 0.7, chunk, entropy, None, softcap, partitioner, tied, kept)
        return sum(jnp.sum(weight * x) for weight, x in zip(weights, said, strict=False) if x is not None)

    return total


def value_and_gradients(total: Total, hidden: Any, kernel: Any) -> list[Any]:
    return jax.tree.leaves(jax.jit(jax.value_and_grad(total, argnums=(0, 1)))(hidden, kernel))


# Every pair of values is among them.
IN_PAIRS = [
    (0.0, False, False, False),
    (0.0, True, True, True),
    (2.0, False, True, False),
    (2.0, True, False, True),
    (2.0, True, False, False),
    (0.0, False, True, True),
]
REST = [case for case in itertools.product((0.0, 2.0), *[(False, True)] * 3) if case not in IN_PAIRS]


@pytest.mark.parametrize(("softcap", "tied", "entropy", "truncated"), [*IN_PAIRS, *further(*REST)])
def test_blocks_of_the_vocabulary_say_what_all_of_it_says(softcap: float, tied: bool, entropy: bool, truncated: bool) -> None:
    hidden, kernel, _ = drawn(7)
    kernel = kernel.T if tied else kernel
    expected = value_and_gradients(total_of(1000, tied, entropy, softcap, truncated=truncated), hidden, kernel)
    for chunk in (1, 7, 30):  # blocks of 1, 3 and 15 of 29 entries
        found = value_and_gradients(total_of(chunk, tied, entropy, softcap, truncated=truncated), hidden, kernel)
        for x, y in zip(found, expected, strict=True):
            np.testing.assert_allclose(x, y, atol=1e-5, err_msg=f"chunk {chunk}")


@pytest.mark.parametrize("slope", [-20, 20])
def test_each_block_may_lie_far_above_or_below_the_one_before_it(slope: int) -> None:
    """Its sum of exponentials alone would be infinite, or nothing, relative to the other's."""
    hidden, kernel, tokens = drawn(7)
    hidden, kernel = abs(hidden), kernel + np.float32(slope) * np.arange(VOCAB, dtype=np.float32)
    expected = by_hand(hidden, kernel, tokens, 0.7)
    assert np.min(expected[0]) < -1000
    found = head.logprobs(hidden, kernel, tokens, SEGMENTS, 0.7, 7, entropy=True)
    np.testing.assert_allclose(found[:2], expected, rtol=1e-5, atol=1e-3)


def test_in_bf16_the_kernels_gradient_is_rounded_once() -> None:
    hidden, kernel, _ = drawn(7)
    exact = value_and_gradients(total_of(1000), hidden.astype(jnp.bfloat16).astype(np.float32), kernel)
    found = value_and_gradients(total_of(7), hidden.astype(jnp.bfloat16), kernel)
    assert found[2].dtype == np.float32
    for x, y in zip(found[1:], exact[1:], strict=True):
        assert np.max(abs(x.astype(np.float32) - y)) < 0.02 * np.max(abs(y))


def test_unless_a_chunk_is_given_the_size_of_the_vocabulary_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, kernel = np.zeros((4, 33, 8), np.float32), np.zeros((8, 999), np.float32)
    ids = np.ones((4, 33), np.int32)

    def largest(logits: int, narrowest: int) -> int:
        monkeypatch.setattr(head, "NARROWEST", narrowest)

        def total(hidden: jax.Array, kernel: jax.Array) -> jax.Array:
            return jnp.sum(head.logprobs(hidden, kernel, ids, ids, 1.0, logits_at_once=logits)[0])

        program = jax.make_jaxpr(jax.grad(total, argnums=(0, 1)))
        return max(arrays_in(program(hidden, kernel).jaxpr))

    assert largest(8 * 999, 1) == 8 * 999
    assert largest(8 * 999, 256) == 4 * 33 * 256
    assert largest(2 * 33 * 999, 1) == 4 * 32 * 999  # two blocks would do
    assert largest(2 * 33 * 999 - 999, 1) < 2 * 33 * 999


ON_A_MESH = """
import numpy as np
from areal_x.trainer import MeshConfig
from areal_x_jax.sharding import ONE_DEVICE, make_partitioner
from tests.jax import test_head

rng = np.random.default_rng(0)
test_head.ROWS, test_head.VOCAB, test_head.SEGMENTS = 4, 24, np.ones((4, test_head.LENGTH), np.int32)
hidden, kernel, _ = test_head.drawn(7)
partitioner = make_partitioner(MeshConfig(data=2, fsdp=2, tensor=2))
for tied, truncated in ((False, False), (True, False), (False, True), (True, True)):
    given = hidden, kernel.T if tied else kernel
    wanted = test_head.value_and_gradients(test_head.total_of(1000, tied, True, 2.0, truncated=truncated), *given)
    for chunk in (20, 1000) if truncated else (20,):
        total = test_head.total_of(chunk, tied, True, 2.0, partitioner, truncated)
        for x, y in zip(test_head.value_and_gradients(total, *given), wanted, strict=True):
            np.testing.assert_allclose(x, y, atol=1e-5)
print("the same")
"""


def test_a_mesh_that_splits_rows_and_the_vocabulary_changes_nothing() -> None:
    assert python_with(8, "-c", ON_A_MESH) == "the same\n"


@pytest.mark.parametrize(
    "tied, dtype, entropy", [(False, np.float32, False), (True, np.float32, True), (True, jnp.bfloat16, True)]
)
def test_the_compiled_head_allocates_a_few_blocks_of_logits(tied: bool, dtype: Any, entropy: bool) -> None:
    """Beside its inputs and gradients. A copy of the kernel would be 4 blocks, all logits 16."""
    features, vocab, chunk = 256, 16000, 64
    ids = jax.ShapeDtypeStruct((4, 256), np.int32)
    hidden = jax.ShapeDtypeStruct((4, 256, features), dtype)
    kernel = jax.ShapeDtypeStruct((vocab, features) if tied else (features, vocab), np.float32)

    def allocated(chunk: int) -> int:
        def total(hidden: Any, kernel: Any, tokens: Any, ids: Any) -> Any:
            kernel = kernel.T if tied else kernel
            said = head.logprobs(hidden, kernel, tokens, ids, 1.0, chunk, entropy, tied=tied)
            return sum(jnp.sum(x) for x in jax.tree.leaves(said))

        program = jax.jit(jax.value_and_grad(total, argnums=(0, 1))).lower(hidden, kernel, ids, ids).compile()
        return program.memory_analysis().temp_size_in_bytes

    block, inputs = 4 * chunk * vocab, 4 * 4 * 256 * features
    assert allocated(chunk) < 3 * block + 2 * inputs
    assert allocated(4 * 256) > 16 * block
