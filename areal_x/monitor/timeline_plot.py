"""Plots a run's timeline: the trainer's phases, and below them the requests and rewards in progress
at the same time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from areal_x.runtime import timeline
from areal_x.runtime.timeline import ENGINE, GENERATION, REWARDS, TRAINER, Interval

PICTURE = "timeline.png"
STEPS = 8  # the last ones; with more, each would be too narrow to read
# Okabe and Ito's colours, which colour-blind readers can distinguish.
COLOURS = {
    "wait": "#CCCCCC",
    "log-probabilities": "#56B4E9",
    "update": "#0072B2",
    "publish": "#E69F00",
    "checkpoint": "#CC79A7",
    "evaluate": "#009E73",
}
TURNS = dict.fromkeys(("sleep", "wake", "rest"), "#F0E442")  # of a run with train.colocate
PAUSE, COUNT = "#D55E00", "#555555"


def plot_timeline(run: str | Path, path: str | Path | None = None, steps: int = STEPS) -> Any:
    """Plots the last steps of a run from its timeline.json and returns the matplotlib Figure; with
    a path, also writes it as an image.

    The top panel shows the trainer, a row a phase; the ones below show the number of requests in
    generation, with the engine's pauses as bars across, and the number of rewards being computed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    lanes = timeline.read(Path(run))
    start, end = window(lanes, steps)
    figure = Figure(figsize=(10, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    trainer, generation, rewards = figure.subplots(3, 1, sharex=True, height_ratios=(3, 2, 1))
    colours = COLOURS | (TURNS if any(i.name in TURNS for i in lanes[TRAINER]) else {})
    names = list(colours)
    for row, name in enumerate(names):
        bars = [(i.start, i.end - i.start) for i in lanes[TRAINER] if i.name == name]
        trainer.broken_barh(
            bars,
            (row - 0.4, 0.8),
            facecolors=colours[name],
            edgecolors=colours[name],
            linewidth=0.5,
        )
    trainer.set_yticks(range(len(names)), names)
    trainer.set_ylim(len(names) - 0.5, -0.5)
    for axes, lane, label in (
        (generation, GENERATION, "requests\nin generation"),
        (rewards, REWARDS, "rewards being\ncomputed"),
    ):
        axes.step(*in_flight(lanes[lane]), where="post", color=COUNT, linewidth=1.0)
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=4))
    for number, pause in enumerate(lanes[ENGINE]):
        named = {"label": "pause for new weights"} if number == 0 else {}
        generation.axvspan(pause.start, pause.end, color=PAUSE, linewidth=0.8, **named)
    if lanes[ENGINE]:
        generation.legend(loc="lower right", bbox_to_anchor=(1, 0.92), frameon=False)
    rewards.set_xlabel("seconds since the run began")
    rewards.set_xlim(start, end)
    for axes in (trainer, generation, rewards):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", color="#DDDDDD", linewidth=0.6)
        axes.set_axisbelow(True)
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure


def window(lanes: Mapping[str, Sequence[Interval]], steps: int) -> tuple[float, float]:
    """The interval of the last steps, in seconds since the run began."""
    begins = [i.start for i in lanes[TRAINER] if i.name == "wait"]
    end = max((i.end for lane in lanes.values() for i in lane), default=1.0)
    return (begins[-steps] if len(begins) >= steps else 0.0), end


def in_flight(intervals: Sequence[Interval]) -> tuple[list[float], list[int]]:
    """The times at which an interval begins or ends, and the number of open ones from then on."""
    changes = sorted([(i.start, 1) for i in intervals] + [(i.end, -1) for i in intervals])
    counts, count = [], 0
    for _, change in changes:
        count += change
        counts.append(count)
    return [0.0, *(time for time, _ in changes)], [0, *counts]
