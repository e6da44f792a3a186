"""The generalised Jensen-Shannon divergence against loops over the vocabulary."""

from __future__ import annotations

from functools import partial
from math import exp, log

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_x.algorithms.distillation import generalized_jsd
from areal_x.errors import ConfigError
from tests.algorithms.agreement import TOLERANCES, WAYS, agree
from tests.algorithms.frameworks import value_and_gradient

BETAS = [0.0, 0.1, 0.5, 0.9, 1.0]
on_every_beta = pytest.mark.parametrize("beta", BETAS)


def softmax(logits):
    top = max(logits)
    powers = [exp(x - top) for x in logits]
    return [p / sum(powers) for p in powers]


def kl(p, q):
    return sum(a * log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


def by_hand(student_logits, teacher_logits, beta):
    student, teacher = softmax(student_logits), softmax(teacher_logits)
    if beta in (0, 1):
        return kl(teacher, student) if beta == 0 else kl(student, teacher)
    mixture = [beta * t + (1 - beta) * s for s, t in zip(student, teacher, strict=True)]
    return beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)


def logits(*shape, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=shape) * 2, rng.normal(size=shape) * 2


@on_every_beta
def test_it_is_the_definition_at_every_token(beta):
    student, teacher = logits(2, 3, 7)
    divergence = generalized_jsd(student, teacher, beta)
    assert divergence.shape == (2, 3)
    for at in np.ndindex(2, 3):
        assert divergence[at] == pytest.approx(by_hand(student[at], teacher[at], beta), rel=1e-12)


def test_the_ends_are_what_it_tends_to_there_divided_by_the_vanishing_share():
    student, teacher = logits(5, 7)
    np.testing.assert_allclose(generalized_jsd(student, teacher, 1e-7) / 1e-7, generalized_jsd(student, teacher, 0), rtol=1e-5)
    near_one = generalized_jsd(student, teacher, 1 - 1e-7) / 1e-7
    np.testing.assert_allclose(near_one, generalized_jsd(student, teacher, 1), rtol=1e-5)


@given(st.lists(st.tuples(st.floats(-30, 30), st.floats(-30, 30)), min_size=2, max_size=9), st.floats(0, 1), st.floats(-9, 9))
def test_it_is_never_negative_nought_for_equals_and_blind_to_a_shift(pairs, beta, shift):
    student, teacher = np.array(pairs).T
    divergence = generalized_jsd(student, teacher, beta)
    assert divergence >= -1e-12
    assert generalized_jsd(student, student, beta) == pytest.approx(0, abs=1e-12)
    assert generalized_jsd(student + shift, teacher - shift, beta) == pytest.approx(divergence, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_numpy_jax_and_torch_agree(beta):
    student, teacher = logits(4, 7, seed=1)
    agree(partial(generalized_jsd, beta=beta), student, teacher, torch_compiled=False)  # it is below, with its gradient
    slope = np.zeros_like(student)
    for at in np.ndindex(student.shape):
        step = np.zeros_like(student)
        step[at] = 1e-6
        up, down = (generalized_jsd(student + s, teacher, beta).sum() for s in (step, -step))
        slope[at] = (up - down) / 2e-6
    for dtype, ways in WAYS.items():
        for framework, compiled in ways:
            if framework == "numpy":
                continue
            value, gradient = value_and_gradient(
                lambda leaves, constants: generalized_jsd(leaves["student"], constants["teacher"], beta).sum(),
                {"student": student}, {"teacher": teacher}, framework=framework, dtype=dtype, compiled=compiled,
            )  # fmt: skip
            np.testing.assert_allclose(value, generalized_jsd(student, teacher, beta).sum(), rtol=TOLERANCES[dtype])
            np.testing.assert_allclose(gradient["student"], slope, rtol=10 * TOLERANCES[dtype], atol=TOLERANCES[dtype])


@on_every_beta
@pytest.mark.parametrize("framework", ["jax", "torch"])
@pytest.mark.parametrize("ruled_out", [-np.inf, -1e4])
def test_large_logits_and_tokens_that_are_ruled_out_give_finite_values_and_gradients(beta, framework, ruled_out):
    student, teacher = np.array([[1e4, 1e4 - 1, ruled_out, ruled_out]]), np.array([[0.0, 1.0, ruled_out, ruled_out]])
    value, gradient = value_and_gradient(
        lambda leaves, _: generalized_jsd(leaves["student"], leaves["teacher"], beta).sum(),
        {"student": student, "teacher": teacher}, {}, framework=framework, dtype=np.float32,
    )  # fmt: skip
    assert value == pytest.approx(by_hand([0, -1], [0, 1], beta), rel=1e-4)
    for g in gradient.values():
        assert np.isfinite(g).all()
        np.testing.assert_allclose(g[0, 2:], 0, atol=1e-30)


def test_half_precision_is_lifted():
    student, teacher = (x.astype(np.float16) for x in logits(3, 5))
    expected = generalized_jsd(student.astype(np.float32), teacher.astype(np.float32), 0.5)
    result = generalized_jsd(student, teacher, 0.5)
    assert result.dtype == np.float32
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("beta", [-0.1, 1.1, np.nan])
def test_a_share_outside_of_nought_to_one_is_refused(beta):
    with pytest.raises(ConfigError, match=r"generalized_jsd\.beta"):
        generalized_jsd(*logits(1, 3), beta)
