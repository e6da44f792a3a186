"""Says how to share out accelerators between generation and training, from what a run measured or
from the sizes of things.

    python -m areal_x.plan examples/arithmetic/grpo.gin --accelerators 8 --from runs/arithmetic-grpo-1
    python -m areal_x.plan FILE.gin --accelerators 64 --parameters 7e9 --flops 9.9e14 --bandwidth 3.35e12 --mean-length 3000

It simulates the file's run with each split, bounds of staleness, windows and concurrencies, prints
what it predicts of the fastest, and draws step time and idle shares over the splits. -b binds one
parameter over the file's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from areal_x.config.reader import Config, load
from areal_x.config.types import check_early
from areal_x.errors import ConfigError, UserError
from areal_x.monitor.metrics import read
from areal_x.monitor.plot import BLUE, GREY, ORANGE
from areal_x.run import run_dir
from areal_x.run.journal import FILE, Journal
from areal_x.simulation.planner import (
    STALENESS,
    Choice,
    Prediction,
    Profile,
    profile_from_run,
    profile_from_sizes,
    recommended,
    search,
)
from areal_x.train import fail, parser_of

STEPS_READ = 20  # of a run's journal, the newest
SHOWN = 12  # rows of the table
COLOURS = (GREY, "#56B4E9", BLUE, ORANGE)  # of STALENESS
PEAKS = ("parameters", "flops", "bandwidth", "mean_length")


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0, or 1 after one sentence about a mistake."""
    options = parse(arguments)
    sys.path.insert(0, str(Path.cwd()))  # gin files import examples.arithmetic.task and the like
    config: Config | None = None
    try:
        if options.accelerators < 2:
            raise ConfigError(
                "--accelerators",
                options.accelerators,
                "at least 2: one that generates and one that trains",
            )
        ran, profile = from_run(options.recorded) if options.recorded else (None, None)
        config = load(options.file, options.bindings)
        check_early(config)
        asked = choice_of(config)
        profile = profile or from_sizes(config, options)
        if ran is not None:
            asked = replace(asked, concurrency=min(asked.concurrency, profile.concurrency))
        predictions = search(profile, options.accelerators, asked)
        show(predictions, config)
        print(f"plot: {draw(predictions, asked, options.plot)}")
    except UserError as error:
        of_command = str(getattr(error, "binding", "")).startswith("--")
        return fail(error if config is None or of_command else config.locate(error))
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of("plan", __doc__)
    parser.add_argument("file", metavar="FILE.gin", type=Path)
    parser.add_argument(
        "--accelerators", type=int, required=True, help="how many there are for both"
    )
    parser.add_argument(
        "--from",
        dest="recorded",
        metavar="RUN",
        type=Path,
        help="a run's directory: its measurements",
    )
    parser.add_argument("--parameters", type=float, help="of the model")
    parser.add_argument(
        "--flops", type=float, help="of one accelerator, operations a second at its peak"
    )
    parser.add_argument(
        "--bandwidth", type=float, help="of one accelerator's memory, bytes a second at its peak"
    )
    parser.add_argument("--mean-length", type=float, help="tokens of a completion on average")
    parser.add_argument(
        "--prompt-tokens", type=int, default=200, help="of a prompt on average (default: 200)"
    )
    parser.add_argument(
        "--efficiency",
        type=float,
        default=0.4,
        help="share of both peaks that is reached (default: 0.4)",
    )
    parser.add_argument(
        "--plot", type=Path, default=Path("plan.png"), help="where to draw (default: plan.png)"
    )
    return parser.parse_args(arguments)


def choice_of(config: Config) -> Choice:
    """What a gin file says of a run. An embedded engine and its trainer count as one accelerator
    each."""
    on_servers = config.value("train.engine") == "vllm"
    given = {
        name: config.value(f"train.{name}")
        for name in ("max_staleness", "window", "groups_per_step", "group_size")
    }
    return Choice(
        generation=(
            (len(config.value("vllm.urls")) or config.value("vllm.servers")) if on_servers else 1
        ),
        training=config.value("mesh.processes"),
        concurrency=(
            config.value("vllm.concurrency") if on_servers else config.value("embedded.slots")
        ),
        **given,
    )


def from_run(run: Path) -> tuple[Choice, Profile]:
    """What a run chose, and what it measured. Raises: UserError for what is no run, or one that is
    too short."""
    rows = [row for row in read(run) if row.get("packed_tokens")]
    if len(rows) < 3 or not (run / FILE).is_file():
        raise UserError(
            f"--from {run} has {len(rows)} steps to learn from: give the directory of a run of at"
            " least 3 steps"
        )
    with Journal(run) as journal:
        groups = [
            group for step in journal.steps()[-STEPS_READ:] for group in journal.groups_of(step)
        ]
    trajectories = [t for group in groups for episode in group.scored for t in episode.trajectories]
    if not trajectories:
        raise UserError(
            f"--from {run} has a journal without a step: give the directory of a run of at least 3"
            " steps"
        )
    lengths = np.array([t.mask.sum() for t in trajectories], np.int32)
    prompt = round(float(np.mean([len(t) - t.mask.sum() for t in trajectories])))
    ran = choice_of(load(run / run_dir.CONFIG))
    return ran, profile_from_run(rows, lengths, prompt, ran)


