"""Divides the time of a run's steps into parts, from its timeline: what the trainer did, or what it
waited for.

    wait │ log-probabilities │ update │ publish │ evaluate │ checkpoint │ wait …      the trainer's thread
     └─ what the last episode to end did meanwhile: generate, its reward, or neither (the environment)

The trainer waits for the slowest of a step's episodes, so that one's time is what the wait went to.
Before it was admitted, the others' time is: they held the engine. Whatever more the rollout did
meanwhile, the step would not have been shorter without it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from areal_x.runtime.timeline import TRAINER, Interval

PARTS = (
    "trainer",
    "generation",
    "rewards",
    "environment",
    "weights",
    "evaluation",
    "checkpoint",
    "turns",
    "idle",
    "other",
)
STEPS = 50  # the newest ones, whose parts are what the run is like now
OF_TRAINER = {
    "log-probabilities": "trainer",
    "update": "trainer",
    "evaluate": "evaluation",
    "checkpoint": "checkpoint",
}
NESTED = {"stage": "weights", "sleep": "turns", "wake": "turns", "rest": "turns"}
EPISODE = re.compile(r"group (\d+), episode (\d+) ")

Stretch = tuple[float, float]


class TimeParts(NamedTuple):
    """Where the time of a run's steps went."""

    seconds: float
    """Seconds of all steps that are counted, evaluations and checkpoints between them included."""

    steps: int
    shares: dict[str, float]
    """The share of each of PARTS; together 1."""


def time_parts(lanes: Mapping[str, Sequence[Interval]], drains: bool = False) -> TimeParts | None:
    """Returns where the newest STEPS steps of a timeline went, without its first, which compiles,
    if there are more than two; None without a whole step.

    Evaluations and checkpoints count where a step follows them, so that those at a run's end do not.
    Episodes of shards are found in their own lanes.

    drains: True if a publication waits for the groups in flight (train.deterministic).
    """
    of_trainer = sorted((i for i in lanes.get(TRAINER, ())), key=lambda i: i.start)
    waits = [i for i in of_trainer if i.name == "wait"]
    publications = [i for i in of_trainer if i.name == "publish"]
    if not waits or not publications:
        return None
    counted = waits[1:] if len(waits) > 2 else waits
    begin, end = counted[-STEPS:][0].start, publications[-1].end
    if begin >= end:
        return None
    of_trainer = [i for i in of_trainer if i.end > begin and i.start < end]
    found = dict.fromkeys(PARTS, 0.0)
    for i in of_trainer:
        if (part := OF_TRAINER.get(i.name) or NESTED.get(i.name)) is not None:
            found[part] += length((i.start, i.end), begin, end)
    rollout = Rollout(lanes, begin, end)
    nested = [(i.start, i.end) for i in of_trainer if i.name in NESTED]
    for i in of_trainer:
        if i.name not in ("wait", "publish"):
            continue
        for start, until in without((max(i.start, begin), min(i.end, end)), nested):
            if i.name == "wait" or drains:
                for part, seconds in rollout.awaited(start, until).items():
                    found[part] += seconds
            else:
                found["weights"] += until - start
    whole = end - begin
    found["other"] += max(0.0, whole - sum(found.values()))
    steps = sum(begin <= i.start < end for i in waits)
    return TimeParts(whole, steps, {part: x / whole for part, x in found.items()})


