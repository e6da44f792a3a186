"""The parts of a reinforcement-learning algorithm. All are plain functions: any can be replaced, and
none knows the others."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np

from areal_x.algorithms import proximal
from areal_x.algorithms.arrays import lift, masked, stop_gradient
from areal_x.algorithms.losses import summands
from areal_x.algorithms.parts import RecipeCall, parameter_names, unwrapped
from areal_x.algorithms.validation import SCORERS, host_only, validate_parts
from areal_x.errors import ConfigError, at_least, function_name, one_of
from areal_x.types import (
    Array,
    Batch,
    Divergence,
    Group,
    Loss,
    LossTerms,
    Policy,
    Task,
    evaluate_loss,
)

Advantages = Callable[..., Any]
Weighting = Callable[..., Array]
Correction = Callable[[Array, Array, Array], Array]
Filter = Callable[[Group], bool]
Shaping = Callable[[np.ndarray], np.ndarray]
TeacherContext = Callable[..., Any]
TeacherWeights = Callable[[Task], Mapping[str, float]]

PROXIMAL = ("behavior", "recompute", "interpolate")
TRUNCATED = ("train", "mask", "bootstrap")
NEEDS = ("entropy", *sorted(SCORERS), "teacher_logits", "values", "greedy")


@dataclass(frozen=True)
class Algorithm:
    """A loss, the host-side computations around it, and what they need from the run."""

    name: str

    loss: Loss
    """`(policy, batch) → (terms, metrics)`, minimised by the trainer."""

    weighting: Weighting
    """`(mask, segment_ids) → [rows, length]`: the weight of each token's term in the loss. A
    function with a parameter `groups_of_segments` gets that too."""

    advantages: Advantages | None = None
    """Advantages from rewards, or None if the algorithm does not use rewards. The function gets
    those of these arrays that its parameters name.

    Without `mask`, one value an episode, `[S]`: `rewards`, `groups` (equal for the attempts at one
    task), `lengths` (generated tokens), `greedy_rewards` (of a greedy answer to the same task).

    With `mask`, one value a token, `[S, T]`: `rewards` (a sequence's on its last masked token, plus
    its per-token rewards), `mask`, `values` (the critic's), and with truncated = "bootstrap"
    `truncated`, `[S]`; `groups` as before.

    Returns advantages of the shape of `rewards`, or (advantages, returns) if a critic is trained on
    the returns.
    """

    corrections: Correction | None = None
    """`(log_ratio, mask, segment_ids) → [rows, length]`, multiplied into the weights to correct for
    off-policy samples; log_ratio is proximal - behavior. With `proximal` "behavior" it would be 0
    everywhere, so the proximal policy is then recomputed. A function of your own gets numpy arrays
    of a whole optimizer step, but with `proximal` "interpolate" the trainer's, of one
    micro-batch."""

    proximal: str = "behavior"
    """The policy that importance ratios are taken against: "behavior", the one that sampled the
    token; "recompute", the trainer's own before the step, which costs a forward pass only where
    `extra_pass` gives a reason; "interpolate", between behavior and current policy by the token's
    age (`areal_x.algorithms.proximal`)."""

    filters: tuple[Filter, ...] = ()
    """Functions `(group) → bool`. A group that one of them rejects is not trained on but replaced
    by another."""

    shaping: Shaping | None = None
    """A function of the generated lengths, `[S] → [S]`, added to the rewards."""

    truncated: str = "train"
    """Answers that reached the token limit: "train" as any other; "mask", train on none of their tokens,
    while their rewards still count in their groups' baselines (DAPO's overlong filtering); "bootstrap",
    add the critic's value at their end to the return, for recipes with a critic."""

    reward_kl: float = 0.0
    """β of -β (behavior_logp - reference_logp), added to every token's reward. At least 0."""

    value_loss: Loss | None = None
    """The critic's loss, for recipes with a critic."""

    divergence: Divergence | None = None
    """`(student_logits, teacher_logits) [..., vocabulary] → [...]`, which the loss reads as
    `policy.divergence`."""

    teacher_context: TeacherContext | None = None
    """What a teacher reads in place of an answer's prompt: a function of those of `task`, `group`,
    `episode` and `tokenizer` that its parameters name, which returns a text, chat messages, or None
    for the prompt itself."""

    teacher_weights: TeacherWeights | None = None
    """`(task) → {teacher: weight}`: how much each of `train.teachers` counts."""

    needs: frozenset[str] = frozenset()
    """Inputs that cost the run extra: "entropy" (of the full distribution), "reference" (a frozen
    copy of the initial policy), "teacher" (another model, whose log-probabilities take the
    reference's place), "teachers" (several, weighted by `teacher_weights`), "self" (in the teacher's
    place, the policy before the step, behind `teacher_context`), "teacher_logits" (the teacher's full
    distribution at each token, which only `divergence` reads), "values" (a critic), "greedy" (a
    greedy answer to each task)."""

    pairs: bool = False
    """True if an episode is two trajectories, chosen and rejected, that must be adjacent in a
    row."""

    head: str = "policy"
    """The head of the trained model: "policy" or "reward"."""

    source: str = ""
    """arXiv number of the paper."""

    made_by: RecipeCall | None = field(default=None, compare=False, repr=False)
    """The call of the recipe that made it; parts may have been replaced since."""

    def __post_init__(self) -> None:
        one_of(f"{self.name}.proximal", self.proximal, PROXIMAL)
        at_least(f"{self.name}.reward_kl", self.reward_kl, 0)
        if self.corrections is not None and self.proximal == "behavior":
            object.__setattr__(self, "proximal", "recompute")
        if self.head != "policy" and self.proximal != "behavior":
            raise ConfigError(
                f"{self.name}.proximal",
                self.proximal,
                "'behavior': a reward model has no policy, so there are no ratios",
            )
        one_of(f"{self.name}.truncated", self.truncated, TRUNCATED)
        if self.truncated == "bootstrap" and not (
            "values" in self.needs
            and self.advantages is not None
            and "truncated" in parameter_names(self.advantages)
        ):
            wanted = (
                "'train' or 'mask': only advantages of a critic's values, as ppo's, can bootstrap"
            )
            raise ConfigError(f"{self.name}.truncated", self.truncated, wanted)
        for need in self.needs:
            one_of(f"{self.name}.needs", need, NEEDS)
        if len(scorers := sorted(self.needs & SCORERS)) > 1:
            wanted = f"without either {' or '.join(map(repr, scorers))}"
            raise ConfigError(f"{self.name}.needs", sorted(self.needs), wanted)
        self._check_teachers()
        if ("values" in self.needs) != (self.value_loss is not None):
            raise ConfigError(
                f"{self.name}.value_loss",
                self.value_loss,
                "given if and only if 'values' is needed",
            )
        if ("teacher_logits" in self.needs) != (self.divergence is not None):
            raise ConfigError(
                f"{self.name}.divergence",
                self.divergence,
                "given if and only if 'teacher_logits' is needed",
            )
        validate_parts(self)

    def _check_teachers(self) -> None:
        if ("teachers" in self.needs) != (self.teacher_weights is not None):
            wanted = "given if and only if 'teachers' are needed"
            raise ConfigError(f"{self.name}.teacher_weights", self.teacher_weights, wanted)
        if "self" in self.needs and self.teacher_context is None:
            wanted = "given, as a model that reads what it read before teaches itself nothing"
            raise ConfigError(f"{self.name}.teacher_context", None, wanted)
        if self.teacher_context is not None and not self.needs & (SCORERS - {"reference"}):
            wanted = "left out, as no teacher scores tokens"
            raise ConfigError(f"{self.name}.teacher_context", self.teacher_context, wanted)

    @property
    def reads_tasks(self) -> bool:
        """True if it computes from tasks, and not only from their groups' episodes."""
        return self.teacher_context is not None or self.teacher_weights is not None

    def extra_pass(self, minibatches: int = 1) -> str:
        """Returns the reason why a forward pass before the step must compute the proximal policy's
        log-probabilities; "" if none is needed. minibatches: optimizer steps per batch.

        While the gradients of a single optimizer step are computed, in any number of micro-batches,
        the trained policy is still the one before the step.
        """
        if self.proximal != "recompute":
            return ""
        if minibatches > 1:
            return f"of the {minibatches} optimizer steps on a batch, the first changes the policy"
        return self._on_host

    @cached_property
    def _on_host(self) -> str:
        """The reason why the corrections must be called on the host; "" if there is none. They are
        tried to find out, and every step asks."""
        return "" if self.corrections is None else host_only(self.corrections)

    def uses_own_pass(self, minibatches: int = 1) -> bool:
        """True if the proximal policy's log-probabilities are those of the step's own forward
        pass."""
        return self.proximal == "recompute" and not self.extra_pass(minibatches)

    def step_loss(self, own_pass: bool = False) -> Loss:
        """The loss that the trainer minimises: the recipe's own, around a proximal policy that is
        computed inside the loss with `proximal` "interpolate" or with own_pass.

        own_pass: the batch was made for the step's own forward pass (see `uses_own_pass`).
        """
        if own_pass:
            return AnchoredLoss(self.loss, self.corrections, trained_policy)
        if self.proximal == "interpolate":
            return AnchoredLoss(self.loss, self.corrections, interpolated_policy)
        return self.loss

    def rebuilt(self) -> Iterator[tuple[Callable[..., Any], dict[str, Any]]]:
        """Yields the recipe and the arguments that make an equal algorithm; nothing if none do."""
        from areal_x.algorithms.rebuild import rebuilt  # which knows the recipes

        return rebuilt(self)

    def explain(self) -> str:
        """Describes each part: its formula, its source and the numbers it is bound to."""
        parts: list[tuple[str, Any]] = [
            ("advantages", self.advantages),
            *(
                ("loss" if factor == 1 else f"loss × {factor:g}", loss)
                for factor, loss in summands(self.loss)
            ),
            ("divergence", self.divergence),
            ("teacher's context", self.teacher_context),
            ("teachers' weights", self.teacher_weights),
            ("weighting", self.weighting),
            ("corrections", self.corrections),
            ("value loss", self.value_loss),
            ("shaping", self.shaping),
            *(("filter", keep) for keep in self.filters),
        ]
        lines = [f"{self.name}" + (f" (arXiv {self.source})" if self.source else "")]
        lines += [f"  proximal policy: {PROXIMAL_IN_WORDS[self.proximal]}"]
        if self.proximal == "recompute":
            reason = self.extra_pass() or "only with several train.minibatches"
            lines += [f"  forward pass before the step: {reason}"]
        lines += (
            [f"  per-token reward: reward - {self.reward_kl:g} · (behavior - reference)"]
            if self.reward_kl
            else []
        )
        lines += [f"  truncated answers: {self.truncated}"] if self.truncated != "train" else []
        lines += [f"  needs: {', '.join(sorted(self.needs))}"] if self.needs else []
        for title, part in parts:
            lines += ["", *describe_part(title, part)] if part is not None else []
        return "\n".join(lines)


