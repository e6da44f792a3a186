"""Supervised fine-tuning of a random model, before reinforcement learning: each demonstration is
used once."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import entry_points
from pathlib import Path

import numpy as np
from jaxtyping import Int32

from areal_x import (
    NOT_THE_POLICY,
    Batch,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    TrainerConfig,
    Trajectory,
    create_trainer,
    pack,
    sft,
    write_model,
)

ROWS = 25  # per step: one shape, so one compiled program
# with 80 tokens each small enough for a core's cache: half the time of all rows at once
MICRO_BATCH_ROWS = 5


def supervise(
    directory: Path, batches: Iterable[Batch], *, backend: str, seed: int, learning_rate: float
) -> None:
    """Trains the model in `directory` with one step per batch and writes it back. All batches must
    have one shape.

    Raises ValueError for fewer than two batches.
    """
    began = time.perf_counter()
    batches = list(batches)
    steps = len(batches)
    if steps < 2:
        raise ValueError(f"a schedule of warm-up and decay needs 2 batches, got {steps}")
    trainer = create_trainer(
        backend,
        # Every field is set, so that gin bindings of the run (`optimizer.learning_rate`) have no
        # effect here.
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
            head_chunk=MICRO_BATCH_ROWS * batches[0].shape[1],
            temperature=1.0,
            seed=seed,
        ),
    )
    recipe = sft()
    print(f"warm start on {backend}, once for these settings:", end="", flush=True)
    for step, batch in enumerate(batches, start=1):
        weights = np.asarray(recipe.weighting(batch.mask, batch.segment_ids), np.float32)
        trainer.update(batch.replace(weights=weights), recipe.loss)
        if 10 * step // steps > 10 * (step - 1) // steps:
            print(f" {10 * (10 * step // steps)}%", end="", flush=True)
    write_model(directory, directory, trainer.weights())
    print(f" in {time.perf_counter() - began:.0f} s", flush=True)


def supervised_trajectory(*parts: tuple[Int32[np.ndarray, " tokens"], bool]) -> Trajectory:
    """A demonstration from consecutive (tokens, trained) parts; parts with True are trained on."""
    tokens = np.concatenate([ids for ids, _ in parts])
    mask = np.concatenate([np.full(len(ids), trained) for ids, trained in parts])
    return Trajectory(
        tokens,
        mask,
        np.zeros(len(tokens), np.float32),
        np.where(mask, 0, NOT_THE_POLICY).astype(np.int32),
    )


def batches_of(
    demonstrations: Sequence[Trajectory], steps: int, row_length: int, seed: int
) -> Iterator[Batch]:
    """Yields `steps` batches of one shape: all demonstrations are packed together, so that rows are
    full, and the rows shuffled.

    Raises ValueError if they fill too few rows.
    """
    packed = pack(demonstrations, row_length).batch
    if len(packed.tokens) < steps * ROWS:
        raise ValueError(
            f"{steps} steps take {steps * ROWS} rows, the demonstrations fill {len(packed.tokens)}:"
            " make more"
        )
    order = np.random.default_rng([4, seed]).permutation(packed.shape[0])
    for step in range(steps):
        rows = order[step * ROWS : (step + 1) * ROWS]
        yield packed.map(lambda x, rows=rows: x[rows])


def installed(backend: str) -> str:
    """The backend, or one that is installed if it is not."""
    installed = entry_points(group="areal_x.backends").names
    return backend if backend in installed or not installed else min(installed)
