"""Distillation from the probabilities that teachers give to the student's own answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import gin

from areal_x.algorithms import losses, teaching, weighting
from areal_x.algorithms.algorithm import Algorithm, TeacherContext, TeacherWeights
from areal_x.algorithms.assembly import PARTS, assemble
from areal_x.algorithms.distillation import generalized_jsd
from areal_x.algorithms.parts import records_call
from areal_x.errors import one_of, positive, within
from areal_x.types import Loss, Task

SELF = {"initial": "teacher", "current": "self"}  # the need of each


@gin.configurable
@records_call
def distill(
    beta: float | None = None, rl: Algorithm | None = None, rl_weight: float = 1.0, **parts: Any
) -> Algorithm:
    """On-policy distillation: the student samples, and is trained on the probabilities that the
    teacher, `train.teacher`, gives to those tokens.

    Args:
        beta: None for the reverse KL at the sampled tokens, as a policy gradient. A number for the
            generalised Jensen-Shannon divergence over the full vocabulary (GKD), from 0,
            KL(teacher ‖ student), to 1, KL(student ‖ teacher): it has less variance, and the
            trainer holds the teacher's weights beside the student's.
        rl: A recipe whose loss is added. All its other parts are used too, except its weighting.
        rl_weight: Factor of that loss.
    """
    loss: Loss = losses.sampled_reverse_kl
    own: dict[str, Any] = {"needs": frozenset({"teacher"})}
    if beta is not None:
        within("distill.beta", beta, 0, 1)
        loss = losses.divergence
        own |= {
            "needs": frozenset({"teacher_logits"}),
            "divergence": partial(generalized_jsd, beta=beta),
        }
    return taught(distill, parts, loss, rl, rl_weight, source="2306.13649", **own)


@gin.configurable
@records_call
def self_distill(
    context: TeacherContext = teaching.solution,
    teacher: str = "initial",
    clip: float | None = None,
    rl: Algorithm | None = None,
    rl_weight: float = 1.0,
    **parts: Any,
) -> Algorithm:
    """On-policy self-distillation: the model teaches itself, having read more. The student answers the
    task's prompt; the teacher, the same model, scores that answer behind a prompt that also shows
    the solution, a hint or an attempt that succeeded.

    Prompt and answer of the teacher must fit into `train.row_length`. With a model in
    `train.teacher`, that one reads the context.

    Args:
        context: What the teacher reads in place of the prompt: a function of any of `task`, `group`,
            `episode` and `tokenizer` that returns a text, messages or None, for the prompt itself.
            `@contexts.solution` shows the task's answer, `@contexts.solved_attempt` another attempt
            of the group that succeeded (SDPO, arXiv 2601.20802).
        teacher: "initial", the model before the run, held beside the trained one (OPSD); or
            "current", the trained one before each step, which takes no memory and teaches what it
            has learned since (SDFT, arXiv 2601.19897, whose teacher follows by a moving average).
        clip: Bound of |teacher - logp| at each token, in nats, above 0: a few tokens at which the
            teacher knows the result would otherwise outweigh all others. None for none.
        rl: A recipe whose loss is added. All its other parts are used too, except its weighting.
        rl_weight: Factor of that loss.
    """
    one_of("self_distill.teacher", teacher, tuple(SELF))
    return taught(
        self_distill,
        parts,
        reverse_kl("self_distill", clip),
        rl,
        rl_weight,
        source="2601.18734",
        needs=frozenset({SELF[teacher]}),
        teacher_context=context,
    )


@gin.configurable
@records_call
def multi_distill(
    weights: Mapping[str, float] | TeacherWeights = teaching.by_domain,
    clip: float | None = None,
    rl: Algorithm | None = None,
    rl_weight: float = 1.0,
    **parts: Any,
) -> Algorithm:
    """Multi-teacher on-policy distillation: each task's answers are scored by the teacher of its
    domain, or by a weighted mixture of several, of `train.teachers`.

    The mixture is of log-probabilities, Σ w log p, so that the gradient is that of
    Σ w KL(student ‖ teacher). Only teachers with a weight above 0 score an answer.

    Args:
        weights: A dict of one weight a teacher for all tasks; or a function (task) → such a dict.
            `@teachers.by_domain` takes the teacher that the task's metadata names. Weights are
            divided by their sum.
        clip: Bound of |teacher - logp| at each token, in nats, above 0. None for none.
        rl: A recipe whose loss is added. All its other parts are used too, except its weighting.
        rl_weight: Factor of that loss.
    """
    if isinstance(weights, Mapping):
        teaching.shares(weights, Task("", ""))
        weights = partial(same_weights, weights=dict(weights))
    return taught(
        multi_distill,
        parts,
        reverse_kl("multi_distill", clip),
        rl,
        rl_weight,
        source="2601.02780",
        needs=frozenset({"teachers"}),
        teacher_weights=weights,
    )


def same_weights(task: Task, weights: Mapping[str, float]) -> Mapping[str, float]:
    """The same weights for every task."""
    return weights


def reverse_kl(name: str, clip: float | None) -> Loss:
    if clip is None:
        return losses.sampled_reverse_kl
    positive(f"{name}.clip", clip)
    return partial(losses.clipped_reverse_kl, clip=clip)


def taught(
    recipe: Callable[..., Algorithm],
    parts: Mapping[str, Any],
    loss: Loss,
    rl: Algorithm | None,
    rl_weight: float,
    **own: Any,
) -> Algorithm:
    """Returns the algorithm of a teacher's loss and, if there is one, a reinforcement-learning
    recipe's, with the latter's parts."""
    if rl is None:
        own = {"advantages": None, **own}
    else:
        loss = losses.combine(loss, losses.Scaled(rl.loss, rl_weight))
        theirs = {
            part: getattr(rl, part)
            for part in PARTS
            if part not in ("loss", "weighting", *OF_TEACHERS)
        }
        own = {**theirs, **own, "needs": own["needs"] | rl.needs}
    return assemble(recipe, parts, loss=loss, weighting=weighting.token_mean, **own)


OF_TEACHERS = ("divergence", "teacher_context", "teacher_weights")
