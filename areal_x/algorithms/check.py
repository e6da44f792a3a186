"""Whether the parts of an algorithm go together, found out before a run by calling them on one
token."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np

from areal_x.algorithms.losses import each
from areal_x.algorithms.parts import asked_for, call_by_name, is_own
from areal_x.errors import ConfigError, function_name
from areal_x.types import Batch, Episode, Group, Loss, Policy, Scored, Task

if TYPE_CHECKING:
    from areal_x.algorithms.algorithm import Algorithm, Correction

TEACHERS = frozenset({"teacher", "teacher_logits"})
NOTHING = 1e-9  # an advantage that is no more than rounding


def rehearse(algorithm: Algorithm) -> None:
    """Calls the parts on one token, so that a setting which cannot work, or a loss that reads what
    nothing gives it, is refused when the algorithm is made and not at the first batch. Only this
    project's own: a user's may count its calls, or know one framework alone. Raises: ConfigError.
    """
    floats, ids, mask = np.ones((1, 1)), np.ones((1, 1), np.int32), np.ones((1, 1), np.bool_)
    integers = ("tokens", "segment_ids", "prefix_ids", "positions", "versions", "ages")
    inputs = {
        f.name: ids if f.name in integers else floats for f in (*fields(Policy), *fields(Batch))
    } | {"mask": mask}

    def call(loss: Loss, inputs: dict[str, Any]) -> None:
        policy, batch = ({f.name: inputs[f.name] for f in fields(noun)} for noun in (Policy, Batch))
        loss(Policy(**policy), Batch(**batch))

    for loss in (loss for _, loss in each(algorithm.loss) if is_own(loss)):
        call(loss, inputs)
        for name in lacking(algorithm):
            try:
                call(loss, inputs | {name: None})
            except Exception:
                wanted = (
                    f"one that does without {name}, which {algorithm.name} does not give it: set"
                    f" its {GIVEN_BY[name]} too"
                )
                raise ConfigError(f"{algorithm.name}.loss", function_name(loss), wanted) from None
    if algorithm.value_loss is not None and is_own(algorithm.value_loss):
        call(algorithm.value_loss, inputs)
    if algorithm.advantages is not None and is_own(algorithm.advantages):
        one = floats if "mask" in asked_for(algorithm.advantages) else floats[0]
        given = {
            "rewards": one,
            "values": one,
            "greedy_rewards": one,
            "mask": mask,
            "groups": ids[0],
            "lengths": ids[0],
        }
        call_by_name(algorithm.advantages, given)
    if is_own(algorithm.weighting):
        call_by_name(
            algorithm.weighting,
            {"mask": mask, "segment_ids": ids, "groups_of_segments": np.zeros((1, 2), np.int32)},
        )
    if algorithm.corrections is not None and is_own(algorithm.corrections):
        algorithm.corrections(floats - 1, mask, ids)
    if (
        algorithm.proximal == "interpolate"
        and algorithm.corrections is not None
        and looks_beyond_a_row(algorithm.corrections)
    ):
        wanted = (
            f"'recompute': {function_name(algorithm.corrections)} looks at all sequences of an"
            " optimizer step together, and around an interpolated policy it would be given those"
            " of one micro-batch"
        )
        raise ConfigError(f"{algorithm.name}.proximal", "interpolate", wanted)
    if algorithm.shaping is not None and is_own(algorithm.shaping):
        algorithm.shaping(ids[0])


def looks_beyond_a_row(correction: Correction) -> bool:
    """Whether a row's weights depend on the rows beside it, as rows of very different log-ratios
    show."""
    log_ratio = np.geomspace(1e-6, 1e3, 10)[:, None] * np.array([[0.7, -1.0, 1.3]])
    mask, ids = np.ones(log_ratio.shape, np.bool_), np.ones(log_ratio.shape, np.int32)
    try:
        together = np.asarray(correction(log_ratio, mask, ids))
        alone = [
            np.asarray(correction(*(x[i : i + 1] for x in (log_ratio, mask, ids))))
            for i in range(len(mask))
        ]
    except Exception:
        if is_own(correction):
            raise
        return False  # a user's may know one framework alone
    return not np.array_equal(together, np.concatenate(alone))


GIVEN_BY = {
    "reference_logp": "needs (by 'reference' or 'teacher')",
    "entropy": "needs (by 'entropy')",
    "divergence": "divergence and needs (by 'teacher_logits')",
    "returns": "needs (by 'values')",
    "old_values": "needs (by 'values')",
    "advantages": "advantages",
    "values": "head (by 'reward')",
    "logp": "head (by 'policy')",
}


def lacking(algorithm: Algorithm) -> list[str]:
    """The arrays of GIVEN_BY that the algorithm's loss does not get."""
    needs = algorithm.needs
    given = {
        "reference_logp": needs & {"reference", "teacher"} or algorithm.reward_kl > 0,
        "entropy": "entropy" in needs,
        "divergence": "teacher_logits" in needs,
        "returns": "values" in needs,
        "old_values": "values" in needs,
        "advantages": algorithm.advantages is not None,
        "values": algorithm.head != "policy",
        "logp": algorithm.head == "policy",
    }
    return [name for name, is_there in given.items() if not is_there]


def learns_from_reward(algorithm: Algorithm) -> bool:
    """Whether the rewards that episodes are given are all that it learns from."""
    return (
        algorithm.advantages is not None
        and algorithm.shaping is None
        and not algorithm.needs & TEACHERS
    )


def check_group_size(algorithm: Algorithm, group_size: int) -> None:
    """Computes the algorithm's own advantages of groups of this size whose rewards all differ, and
    asks its filters about one. Distillation learns without rewards, and a user's function is not
    called here. Raises: ConfigError where every advantage is 0 or every group is given back."""
    function = algorithm.advantages
    if function is None or algorithm.needs & TEACHERS:
        return
    scored = tuple(Episode(Scored(float(i))) for i in range(group_size))
    refused = [
        keep
        for keep in algorithm.filters
        if is_own(keep) and not keep(Group(Task("", ""), 0, 0, scored))
    ]
    if refused:
        wanted = (
            f"at least 2: {algorithm.name}'s filter {function_name(refused[0])} gives every group"
            " of this size back"
        )
        raise ConfigError("train.group_size", group_size, wanted)
    if is_own(function) and not np.any(
        np.abs(advantages_of_groups(algorithm, group_size)) > NOTHING
    ):
        wanted = (
            f"at least 2: {algorithm.name} compares the rewards of a task's attempts with each"
            " other, and in groups of this size every advantage is 0"
        )
        raise ConfigError("train.group_size", group_size, wanted)


def advantages_of_groups(algorithm: Algorithm, group_size: int) -> np.ndarray:
    """Of 3 groups with rewards that differ within them and between them, two tokens an episode."""
    assert algorithm.advantages is not None
    count = 3 * group_size
    rewards, lengths, mask = (
        np.arange(count) ** 2 / count,
        np.full(count, 2),
        np.ones((count, 2), np.bool_),
    )
    given = {
        "groups": np.repeat(np.arange(3), group_size),
        "lengths": lengths,
        "greedy_rewards": np.full(count, -1.0),
    }
    given |= {"rewards": rewards, "mask": mask, "values": np.zeros((count, 2))}
    if "mask" in asked_for(algorithm.advantages):
        given["rewards"] = np.stack([np.zeros(count), rewards], axis=1)
    found = call_by_name(algorithm.advantages, given)
    return np.asarray(found[0] if isinstance(found, tuple) else found)
