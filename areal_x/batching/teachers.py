"""Log-probabilities by teachers that read another prompt than the student, or of which each scores
some of the answers: on the host, around any `Scorer`.

    answers ──another prompt──▶ packed anew, once a teacher ──Scorer──▶ Σ weight · logp, at the answers' own tokens
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float32, Int32

from areal_x.algorithms.algorithm import Algorithm, TeacherContext
from areal_x.algorithms.parts import call_by_name
from areal_x.algorithms.teaching import shares
from areal_x.batching.packing import Packed, pack
from areal_x.errors import UserError, function_name
from areal_x.protocols.trainer import Scorer
from areal_x.types import NOT_THE_POLICY, Episode, Group, Kept, Task, Trajectory

ONE = ""  # the name of a teacher that has no others beside it


@dataclass(frozen=True)
class Reader:
    """The policy's tokenizer, for prompts that only a teacher reads."""

    tokenizer: Any

    encode: Callable[[Any], Int32[np.ndarray, " T"]]
    """Tokenises a prompt (a text or chat messages) as workflows do."""


def teacher_logprobs(
    packed: Packed,
    trajectories: Sequence[Trajectory],
    sources: Sequence[tuple[Group, Episode]],
    algorithm: Algorithm,
    teachers: Mapping[str, Scorer],
    reader: Reader | None,
) -> Float32[np.ndarray, "rows length"]:
    """Returns, in the rows of `packed`, the teachers' log-probability of each token of the answers: from
    a trajectory's first trained token on. 0 elsewhere.

    sources: of each trajectory, its group and episode. teachers: by name; one alone is ONE. reader: for
    an algorithm with a teacher's context.

    Raises: UserError for weights of teachers that are not there, a context that is no prompt or does
    not fit into a row, and trajectories with images.
    """
    begins = [int(np.argmax(t.mask)) if t.mask.any() else len(t) for t in trajectories]
    read: Sequence[Trajectory] = trajectories
    if (context := algorithm.teacher_context) is not None:
        assert reader is not None, "a teacher's context needs a tokenizer"
        read = [
            behind(t, begin, prompt_of(context, *source, reader), source[0])
            for t, begin, source in zip(trajectories, begins, sources, strict=True)
        ]
        check_lengths(read, sources, row_length=packed.batch.shape[1])
    weights = [weights_of(algorithm, group.task, teachers.keys()) for group, _ in sources]
    shared = packed.batch.parents is not None
    total = [np.zeros(len(t), np.float64) for t in trajectories]
    for name, teacher in teachers.items():
        own = [i for i, w in enumerate(weights) if name in w and begins[i] < len(trajectories[i])]
        if not own:
            continue
        rows = pack(
            [read[i] for i in own],
            packed.batch.shape[1],
            groups=[sources[i][0].ticket for i in own] if shared else None,
        )
        logp = rows.gather(np.asarray(teacher.logprobs(rows.batch)))
        for i, scored in zip(own, logp, strict=True):
            answer = len(trajectories[i]) - begins[i]
            total[i][begins[i] :] += weights[i][name] * scored[-answer:]
    return packed.spread_tokens([x.astype(np.float32) for x in total])


def weights_of(algorithm: Algorithm, task: Task, names: Collection[str]) -> dict[str, float]:
    """Returns the share of each teacher in what a task's answers are taught. names: of all teachers.
    Raises: UserError for one that is not there."""
    if algorithm.teacher_weights is None:
        return {ONE: 1.0}
    weights = shares(algorithm.teacher_weights(task), task)
    if unknown := sorted(weights.keys() - set(names)):
        raise UserError(
            f"task {task.id!r} is to be taught by {unknown[0]!r}, which train.teachers has not:"
            f" it has {', '.join(map(repr, names))}"
        )
    return weights


def prompt_of(
    context: TeacherContext, group: Group, episode: Episode, reader: Reader
) -> Int32[np.ndarray, " T"] | None:
    """Returns the tokens that a teacher reads in place of the prompt; None for the prompt itself."""
    available: dict[str, Any] = {
        "task": group.task,
        "group": group,
        "episode": episode,
        "tokenizer": reader.tokenizer,
    }
    prompt = call_by_name(context, available)
    if prompt is None:
        return None
    if not isinstance(prompt, str | list | tuple) or not len(prompt):
        raise UserError(
            f"{function_name(context)} returned {prompt!r:.200} for task {group.task.id!r}: a"
            " teacher's context must be a text, chat messages, or None for the prompt itself"
        )
    return reader.encode(prompt)


def behind(
    trajectory: Trajectory, begin: int, prompt: Int32[np.ndarray, " P"] | None, group: Group
) -> Trajectory:
    """Returns a trajectory's answer, its tokens from `begin` on, behind another prompt."""
    if trajectory.images is not None:
        raise UserError(
            f"task {group.task.id!r} has images, which a teacher with a context of its own does not"
            " see yet: use @distill(), whose teacher reads what the student read"
        )
    if prompt is None:
        return trajectory
    context, answer = len(prompt), len(trajectory) - begin

    def joined(filling: Any, array: np.ndarray) -> np.ndarray:
        return np.concatenate([np.full(context, filling, array.dtype), array[begin:]])

    kept = trajectory.kept
    if kept is not None:
        before = int(kept.counts[:begin].sum())
        kept = Kept.joined([Kept.everything(context), Kept(kept.counts[begin:], kept.ids[before:])])
    tokens = np.concatenate([np.asarray(prompt, np.int32), trajectory.tokens[begin:]])
    assert len(tokens) == context + answer
    return replace(
        trajectory,
        tokens=tokens,
        mask=joined(False, trajectory.mask),
        logprobs=joined(0, trajectory.logprobs),
        versions=joined(NOT_THE_POLICY, trajectory.versions),
        token_rewards=None,
        credit=None,
        experts=None,  # they were chosen behind the other prompt
        kept=kept,
    )


def check_lengths(
    read: Sequence[Trajectory], sources: Sequence[tuple[Group, Episode]], row_length: int
) -> None:
    longest = max(range(len(read)), key=lambda i: len(read[i]), default=0)
    if len(read) and (length := len(read[longest])) > row_length:
        raise UserError(
            f"what the teacher reads for task {sources[longest][0].task.id!r}, its context and an"
            f" answer, has {length} tokens and does not fit into a row of {row_length}: raise"
            f" train.row_length to at least {length}, or shorten the context"
        )
