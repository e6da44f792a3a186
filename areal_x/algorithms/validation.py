"""Checks that the parts of an algorithm fit together, before a run, by calling them on tiny
inputs."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np

from areal_x.algorithms.losses import summands
from areal_x.algorithms.parts import call_by_name, is_built_in, parameter_names
from areal_x.errors import ConfigError, function_name
from areal_x.types import Batch, Episode, Group, Loss, Policy, Scored, Task

if TYPE_CHECKING:
    from areal_x.algorithms.algorithm import Algorithm, Correction

# Whose log-probabilities a batch has in the reference's place.
SCORERS = frozenset({"reference", "teacher", "teachers", "self"})
TEACHERS = SCORERS - {"reference"} | {"teacher_logits"}
ROUNDING = 1e-9  # an advantage of at most this size is rounding error

# array that a loss may read → the settings that provide it
PROVIDED_BY = {
    "reference_logp": "needs (by 'reference', 'teacher', 'teachers' or 'self')",
    "entropy": "needs (by 'entropy')",
    "divergence": "divergence and needs (by 'teacher_logits')",
    "returns": "needs (by 'values')",
    "old_values": "needs (by 'values')",
    "advantages": "advantages",
    "values": "head (by 'reward')",
    "logp": "head (by 'policy')",
}


def validate_parts(algorithm: Algorithm) -> None:
    """Calls the parts on one token, so that an invalid setting, or a loss that reads an array which
    nothing provides, is refused when the algorithm is made and not at the first batch.

    Only built-in functions are called: a user's may count its calls, or support one framework only.

    Raises: ConfigError.
    """
    floats, ids, mask = np.ones((1, 1)), np.ones((1, 1), np.int32), np.ones((1, 1), np.bool_)
    integers = ("tokens", "segment_ids", "parents", "positions", "versions", "ages")
    inputs = {
        f.name: ids if f.name in integers else floats for f in (*fields(Policy), *fields(Batch))
    } | {"mask": mask}

    def call(loss: Loss, inputs: dict[str, Any]) -> None:
        policy, batch = ({f.name: inputs[f.name] for f in fields(noun)} for noun in (Policy, Batch))
        loss(Policy(**policy), Batch(**batch))

    for loss in (loss for _, loss in summands(algorithm.loss) if is_built_in(loss)):
        call(loss, inputs)
        for name in missing_inputs(algorithm):
            try:
                call(loss, inputs | {name: None})
            except Exception:
                wanted = (
                    f"one that does not read {name}, which {algorithm.name} does not provide: set"
                    f" its {PROVIDED_BY[name]} too"
                )
                raise ConfigError(f"{algorithm.name}.loss", function_name(loss), wanted) from None
    if algorithm.value_loss is not None and is_built_in(algorithm.value_loss):
        call(algorithm.value_loss, inputs)
    if algorithm.advantages is not None and is_built_in(algorithm.advantages):
        one = floats if "mask" in parameter_names(algorithm.advantages) else floats[0]
        available = {
            "rewards": one,
            "values": one,
            "greedy_rewards": one,
            "mask": mask,
            "groups": ids[0],
            "lengths": ids[0],
        }
        call_by_name(algorithm.advantages, available)
    if is_built_in(algorithm.weighting):
        call_by_name(
            algorithm.weighting,
            {"mask": mask, "segment_ids": ids, "groups_of_segments": np.zeros((1, 2), np.int32)},
        )
    if algorithm.corrections is not None and is_built_in(algorithm.corrections):
        algorithm.corrections(floats - 1, mask, ids)
    if (
        algorithm.proximal == "interpolate"
        and algorithm.corrections is not None
        and couples_rows(algorithm.corrections)
    ):
        wanted = (
            f"'recompute': {looks_at_all(algorithm.corrections)}, and with an interpolated policy it"
            " would be called for one micro-batch at a time"
        )
        raise ConfigError(f"{algorithm.name}.proximal", "interpolate", wanted)
    if algorithm.shaping is not None and is_built_in(algorithm.shaping):
        algorithm.shaping(ids[0])


def host_only(correction: Correction) -> str:
    """Returns the reason why a correction must be called on the host with all of an optimizer step;
    "" if a trainer's loss may call it for each micro-batch."""
    if not is_built_in(correction):
        return (
            f"{function_name(correction)}, which is no part of AReaL-X, is called with numpy arrays"
        )
    return looks_at_all(correction) if couples_rows(correction) else ""


