"""Displays a run's progress: a live panel in a terminal, one changing line in a notebook, a line a
step elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from itertools import pairwise
from statistics import median
from types import TracebackType
from typing import Any, Protocol, TextIO

from areal_x.algorithms.mismatch import MAX_LAGS
from areal_x.errors import printable
from areal_x.monitor.metrics import Row

BARS = "▁▂▃▄▅▆▇█"
# The user is warned after this many steps in a row in which most groups gave no training signal.
STEPS_WITHOUT_SIGNAL = 5


class Display:
    """Shows each row of metrics, and messages between them. Use it in a `with`, which restores the
    terminal at its end.

    steps: number of the run's steps. stream: standard output by default.
    """

    def __init__(self, steps: int, stream: TextIO | None = None) -> None:
        self.steps = steps
        self.rows: list[Row] = []
        stream = stream or sys.stdout
        self._screen: _Screen = (
            _Terminal(self, stream)
            if stream.isatty()
            else _Notebook()
            if in_notebook()
            else _Lines(stream)
        )

    def show(self, row: Row) -> None:
        """Shows the metrics of the step that just ended, or of step 0 before the first one."""
        self.rows.append(row)
        self._screen.show(line(row, self.steps, seconds_left(self.rows, self.steps)))
        if text := warning(self.rows):
            self._screen.message(text)

    def message(self, text: str) -> None:
        """Shows an event between steps, such as the start of a server or a saved checkpoint."""
        self._screen.message(printable(text))

    def __enter__(self) -> Display:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._screen.close()


def line(row: Row, steps: int, left: float | None) -> str:
    """A step in one line, without the quantities that the row lacks."""
    parts = [f"step {int(row['step']):>{len(str(steps))}}/{steps}"]
    parts += [f"{label} {text}" for label, text in summary(row).items()]
    if left is not None and row["step"] < steps:
        parts.append(f"left {clock(left)}")
    return "  ".join(parts)


def summary(row: Row) -> dict[str, str]:
    """The most important numbers of a row, as text by label."""
    shown = {
        "reward": _number(row, "reward", "{:.3f}"),
        "accuracy": _number(row, "accuracy", "{:.1%}"),
        "generated": _tokens(row, "generation_tokens_per_second"),
        "trained": _tokens(row, "training_tokens_per_second"),
        "truncated": _share(row, "truncated"),
        "staleness": (
            _number(row, "staleness_mean", "{:.1f}")
            + _number(row, "staleness_max", " (at most {:.0f})")
        ),
        "kl by age": kl_by_age(row),
        "queue": _number(row, "queue_depth", "{:.0f}"),
        "failed": _count(row, "failed"),
        "timed out": _count(row, "timed_out"),
        "skipped": _count(row, "skipped"),
    }
    return {label: text for label, text in shown.items() if text}


def warning(rows: list[Row]) -> str:
    """A sentence if most groups have given no training signal for 5, 10, 20, … steps in a row, else
    the empty string."""
    steps = 0
    for row in reversed(rows):
        if min(row.get("groups_without_variance") or 0, row.get("zero_advantages") or 0) <= 1 / 2:
            break
        steps += 1
    times, rest = divmod(steps, STEPS_WITHOUT_SIGNAL)
    if rest or times.bit_count() != 1:
        return ""
    return (
        f"in each of the last {steps} steps most groups had no variance, that is equal rewards for"
        f" all attempts at a task ({rows[-1]['groups_without_variance']:.0%} of the groups in this"
        " one): their advantages are 0 and nothing is learnt from them; look at the reward and at"
        " the difficulty of the tasks"
    )


def kl_by_age(row: Row) -> str:
    """The KL divergence between engine and trainer on tokens of the current version, of the one
    before it, and so on."""
    found = [row.get(f"mismatch/kl_lag{lag}") for lag in range(MAX_LAGS)]
    while found and found[-1] is None:
        found.pop()
    return " ".join("–" if kl is None else f"{kl:.0e}" for kl in found)


def seconds_left(rows: list[Row], steps: int) -> float | None:
    """An estimate from the median of recent steps, as the first ones compile and some evaluate."""
    seconds = [row["seconds"] for row in rows[-20:] if row.get("seconds") and row["step"] > 0]
    return median(seconds) * (steps - rows[-1]["step"]) if seconds else None


def clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def sparkline(values: list[float], width: int = 48) -> str:
    """A sparkline of the values, scaled from their minimum to their maximum, newest at the right;
    with more values than `width`, each mark is the mean of an equal share."""
    if len(values) > width:
        edges = [i * len(values) // width for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, span = min(values, default=0.0), max(values, default=0.0) - min(values, default=0.0)
    return "".join(
        BARS[round((value - low) / span * (len(BARS) - 1)) if span else 0] for value in values
    )


def in_notebook() -> bool:
    ipython: Any = sys.modules.get("IPython")
    return "ipykernel" in sys.modules and ipython is not None and ipython.get_ipython() is not None


class _Screen(Protocol):
    def show(self, text: str) -> None: ...
    def message(self, text: str) -> None: ...
    def close(self) -> None: ...


class _Lines:
    """Prints one line a step."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def show(self, text: str) -> None:
        print(text, file=self.stream, flush=True)

    def message(self, text: str) -> None:
        self.show(text)

    def close(self) -> None:
        pass


