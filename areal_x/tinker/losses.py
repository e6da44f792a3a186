"""The client's loss functions: names and inputs of the API over the losses of areal_x.algorithms.

Every loss here is a sum over targets of a function of their log-probabilities, so its gradient is
that of -Σ coefficient · logp with coefficient = -∂loss/∂logp at the current weights. The weights do
not change until the next optimizer step, so what a model keeps of a forward_backward is the
coefficients: gradients of several requests, of whatever losses, add up as rows of one batch of
weighted cross entropy. (The client's own custom losses do the same in two passes.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32

from areal_x.algorithms import losses
from areal_x.errors import UserError, nearest
from areal_x.protocols.backends import Backend
from areal_x.tinker.data import Datum, Layout
from areal_x.types import Loss, Policy

Config = Mapping[str, float | str]

LOW, HIGH = "clip_low_threshold", "clip_high_threshold"


class NamedLoss(NamedTuple):
    """A loss of the API. inputs: what each datum has besides target_tokens. make: called with the
    config over its defaults. optional: those inputs that a datum may lack, and are 1 then."""

    make: Callable[..., Loss]
    inputs: tuple[str, ...]
    defaults: Mapping[str, float]
    optional: tuple[str, ...] = ()


def _clipped(loss: Callable[..., Any], **thresholds: float) -> Loss:
    """The API's thresholds are ratios, ours distances from 1."""
    return partial(loss, clip_low=1 - thresholds[LOW], clip_high=thresholds[HIGH] - 1)


def _cross_entropy() -> Loss:
    return losses.sft


def _importance_sampling() -> Loss:
    return partial(losses.ppo_clip, clip_low=math.inf, clip_high=math.inf)


def _dro(beta: float) -> Loss:
    return partial(losses.dro, beta=beta)


def _stable_reinforce(kl_coeff: float, **thresholds: float) -> Loss:
    """The API does not publish its objective. This one is a policy gradient whose importance weights
    are constants and bounded above, with a penalty for leaving the policy that sampled."""
    penalty = partial(losses.kl_penalty, coefficient=kl_coeff, estimator="k3")
    return losses.combine(partial(losses.cispo, clip_high=thresholds[HIGH] - 1), penalty)


OF_SAMPLES = ("logprobs", "advantages")
WEIGHTS = "weights"
COUNTED = "sequence_ratio_mask"  # 0 for targets that a loss leaves out, such as a prompt's
LOSSES = {
    "cross_entropy": NamedLoss(_cross_entropy, (WEIGHTS,), {}, (WEIGHTS,)),
    "importance_sampling": NamedLoss(_importance_sampling, OF_SAMPLES, {}),
    "ppo": NamedLoss(partial(_clipped, losses.ppo_clip), OF_SAMPLES, {LOW: 0.8, HIGH: 1.2}),
    "cispo": NamedLoss(partial(_clipped, losses.cispo), OF_SAMPLES, {LOW: 0.8, HIGH: 1.2}),
    "dro": NamedLoss(_dro, OF_SAMPLES, {"beta": 0.05}),
    "gspo": NamedLoss(
        partial(_clipped, losses.gspo),
        (*OF_SAMPLES, COUNTED),
        {LOW: 1 - 3e-4, HIGH: 1 + 4e-4},
        (COUNTED,),
    ),
    "stable_reinforce": NamedLoss(
        _stable_reinforce, (*OF_SAMPLES, COUNTED), {"kl_coeff": 0.01, HIGH: 2.0}
    ),
}


def counts_samples(name: str) -> bool:
    """True for a loss that needs to know which targets were sampled."""
    known = LOSSES[name]
    return COUNTED in known.inputs and COUNTED not in known.optional


def find(name: str, config: Config) -> Loss:
    """Returns a loss with its config.

    Raises: UserError for a loss or a config that is unknown or out of range.
    """
    if name not in LOSSES:
        hint = nearest(name, list(LOSSES)) or f": this server computes {', '.join(LOSSES)}"
        raise UserError(f"there is no loss {name!r}{hint}")
    return _made(name, tuple(sorted(config.items())))


@lru_cache(256)  # a backend compiles each function once
def _made(name: str, config: tuple[tuple[str, float | str], ...]) -> Loss:
    known = LOSSES[name]
    for key, value in config:
        if key not in known.defaults:
            has = ", ".join(known.defaults) or "none"
            raise UserError(f"the loss {name} has no setting {key!r}; its settings: {has}")
        if not isinstance(value, float | int) or not math.isfinite(value):
            raise UserError(f"the setting {key} of the loss {name} must be a number, not {value!r}")
    settings = {key: float(x) for key, x in {**known.defaults, **dict(config)}.items()}
    if HIGH in settings and not settings.get(LOW, 0.0) <= 1 <= settings[HIGH]:
        raise UserError(
            f"{LOW} = {settings.get(LOW, 0.0):g} and {HIGH} = {settings[HIGH]:g} must lie on either"
            " side of 1, the ratio of an unchanged policy"
        )
    return known.make(**settings)


def check_inputs(name: str, index: int, given: Mapping[str, np.ndarray]) -> None:
    """Raises: UserError for a datum whose inputs are not those of the loss.

    given: all but target_tokens, by name.
    """
    wanted, optional = LOSSES[name].inputs, LOSSES[name].optional
    missing = [x for x in wanted if x not in given and x not in optional]
    unknown = [x for x in given if x not in wanted]
    if missing or unknown:
        what = f"lacks {missing[0]}" if missing else f"has {unknown[0]}, which nothing reads"
        names = ", ".join(("target_tokens", *wanted))
        raise UserError(f"datum {index} {what}: the inputs of {name} are {names}")


class Evaluated(NamedTuple):
    """A loss at the current weights: its value at each target, and its coefficients (see above)."""

    terms: list[np.ndarray]
    coefficients: list[np.ndarray]


def check_finite(name: str, found: Evaluated) -> None:
    """Raises: UserError for a gradient that is not finite."""
    if not all(np.isfinite(x).all() for x in found.coefficients):
        raise UserError(f"the gradient of the loss {name} is not finite: the step would be lost")


def evaluate(
    backend: Backend,
    loss: Loss,
    layout: Layout,
    datums: list[Datum],
    logprobs: Float32[np.ndarray, "rows length"],
) -> Evaluated:
    """Evaluates a loss and its derivative by each log-probability, in the backend's arrays."""
    absent = {WEIGHTS: 1.0, COUNTED: 1.0}
    of = {
        name: layout.spread(
            [x.inputs.get(name, np.full(x.targets.shape, absent.get(name, 0.0))) for x in datums]
        )
        for name in (WEIGHTS, COUNTED, *OF_SAMPLES)
    }
    sampled = of["logprobs"]
    batch = layout.batch.replace(
        mask=layout.batch.mask & (of[COUNTED] != 0),
        weights=of[WEIGHTS],
        behavior_logp=sampled,
        proximal_logp=sampled,
        reference_logp=sampled,
        advantages=of["advantages"],
    )
    policy = Policy(logp=np.asarray(logprobs, np.float32))
    terms, gradient = backend.differentiate(loss, policy, batch)
    return Evaluated(
        layout.gather(np.asarray(terms) * of[WEIGHTS]),
        layout.gather(-np.asarray(gradient.logp)),
    )
