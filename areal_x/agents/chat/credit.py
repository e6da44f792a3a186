"""Which of an episode's calls its reward is owed to, and the trajectories that say so.

An episode's reward S is its outcome's, or where the outcome has none the sum of what its calls were
given. Every trajectory of the episode has all of S, as those of any workflow. What `credit.how`
changes is what the tokens of each call get of it:

    every       the episode's advantage
    last        the last call's tokens the episode's advantage, others nothing: they are context
    discounted  the episode's advantage times discount ** (calls that came after)
    given       what the call itself was given; the last call also what of S no call was given. As `every` where none was given

`given` is for algorithms that look at rewards token by token (`gae`, `returns_to_go`); those that
compare whole episodes see S. It is said in token rewards that sum to 0 in each trajectory, as the
batch adds S to them at the last trained token. There -S takes it away, each call's own stands at
its last token, and what other trajectories earned at the first token of all. That is context: an
algorithm of tokens does not look there, and for one of episodes the sum is S however many
trajectories there are.
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
    """What the calls of an episode get of its reward, and how they become trajectories.

    how: "every" call the episode's advantage; "last": only the last call is trained on;
    "discounted": a call's advantage counts discount ** (calls after it); "given": each call earned
    what it was given, for algorithms with rewards token by token. discount: of "discounted",
    between 0 and 1. export: "merged": a conversation is one trajectory as far as its prompts go on
    with the tokens before them; "individual": each call is one, with its whole prompt as context.
    """

    how: Literal["every", "last", "discounted", "given"] = "every"
    discount: float = 1.0
    export: Literal["merged", "individual"] = "merged"

    def __post_init__(self) -> None:
        one_of("credit.how", self.how, HOW)
        within("credit.discount", self.discount, 0, 1)
        one_of("credit.export", self.export, EXPORTS)


def episode_of_calls(calls: Sequence[Call], outcome: Outcome | None, credit: Credit) -> Episode:
    """What there is to learn from an agent's calls. outcome: None where nothing but calls was given
    a reward.

    The details of a scored episode also say how many calls were first, continued, rewritten and
    forked (see areal_x.agents.chat.merging). An episode in which nothing was generated, or nothing
    rewarded, failed.
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
    """Each call's value at its tokens, 1 at context."""
    out = np.ones(len(item.trajectory), np.float32)
    for span in item.spans:
        out[span.start : span.stop] = values[span.call]
    return out


def _token_rewards(
    item: MergedTrajectory, earned: Sequence[float], reward: float
) -> Float32[np.ndarray, " T"]:
    """From the last token, where all of the reward will be added, to where each call earned its
    part."""
    out = np.zeros(len(item.trajectory), np.float64)
    for span in item.spans:
        out[span.stop - 1] += earned[span.call]
    out[0] += reward - out.sum()
    out[-1] -= reward
    return out.astype(np.float32)
