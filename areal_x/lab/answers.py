"""What the page shows of a run's trajectories, as plain data for JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from areal_x.errors import UserError
from areal_x.lab.filters import Filter, select
from areal_x.lab.index import NONE, OUTCOMES, PRUNED, STATUSES, Index
from areal_x.lab.reading import connection_to
from areal_x.lab.search import Slice, search
from areal_x.lab.vocabulary import Vocabulary
from areal_x.run.group_bytes import OUTCOMES as KINDS
from areal_x.run.group_bytes import decode
from areal_x.run.token_record import TokenRecord, of_trajectories
from areal_x.types import NOT_THE_POLICY, Group, Scored, Task, Trajectory

MOST_ROWS = 200  # of a page
MOST_TOKENS = 4000  # of a trajectory, in one answer
SHOWN_CHARACTERS = 4000  # of a prompt or an answer beside others of its group
PREVIEW_TOKENS = 60
SEARCHED_ROWS = 2048  # between two sorts of the rows that are left

# Why a trajectory lacks what training makes of its tokens.
NOT_TRAINED = "no step has trained on this group yet"
NOT_RECORDED = "recorded for a share of the groups (journal.token_share), and not for this one"
NOT_COMPUTED = {
    "advantages": "the algorithm has no advantages",
    "trainer_logprobs": (
        "the trainer kept none: its head has no log-probabilities, its backend keeps none, or a"
        " version before this one wrote the journal"
    ),
    "entropies": "the loss needs no entropy: journal.entropy = True computes it for the journal",
}


def rows_page(index: Index, wanted: Filter, begin: int, count: int) -> dict[str, Any]:
    """Returns rows `begin` to `begin + count` of those that a filter selects, and how many it
    does."""
    selection = select(index, wanted)
    page = selection.page(begin, min(count, MOST_ROWS))
    return {"total": len(selection), "rows": described_rows(index, page), **about(index)}


def about(index: Index) -> dict[str, Any]:
    """Returns how far an index is, and what it could not read."""
    return {
        "progress": index.progress,
        "indexed": len(index.rows),
        "unreadable": index.unreadable,
        "error": index.error,
        "reasons": [reason for reason in index.reasons if reason],
    }


def described_rows(index: Index, numbers: Any) -> list[dict[str, Any]]:
    rows = {
        name: index.rows.column(name)[numbers].tolist()
        for name in (
            "group",
            "episode",
            "trajectory",
            "outcome",
            "reward",
            "length",
            "trained",
            "finish",
            "error",
        )
    }
    found = []
    for i in range(len(numbers)):
        group = rows["group"][i]
        of_group = {
            name: int(index.groups.column(name)[group])
            for name in ("ticket", "step", "version", "status")
        }
        status = of_group.pop("status")
        error = rows["error"][i]
        found.append(
            {
                **of_group,
                "status": "pruned" if status == PRUNED else STATUSES[status],
                "task": index.tasks[group],
                "episode": rows["episode"][i],
                "trajectory": rows["trajectory"][i],
                "outcome": OUTCOMES[rows["outcome"][i]],
                "reward": rows["reward"][i],
                "length": rows["length"][i],
                "trained": rows["trained"][i],
                "finish": index.reasons[rows["finish"][i]],
                "error": index.failures[error].error[:200] if error != NONE else "",
            }
        )
    return found


def searched(
    run: Path, index: Index, vocabulary: Vocabulary, wanted: Filter, text: str, begin: int
) -> dict[str, Any]:
    """Returns a slice of a search through the rows that a filter selects: see `search`."""
    selection = select(index, wanted)
    part = selection.page(begin, SEARCHED_ROWS)
    result: Slice = search(run, index, vocabulary, part, text, MOST_ROWS, begin)
    rows = described_rows(index, np.array([f.row for f in result.found], np.int64))
    for row, found in zip(rows, result.found, strict=True):
        row["excerpt"] = [found.before, found.match, found.after]
    return {
        "total": len(selection),
        "next": result.next,
        "left_out": result.left_out,
        "rows": rows,
        **about(index),
    }


def failures(index: Index) -> list[dict[str, Any]]:
    """Returns the errors of a run's episodes, the most frequent first."""
    found = [
        {"number": number, **{f.name: getattr(failure, f.name) for f in fields(failure)}}
        for number, failure in enumerate(index.failures)
    ]
    return sorted(found, key=lambda failure: -failure["count"])