def from_sizes(config: Config, options: argparse.Namespace) -> Profile:
    missing = [f"--{name.replace('_', '-')}" for name in PEAKS if getattr(options, name) is None]
    if missing:
        raise UserError(
            f"nothing says how fast things are: give --from RUN, or also {', '.join(missing)}"
        )
    return profile_from_sizes(
        options.parameters,
        options.flops,
        options.bandwidth,
        options.mean_length,
        most=config.value("sampling.max_tokens"),
        prompt_tokens=options.prompt_tokens,
        concurrency=choice_of(config).concurrency,
        efficiency=options.efficiency,
    )


def show(predictions: Sequence[Prediction], config: Config) -> None:
    """The fastest as a table, and what to bind for the recommended one."""
    from rich.console import Console
    from rich.table import Table

    chosen = recommended(predictions)
    table = Table(
        *("generate", "train", "max\nstale", "window", "slots\neach", "seconds\na step"),
        box=None,
        pad_edge=False,
    )
    for name in ("trainer\nidle", "slots\nidle", "mean\nage", "max\nage"):
        table.add_column(name, justify="right")
    for p in [chosen, *(p for p in predictions if p is not chosen)][:SHOWN]:
        c = p.choice
        settings = (c.generation, c.training, c.max_staleness, c.window, c.concurrency)
        told = (
            f"{p.step_seconds:.3g}",
            f"{p.trainer_idle:.0%}",
            f"{p.generation_idle:.0%}",
            f"{p.staleness_mean:.1f}",
        )
        table.add_row(
            *map(str, settings), *told, str(p.staleness_max), style="bold" if p is chosen else None
        )
    Console().print(table)
    c = chosen.choice
    slots = "vllm.concurrency" if config.value("train.engine") == "vllm" else "embedded.slots"
    print(
        f"recommended (the least staleness within 2 % of the fastest): {c.generation} to generate,"
        f" {c.training} to train; train.max_staleness = {c.max_staleness}, train.window ="
        f" {c.window}, {slots} = {c.concurrency}"
    )


def draw(predictions: Sequence[Prediction], asked: Choice, path: Path) -> Path:
    """Step time over the split for each bound on staleness, and the idle shares at the recommended
    one; window and concurrency as the file has them."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    figure = Figure(figsize=(7, 5), layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True)
    plain = [
        p
        for p in predictions
        if (p.choice.window, p.choice.concurrency) == (asked.window, asked.concurrency)
    ]
    for staleness, colour in zip(STALENESS, COLOURS, strict=True):
        splits, course = course_of(plain, staleness)
        top.plot(
            splits, [p.step_seconds for p in course], color=colour, marker="o", label=str(staleness)
        )
    top.set_ylabel("seconds a step")
    top.set_ylim(bottom=0)
    top.legend(frameon=False, ncols=len(STALENESS), title="max_staleness", loc="upper center")

    chosen = recommended(plain).choice
    splits, course = course_of(plain, chosen.max_staleness)
    bottom.plot(splits, [p.trainer_idle for p in course], color=BLUE, marker="o", label="trainer")
    bottom.plot(
        splits,
        [p.generation_idle for p in course],
        color=ORANGE,
        marker="o",
        label="slots of the engine",
    )
    bottom.set_ylabel(f"idle share\n(max_staleness {chosen.max_staleness})")
    bottom.set_ylim(-0.02, 1.02)
    bottom.yaxis.set_major_formatter(PercentFormatter(1.0))
    bottom.set_xlabel(f"accelerators that generate, of {chosen.generation + chosen.training}")
    bottom.xaxis.set_major_locator(MaxNLocator(integer=True))
    bottom.legend(frameon=False, loc="lower center", ncols=2, bbox_to_anchor=(0.5, 1))
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    figure.savefig(path, dpi=150)
    return path


def course_of(
    predictions: Sequence[Prediction], staleness: int
) -> tuple[list[int], list[Prediction]]:
    """Accelerators that generate, rising, and what is predicted with so many."""
    course = sorted(
        (p for p in predictions if p.choice.max_staleness == staleness),
        key=lambda p: p.choice.generation,
    )
    return [p.choice.generation for p in course], course


if __name__ == "__main__":
    sys.exit(main())
