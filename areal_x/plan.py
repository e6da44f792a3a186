"""Recommends how to divide accelerators between generation and training, from a run's measurements
or from the sizes of model and hardware.

    python -m areal_x.plan examples/arithmetic/grpo.gin --accelerators 8 --from runs/arithmetic-grpo-1
    python -m areal_x.plan FILE.gin --accelerators 64 --parameters 7e9 --flops 9.9e14 --bandwidth 3.35e12 --mean-length 3000
    python -m areal_x.plan FILE.gin --nodes 8 --gpus-per-node 8 --from runs/arithmetic-grpo-1

It simulates the file's run for each split, staleness bound, window and concurrency, prints the
predictions for the fastest, and plots step time and idle fractions over the splits. A server has
tensor × pipeline × data accelerators (vllm.tensor and so on, or sglang.tensor). With --nodes in place
of --accelerators no server is on two nodes, nor is a group of ranks that exchanges activations
(mesh.tensor, mesh.expert). -b binds one parameter over the file's.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from areal_x.algorithms.algorithm import Algorithm
from areal_x.algorithms.recipes import grpo
from areal_x.algorithms.validation import SCORERS
from areal_x.config.reader import Config, load
from areal_x.config.types import check_early
from areal_x.engines.fleet.config import program_of, widths_in
from areal_x.errors import ConfigError, UserError, positive
from areal_x.monitor.metrics import read
from areal_x.monitor.plot import BLUE, GREY, ORANGE
from areal_x.protocols.backends import load_backend
from areal_x.run import run_dir
from areal_x.run.journal import FILE, Journal
from areal_x.simulation.planner import (
    STALENESS,
    Choice,
    Nodes,
    Prediction,
    Profile,
    profile_from_run,
    profile_from_sizes,
    recommended,
    search,
)
from areal_x.train import fail, parser_of

STEPS_READ = 20  # newest steps of a run's journal
SHOWN = 12  # rows of the table
COLOURS = (GREY, "#56B4E9", BLUE, ORANGE)  # one for each of STALENESS
PEAKS = ("parameters", "flops", "bandwidth", "mean_length")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 1 after one sentence about a mistake."""
    options = parse(arguments)
    sys.path.insert(0, str(Path.cwd()))  # gin files import examples.arithmetic.task and the like
    config: Config | None = None
    try:
        accelerators = accelerators_of_all(options)
        ran, profile = from_run(options.recorded) if options.recorded else (None, None)
        config = load(options.file, options.bindings)
        check_early(config)
        asked = choice_of(config)
        profile = profile or from_sizes(config, options)
        if ran is not None:
            asked = replace(asked, concurrency=min(asked.concurrency, profile.concurrency))
        nodes = nodes_of(config, options) if options.nodes else None
        predictions = search(profile, accelerators, asked, nodes)
        show(predictions, config, accelerators)
        print(f"plot: {draw(predictions, asked, options.plot)}")
    except UserError as error:
        of_option = isinstance(error, ConfigError) and error.binding.startswith("--")
        return fail(error if config is None or of_option else config.locate(error))
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of("plan", __doc__)
    parser.add_argument("file", metavar="FILE.gin", type=Path)
    parser.add_argument("--accelerators", type=int, help="number of accelerators for both")
    parser.add_argument("--nodes", type=int, default=0, help="in place of it: number of nodes")
    parser.add_argument("--gpus-per-node", type=int, default=0, help="accelerators of each node")
    parser.add_argument(
        "--from",
        dest="recorded",
        metavar="RUN",
        type=Path,
        help="directory of a run whose measurements are used",
    )
    parser.add_argument("--parameters", type=float, help="number of the model's parameters")
    parser.add_argument("--flops", type=float, help="peak operations per second of one accelerator")
    parser.add_argument(
        "--bandwidth", type=float, help="peak memory bandwidth of one accelerator, bytes per second"
    )
    parser.add_argument("--mean-length", type=float, help="mean tokens of a completion")
    parser.add_argument(
        "--prompt-tokens", type=int, default=200, help="mean tokens of a prompt (default: 200)"
    )
    parser.add_argument(
        "--efficiency",
        type=float,
        default=0.4,
        help="fraction of both peaks that is reached (default: 0.4)",
    )
    parser.add_argument(
        "--plot", type=Path, default=Path("plan.png"), help="file of the plot (default: plan.png)"
    )
    return parser.parse_args(arguments)


def accelerators_of_all(options: argparse.Namespace) -> int:
    """Returns how many there are. Raises: ConfigError unless they can be divided."""
    if options.nodes or options.gpus_per_node:
        if options.accelerators is not None:
            wanted = "left out with --nodes and --gpus-per-node"
            raise ConfigError("--accelerators", options.accelerators, wanted)
        positive("--nodes", options.nodes)
        positive("--gpus-per-node", options.gpus_per_node)
        options.accelerators = options.nodes * options.gpus_per_node
    if options.accelerators is None:
        raise UserError(
            "the plan needs accelerators: add --accelerators, or --nodes and --gpus-per-node"
        )
    found: int = options.accelerators
    if found < 2:
        raise ConfigError("--accelerators", found, "at least 2: one to generate and one to train")
    return found


def nodes_of(config: Config, options: argparse.Namespace) -> Nodes:
    """Returns the nodes. Raises: ConfigError for a server or a group of ranks that is larger than a
    node."""
    each = options.gpus_per_node
    widths = widths_in(config.value)
    if widths.accelerators > each:
        name = max(("tensor", "pipeline", "data"), key=partial(getattr, widths))
        wanted = f"smaller: a server has {widths.accelerators} accelerators ({widths}), and a node {each}"
        raise ConfigError(f"{program_of(config.value)}.{name}", getattr(widths, name), wanted)
    together = config.value("mesh.tensor") * config.value("mesh.expert")
    if together > each:
        wanted = f"with mesh.expert at most {each} together, the accelerators of a node"
        raise ConfigError("mesh.tensor", config.value("mesh.tensor"), wanted)
    takes_all = load_backend(config.value("train.backend")).DEVICES_EACH is None
    return Nodes(options.nodes, each, each if takes_all else together)