class Rollout:
    """The spans of the rollout's side, of a stretch of time, by what they tell of a wait."""

    def __init__(self, lanes: Mapping[str, Sequence[Interval]], begin: float, end: float) -> None:
        spans = [i for lane in lanes.values() for i in lane if i.end > begin and i.start < end]
        self.episodes = sorted((i for i in spans if i.name == "episode"), key=lambda i: i.end)
        self.generating: dict[tuple[int, int], list[Stretch]] = {}
        self.scoring: dict[tuple[int, int], list[Stretch]] = {}
        for i in spans:
            if i.name == "generate" and "ticket" in i.arguments:
                of = i.arguments["ticket"], i.arguments.get("index", 0)
                self.generating.setdefault(of, []).append((i.start, i.end))
            elif i.name == "reward" and (found := EPISODE.match(i.arguments.get("of", ""))):
                of = int(found[1]), int(found[2])
                # It waited for a free process: so many rewards were computed at once.
                asked = i.start - i.arguments.get("queued", 0.0)
                self.scoring.setdefault(of, []).append((asked, i.end))
        pauses = [i for i in spans if i.name == "pause"]
        self.pauses = [(i.start, i.end) for i in pauses]
        staged = [i for i in lanes.get(TRAINER, ()) if i.name == "stage"]
        self.publications = list(_publications(staged, pauses))

    def awaited(self, start: float, end: float) -> dict[str, float]:
        """Returns what a wait of the trainer went to, in seconds by part."""
        last = next((i for i in reversed(self.episodes) if i.end <= end), None)
        if last is None:  # still open, or its span is in no lane
            last = next((i for i in self.episodes if i.start < end), None)
        if last is None or last.end <= start:
            return self._meanwhile(start, end)
        found = self._meanwhile(start, max(start, min(last.start, end)))
        of = last.arguments.get("ticket", -1), last.arguments.get("index", 0)
        found = added(
            found,
            divided(
                (max(start, last.start), min(end, last.end)),
                ("weights", self.pauses),
                ("generation", self.generating.get(of, ())),
                ("rewards", self.scoring.get(of, ())),
                rest="environment",
            ),
        )
        return added(found, {"other": max(0.0, end - last.end)})

    def _meanwhile(self, start: float, end: float) -> dict[str, float]:
        """Divides a stretch by what any episode did."""
        return divided(
            (start, end),
            ("weights", self.pauses),
            ("generation", [x for of in self.generating.values() for x in of]),
            ("rewards", [x for of in self.scoring.values() for x in of]),
            ("environment", [(i.start, i.end) for i in self.episodes]),
            ("weights", self.publications),
            rest="idle",
        )


def _publications(staged: Iterable[Interval], pauses: Sequence[Interval]) -> Iterable[Stretch]:
    """Yields the time from the end of each version's staging until the last server has it."""
    taken: dict[int, float] = {}
    for pause in pauses:
        version = pause.arguments.get("version", -1)
        taken[version] = max(taken.get(version, 0.0), pause.end)
    for i in staged:
        if (until := taken.get(i.arguments.get("version", -1))) is not None:
            yield i.end, until


# ---- stretches of time


def divided(stretch: Stretch, *parts: tuple[str, Iterable[Stretch]], rest: str) -> dict[str, float]:
    """Divides a stretch of time among parts: each instant goes to the first part that covers it, or
    else to the rest. Returns seconds."""
    found: dict[str, float] = {}
    left = [stretch] if stretch[1] > stretch[0] else []
    for part, covering in parts:
        before = total(left)
        covering = [x for x in covering if x[1] > stretch[0] and x[0] < stretch[1]]
        left = [x for one in left for x in without(one, covering)]
        found[part] = found.get(part, 0.0) + before - total(left)
    found[rest] = found.get(rest, 0.0) + total(left)
    return found


def without(stretch: Stretch, covering: Iterable[Stretch]) -> list[Stretch]:
    """Returns what others leave of a stretch of time."""
    found, at = [], stretch[0]
    for start, end in sorted(x for x in covering if x[1] > stretch[0] and x[0] < stretch[1]):
        if start > at:
            found.append((at, start))
        at = max(at, end)
    if at < stretch[1]:
        found.append((at, stretch[1]))
    return found


def total(stretches: Iterable[Stretch]) -> float:
    return sum(end - start for start, end in stretches)


def covered(stretches: Iterable[Stretch]) -> float:
    """Returns the length of the union of stretches."""
    found, until = 0.0, float("-inf")
    for begin, end in sorted(stretches):
        found += max(0.0, end - max(begin, until))
        until = max(until, end)
    return found


def length(stretch: Stretch, begin: float, end: float) -> float:
    """Returns the seconds of a stretch that lie between begin and end."""
    return max(0.0, min(stretch[1], end) - max(stretch[0], begin))


def added(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
    return {part: a.get(part, 0.0) + b.get(part, 0.0) for part in {**a, **b}}
