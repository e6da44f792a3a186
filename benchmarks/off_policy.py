"""Effect of corrections for very stale samples: accuracy over steps, generation eight steps ahead, four minibatches per step.

    python -m benchmarks.off_policy [--seeds 0 1] [--learning-rate 2e-4] [--steps 50] [--figure docs/off_policy.png]

All variants clip around the policy before the step (except the last, which clips around the one that sampled) and differ in the
weight of stale tokens. Prints accuracies as a markdown table and plots them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.recipes import train

NAME = "decoupled_ppo"
VARIANTS = {
    "no correction": [f"{NAME}.corrections = None"],
    "truncated (cap 2)": [f"{NAME}.corrections = @corrections.truncated"],
    "masked (0.5 to 5)": [f"{NAME}.corrections = @corrections.masked", "corrections.masked.low = 0.5"],
    "second_moment (0.04)": [f"{NAME}.corrections = @corrections.second_moment"],
    "decoupled_ppo (masked above 5)": [],
    "interpolate": [f"{NAME}.proximal = 'interpolate'"],
    "clip around the sampler": [f"{NAME}.corrections = None", f"{NAME}.proximal = 'behavior'"],
}
COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#D55E00", "#CC79A7", "#999999")  # Okabe and Ito's palette


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--figure", default="docs/off_policy.png")
    given = parser.parse_args()
    shared = [
        "train.max_staleness = 8",
        "train.minibatches = 4",
        "train.evaluate_every = 5",
        f"train.steps = {given.steps}",
        f"optimizer.learning_rate = {given.learning_rate}",
    ]
    steps = range(0, given.steps + 1, 5)
    columns = ("variant", "best", "worst after step 5", "last", "mean over steps", "policy gap", "skipped")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)
    courses = {}
    for variant, bindings in VARIANTS.items():
        runs = [train("decoupled_ppo", [*shared, *bindings, f"seed = {seed}"]) for seed in given.seeds]
        found = np.array([[100 * row["accuracy"] for row in rows if "accuracy" in row] for rows in runs])
        courses[variant] = found
        gap = np.mean([row["policy_gap"] for rows in runs for row in rows if "policy_gap" in row])
        skipped = sum(row.get("skipped", 0) for rows in runs for row in rows)
        cells = [
            each(found.max(1)),
            each(found[:, 2:].min(1)),
            each(found[:, -1]),
            each(found.mean(1)),
            f"{gap:.3f}",
            f"{skipped:.0f}",
        ]
        print(f"| {variant} | {' | '.join(cells)} |", flush=True)
    draw(courses, list(steps), Path(given.figure))


def each(values: np.ndarray) -> str:
    return ", ".join(f"{x:.1f}" for x in values)


def draw(courses: dict[str, np.ndarray], steps: Sequence[int], path: Path) -> None:
    """Plots one thick line per variant, the mean of its seeds, which are the thin lines."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for colour, (variant, found) in zip(COLOURS, courses.items(), strict=True):
        axes.plot(steps, found.mean(0), color=colour, linewidth=2.2, label=variant)
        for course in found:
            axes.plot(steps, course, color=colour, linewidth=0.6, alpha=0.6)
    axes.set(xlabel="step of four minibatches, samples up to eight steps old", ylabel="held-out accuracy, %", ylim=(-2, 102))
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