PROXIMAL_IN_WORDS = {
    "behavior": "the policy that sampled the token (behavior)",
    "recompute": "the trainer's own policy before the step",
    "interpolate": "behavior + α (logp - behavior), α growing with the token's age",
}


def trained_policy(policy: Policy, batch: Batch) -> Array:
    """sg(logp): during the only optimizer step on a batch, the policy before the step."""
    return stop_gradient(lift(policy.logp))


def interpolated_policy(policy: Policy, batch: Batch) -> Array:
    ages: Array = batch.ages
    return proximal.interpolate(policy.logp, batch.behavior_logp, -ages, 0)


@dataclass(frozen=True)
class AnchoredLoss:
    """A loss whose proximal policy is computed inside it, from the current log-probabilities, and so
    are the corrections: once for each micro-batch."""

    loss: Loss
    corrections: Correction | None

    anchor: Callable[[Policy, Batch], Array]
    """`(policy, batch) → [rows, length]`: the proximal policy's log-probabilities, as constants."""

    def __call__(self, policy: Policy, batch: Batch) -> LossTerms:
        anchor = self.anchor(policy, batch)
        terms, metrics = evaluate_loss(self.loss, policy, batch.replace(proximal_logp=anchor))
        if self.corrections is not None:
            log_ratio = masked(anchor - batch.behavior_logp, batch.mask)
            terms = terms * self.corrections(log_ratio, batch.mask, batch.segment_ids)
        return terms, metrics


def describe_part(title: str, function: Any) -> list[str]:
    """Lines with the function's name, the numbers in effect (unbound ones marked "default") and its
    docstring."""
    bound = function.keywords if isinstance(function, partial) else {}
    plain = unwrapped(function)
    defaults = {
        name: p.default
        for name, p in inspect.signature(plain).parameters.items()
        if p.default is not inspect.Parameter.empty
    }
    numbers = [
        f"{name} = {_short(value)}" + ("" if name in bound else " (default)")
        for name, value in (defaults | bound).items()
    ]
    text = inspect.cleandoc(plain.__doc__ or "").splitlines()
    return [
        f"  {title}: {function_name(plain)}" + (f" with {', '.join(numbers)}" if numbers else ""),
        *(f"      {line}".rstrip() for line in text),
    ]


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else getattr(value, "__name__", repr(value))
