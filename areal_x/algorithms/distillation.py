"""Distillation from a teacher's full distribution over the vocabulary, not only from the sampled
tokens."""

from __future__ import annotations

import math

from array_api_compat import array_namespace
from jaxtyping import Float

from areal_x.algorithms.arrays import lift, stop_gradient
from areal_x.errors import within
from areal_x.types import Array

# replaces a logit of -inf: its probability is still 0, and differences of logits stay finite
MIN_LOGIT = -1e30


def generalized_jsd(
    student_logits: Float[Array, "*tokens vocabulary"],
    teacher_logits: Float[Array, "*tokens vocabulary"],
    beta: float,
) -> Float[Array, "*tokens"]:
    """The generalised Jensen-Shannon divergence of student and teacher, in nats, at least float32.

    β KL(teacher ‖ M) + (1 - β) KL(student ‖ M) with M = β teacher + (1 - β) student, in
    probabilities. At β = 0 it is KL(teacher ‖ student) and at β = 1 KL(student ‖ teacher): the
    limits there, divided by β or 1 - β. Raises ConfigError unless 0 ≤ β ≤ 1. Source: generalised
    knowledge distillation, arXiv 2306.13649, eq. 1.
    """
    within("generalized_jsd.beta", beta, 0, 1)
    xp = array_namespace(student_logits)
    student, teacher = _log_softmax(student_logits), _log_softmax(teacher_logits)
    if beta == 0:
        return _kl(teacher, student)
    if beta == 1:
        return _kl(student, teacher)
    mixture = xp.logaddexp(math.log(beta) + teacher, math.log1p(-beta) + student)
    return beta * _kl(teacher, mixture) + (1 - beta) * _kl(student, mixture)


def _log_softmax(logits: Array) -> Array:
    xp = array_namespace(logits)
    logits = xp.clip(lift(logits), MIN_LOGIT, None)
    shifted = logits - stop_gradient(xp.max(logits, axis=-1, keepdims=True))
    return shifted - xp.log(xp.sum(xp.exp(shifted), axis=-1, keepdims=True))


def _kl(log_p: Array, log_q: Array) -> Array:
    xp = array_namespace(log_p)
    return xp.sum(xp.exp(log_p) * (log_p - log_q), axis=-1)