class _Notebook:
    """Prints one line that each step overwrites; messages stay."""

    def __init__(self) -> None:
        self.width = 0

    def show(self, text: str) -> None:
        print("\r" + text.ljust(self.width), end="", flush=True)
        self.width = len(text)

    def message(self, text: str) -> None:
        print(("\n" if self.width else "") + text, flush=True)
        self.width = 0

    def close(self) -> None:
        if self.width:
            print(flush=True)


class _Terminal:
    """A panel that rich redraws in place, so that the clock also advances between steps."""

    def __init__(self, display: Display, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self.display = display
        self.began = time.monotonic()
        self.last = self.began
        self.live = Live(
            console=Console(file=stream), get_renderable=self.draw, refresh_per_second=2
        )
        self.live.start()

    def show(self, text: str) -> None:
        self.last = time.monotonic()
        self.live.refresh()

    def message(self, text: str) -> None:
        self.live.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        self.live.stop()

    def draw(self) -> Any:
        now = time.monotonic()
        return panel(self.display.rows, self.display.steps, now - self.began, now - self.last)


def panel(rows: list[Row], steps: int, elapsed: float, since_last: float) -> Any:
    """The live view: progress, times, the newest step's metrics, and the history of reward and
    accuracy."""
    from rich.columns import Columns
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    step = int(rows[-1]["step"]) if rows else 0
    left = seconds_left(rows, steps) if rows else None
    bar = Table.grid(padding=(0, 2))
    times = f"{clock(elapsed)} elapsed" + (
        f", {clock(max(left - since_last, 0))} left" if left is not None else ""
    )
    bar.add_row(f"step {step}/{steps}", ProgressBar(total=steps, completed=step, width=40), times)
    pairs = summary(_newest(rows)).items()
    numbers = Columns(
        [Text.assemble((f"{label} ", "dim"), text) for label, text in pairs], padding=(0, 3)
    )
    history = Table.grid(padding=(0, 2))
    for key in ("reward", "accuracy"):
        values = [row[key] for row in rows if row.get(key) is not None]
        if len(values) > 1:
            history.add_row(
                f"[dim]{key}[/dim]",
                f"[cyan]{sparkline(values)}[/cyan]",
                f"{min(values):.2f} to {max(values):.2f}",
            )
    return Group(bar, numbers, history)


def _newest(rows: list[Row]) -> dict[str, float]:
    """The newest row, with the accuracy of the last evaluation and the total of skipped optimizer
    steps."""
    accuracies = [row["accuracy"] for row in rows if row.get("accuracy") is not None]
    skipped = {"skipped": sum(row.get("skipped") or 0 for row in rows)}
    return {
        **(rows[-1] if rows else {}),
        **skipped,
        **({"accuracy": accuracies[-1]} if accuracies else {}),
    }


def _number(row: Mapping[str, float], key: str, form: str) -> str:
    return form.format(row[key]) if row.get(key) is not None else ""


def _share(row: Mapping[str, float], key: str) -> str:
    return f"{row[key]:.0%}" if row.get(key) else ""


def _tokens(row: Mapping[str, float], key: str) -> str:
    rate = row.get(key)
    if rate is None:
        return ""
    return f"{rate / 1000:.1f}k tok/s" if rate >= 1000 else f"{rate:.0f} tok/s"


def _count(row: Mapping[str, float], key: str) -> str:
    return f"{row[key]:.0f}" if row.get(key) else ""