def outcome_counts(index: Index) -> dict[str, int]:
    """Returns how many episodes had each outcome, of the groups that the index has."""
    count = len(index.rows)
    outcome = index.rows.column("outcome", count)
    # an episode has a row per trajectory, one after another
    group, episode = (index.rows.column(name, count) for name in ("group", "episode"))
    first = np.ones(count, np.bool_)
    first[1:] = (np.diff(group) != 0) | (np.diff(episode) != 0)
    counts = np.bincount(outcome[first], minlength=len(OUTCOMES))
    return dict(zip(OUTCOMES, counts.tolist(), strict=True))


# ---- one group


def read_group(run: Path, ticket: int) -> tuple[Group, int | None, str]:
    """Returns a group, the step that consumed it and its status.

    Raises: UserError for a group that the journal does not have, or whose bytes are damaged.
    """
    with connection_to(run) as connection:
        row = connection.execute(
            "SELECT task, admitted_version, status, content, (SELECT step FROM consumed WHERE"
            " consumed.ticket = groups.ticket) FROM groups WHERE ticket = ?",
            (ticket,),
        ).fetchone()
    if row is None or row[3] is None:
        raise UserError(f"the journal has no finished group {ticket} (any more)")
    task, version, status, content, step = row
    try:
        return decode(content, Task(task or "", ""), ticket, version), step, status
    except Exception as error:
        raise UserError(f"the group {ticket} is damaged in the journal ({error})") from error


def group_view(run: Path, ticket: int, vocabulary: Vocabulary | None) -> dict[str, Any]:
    """Returns a group with the texts of its trajectories, shortened."""
    group, step, status = read_group(run, ticket)
    rewards = group.rewards
    mean = float(np.mean(rewards)) if rewards else None
    episodes, number = [], 0
    for episode in group.episodes:
        outcome = episode.outcome
        shown: dict[str, Any] = {
            "outcome": next(k for k, v in KINDS.items() if isinstance(outcome, v)),
            **{f.name: getattr(outcome, f.name) for f in fields(outcome)},
            "trajectories": [],
        }
        for trajectory in episode.trajectories:
            shown["trajectories"].append(_shortened(number, trajectory, vocabulary))
            number += 1
        episodes.append(shown)
    return {
        "ticket": ticket,
        "task": group.task.id,
        "version": group.admitted_version,
        "step": step,
        "status": status,
        "greedy_reward": group.greedy_reward,
        "mean": mean,
        "std": float(np.std(rewards)) if rewards else None,
        "episodes": episodes,
    }


def _shortened(
    number: int, trajectory: Trajectory, vocabulary: Vocabulary | None
) -> dict[str, Any]:
    start = int(trajectory.mask.argmax()) if trajectory.mask.any() else 0
    texts = {}
    for name, tokens in (
        ("prompt", trajectory.tokens[:start]),
        ("answer", trajectory.tokens[start:]),
    ):
        shown = tokens[:SHOWN_CHARACTERS].tolist()
        text = " ".join(map(str, shown)) if vocabulary is None else vocabulary.text(shown)
        whole = len(text) <= SHOWN_CHARACTERS and len(tokens) <= SHOWN_CHARACTERS
        texts[name] = {"text": text[:SHOWN_CHARACTERS], "whole": whole}
    return {
        "number": number,
        "length": len(trajectory),
        "trained": int(trajectory.mask.sum()),
        "reward": trajectory.reward,
        "finish": trajectory.finish_reason,
        "logprob": _mean(trajectory.logprobs[_sampled(trajectory)]),
        **texts,
    }


def tokens_view(
    run: Path, ticket: int, number: int, vocabulary: Vocabulary | None, begin: int, count: int
) -> dict[str, Any]:
    """Returns a part of a trajectory, token by token: `pieces` (texts, or ids without a
    vocabulary), `ids`, and the arrays that the journal has: `mask`, `logprobs`, `versions`,
    `credit`, `token_rewards`, `kept` (how many tokens truncated sampling left); where they were
    recorded, `advantages`, `trainer_logprobs` and `entropies` (NaN at what is not trained on), and
    why each that is not there is not (`lacking`).

    Raises: UserError for a group or a trajectory that the journal does not have.
    """
    group, step, _ = read_group(run, ticket)
    trajectories = [(e, t) for e in group.episodes for t in e.trajectories]
    if not 0 <= number < len(trajectories):
        raise UserError(f"the group {ticket} has no trajectory {number}")
    episode, whole = trajectories[number]
    end = min(begin + min(count, MOST_TOKENS), len(whole))
    part = slice(begin, end)
    ids = whole.tokens[part].tolist()
    arrays: dict[str, Any] = {
        "mask": whole.mask[part].tolist(),
        "logprobs": whole.logprobs[part].tolist(),
        "versions": whole.versions[part].tolist(),
    }
    for name in ("credit", "token_rewards"):
        if (array := getattr(whole, name)) is not None:
            arrays[name] = array[part].tolist()
    if whole.kept is not None:
        arrays["kept"] = whole.kept.counts[part].tolist()
    trained, lacking = trained_arrays(run, ticket, step, [t for _, t in trajectories])
    arrays |= {name: x[number][part].tolist() for name, x in trained.items()}
    sampled = _sampled(whole)
    versions = whole.versions[sampled]
    outcome = episode.outcome
    rewards = group.rewards
    return {
        "ticket": ticket,
        "task": group.task.id,
        "step": step,
        "admitted_version": group.admitted_version,
        "trajectory": number,
        "trajectories": len(trajectories),
        "length": len(whole),
        "trained": int(whole.mask.sum()),
        "begin": begin,
        "end": end,
        "reward": whole.reward,
        "episode_reward": outcome.reward if isinstance(outcome, Scored) else None,
        "details": dict(outcome.details) if isinstance(outcome, Scored) else {},
        "mean": float(np.mean(rewards)) if rewards else None,
        "finish": whole.finish_reason,
        "has_images": whole.images is not None,
        "newest_version": int(versions.max()) if len(versions) else None,
        "oldest_version": int(versions.min()) if len(versions) else None,
        "lowest_logprob": float(whole.logprobs[sampled].min()) if sampled.any() else None,
        "mean_logprob": _mean(whole.logprobs[sampled]),
        "ids": ids,
        "pieces": None if vocabulary is None else vocabulary.pieces(ids),
        "lacking": lacking,
        **arrays,
    }


