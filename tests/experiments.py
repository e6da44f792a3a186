"""The small experiment that tests of the ring vary: a tiny model, short answers, and a reward that is rarely 0."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from areal_x.engines.embedded import EmbeddedConfig
from areal_x.experiment import Experiment
from areal_x.protocols.engine import SamplingParams
from areal_x.protocols.trainer_config import ModelConfig, OptimizerConfig, TrainerConfig
from areal_x.types import Task
from areal_x.workflows.single_turn import SingleTurn
from tests.ones import counts_ones

BACKEND = "torch" if find_spec("areal_x_torch") else "jax"  # torch compiles nothing
TASKS = [Task(str(i), f"{i}+{7 * i % 10}=") for i in range(10)]


TRUNCATED = SingleTurn(
    reward=counts_ones, sampling=SamplingParams(max_tokens=8, top_p=0.9, top_k=20, min_p=0.05), reward_workers=1
)


def tiny_experiment(model: Path, runs: Path, **changes: Any) -> Experiment:
    """Six synchronous steps of GRPO on a model directory, with changed settings."""
    settings: dict[str, Any] = {
        "backend": BACKEND,
        "dataset": TASKS,
        "workflow": SingleTurn(reward=counts_ones, sampling=SamplingParams(max_tokens=8), reward_workers=1),
        "trainer": TrainerConfig(
            model=ModelConfig(str(model)), optimizer=OptimizerConfig(learning_rate=1e-3), micro_batch_rows=4
        ),
        "embedded": EmbeddedConfig(slots=8),
        "steps": 6,
        "groups_per_step": 2,
        "group_size": 4,
        "max_staleness": 0,
        "row_length": 32,
        "runs": str(runs),
        "name": "run",
    }
    return Experiment(**settings | changes)