def slots_of(config: Config) -> str:
    """Returns the setting of how many requests one server, or the embedded engine, works on."""
    servers = program_of(config.value)
    return f"{servers}.concurrency" if servers else "embedded.slots"


def choice_of(config: Config) -> Choice:
    """Returns the choice that a gin file makes. An embedded engine and its trainer count as one
    accelerator each."""
    servers, width = program_of(config.value), widths_in(config.value).accelerators
    given = {
        name: config.value(f"train.{name}")
        for name in ("max_staleness", "window", "groups_per_step", "group_size")
    }
    return Choice(
        generation=width
        * (
            (
                len(config.value(f"{servers}.urls"))
                or config.value(f"{servers}.most")
                or config.value(f"{servers}.servers")
            )
            if servers
            else 1
        ),
        width=width,
        training=config.value("mesh.processes"),
        concurrency=config.value(slots_of(config)),
        **given,
    )


def from_run(run: Path) -> tuple[Choice, Profile]:
    """Returns a run's choice and its measurements.

    Raises: UserError if it is not a run, or too short.
    """
    rows = [row for row in read(run) if row.get("packed_tokens")]
    if len(rows) < 3 or not (run / FILE).is_file():
        raise UserError(
            f"--from {run} has {len(rows)} measured steps: name the directory of a run of at"
            " least 3 steps"
        )
    with Journal(run) as journal:
        groups = [
            group for step in journal.steps()[-STEPS_READ:] for group in journal.groups_of(step)
        ]
    trajectories = [t for group in groups for episode in group.scored for t in episode.trajectories]
    if not trajectories:
        raise UserError(
            f"--from {run} has a journal without a step: name the directory of a run of at least 3"
            " steps"
        )
    lengths = np.array([t.mask.sum() for t in trajectories], np.int32)
    prompt = round(float(np.mean([len(t) - t.mask.sum() for t in trajectories])))
    ran = choice_of(load(run / run_dir.CONFIG))
    return ran, profile_from_run(rows, lengths, prompt, ran)


def from_sizes(config: Config, options: argparse.Namespace) -> Profile:
    """Returns a profile computed from the command line's sizes.

    Raises: UserError naming the missing ones.
    """
    missing = [f"--{name.replace('_', '-')}" for name in PEAKS if getattr(options, name) is None]
    if missing:
        raise UserError(
            f"the plan needs measurements or sizes: add --from RUN, or {', '.join(missing)}"
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
        passes=forward_passes(config),
    )


def forward_passes(config: Config) -> int:
    """Returns how many passes over a batch there are before its first optimizer step: for the proximal policy, and
    for a reference, a teacher or a critic."""
    algorithm: Algorithm = grpo()
    if config.is_bound("train.algorithm"):
        algorithm = copy.deepcopy(config.value("train.algorithm"))  # calls gin's reference
    models = algorithm.needs & {"teacher_logits", "values", *SCORERS}
    return bool(algorithm.extra_pass(config.value("train.minibatches"))) + len(models)


def show(predictions: Sequence[Prediction], config: Config, accelerators: int) -> None:
    """Prints the fastest choices as a table, and the bindings of the recommended one.
    accelerators: how many there are."""
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
        predicted = (
            f"{p.step_seconds:.3g}",
            f"{p.trainer_idle:.0%}",
            f"{p.generation_idle:.0%}",
            f"{p.staleness_mean:.1f}",
        )
        table.add_row(
            *map(str, settings),
            *predicted,
            str(p.staleness_max),
            style="bold" if p is chosen else None,
        )
    Console().print(table)
    c = chosen.choice
    servers = f" ({c.servers} servers of {c.width})" if c.width > 1 else ""
    unused = accelerators - c.generation - c.training
    left = f", {unused} unused, as nothing is on two nodes" if unused else ""
    print(
        f"recommended (the least staleness within 2 % of the fastest): {c.generation} to generate"
        f"{servers}, {c.training} to train{left}; train.max_staleness = {c.max_staleness}, train.window ="
        f" {c.window}, {slots_of(config)} = {c.concurrency}"
    )


def draw(predictions: Sequence[Prediction], asked: Choice, path: Path) -> Path:
    """Plots step time over the split for each staleness bound, and the idle fractions at the
    recommended bound, with the file's window and concurrency. Returns the path."""
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
        splits, curve = curve_of(plain, staleness)
        top.plot(
            splits, [p.step_seconds for p in curve], color=colour, marker="o", label=str(staleness)
        )
    top.set_ylabel("seconds a step")
    top.set_ylim(bottom=0)
    top.legend(frameon=False, ncols=len(STALENESS), title="max_staleness", loc="upper center")

    chosen = recommended(plain).choice
    splits, curve = curve_of(plain, chosen.max_staleness)
    bottom.plot(splits, [p.trainer_idle for p in curve], color=BLUE, marker="o", label="trainer")
    bottom.plot(
        splits,
        [p.generation_idle for p in curve],
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


def curve_of(
    predictions: Sequence[Prediction], staleness: int
) -> tuple[list[int], list[Prediction]]:
    """Returns the numbers of generating accelerators, ascending, and the prediction for each."""
    curve = sorted(
        (p for p in predictions if p.choice.max_staleness == staleness),
        key=lambda p: p.choice.generation,
    )
    return [p.choice.generation for p in curve], curve


if __name__ == "__main__":
    sys.exit(main())
