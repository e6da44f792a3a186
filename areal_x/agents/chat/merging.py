"""From an episode's calls to trajectories in which every generated token is trained on exactly
once.

A line is a sequence of tokens that a conversation became. Each call either goes on where a line
ends or begins a line:

    first      the first call
    continued  its prompt begins with all tokens of a line: what follows them is context, and the line goes on
    rewritten  its prompt leaves a line within the line's last completion: a template or the agent changed what was said there
    forked     anything else: a sub-agent, another answer to the same prompt, a history that was made shorter

The last two, like the first, begin a line whose context is the whole prompt; the line that they
left keeps its tokens. A line always ends with tokens that the policy generated: to cut it where a
prompt leaves it would lose some of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from jaxtyping import Int16, Int32

from areal_x.agents.chat.calls import Call
from areal_x.types import Trajectory

Kind = Literal["first", "continued", "rewritten", "forked"]
KINDS: tuple[Kind, ...] = ("first", "continued", "rewritten", "forked")


@dataclass(frozen=True)
class Span:
    """Where a call's completion stands in a trajectory: `start : stop`. call: its place among the
    calls that were given."""

    call: int
    start: int
    stop: int


@dataclass(frozen=True)
class MergedTrajectory:
    """A trajectory without a reward yet, and which calls generated what of it, in order."""

    trajectory: Trajectory
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class MergedTrajectories:
    """counts: how many calls were of each kind, of those with something to train on; empty where
    nothing was merged."""

    trajectories: tuple[MergedTrajectory, ...]
    counts: Mapping[str, int] = field(default_factory=dict)


def separate_calls(calls: Sequence[Call]) -> MergedTrajectories:
    """Each call as a trajectory of its own. Calls without tokens and those that the engine aborted
    are left out."""
    return MergedTrajectories(
        tuple(_from_call(index, call) for index, call in enumerate(calls) if trainable(call))
    )


def merge_calls(calls: Sequence[Call]) -> MergedTrajectories:
    """As few trajectories as hold every generated token once. Calls without tokens and those that
    the engine aborted are left out. Among lines that a call could continue it continues the
    longest."""
    trajectories: list[MergedTrajectory] = []
    counts: Counter[Kind] = Counter()
    for index, call in enumerate(calls):
        if not trainable(call):
            continue
        shared = [common_prefix(merged.trajectory.tokens, call.prompt) for merged in trajectories]
        whole = [i for i, merged in enumerate(trajectories) if shared[i] == len(merged.trajectory)]
        if whole:
            longest = max(whole, key=lambda i: shared[i])
            trajectories[longest] = _extended(trajectories[longest], index, call)
            counts["continued"] += 1
            continue
        trajectories.append(_from_call(index, call))
        counts[_kind(trajectories[:-1], shared, call)] += 1
    return MergedTrajectories(tuple(trajectories), {kind: counts[kind] for kind in KINDS})


def trainable(call: Call) -> bool:
    return len(call.completion.tokens) > 0 and call.completion.finish_reason != "abort"


def common_prefix(a: Int32[np.ndarray, " A"], b: Int32[np.ndarray, " B"]) -> int:
    """How many tokens both begin with."""
    most = min(len(a), len(b))
    different = np.flatnonzero(a[:most] != b[:most])
    return int(different[0]) if len(different) else most


def _kind(trajectories: Sequence[MergedTrajectory], shared: Sequence[int], call: Call) -> Kind:
    """Why a call that continues none of the lines begins one."""
    if not trajectories:
        return "first"
    nearest = max(range(len(trajectories)), key=lambda i: shared[i])
    goes_on = len(call.prompt) > shared[nearest]
    return (
        "rewritten"
        if goes_on and shared[nearest] >= trajectories[nearest].spans[-1].start
        else "forked"
    )


def _from_call(index: int, call: Call) -> MergedTrajectory:
    completion, context = call.completion, len(call.prompt)
    trajectory = Trajectory.from_completion(
        call.prompt,
        completion.tokens,
        completion.logprobs,
        completion.versions,
        None,
        completion.finish_reason,
        completion.experts,
    )
    return MergedTrajectory(trajectory, (Span(index, context, len(trajectory)),))


def _extended(merged: MergedTrajectory, index: int, call: Call) -> MergedTrajectory:
    """The line with the rest of the call's prompt as context, and its completion."""
    old, held = merged.trajectory, len(merged.trajectory)
    # its prompt begins with the old one's tokens: only what it says of them differs
    new = _from_call(index, call).trajectory
    trajectory = Trajectory(
        tokens=new.tokens,
        mask=np.concatenate([old.mask, new.mask[held:]]),
        logprobs=np.concatenate([old.logprobs, new.logprobs[held:]]),
        versions=np.concatenate([old.versions, new.versions[held:]]),
        finish_reason=new.finish_reason,
        experts=_experts(old, new),
    )
    return MergedTrajectory(
        trajectory, (*merged.spans, Span(index, len(call.prompt), len(trajectory)))
    )


def _experts(old: Trajectory, new: Trajectory) -> Int16[np.ndarray, "T layers per_token"] | None:
    """Those that a token went through when it was first read: of the old ones all but the last,
    which only the new call read. None unless both were recorded."""
    if old.experts is None or new.experts is None:
        return None
    return np.concatenate([old.experts[:-1], new.experts[len(old) - 1 :]])