def looks_at_all(correction: Correction) -> str:
    return f"{function_name(correction)} looks at all sequences of an optimizer step together"


def couples_rows(correction: Correction) -> bool:
    """True if the weights of a row depend on the other rows, as tried on rows of very different
    log-ratios."""
    log_ratio = np.geomspace(1e-6, 1e3, 10)[:, None] * np.array([[0.7, -1.0, 1.3]])
    mask, ids = np.ones(log_ratio.shape, np.bool_), np.ones(log_ratio.shape, np.int32)
    try:
        together = np.asarray(correction(log_ratio, mask, ids))
        alone = [
            np.asarray(correction(*(x[i : i + 1] for x in (log_ratio, mask, ids))))
            for i in range(len(mask))
        ]
    except Exception:
        if is_built_in(correction):
            raise
        return False  # a user's function may support one framework only
    return not np.array_equal(together, np.concatenate(alone))


def missing_inputs(algorithm: Algorithm) -> list[str]:
    """Names of the arrays in PROVIDED_BY that the algorithm's loss does not get."""
    needs = algorithm.needs
    provided = {
        "reference_logp": needs & SCORERS or algorithm.reward_kl > 0,
        "entropy": "entropy" in needs,
        "divergence": "teacher_logits" in needs,
        "returns": "values" in needs,
        "old_values": "values" in needs,
        "advantages": algorithm.advantages is not None,
        "values": algorithm.head != "policy",
        "logp": algorithm.head == "policy",
    }
    return [name for name, is_there in provided.items() if not is_there]


def learns_from_reward_alone(algorithm: Algorithm) -> bool:
    """True if the episodes' rewards are its only training signal: no teacher and no shaping."""
    return (
        algorithm.advantages is not None
        and algorithm.shaping is None
        and not algorithm.needs & TEACHERS
    )


def validate_group_size(algorithm: Algorithm, group_size: int) -> None:
    """Tries groups of this size, with rewards that all differ, on the algorithm's built-in
    advantages and filters.

    Distillation is exempt, as it learns without rewards, and users' functions are not called.

    Raises: ConfigError if every advantage is 0 or a filter rejects every group.
    """
    function = algorithm.advantages
    if function is None or algorithm.needs & TEACHERS:
        return
    scored = tuple(Episode(Scored(float(i))) for i in range(group_size))
    refused = [
        keep
        for keep in algorithm.filters
        if is_built_in(keep) and not keep(Group(Task("", ""), 0, 0, scored))
    ]
    if refused:
        wanted = (
            f"at least 2: {algorithm.name}'s filter {function_name(refused[0])} rejects every"
            " group of this size"
        )
        raise ConfigError("train.group_size", group_size, wanted)
    if is_built_in(function) and not np.any(
        np.abs(probe_advantages(algorithm, group_size)) > ROUNDING
    ):
        wanted = (
            f"at least 2: {algorithm.name} compares the rewards of a task's attempts with each"
            " other, and in groups of this size every advantage is 0"
        )
        raise ConfigError("train.group_size", group_size, wanted)


def probe_advantages(algorithm: Algorithm, group_size: int) -> np.ndarray:
    """Advantages of 3 groups whose rewards differ within and between groups, two tokens an
    episode."""
    assert algorithm.advantages is not None
    count = 3 * group_size
    rewards = np.arange(count) ** 2 / count
    per_token = "mask" in parameter_names(algorithm.advantages)
    available = {
        "rewards": np.stack([np.zeros(count), rewards], axis=1) if per_token else rewards,
        "mask": np.ones((count, 2), np.bool_),
        "values": np.zeros((count, 2)),
        "groups": np.repeat(np.arange(3), group_size),
        "lengths": np.full(count, 2),
        "greedy_rewards": np.full(count, -1.0),
    }
    found = call_by_name(algorithm.advantages, available)
    return np.asarray(found[0] if isinstance(found, tuple) else found)
