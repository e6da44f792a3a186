"""Writes docs/sizing.md, a table of models and accelerators, from the planner: nothing in it was measured.

python docs/sizing.py            # minutes
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from areal_x.preflight.memory import bytes_per_trained_parameter
from areal_x.protocols.trainer_config import TrainerConfig
from areal_x.simulation.planner import Choice, Prediction, predict, profile_from_sizes, recommended

PAGE = Path(__file__).with_name("sizing.md")
MODELS = {"0.6B": 0.6e9, "1.7B": 1.7e9, "4B": 4e9, "8B": 8.2e9, "14B": 14.8e9, "32B": 32.8e9, "70B": 70.6e9}
ACCELERATORS = (2, 4, 8, 16, 64)
MEMORY, FLOPS, BANDWIDTH = 80e9, 9.9e14, 3.35e12  # of one H100
USABLE = 0.75  # of the memory, for state or weights: the rest is for activations, or for caches
NODE = 8  # accelerators
GROUPS, GROUP_SIZE, MEAN, MOST, PROMPT, CONCURRENCY, STALENESS = 32, 8, 1000, 4096, 200, 128, 2
STATE = bytes_per_trained_parameter(TrainerConfig(), item=2)  # bytes per parameter in bf16 with AdamW

HEAD = f"""# Sizing: how many accelerators for which model

Written by `python docs/sizing.py` from the planner's simulation
([scale.md](scale.md#planning-how-many-accelerators-generate-how-many-train)); do not edit. **Nothing in this table
was measured.** It is a first guess for accelerators of {MEMORY / 1e9:.0f} GB, {FLOPS:.2g} operations and
{BANDWIDTH:.3g} bytes a second (an H100), of which 40 % are reached, {NODE} in a node. Full training with AdamW in
bf16 takes {STATE:.0f} bytes a parameter, and state or served weights fill at most {USABLE:.0%} of the memory. Each
step has {GROUPS} groups of {GROUP_SIZE} answers, of {MEAN} tokens in the mean and at most {MOST}, after prompts of
{PROMPT}; `train.max_staleness = {STALENESS}`, {CONCURRENCY} requests a server. Dense models; a mixture computes as
its active parameters and needs memory for all.

Each cell: accelerators that generate (`vllm.servers` × `vllm.tensor`) + accelerators that train (`mesh.fsdp` ×
`mesh.tensor`), and the seconds of a step. "–": it does not fit; train adapters (`lora.rank`), share the accelerators
in turns ([colocate.md](colocate.md)) or keep the state on the host (`trainer.offload`).

"""
TAIL = """
For your own lengths, hardware and file, and then from a short run of your own:

```sh
python -m areal_x.plan FILE.gin --accelerators 16 --parameters 8.2e9 --flops 9.9e14 --bandwidth 3.35e12 --mean-length 1000
python -m areal_x.plan FILE.gin --accelerators 16 --from RUN
```

`python -m areal_x.check FILE.gin` counts the memory of the file's own model and rows. With one accelerator trainer
and engine share it ([first_run.md](first_run.md)). More than one process trains with `train.cluster = 'ray'` and
`mesh.processes` ([cluster.md](cluster.md)).
"""


@dataclass(frozen=True)
class Least:
    """The smallest parts of a model that fit."""

    serving: int
    """Accelerators of one server."""

    training: int
    """Accelerators that train."""


def least(parameters: float) -> Least:
    """Returns the smallest powers of two that hold weights in bf16, and the training state."""
    return Least(_power(2 * parameters / (USABLE * MEMORY)), _power(STATE * parameters / (USABLE * MEMORY)))


def _power(number: float) -> int:
    power = 1
    while power < number:
        power *= 2
    return power


def best(parameters: float, accelerators: int) -> Prediction | None:
    """Returns the prediction for the best split into servers and a power of two that train; None if none fits."""
    smallest = least(parameters)
    profile = profile_from_sizes(
        parameters, FLOPS, BANDWIDTH, MEAN, most=MOST, prompt_tokens=PROMPT, concurrency=CONCURRENCY, efficiency=0.4, passes=0
    )
    found, training = [], max(smallest.training, accelerators // 8)  # the fewest are never the best
    while (left := accelerators - training) >= smallest.serving:
        generation = left // smallest.serving * smallest.serving
        choice = Choice(generation, training, STALENESS, 1, CONCURRENCY, GROUPS, GROUP_SIZE, width=smallest.serving)
        found.append(predict(profile, choice, steps=4))
        training *= 2
    return recommended(found) if found else None


def cell(parameters: float, accelerators: int) -> str:
    found = best(parameters, accelerators)
    if found is None:
        return "–"
    choice = found.choice
    tensor = min(NODE, least(parameters).training) if choice.training > 2 * NODE else 1
    mesh = f"{choice.training // tensor} × {tensor}"
    return f"{choice.servers} × {choice.width} + {mesh}, {found.step_seconds:.2g} s"


def row(name: str) -> str:
    cells = [cell(MODELS[name], count) for count in ACCELERATORS]
    return f"| {name} | {' | '.join(cells)} |\n"


def page() -> str:
    head = f"| model | {' | '.join(map(str, ACCELERATORS))} |\n|{'---|' * (len(ACCELERATORS) + 1)}\n"
    return HEAD + head + "".join(map(row, MODELS)) + TAIL


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
