"""Merges an episode's calls into trajectories in which every generated token is trained on exactly
once.

Each call either continues a trajectory at its end or starts a new one:

    first      the first call
    continued  its prompt begins with all tokens of a trajectory: the rest of the prompt is context, and the trajectory grows
    rewritten  its prompt leaves a trajectory within its last completion: a template or the agent changed that completion
    forked     anything else: a sub-agent, another answer to the same prompt, a history that was shortened

The last two, like the first, start a trajectory whose context is the whole prompt; the trajectory
that they diverge from keeps its tokens. A trajectory always ends with tokens that the policy
generated: cutting it where a prompt diverges would lose some of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from jaxtyping import Int16, Int32

from areal_x.agents.chat.calls import Call
from areal_x.types import Images, Kept, Trajectory

Kind = Literal["first", "continued", "rewritten", "forked"]
KINDS: tuple[Kind, ...] = ("first", "continued", "rewritten", "forked")


@dataclass(frozen=True)
class Span:
    """The position of a call's completion in a trajectory: `start : stop`. call: its index among
    the calls."""

    call: int
    start: int
    stop: int


@dataclass(frozen=True)
class MergedTrajectory:
    """A trajectory without a reward yet, and the spans of the calls that generated it, in order."""

    trajectory: Trajectory
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class MergedTrajectories:
    """counts: the number of trainable calls of each kind; empty if nothing was merged."""

    trajectories: tuple[MergedTrajectory, ...]
    counts: Mapping[str, int] = field(default_factory=dict)


def separate_calls(calls: Sequence[Call]) -> MergedTrajectories:
    """Returns each call as a trajectory of its own, without calls that have no tokens or were
    aborted by the engine."""
    return MergedTrajectories(
        tuple(_from_call(index, call) for index, call in enumerate(calls) if trainable(call))
    )


def merge_calls(calls: Sequence[Call]) -> MergedTrajectories:
    """Returns the fewest trajectories that hold every generated token once, without calls that have
    no tokens or were aborted by the engine. A call that could continue several trajectories
    continues the longest."""
    trajectories: list[MergedTrajectory] = []
    counts: Counter[Kind] = Counter()
    for index, call in enumerate(calls):
        if not trainable(call):
            continue
        shared = [common_prefix(merged.trajectory.tokens, call.prompt) for merged in trajectories]
        whole = [
            i
            for i, merged in enumerate(trajectories)
            if shared[i] == len(merged.trajectory)
            and begins_with(call.images, merged.trajectory.images)
        ]
        if whole:
            longest = max(whole, key=lambda i: shared[i])
            trajectories[longest] = _extended(trajectories[longest], index, call)
            counts["continued"] += 1
            continue
        trajectories.append(_from_call(index, call))
        counts[_kind(trajectories[:-1], shared, call)] += 1
    return MergedTrajectories(tuple(trajectories), {kind: counts[kind] for kind in KINDS})


def begins_with(images: Images | None, first: Images | None) -> bool:
    """True if the first of these images are those: their tokens alone tell only their sizes."""
    if first is None or images is first:
        return True
    if images is None or len(images.grids) < len(first.grids):
        return False
    return np.array_equal(images.grids[: len(first.grids)], first.grids) and np.array_equal(
        images.patches[: len(first.patches)], first.patches
    )


def trainable(call: Call) -> bool:
    return len(call.completion.tokens) > 0 and call.completion.finish_reason != "abort"


def common_prefix(a: Int32[np.ndarray, " A"], b: Int32[np.ndarray, " B"]) -> int:
    """Returns the length of the common prefix."""
    most = min(len(a), len(b))
    equal = a[:most] == b[:most]
    if not most or equal[first := int(equal.argmin())]:
        return most
    return first


def _kind(trajectories: Sequence[MergedTrajectory], shared: Sequence[int], call: Call) -> Kind:
    """Returns why a call that continues none of the trajectories starts a new one."""
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
    completion = call.completion
    context = len(call.prompt)
    trajectory = Trajectory.from_completion(
        call.prompt,
        completion.tokens,
        completion.logprobs,
        completion.versions,
        None,
        completion.finish_reason,
        completion.experts,
        images=call.images,
        kept=completion.kept,
    )
    return MergedTrajectory(trajectory, (Span(index, context, len(trajectory)),))


def _extended(merged: MergedTrajectory, index: int, call: Call) -> MergedTrajectory:
    """Returns the trajectory extended by the rest of the call's prompt, as context, and its
    completion."""
    old = merged.trajectory
    held = len(merged.trajectory)
    # its prompt begins with the old one's tokens: only their mask, logprobs and versions differ
    new = _from_call(index, call).trajectory
    trajectory = Trajectory(
        tokens=new.tokens,
        mask=np.concatenate([old.mask, new.mask[held:]]),
        logprobs=np.concatenate([old.logprobs, new.logprobs[held:]]),
        versions=np.concatenate([old.versions, new.versions[held:]]),
        finish_reason=new.finish_reason,
        experts=_experts(old, new),
        images=new.images,
        kept=_kept(old, call),
    )
    return MergedTrajectory(
        trajectory, (*merged.spans, Span(index, len(call.prompt), len(trajectory)))
    )


def _experts(old: Trajectory, new: Trajectory) -> Int16[np.ndarray, "T layers per_token"] | None:
    """Returns the experts that each token was routed to when it was first computed: all but the
    last of the old trajectory, whose last token only the new call computed. None unless both were
    recorded."""
    if old.experts is None or new.experts is None:
        return None
    return np.concatenate([old.experts[:-1], new.experts[len(old) - 1 :]])


def _kept(old: Trajectory, call: Call) -> Kept | None:
    """Returns what was kept at each token when it was sampled; None if nothing was left out at
    any."""
    new = call.completion
    if old.kept is None and new.kept is None:
        return None
    return Kept.joined(
        [
            old.kept or Kept.everything(len(old)),
            Kept.everything(len(call.prompt) - len(old)),
            new.kept or Kept.everything(len(new.tokens)),
        ]
    )
