"""What a recipe consists of. All parts are plain functions: any can be replaced, and none knows of
the others."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from areal_x.algorithms import proximal
from areal_x.algorithms.check import rehearse
from areal_x.algorithms.losses import each
from areal_x.algorithms.parts import Made, plain
from areal_x.errors import ConfigError, at_least, function_name, one_of
from areal_x.types import Array, Batch, Divergence, Group, Loss, LossTerms, Policy, evaluate_loss

Advantages = Callable[..., Any]
Weighting = Callable[..., Array]
Correction = Callable[[Array, Array, Array], Array]
Filter = Callable[[Group], bool]
Shaping = Callable[[np.ndarray], np.ndarray]

PROXIMAL = ("behavior", "recompute", "interpolate")
NEEDS = ("entropy", "reference", "teacher", "teacher_logits", "values", "greedy")


@dataclass(frozen=True)
class Algorithm:
    """The parts of a recipe.

    loss: `(policy, batch) → (terms, metrics)`. weighting: `(mask, segment_ids) → [rows, length]`,
    what each term counts; `groups_of_segments` too, if it asks for it. advantages: a function of
    any of these, which it gets by the names of its parameters; None where nothing is judged.
        Without `mask`, of one value an episode, `[S]`: `rewards`, `groups` (which share a task), `lengths` (generated tokens),
        `greedy_rewards` (of a greedy answer to the same task). With `mask`, of one a token, `[S, T]`: `rewards` (a sequence's
        on its last masked token, with its own token rewards), `mask`, `values` (the critic's); `groups` as before.
        It gives advantages of the shape of `rewards`, or (advantages, returns) where a critic learns the returns.
    corrections: `(log_ratio, mask, segment_ids) → [rows, length]`, multiplies the weights;
    log_ratio is proximal - behavior. As
        around "behavior" that is 0, the proximal policy is then recomputed.
    proximal: the policy that ratios are taken against: "behavior", the one that sampled the token;
    "recompute", the trainer's
        own before the step; "interpolate", between the two by age (areal_x.algorithms.proximal).
    filters: a group is trained on where all hold, else given back and replaced by another. shaping:
    `lengths [S] → [S]`, added to the rewards. reward_kl: β of -β (b - ref), added to every token's
    reward. value_loss: what the critic minimises, where there is one. divergence: `(student_logits,
    teacher_logits) [..., vocabulary] → [...]`, what the loss finds in `policy.divergence`. needs:
    what the run pays for: "entropy" of the full distribution, "reference" (a frozen copy of the
    initial policy),
        "teacher" (another model, whose log-probabilities take the reference's place), "teacher_logits" (its whole distribution
        at each token, which only `divergence` sees), "values" (a critic), "greedy" (a greedy answer to each task).
    pairs: whether an episode's two trajectories, chosen and rejected, stay side by side in a row
    for the loss. head: of the model that learns, "policy" or "reward". source: where it was
    published. made: by which recipe, of what; parts may have been replaced since.
    """

    name: str
    loss: Loss
    weighting: Weighting
    advantages: Advantages | None = None
    corrections: Correction | None = None
    proximal: str = "behavior"
    filters: tuple[Filter, ...] = ()
    shaping: Shaping | None = None
    reward_kl: float = 0.0
    value_loss: Loss | None = None
    divergence: Divergence | None = None
    needs: frozenset[str] = frozenset()
    pairs: bool = False
    head: str = "policy"
    source: str = ""
    made: Made | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        one_of(f"{self.name}.proximal", self.proximal, PROXIMAL)
        at_least(f"{self.name}.reward_kl", self.reward_kl, 0)
        if self.corrections is not None and self.proximal == "behavior":
            object.__setattr__(self, "proximal", "recompute")
        if self.head != "policy" and self.proximal != "behavior":
            raise ConfigError(
                f"{self.name}.proximal",
                self.proximal,
                "'behavior': a reward model has no policy to take ratios of",
            )
        for need in self.needs:
            one_of(f"{self.name}.needs", need, NEEDS)
        if {"reference", "teacher"} <= self.needs:
            raise ConfigError(
                f"{self.name}.needs", sorted(self.needs), "without either 'reference' or 'teacher'"
            )
        if ("values" in self.needs) != (self.value_loss is not None):
            raise ConfigError(
                f"{self.name}.value_loss", self.value_loss, "given exactly where 'values' is needed"
            )
        if ("teacher_logits" in self.needs) != (self.divergence is not None):
            raise ConfigError(
                f"{self.name}.divergence",
                self.divergence,
                "given exactly where 'teacher_logits' is needed",
            )
        rehearse(self)

    def step_loss(self) -> Loss:
        """The loss as the trainer gets it: around an interpolated policy where the recipe says
        so."""
        if self.proximal != "interpolate":
            return self.loss
        return Interpolated(self.loss, self.corrections)

    def explain(self) -> str:
        """The recipe in words and symbols: each part with its formula, its source and the numbers
        it is bound to."""
        parts: list[tuple[str, Any]] = [
            ("advantages", self.advantages),
            *(
                ("loss" if factor == 1 else f"loss × {factor:g}", loss)
                for factor, loss in each(self.loss)
            ),
            ("divergence", self.divergence),
            ("weighting", self.weighting),
            ("corrections", self.corrections),
            ("value loss", self.value_loss),
            ("shaping", self.shaping),
            *(("filter", keep) for keep in self.filters),
        ]
        lines = [f"{self.name}" + (f" (arXiv {self.source})" if self.source else "")]
        lines += [f"  proximal policy: {PROXIMAL_IN_WORDS[self.proximal]}"]
        lines += (
            [f"  reward - {self.reward_kl:g} · (b - reference), token by token"]
            if self.reward_kl
            else []
        )
        lines += [f"  needs: {', '.join(sorted(self.needs))}"] if self.needs else []
        for title, part in parts:
            lines += ["", *described(title, part)] if part is not None else []
        return "\n".join(lines)


PROXIMAL_IN_WORDS = {
    "behavior": "p = b, the policy that sampled the token",
    "recompute": "p is the trainer's own policy before the step",
    "interpolate": "p = b + α (θ - b), α growing with the token's age",
}


@dataclass(frozen=True)
class Interpolated:
    """A loss around the policy between the one that sampled and the one that learns, which only the
    loss itself sees."""

    loss: Loss
    corrections: Correction | None

    def __call__(self, policy: Policy, batch: Batch) -> LossTerms:
        ages: Array = batch.ages
        between = proximal.interpolate(policy.logp, batch.behavior_logp, -ages, 0)
        terms, metrics = evaluate_loss(self.loss, policy, batch.replace(proximal_logp=between))
        if self.corrections is not None:
            terms = terms * self.corrections(
                between - batch.behavior_logp, batch.mask, batch.segment_ids
            )
        return terms, metrics


def described(title: str, function: Any) -> list[str]:
    """Its name with the numbers in effect, those that the recipe binds marked, and its
    docstring."""
    bound = function.keywords if isinstance(function, partial) else {}
    of = plain(function)
    defaults = {
        name: p.default
        for name, p in inspect.signature(of).parameters.items()
        if p.default is not inspect.Parameter.empty
    }
    numbers = [
        f"{name} = {_short(value)}" + ("" if name in bound else " (default)")
        for name, value in (defaults | bound).items()
    ]
    text = inspect.cleandoc(of.__doc__ or "").splitlines()
    return [
        f"  {title}: {function_name(of)}" + (f" with {', '.join(numbers)}" if numbers else ""),
        *(f"      {line}".rstrip() for line in text),
    ]


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else getattr(value, "__name__", repr(value))