def trained_arrays(
    run: Path, ticket: int, step: int | None, trajectories: Sequence[Trajectory]
) -> tuple[dict[str, list[Any]], dict[str, str]]:
    """Returns what a step made of a group's tokens, per trajectory, and why the rest is missing."""
    try:
        with connection_to(run) as connection:
            row = connection.execute(
                "SELECT content FROM trained WHERE ticket = ? AND step = ?", (ticket, step)
            ).fetchone()
    except UserError as error:
        if "no such table" not in str(error):  # a journal of an earlier version
            raise
        row = None
    if row is None:
        why = NOT_TRAINED if step is None else NOT_RECORDED
        return {}, dict.fromkeys(NOT_COMPUTED, why)
    masks = [t.mask for t in trajectories]
    try:
        record = TokenRecord.decode(row[0])
        arrays = {
            "advantages": record.advantages,
            "trainer_logprobs": record.logprobs,
            "entropies": record.entropies,
        }
        found = {name: of_trajectories(x, masks) for name, x in arrays.items() if x is not None}
    except Exception as error:  # whatever damaged bytes raise
        return {}, dict.fromkeys(NOT_COMPUTED, f"it is damaged in the journal ({error})")
    return found, {name: why for name, why in NOT_COMPUTED.items() if name not in found}


def previews(
    run: Path, vocabulary: Vocabulary, wanted: Sequence[tuple[int, int]]
) -> list[str | None]:
    """Returns the beginnings of answers, each of a ticket and a trajectory's number; None for one
    that cannot be read."""
    groups: dict[int, list[Trajectory] | None] = {}
    found: list[str | None] = []
    for ticket, number in wanted:
        if ticket not in groups:
            try:
                group, _, _ = read_group(run, ticket)
                groups[ticket] = [t for e in group.episodes for t in e.trajectories]
            except UserError:
                groups[ticket] = None
        of_group = groups[ticket]
        if of_group is None or not 0 <= number < len(of_group):
            found.append(None)
            continue
        trajectory = of_group[number]
        start = int(trajectory.mask.argmax()) if trajectory.mask.any() else 0
        found.append(vocabulary.text(trajectory.tokens[start : start + PREVIEW_TOKENS].tolist()))
    return found


def _sampled(trajectory: Trajectory) -> Any:
    return trajectory.mask & (trajectory.versions != NOT_THE_POLICY)


def _mean(x: Any) -> float | None:
    return float(np.mean(x)) if len(x) else None


def compared(a: Mapping[str, Any], b: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Returns the settings of a run by name, beside another's: the text of each, None for one that
    it has not."""
    others = a if b is None else b
    return [
        {"name": name, "a": _written(a, name), "b": _written(others, name)}
        for name in sorted(a.keys() | others.keys())
    ]


def _written(settings: Mapping[str, Any], name: str) -> str | None:
    if name not in settings:
        return None
    value = settings[name]
    return value if isinstance(value, str) and value.startswith("@") else repr(value)


def without_surrogates(value: Any) -> Any:
    """Replaces what a text may hold and UTF-8 may not."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {without_surrogates(k): without_surrogates(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        # long lists are arrays of numbers
        return (
            value
            if value and isinstance(value[0], int | float)
            else [*map(without_surrogates, value)]
        )
    return value
