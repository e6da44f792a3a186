"""The model that reinforcement starts from: supervised on a sloppy tutor's answers, made once and kept.

It writes steps well and forgets most carries, so that greedily it solves just the problems without any: 31 % of the held-out
ones. That is what reinforcement has to mend. What it hardly mends is the quality of the steps: the share of held-out problems
that the model would solve if each carry were written for it is, within 4 points, where seven runs of reinforcement ended. That
share is 95 to 96 % here (seeds 0, 1, 2); a learning rate of 4e-3 with 3 carries of 4 forgotten gave 94 and 88 % (seeds 0, 1).
The initial weights matter as much: see `spread` in examples/arithmetic/model.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import gin
import numpy as np

from areal_x import model_dir
from areal_x.algorithms.recipes import sft
from areal_x.data.packing import pack
from areal_x.errors import at_least, within
from areal_x.trainer import MeshConfig, ModelConfig, OptimizerConfig, TrainerConfig, create_trainer
from areal_x.types import Batch, Trajectory
from examples.arithmetic.model import END, encode, write_model
from examples.arithmetic.task import demonstrations, problems

ROW_LENGTH = 80  # of 56 to 128 the shortest that demonstrations fill to 97 %
ROWS = 25  # a step: one shape, so one compiled program; 62 demonstrations
MICRO_BATCH_ROWS = 5  # small enough for a core's cache: half the time of all rows at once
DEMONSTRATIONS = 65  # made for each step, of which a few are left over


@gin.configurable(module="arithmetic")
def warm_start(
    seed: int = 0,
    steps: int = 350,
    learning_rate: float = 2e-3,
    forgetting: float = 0.65,
    backend: str = "jax",
) -> str:
    """The directory of the supervised model, made now unless one of the same settings and code is in the user's cache.

    seed: of the initial weights and the demonstrations. forgetting: the probability that a demonstration drops a carry.
    backend: what trains it; where it is not installed, the one that is. The cache is $XDG_CACHE_HOME/areal_x/arithmetic.
    """
    at_least("arithmetic.warm_start.steps", steps, 2)
    within("arithmetic.warm_start.forgetting", forgetting, 0, 1)
    settings = {"seed": seed, "steps": steps, "learning_rate": learning_rate, "forgetting": forgetting}
    home = cache()
    made = home / _digest(settings)
    if not made.is_dir():
        unfinished = Path(tempfile.mkdtemp(dir=home, prefix=f".{made.name}."))
        try:
            supervise(unfinished, backend=installed(backend), **settings)
            unfinished.rename(made)
        except OSError:
            if not made.is_dir():  # then it is not that another run was quicker
                raise
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return str(made)


def supervise(directory: Path, *, backend: str, seed: int, steps: int, learning_rate: float, forgetting: float) -> None:
    """Writes a random model to `directory` and trains it on demonstrations, each seen once."""
    began = time.perf_counter()
    write_model(directory, seed)
    trainer = create_trainer(
        backend,
        # Every field is given, so that bindings for the run itself (`optimizer.learning_rate`) do not reach in here.
        TrainerConfig(
            model=ModelConfig(path=str(directory)),
            optimizer=OptimizerConfig(
                learning_rate=learning_rate,
                beta1=0.9,
                beta2=0.98,
                eps=1e-8,
                weight_decay=0.01,
                warmup_steps=min(30, steps - 1),
                schedule="cosine",
                schedule_steps=steps,
                final_ratio=0.1,
                clip_norm=1.0,
            ),
            mesh=MeshConfig(data=-1, fsdp=1, expert=1, context=1, tensor=1, processes=1),
            precision="fp32",
            micro_batch_rows=MICRO_BATCH_ROWS,
            head_chunk=MICRO_BATCH_ROWS * ROW_LENGTH,
            temperature=1.0,
            seed=seed,
        ),
    )
    recipe = sft()
    print(f"warm start on {backend}, once for these settings:", end="", flush=True)
    for step, batch in enumerate(batches(steps, seed, forgetting), start=1):
        weights = np.asarray(recipe.weighting(batch.mask, batch.segment_ids), np.float32)
        trainer.update(batch.replace(weights=weights), recipe.loss)
        if 10 * step // steps > 10 * (step - 1) // steps:
            print(f" {10 * (10 * step // steps)}%", end="", flush=True)
    model_dir.write_model(directory, directory, trainer.weights())
    print(f" in {time.perf_counter() - began:.0f} s", flush=True)


def batches(steps: int, seed: int, forgetting: float) -> Iterator[Batch]:
    """`steps` batches of one shape: all demonstrations are packed together, so that rows are full, and then shuffled."""
    tasks = problems(DEMONSTRATIONS * steps, seed)
    answers = demonstrations(tasks, forgetting, seed)
    trajectories = [_trajectory(task.prompt, answer) for task, answer in zip(tasks, answers, strict=True)]
    packed = pack(trajectories, ROW_LENGTH).batch
    order = np.random.default_rng([4, seed]).permutation(packed.shape[0])
    for step in range(steps):
        rows = order[step * ROWS : (step + 1) * ROWS]
        yield packed.map(lambda x, rows=rows: x[rows])


def _trajectory(prompt: str, answer: str) -> Trajectory:
    """A demonstration as a trajectory: trained on from the answer's first character to the end token."""
    context, taught = encode(prompt), np.append(encode(answer), END)
    nothing = np.zeros(len(taught))
    return Trajectory.from_completion(context, taught, nothing, nothing)


def cache() -> Path:
    """Where what takes half a minute to make is kept."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "areal_x" / "arithmetic"
    home.mkdir(parents=True, exist_ok=True)
    return home


def _digest(settings: dict[str, Any]) -> str:
    """Names the settings and the code: a model made by other code is another model."""
    code = [(Path(__file__).parent / f"{name}.py").read_text() for name in ("model", "task", "warm_start")]
    return hashlib.sha256(json.dumps([settings, code]).encode()).hexdigest()[:16]


def installed(backend: str) -> str:
    """The backend, or where it is not installed one that is."""
    installed = entry_points(group="areal_x.backends").names
    return backend if backend in installed or not installed else min(installed)
