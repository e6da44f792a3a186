"""Learning curves of the Tinker cookbook's recipes against `areal-x tinker`, unmodified but for URL, model and tiny local data
(examples/tinker/world.py), on a CPU.

    TINKER_PYTHON=… python -m benchmarks.tinker_recipes [--backends torch jax] [--curves FILE.json] [--figure docs/tinker.png]

TINKER_PYTHON's environment needs tinker-cookbook[math-rl] and datasets. Prints a markdown table of what the recipes log by
step, and plots it. Backends whose curves FILE.json has are not measured again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from examples.tinker.world import CONTEXT, NAME, hub_of, write
from tests.tinker.test_client import PYTHON, serving

Curves = dict[str, list[float]]  # of each recipe


class Recipe(NamedTuple):
    """module: of tinker_cookbook.recipes. metric: of those that it logs."""

    module: str
    metric: str
    title: str
    settings: Mapping[str, Any]


DISTILLATION = "distillation.on_policy_distillation"
RECIPES = (
    Recipe(
        "sl_loop",
        "train_mean_nll",
        "sl_loop: negative log-likelihood, nats a token",
        {"batch_size": 4, "learning_rate": 1e-2, "lora_rank": 8, "save_every": 3, "max_length": 256},
    ),
    Recipe(
        "rl_loop",
        "reward/total",
        "rl_loop: share of right answers",
        {"batch_size": 4, "group_size": 8, "learning_rate": 1e-2, "lora_rank": 8, "save_every": 3, "max_tokens": 12},
    ),
    Recipe(
        "preference.dpo.train",
        "dpo_loss",
        "preference.dpo: loss",
        {"batch_size": 8, "learning_rate": 1e-3, "max_length": 256},
    ),
    Recipe(
        DISTILLATION,  # of the policy that rl_loop saved
        "teacher_kl",
        "on_policy_distillation: KL to the teacher, nats a token",
        {"teacher_model": NAME, "dataset": "deepmath", "lora_rank": 8, "groups_per_batch": 4, "group_size": 4}
        | {"max_tokens": 12, "learning_rate": 1e-2, "save_every": 4},
    ),
)
COLOURS = {"torch": "#D55E00", "jax": "#0072B2"}  # of Okabe and Ito's palette
STYLES = {"torch": "-", "jax": "--"}  # both are seen where they are equal


def has_cookbook() -> bool:
    """True if TINKER_PYTHON runs the recipes."""
    imports = "import tinker_cookbook.recipes.rl_loop, datasets"
    return PYTHON is not None and subprocess.run([PYTHON, "-c", imports], capture_output=True).returncode == 0


def run(place: Path, environment: Mapping[str, str], recipe: str, **settings: Any) -> list[dict[str, float]]:
    """Runs a recipe in the directory of its data and returns what it logged. Raises: RuntimeError."""
    assert PYTHON is not None
    clean = {name: x for name, x in environment.items() if name != "PYTHONPATH"} | hub_of(place)
    log = place / recipe
    command = [PYTHON, "-m", f"tinker_cookbook.recipes.{recipe}", f"model_name={NAME}", f"log_path={log}"]
    command += [f"{name}={x}" for name, x in settings.items()]
    ran = subprocess.run(command, cwd=place, env=clean, capture_output=True, text=True)
    if ran.returncode:
        raise RuntimeError((ran.stdout + ran.stderr)[-3000:])
    return [json.loads(x) for x in (log / "metrics.jsonl").read_text().splitlines()]


def saved(place: Path, recipe: str) -> dict[str, Any]:
    """Returns a recipe's last checkpoint."""
    last: dict[str, Any] = json.loads((place / recipe / "checkpoints.jsonl").read_text().splitlines()[-1])
    if last["name"] != "final":
        raise RuntimeError(f"{recipe} ended without its last checkpoint: {last}")
    return last


def curves(place: Path, backend: str) -> Curves:
    """Runs all recipes against one server in an empty directory, and returns what each logged by step."""
    write(place, backend)
    found: Curves = {}
    with serving(place, NAME, "--backend", backend, "--context", str(CONTEXT), "--slots", "32") as environment:
        for recipe in RECIPES:
            settings = dict(recipe.settings)
            if recipe.module == DISTILLATION:
                settings["teacher_checkpoint"] = saved(place, "rl_loop")["sampler_path"]
            rows = run(place, environment, recipe.module, **settings)
            found[recipe.module] = [x[recipe.metric] for x in rows if recipe.metric in x]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", nargs="+", default=["torch", "jax"], choices=["torch", "jax"])
    parser.add_argument("--curves", type=Path)
    parser.add_argument("--figure", type=Path, default=Path("docs/tinker.png"))
    given = parser.parse_args()
    found: dict[str, Curves] = {}
    if given.curves is not None and given.curves.is_file():
        found = json.loads(given.curves.read_text())
    for backend in given.backends:
        if backend not in found:
            with tempfile.TemporaryDirectory() as place:
                found[backend] = curves(Path(place), backend)
            if given.curves is not None:
                given.curves.write_text(json.dumps(found))
    columns = ("recipe", "backend", "steps", "what it logs at each step")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for recipe in RECIPES:
        for backend in given.backends:
            values = found[backend][recipe.module]
            print(f"| {recipe.title} | {backend} | {len(values)} | {' '.join(f'{x:.2f}' for x in values)} |")
    draw({backend: found[backend] for backend in given.backends}, given.figure)


def draw(found: Mapping[str, Curves], path: Path) -> None:
    """Plots a panel for each recipe, with a line for each backend."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    for axes, recipe in zip(figure.subplots(2, 2).flat, RECIPES, strict=True):
        for backend, own in found.items():
            values = own[recipe.module]
            axes.plot(
                range(len(values)), values, color=COLOURS[backend], linestyle=STYLES[backend], linewidth=1.8, label=backend
            )
        axes.set_title(recipe.title, fontsize=9)
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
        axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
