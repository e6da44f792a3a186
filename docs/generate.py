"""Writes docs/configuration.md (every configurable) and docs/algorithms.md (every recipe) from docstrings and defaults, and
docs/models.md (every family of models) from the table of the tests that prove each cell.

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

sys.path.append(str(Path(__file__).parents[1]))

from tests.model_families import COLUMNS, SERVED, TITLES, is_proven, is_served

ROOT = Path(__file__).resolve().parents[1]
PAGE = Path(__file__).with_name("configuration.md")
HEAD = """# Configuration

Written by `python docs/generate.py` from the code's own docstrings and defaults; do not edit.

A run is described by a gin file: `NAME.PARAMETER = VALUE`, one a line.
`-b "NAME.PARAMETER = VALUE"` on the command line wins over
the file. `@name` refers to a function or class, `@name()` to what it returns. What is not bound keeps the default below.
"""
# Given by the trainer or the ring, never bound.
NOT_BOUND = {"policy", "batch", "mask", "segment_ids", "rewards", "groups", "task", "text", "log_ratio", "values", "lengths"}
NOT_BOUND |= {"groups_of_segments", "turn_rewards", "group", "truncated"}
ALGORITHMS = Path(__file__).with_name("algorithms.md")
RECIPES = ("on_policy", "critics", "off_policy", "teachers", "offline")  # the modules, in the order of the page
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

MODELS = Path(__file__).with_name("models.md")
MODELS_HEAD = """# Models

Written by `python docs/generate.py` from the tests that prove each cell (`PROOFS` in tests/model_families.py); do not edit.

| column | what the test shows, with small random models in fp32 |
|---|---|
| full | all parameters are trained: gradients and saved files are those of transformers |
| LoRA | adapters of every kernel: log-probabilities are those of transformers with the products added |
| tensor, expert, context, stage | the mesh axis of this name gives the numbers of one device |
| packed | sequences packed into rows have the numbers of each one alone in transformers |
| images | the same with images in the prompts ([images.md](images.md)) |

Meshes are described for [JAX](jax.md#devices) and for [torch](torch.md#several-processes). "–" is what no test shows: it is
refused with a sentence, or only not tested. torch trains further causal language models of transformers, and shards models that
transformers has a plan for, without a test of each ([torch.md](torch.md#models)); [jax.md](jax.md#models) lists what JAX
supports of each family. `python -m areal_x.check FILE.gin` says of any model whether the chosen backend trains it, and if not,
which of its unusual parts it has: multi-head latent attention, gated delta rule layers, state-space layers, an
encoder and others.

"""
ENGINES_HEAD = """

## Served by

"yes": a real server's engine computes on a CPU what transformers does with the weights that it begins with and with those that
a swap brings, heads tied and not, and proves them; for images, a real server on a CPU what the torch trainer does, before and
after swaps of the tower too. What they compute on accelerators was not tried family by family.

* vLLM's kernels for a CPU take gated delta rules and latent attention in bfloat16, and of the hub's head widths, only. Of a
  gated delta rule's layers they differ from transformers as much as its own bfloat16 does. Latent attention (DeepSeek, GLM-4.7
  Flash) gives after a swap exactly what an engine gives that began with the new weights, and both differ from transformers,
  so the table has no "yes".
* vLLM has no place for a tied head in Qwen3-Next, GLM-4.5 and latent attention's families: a swap without a head is refused.
* SGLang fills no tied head of Mixtral and Qwen3 MoE, and reads no head of Gemma 3 that is not tied: both are refused, and the
  others of these families are served.
* On a CPU vLLM leaves out the correction of ERNIE's routers and has no kernel for gpt-oss's experts. Its loader orders
  Llama 4's queries and keys anew, so that they are not proved; log-probabilities of text were within 4e-6 of transformers,
  before and after a swap.
* On a CPU vLLM's attention is causal within images: those of Gemma 3 and of Gemma 4 26B-A4B, 31B and 12B are refused there.
  Gemma 4's cells are for models whose images are causal, as E2B's and E4B's. Qwen3.5 with its tower was not served.
* vLLM interleaves Qwen3-VL's angles of time, height and width where `rope_parameters` says `mrope_interleaved`, as on the hub;
  transformers and both trainers always. A config without it, 0.2 nats a token away with images, is refused.
* Of a Gemma 4's `rope_parameters` vLLM leaves out the factor of a proportional rotation and applies the part of the pairs of a
  default one, which transformers does not: such a model, of which the hub has none, is up to 3 nats a token away, and refused.
  SGLang reads no other fields there, so that linear, yarn and Llama 3's rotations are refused too.

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
    for recipe in [getattr(recipes, name) for module in RECIPES for name in recipes_of(module)]:
        required = {"max_tokens": 1024} if "max_tokens" in inspect.signature(recipe).parameters else {}
        algorithm = recipe(**required)
        summary, arguments = split_arguments(inspect.getdoc(recipe) or "")
        settings = [f"* `{algorithm.name}.{name}`: {sentence}\n" for name, sentence in arguments.items()]
        text += f"\n## `{algorithm.name}`\n\n{summary}\n\n" + "".join([*settings, "\n"] if settings else [])
        text += f"```text\n{algorithm.explain()}\n```\n"
    return text


def models() -> str:
    """A row for each family and backend with what tests prove of it, and one for each family with the engines that serve it."""
    rows = [f"| models | `model_type` | backend | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 3) + "|"]
    for family, title in TITLES.items():
        for backend in ("JAX", "torch"):
            cells = ["yes" if is_proven(family, backend, column) else "–" for column in COLUMNS]
            rows.append(f"| {title} | `{family}` | {backend} | {' | '.join(cells)} |")
    served = [f"| models | `model_type` | {' | '.join(SERVED)} |", "|---" * (len(SERVED) + 2) + "|"]
    for family, title in TITLES.items():
        cells = ["yes" if is_served(family, engine) else "–" for engine in SERVED]
        served.append(f"| {title} | `{family}` | {' | '.join(cells)} |")
    return MODELS_HEAD + "\n".join(rows) + ENGINES_HEAD + "\n".join(served) + "\n"


def recipes_of(module: str) -> list[str]:
    """The recipes of a module, in its order."""
    functions = vars(importlib.import_module(f"{recipes.__name__}.{module}"))
    return [name for name in functions if name in recipes.__all__]


if __name__ == "__main__":
    for file, text in ((PAGE, page()), (ALGORITHMS, algorithms()), (MODELS, models())):
        if str(ROOT) in text:
            sys.exit(f"{file.name} would have a default that is a path of this machine")
        if "--check" not in sys.argv:
            file.write_text(text, encoding="utf-8")
        elif not file.is_file() or file.read_text(encoding="utf-8") != text:
            sys.exit(f"{file.name} is not what the code says: run python docs/generate.py")
