"""Writes docs/configuration.md (every configurable) and docs/algorithms.md (every recipe) from docstrings and defaults.

python docs/generate.py           # writes them
python docs/generate.py --check   # fails where a file is not what the code says (the tests run this)
"""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path
from typing import Any

from areal_x.algorithms import recipes
from areal_x.algorithms.algorithm import Algorithm
from areal_x.algorithms.assembly import PARTS, PENALTIES, add_penalties
from areal_x.config.describe import descriptions, settings_of, split_arguments, summary_of
from areal_x.config.reader import configurable_modules, registered, short_name

PAGE = Path(__file__).with_name("configuration.md")
HEAD = """# Configuration

Written by `python docs/generate.py` from the code's own docstrings and defaults; do not edit.

A run is described by a gin file: `NAME.PARAMETER = VALUE`, one a line.
`-b "NAME.PARAMETER = VALUE"` on the command line wins over
the file. `@name` refers to a function or class, `@name()` to what it returns. What is not bound keeps the default below.
"""
# Given by the trainer or the ring, never bound.
NOT_BOUND = {"policy", "batch", "mask", "segment_ids", "rewards", "groups", "task", "text", "log_ratio", "values", "lengths"}
NOT_BOUND |= {"groups_of_segments", "turn_rewards", "group"}
ALGORITHMS = Path(__file__).with_name("algorithms.md")
ALGORITHMS_HEAD = """# Algorithms

Written by `python docs/generate.py` from the code's own docstrings and defaults; do not edit.

An algorithm is data: `train.algorithm = @NAME()`. Below is what `NAME().explain()` prints, with the hyperparameters of the
cited paper: for each part its formula, its source and the values it is bound to.

Besides its own hyperparameters every recipe accepts, in gin as `NAME.PART` or in Python by keyword:

| part | description |
|---|---|
PARTS

logp is the log-probability of a token under the trained policy, proximal and behavior are those under the proximal policy and
the one that sampled; r = exp(logp - proximal), and A is the advantage.
All recipes run synchronously (`train.max_staleness = 0`) and asynchronously, with `train.minibatches` optimizer steps per
batch. `sft`, `dpo`, `ipo` and `reward_model` train on a dataset: `train.workflow = @demonstrations()` or
`@preference_pairs()`, and `train.engine = "none"` unless held-out tasks are to be answered.
"""


def page() -> str:
    for module in {module for module in configurable_modules().values() if module.startswith("areal_x.")}:
        importlib.import_module(module)
    ours = [(s, c) for s, c in registered().items() if c.wrapped.__module__.startswith("areal_x.")]
    ours.sort(key=lambda pair: (short_name(pair[0]) != "train", short_name(pair[0])))
    return HEAD + "".join(section(short_name(selector), configurable) for selector, configurable in ours)


def section(name: str, configurable: Any) -> str:
    lines = [f"\n## `{name}`\n\n{summary_of(configurable)}\n"]
    rows = []
    for setting in settings_of(configurable):
        if setting.name in NOT_BOUND:
            continue
        default = f"`{setting.default}`" if setting.default not in ("", "required") else setting.default
        if setting.name == "parts":
            default, description = "none", "any part by its own name ([algorithms.md](algorithms.md))"
        else:
            description = setting.description
        kind = f"`{cell(setting.type)}`" if setting.type else ""
        rows.append(f"| `{name}.{setting.name}` | {kind} | {cell(default)} | {cell(description)} |\n")
    if rows:
        lines += ["\n| parameter | type | default | description |\n|---|---|---|---|\n", *rows]
    return "".join(lines)


def cell(text: str) -> str:
    """A table's cell: a bar would end it."""
    return text.replace("|", "\\|")


def algorithms() -> str:
    """Every recipe as it explains itself with the numbers of its paper."""
    described = descriptions(Algorithm) | descriptions(add_penalties)
    rows = [f"| `{part}` | {cell(described[part])} |" for part in (*PARTS, *PENALTIES)]
    text = ALGORITHMS_HEAD.replace("PARTS", "\n".join(rows))
    for recipe in [r for r in vars(recipes).values() if inspect.isfunction(inspect.unwrap(r)) and is_recipe(r)]:
        required = {"max_tokens": 1024} if "max_tokens" in inspect.signature(recipe).parameters else {}
        algorithm = recipe(**required)
        summary, arguments = split_arguments(inspect.getdoc(recipe) or "")
        settings = [f"* `{algorithm.name}.{name}`: {sentence}\n" for name, sentence in arguments.items()]
        text += f"\n## `{algorithm.name}`\n\n{summary}\n\n" + "".join([*settings, "\n"] if settings else [])
        text += f"```text\n{algorithm.explain()}\n```\n"
    return text


def is_recipe(function: Any) -> bool:
    plain = inspect.unwrap(function)
    return bool(plain.__module__ == recipes.__name__ and "parts" in plain.__code__.co_varnames)


if __name__ == "__main__":
    for file, text in ((PAGE, page()), (ALGORITHMS, algorithms())):
        if "--check" not in sys.argv:
            file.write_text(text, encoding="utf-8")
        elif not file.is_file() or file.read_text(encoding="utf-8") != text:
            sys.exit(f"{file.name} is not what the code says: run python docs/generate.py")
