"""The overview of a run in a terminal: `areal-x top`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from areal_x.errors import UserError, printable
from areal_x.lab.runs import RUNNING, Run, is_run
from areal_x.monitor.display import clock, sparkline, summary
from areal_x.run import run_dir

SECONDS = 2.0  # between two looks
WIDTH = 40  # of the longest bar
MOST_WAITS = 8  # sentences about who waits for whom
POINTS = 400
CURVES = ("reward", "accuracy")


def run_at(place: Path) -> Run:
    """Returns the run of a directory. Raises: UserError for a place that is none."""
    if not place.is_dir() or not is_run(place):
        raise UserError(f"{place} is not a run's directory, which has a {run_dir.CONFIG}")
    return Run(place.resolve())


def show(run: Run, stream: TextIO, once: bool = False, seconds: float = SECONDS) -> None:
    """Shows a run's overview until it ends; once, if wanted or if the stream is no terminal."""
    console = Console(file=stream, highlight=False)
    if once or not stream.isatty():
        console.print(panel(run)[0])
        return
    with Live(console=console, auto_refresh=False) as live:
        while True:
            shown, goes_on = panel(run)
            live.update(shown, refresh=True)
            if not goes_on:
                return
            time.sleep(seconds)


def panel(run: Run) -> tuple[Any, bool]:
    """Returns what is shown of a run, and whether the run goes on."""
    found = run.overview()
    name, state = printable(found["name"]), found["state"]
    steps = f"/{found['steps']}" if found["steps"] else ""
    head = Text.assemble((name, "bold"), f"  {state}, step {found['step'] or 0}{steps}")
    lines: list[Any] = [head]
    if stall := found["stall"]:
        lines.append(Text(f"nothing has moved for {clock(stall['silent_seconds'])}:", "bold red"))
        lines += [Text(printable(sentence), "red") for sentence in stall["sentences"][:MOST_WAITS]]
    pairs = summary(found["all"]).items() if "step" in found["all"] else ()
    lines.append(Text("  ".join(f"{label} {text}" for label, text in pairs)))
    if found["cause"]:
        lines += [Text(), Text(printable(found["cause"]["sentence"]), "bold")]
    lines.append(bars(found["parts"]))
    curves = Table.grid(padding=(0, 2))
    for key in CURVES:
        values = run.metrics.curves([key], POINTS).get(key, {}).get("value", ())
        if len(values) > 1:
            curves.add_row(key, sparkline(values), f"{min(values):.3g} to {max(values):.3g}")
    return Group(*lines, curves), state == RUNNING


def bars(parts: Mapping[str, Any]) -> Table:
    """Returns a bar for each part of a step's time."""
    table = Table.grid(padding=(0, 2))
    shown = [(parts["labels"][part], share) for part, share in parts["shares"].items()]
    most = max((share for _, share in shown), default=1.0) or 1.0
    for label, share in sorted(shown, key=lambda x: -x[1]):
        if share >= 0.0005:
            table.add_row(label, f"{share:6.1%}", Text("█" * round(WIDTH * share / most), "cyan"))
    if parts["shares"]:
        counted = f"of the {clock(parts['seconds'])} of {parts['steps']} steps"
        table.add_row(Text(counted, "dim"))
    return table
