"""Credits an episode's reward to its calls, and sets it in the trajectories.

An episode's reward S is its outcome's, or, without one, the sum of its calls' rewards. Every
trajectory of the episode has the reward S, as in any workflow. `credit.how` decides which part of
it the tokens of each call get:

    every       the episode's advantage
    last        the last call's tokens get the episode's advantage; all others are context
    discounted  the episode's advantage times discount ** (number of later calls)
    given       the call's own reward; the last call also the part of S that no call was given. As `every` if none was given

`given` is for algorithms with per-token rewards (`gae`, `returns_to_go`); those that compare whole
episodes see S. It is expressed as token rewards that sum to 0 in each trajectory, because the batch
adds S to them at the last trained token: there -S cancels it, each call's own reward is at its last
token, and the rewards earned in other trajectories are at the very first token. That token is
context, which a per-token algorithm ignores, while for a per-episode algorithm the sum is S however
many trajectories there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import gin
import numpy as np
from jaxtyping import Float32

from areal_x.agents.chat.calls import Call
from areal_x.agents.chat.merging import (
    MergedTrajectories,
    MergedTrajectory,
    merge_calls,
    separate_calls,
    trainable,
)
from areal_x.errors import one_of, within
from areal_x.types import Episode, Failed, Outcome, Scored, TimedOut, Trajectory

HOW = ("every", "last", "discounted", "given")
EXPORTS = ("merged", "individual")


@gin.configurable("credit")
@dataclass(frozen=True)
class Credit:
    """The split of an episode's reward among its calls, and of its calls into trajectories."""

    how: Literal["every", "last", "discounted", "given"] = "every"
    """"every": each call gets the episode's advantage; "last": only the last call is trained on;
    "discounted": a call's advantage is multiplied by discount ** (later calls); "given": each call
    gets its own reward, for algorithms with per-token rewards."""
    discount: float = 1.0
    """The discount of "discounted", between 0 and 1."""
    export: Literal["merged", "individual"] = "merged"
    """"merged": a conversation is one trajectory as long as its prompts continue the earlier
    tokens; "individual": each call is one trajectory, with its whole prompt as context."""

    def __post_init__(self) -> None:
        one_of("credit.how", self.how, HOW)
        within("credit.discount", self.discount, 0, 1)
        one_of("credit.export", self.export, EXPORTS)


def episode_of_calls(calls: Sequence[Call], outcome: Outcome | None, credit: Credit) -> Episode:
    """Returns the episode that an agent's calls form. outcome: None if only calls were given a
    reward.

    The details of a scored episode also count the calls that were first, continued, rewritten and
    forked (see areal_x.agents.chat.merging). An episode without generated tokens, or without a
    reward, failed.
    """
    if isinstance(outcome, Failed | TimedOut):
        return Episode(outcome)
    given = [call.reward for call in calls if call.reward is not None]
    if outcome is None and not given:
        return Episode(Failed("neither the episode nor any of its calls was given a reward"))
    kept = [call for call in calls if trainable(call)]
    if not kept:
        return Episode(
            Failed(f"none of the {len(calls)} calls of the episode has a token to train on")
        )
    reward, details = (sum(given), {}) if outcome is None else (outcome.reward, outcome.details)
    merged = merge_calls(kept) if credit.export == "merged" else separate_calls(kept)
    trajectories = tuple(
        replace(t, reward=reward)
        for t in _with_credit(kept, merged, sum(given) if given else None, reward, credit)
    )
    return Episode(Scored(reward, {**details, **merged.counts}), trajectories)


def _with_credit(
    calls: Sequence[Call],
    merged: MergedTrajectories,
    given: float | None,
    reward: float,
    credit: Credit,
) -> list[Trajectory]:
    last = len(calls) - 1
    match credit.how:
        case "last":
            return [item.trajectory for item in separate_calls(calls[last:]).trajectories]
        case "discounted":
            counts = [credit.discount ** (last - index) for index in range(len(calls))]
            return [
                replace(item.trajectory, credit=_by_token(item, counts))
                for item in merged.trajectories
            ]
        case "given" if given is not None:
            earned = [call.reward or 0.0 for call in calls]
            earned[last] += reward - sum(earned)
            return [
                replace(item.trajectory, token_rewards=_token_rewards(item, earned, reward))
                for item in merged.trajectories
            ]
        case _:
            return [item.trajectory for item in merged.trajectories]


def _by_token(item: MergedTrajectory, values: Sequence[float]) -> Float32[np.ndarray, " T"]:
    """Returns each call's value at its tokens, and 1 at context."""
    out = np.ones(len(item.trajectory), np.float32)
    for span in item.spans:
        out[span.start : span.stop] = values[span.call]
    return out


def _token_rewards(
    item: MergedTrajectory, earned: Sequence[float], reward: float
) -> Float32[np.ndarray, " T"]:
    """Moves the reward from the last token, where the batch adds all of it, to the calls that
    earned it."""
    out = np.zeros(len(item.trajectory), np.float64)
    for span in item.spans:
        out[span.stop - 1] += earned[span.call]
    out[0] += reward - out.sum()
    out[-1] -= reward
    return out.astype(np.float32)
