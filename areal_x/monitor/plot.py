"""Plots a run: reward, held-out accuracy and staleness over steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from areal_x.monitor.metrics import Row, read
from areal_x.monitor.timeline_plot import PICTURE, plot_timeline
from areal_x.runtime import timeline

PLOT = "plot.png"
EVERY_SECONDS = 60.0  # between plots of a running run, or more:
MAX_SHARE = 0.01  # plotting takes at most this share of the run's time

# Okabe and Ito's colours, which colour-blind readers can distinguish.
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#555555"


def plot(rows: Sequence[Row], path: str | Path | None = None) -> Any:
    """Plots the rows of a run and returns the matplotlib Figure; with a path, also writes it as an
    image.

    Each quantity has its own panel: a reward need not be a share, and two scales on one panel would
    suggest relations that do not exist.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    figure = Figure(figsize=(7, 6), layout="constrained")
    FigureCanvasAgg(figure)
    top, middle, bottom = figure.subplots(3, 1, sharex=True, height_ratios=(3, 3, 2))

    top.plot(*_course(rows, "reward"), color=BLUE, linewidth=1.8)
    top.set_ylabel("reward\n(mean of samples)")

    middle.plot(*_course(rows, "accuracy"), color=ORANGE, linewidth=1.8, marker="o", markersize=5)
    middle.set_ylabel("held-out accuracy\n(greedy)")
    middle.set_ylim(-0.02, 1.04)
    middle.yaxis.set_major_formatter(PercentFormatter(1.0))

    steps, largest = _course(rows, "staleness_max")
    bottom.step(
        steps, largest, color=GREY, linewidth=1.2, linestyle="--", where="mid", label="largest"
    )
    bottom.plot(*_course(rows, "staleness_mean"), color=GREY, linewidth=1.8, label="mean")
    bottom.set_ylim(-0.05, max([*largest, 1]) * 1.15)
    bottom.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=4))
    bottom.set_ylabel("staleness\n(versions)")
    bottom.legend(loc="lower right", bbox_to_anchor=(1, 0.94), ncols=2, frameon=False)
    bottom.set_xlabel("optimizer step")
    bottom.xaxis.set_major_locator(MaxNLocator(integer=True))

    figure.align_ylabels()
    for axes in (top, middle, bottom):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
        axes.set_axisbelow(True)
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure


@contextmanager
def live_plots(run: Path) -> Iterator[Callable[[], None]]:
    """Writes plot.png and timeline.png of a run's metrics when the body ends, however it ends.
    Yields a function that updates them from time to time, to be called after each step."""
    last = time.monotonic()
    pause = EVERY_SECONDS

    def update() -> None:
        nonlocal last, pause
        began = time.monotonic()
        if began - last > pause:
            write_plots(run)
            last = time.monotonic()
            pause = max(EVERY_SECONDS, (last - began) / MAX_SHARE)

    try:
        yield update
    finally:
        write_plots(run)


def write_plots(run: Path) -> None:
    """Writes both plots. If that fails, prints one line: a run must not end because of a plot."""
    try:
        if rows := read(run):
            plot(rows, run / PLOT)
        if (run / timeline.FILE).is_file():
            plot_timeline(run, run / PICTURE)
    except Exception as error:
        print(
            f"no plot of {run} could be drawn ({type(error).__name__}:"
            f" {' '.join(str(error).split())})"
        )


def _course(rows: Sequence[Row], key: str) -> tuple[list[float], list[float]]:
    """The steps at which a key was measured, and its values."""
    found = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
    return [step for step, _ in found], [value for _, value in found]
