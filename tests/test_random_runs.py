"""Whole runs of random settings: stopped anywhere and resumed they end in the same bits, and so are they replayed."""

from __future__ import annotations

import itertools
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_x.algorithms import recipes
from areal_x.experiment import Experiment
from areal_x.monitor.metrics import read
from areal_x.protocols.trainer_config import LoRAConfig, ModelConfig, OptimizerConfig, TrainerConfig
from areal_x.replay import Replay, compare_losses
from areal_x.run import checkpoint
from areal_x.run.journal import Journal
from tests.random_delays import delayed, digest
from tests.thorough import further

RECIPES = ("grpo", "dapo", "gspo", "rloo", "reinforce_pp", "cispo", "ppo", "decoupled_ppo")
STEPS = 6


def settings(seed: int, backend: str, model: Path) -> dict[str, Any]:
    rng = np.random.default_rng(seed)

    def one_of(*choices: Any) -> Any:
        return choices[int(rng.integers(len(choices)))]

    name = one_of("adamw", "adafactor", "muon")
    moments = "fp32" if name == "adafactor" else one_of("fp32", "bf16")
    optimizer = OptimizerConfig(name, learning_rate=1e-3, warmup_steps=int(rng.integers(3)), moments=moments)
    groups = int(rng.integers(1, 4))
    return {
        "backend": backend,
        "algorithm": getattr(recipes, one_of(*RECIPES))(),
        "trainer": TrainerConfig(
            model=ModelConfig(str(model)),
            optimizer=optimizer,
            micro_batch_rows=int(rng.integers(1, 5)),
            checkpoint=one_of("portable", "sharded"),
            lora=LoRAConfig(rank=one_of(0, 0, 2)),
        ),
        "groups_per_step": groups,
        "minibatches": int(rng.integers(1, groups + 1)),
        "group_size": int(rng.integers(2, 5)),
        "max_staleness": int(rng.integers(0, 5)),
        "share_prompts": bool(rng.integers(2)),
        "seed": seed,
        "steps": STEPS,
        "checkpoint_every": int(rng.integers(1, 4)),
        "evaluate_every": int(rng.integers(0, 3)),
    }


def run(experiment: Experiment, until: int = STEPS, resume: bool = False) -> Path:
    directory = experiment.open(resume)
    for turn in experiment.turns(directory, resume, lambda _: None):
        if turn.metrics["step"] == until:
            break
    return directory


# Runs of torch are replayed in tests/test_replay.py.
CASES = [("jax", 0), *further(("torch", 0), *itertools.product(("jax", "torch"), (1, 2)))]


@pytest.mark.parametrize(("backend", "seed"), CASES, indirect=["backend"])
def test_a_random_run_is_the_same_stopped_resumed_and_replayed(
    seed: int, backend: str, tiny_model_dir: Path, tmp_path: Path
) -> None:
    how, rng = settings(seed, backend, tiny_model_dir), np.random.default_rng(1000 + seed)
    whole = run(delayed(tiny_model_dir, tmp_path, 0, name="whole", **how))
    broken = delayed(tiny_model_dir, tmp_path, 1, name="broken", **how)
    directory, resume = tmp_path / "broken", False
    for stop in sorted(rng.integers(how["checkpoint_every"], STEPS, int(rng.integers(1, 3)))):
        run(broken, int(stop), resume)
        resume = True
    run(broken, resume=True)
    assert digest(directory) == digest(whole)
    with Journal(directory) as journal:
        tickets = [group.ticket for step in journal.steps() for group in journal.groups_of(step)]
        assert len(set(tickets)) == len(tickets) == STEPS * how["groups_per_step"]
    assert checkpoint.steps(directory)[-1] == STEPS
    given = {field.name: getattr(broken, field.name) for field in fields(broken)}
    replayed = Replay(**{**given, "recorded": directory, "name": "again"}).run()
    assert compare_losses(read(whole), replayed.metrics) == f"all {STEPS} losses equal the run's to the last bit"
