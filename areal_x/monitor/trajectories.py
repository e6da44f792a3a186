"""Shows training data token by token in a notebook: single `Trajectory`s, and those of a `Turn`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from areal_x.batching.batch import pack_groups
from areal_x.monitor.html import coloured_tokens
from areal_x.types import NOT_THE_POLICY, Trajectory, Turn


@dataclass(frozen=True)
class Page:
    """HTML that a notebook displays."""

    html: str

    def _repr_html_(self) -> str:
        return self.html


def show_in_notebooks() -> None:
    """Makes IPython, if this process runs it, display a `Trajectory` as `show_trajectory` does."""
    if "IPython" not in sys.modules:
        return
    from IPython import get_ipython

    shell = get_ipython()
    if shell is not None:
        html = shell.display_formatter.formatters["text/html"]
        html.for_type(Trajectory, lambda trajectory: show_trajectory(trajectory).html)


@dataclass(frozen=True)
class TrainedTrajectory:
    """A trajectory with the arrays of the batch that it was trained in."""

    trajectory: Trajectory

    advantages: Float[np.ndarray, " T"] | None
    """Per-token advantages; None if the algorithm has none."""

    gaps: Float[np.ndarray, " T"] | None
    """Log-probability under the trainer before the step minus that under the engine, per token;
    None if it is not known (it is with `proximal = "recompute"`)."""


def show_trajectory(trajectory: Trajectory, tokenizer: Any = None) -> Page:
    """Shows a trajectory's tokens coloured by log-probability, and by version if there are several.
    Without a tokenizer, shows token ids."""
    words = words_of(trajectory, tokenizer)
    return Page(heading(trajectory) + by_logprob(trajectory, words) + by_version(trajectory, words))


def show_turn(turn: Turn, tokenizer: Any, trajectories: Sequence[int] | None = None) -> Page:
    """Shows trajectories of one step, coloured by advantage, by version, and by the difference of
    the trainer's and the engine's log-probabilities.

    trajectories: indices into `trained(turn)`; by default those with the largest and the smallest
    advantage.
    """
    found = trained(turn)
    pages = []
    for i in trajectories if trajectories is not None else extremes(found):
        own, words = found[i].trajectory, words_of(found[i].trajectory, tokenizer)
        pages.append(heading(own))
        if (advantages := found[i].advantages) is not None:
            pages.append(
                coloured_tokens(
                    words, np.where(own.mask, advantages, np.nan), "advantage", limit=2.5
                )
            )
        pages.append(by_version(own, words))
        if (gaps := found[i].gaps) is not None:
            pages.append(
                coloured_tokens(
                    words, np.where(own.mask, gaps, np.nan), "trainer − engine, log-probability"
                )
            )
        else:
            pages.append(by_logprob(own, words))
    return Page("".join(pages))


def trained(turn: Turn) -> list[TrainedTrajectory]:
    """Every trajectory of a step with its arrays from the batches. Packing is deterministic, so
    packing again finds the positions."""
    found = []
    for number, batch in enumerate(turn.batches):
        groups = turn.groups[number :: len(turn.batches)]
        length = np.shape(batch.tokens)[1]
        shares = batch.parents is not None
        # pairs are adjacent in a row
        parts = (
            pack_groups(groups, length, together=together, share_prompts=shares)
            for together in ((1,) if shares else (1, 2))
        )
        part = next(p for p in parts if np.array_equal(p.packed.batch.tokens, batch.tokens))
        recomputed = (
            batch.proximal_logp is not None and batch.proximal_logp is not batch.behavior_logp
        )
        gaps = (
            part.packed.gather(np.asarray(batch.proximal_logp) - np.asarray(batch.behavior_logp))
            if recomputed
            else None
        )
        advantages = (
            None if batch.advantages is None else part.packed.gather(np.asarray(batch.advantages))
        )
        for i, trajectory in enumerate(part.trajectories):
            found.append(
                TrainedTrajectory(
                    trajectory,
                    None if advantages is None else advantages[i],
                    None if gaps is None else gaps[i],
                )
            )
    return found


def extremes(found: Sequence[TrainedTrajectory]) -> list[int]:
    """Indices of the trajectories with the largest and the smallest advantage; the first two if
    there are no advantages."""
    advantages = [None if t.advantages is None else t.advantages[t.trajectory.mask] for t in found]
    known = {i: a for i, a in enumerate(advantages) if a is not None and a.size}
    if not known:
        return list(range(min(2, len(found))))
    largest = max(known, key=lambda i: known[i].max())
    smallest = min(known, key=lambda i: known[i].min())
    return list(dict.fromkeys((largest, smallest)))


def words_of(trajectory: Trajectory, tokenizer: Any) -> list[str]:
    tokens = trajectory.tokens.tolist()
    return (
        [f"{token} " for token in tokens]
        if tokenizer is None
        else [tokenizer.decode([token]) for token in tokens]
    )


def heading(trajectory: Trajectory) -> str:
    reward = "no reward yet" if trajectory.reward is None else f"reward {trajectory.reward:g}"
    trained_on = f"{int(trajectory.mask.sum())} of {len(trajectory)} tokens trained on"
    return f"<div><b>{reward}</b>, {trained_on}, ended by {trajectory.finish_reason}</div>"


def by_logprob(trajectory: Trajectory, words: Sequence[str]) -> str:
    return coloured_tokens(
        words,
        np.where(trajectory.mask, trajectory.logprobs, np.nan),
        "log-probability when it was sampled",
    )


def by_version(trajectory: Trajectory, words: Sequence[str]) -> str:
    """The tokens coloured by version, or only a sentence if all have the same."""
    sampled = trajectory.versions != NOT_THE_POLICY
    versions = np.unique(trajectory.versions[sampled])
    if len(versions) < 2:
        text = f"all of version {versions[0]}" if len(versions) else "not sampled from a policy"
        return f"<div><small>{text}</small></div>"
    newest = versions[-1]
    return coloured_tokens(
        words,
        np.where(sampled, trajectory.versions - newest, np.nan),
        f"versions before {newest}, the newest in it",
    )


show_in_notebooks()
