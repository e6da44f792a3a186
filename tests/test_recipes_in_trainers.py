"""Every recipe around every proximal policy, from groups to a trainer's step: one number in however many micro-batches."""

from __future__ import annotations

import inspect
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_x.algorithms import corrections, recipes
from areal_x.algorithms.algorithm import PROXIMAL, Algorithm
from areal_x.batching.batch import Models, make_batches
from areal_x.batching.teachers import Reader
from areal_x.errors import ConfigError
from areal_x.protocols.backends import create_trainer
from areal_x.protocols.trainer import Trainer
from areal_x.protocols.trainer_config import ModelConfig, OptimizerConfig, TrainerConfig
from areal_x.types import Episode, Group, Scored, Task, Trajectory
from tests.packing_invariance import DIVERGENCE, model_directories

ARGUMENTS: dict[str, dict[str, Any]] = {
    "dr_grpo": {"max_tokens": 6},
    "dapo": {"max_tokens": 6, "overlong_buffer": 3},
    "grpo": {"kl_coefficient": 0.1, "entropy_coefficient": 0.01},
    "distill": {"beta": 0.5},
    "self_distill": {"context": lambda task: f"{task.id}?"},
    "multi_distill": {"weights": {"one": 0.25, "other": 0.75}},
}
FUNCTIONS = {name: f for name, f in vars(recipes).items() if inspect.isfunction(f) and name != "assemble"}
NAMES = [name for name, f in FUNCTIONS.items() if "parts" in inspect.signature(f).parameters]
PAIRS = [(name, proximal) for name in NAMES for proximal in PROXIMAL]
# Between two policies there is no batch to look at as a whole; and a reward model is no policy.
REFUSED = {("m2po", "interpolate"), ("reward_model", "recompute"), ("reward_model", "interpolate")}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    return model_directories(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def trainer_of(directories: tuple[Path, Path, Path]) -> Any:
    pytest.importorskip("areal_x_torch")
    policy, judge, teacher = map(str, directories)

    @cache
    def made(kind: str, rows: int) -> Trainer:
        settings: dict[str, Any] = {"micro_batch_rows": rows, "optimizer": OptimizerConfig(learning_rate=1e-30)}
        if kind == "policy":
            settings |= {"model": ModelConfig(policy)}
        elif kind == "student":
            settings |= {"model": ModelConfig(policy), "entropy": True, "teacher": teacher, "divergence": DIVERGENCE}
        elif kind == "reference":
            settings = {"model": ModelConfig(teacher), "frozen": True, "micro_batch_rows": rows}
        else:
            settings |= {"model": ModelConfig(judge), "head": kind}
        return create_trainer("torch", TrainerConfig(**settings))

    return made


def groups(pairs: bool) -> list[Group]:
    """Groups of several tasks, sampled by versions 0 to 4, with log-probabilities far from the model's present ones."""
    rng = np.random.default_rng(0)

    def trajectory() -> Trajectory:
        prompt, answer = rng.integers(2, 40, rng.integers(1, 4)), rng.integers(2, 40, rng.integers(1, 6))
        versions = rng.integers(0, 5, len(answer))
        return Trajectory.from_completion(prompt, answer, rng.normal(-4, 1.0, len(answer)), versions)

    made = []
    for ticket in range(4):
        episodes = [Episode(Scored(rng.normal()), tuple(trajectory() for _ in range(1 + pairs))) for _ in range(3)]
        made.append(Group(Task(str(ticket), ""), ticket, 0, tuple(episodes), greedy_reward=rng.normal()))
    return made


def step(algorithm: Algorithm, trainer_of: Any, rows: int) -> list[dict[str, float]]:
    """Metrics of an optimizer step over all groups, of policy and critic, without durations."""
    student = algorithm.needs & {"entropy", "teacher_logits"}
    policy = trainer_of("student" if student else algorithm.head, rows)
    reference = trainer_of("reference", rows) if algorithm.needs & {"reference", "teacher"} or algorithm.reward_kl else None
    critic = trainer_of("value", rows) if "values" in algorithm.needs else None
    models = Models(
        policy,
        reference,
        critic,
        teachers={name: trainer_of("reference", rows) for name in ("one", "other")} if "teachers" in algorithm.needs else {},
        reader=Reader(None, lambda prompt: np.array([3, 7], np.int32)),
    )
    (batch,) = make_batches(groups(algorithm.pairs), algorithm, 16, models, version=5)
    assert batch.shape[0] > 3
    said = [policy.update(batch, algorithm.step_loss())]
    if critic is not None:
        assert algorithm.value_loss is not None
        said.append(critic.update(batch, algorithm.value_loss))
    return said


def test_a_correction_that_looks_at_each_row_alone_goes_with_an_interpolated_policy() -> None:
    assert recipes.m2po(proximal="interpolate", corrections=corrections.importance).proximal == "interpolate"
    with pytest.raises(ConfigError, match=r"grpo\.proximal = 'interpolate' .* second_moment looks at all sequences"):
        recipes.grpo(proximal="interpolate", corrections=partial(corrections.second_moment, threshold=2.0))


@pytest.mark.parametrize("name, proximal", PAIRS)
def test_micro_batches_change_nothing(name: str, proximal: str, trainer_of: Any) -> None:
    make = getattr(recipes, name)
    if (name, proximal) in REFUSED:
        with pytest.raises(ConfigError, match=rf"{name}\.proximal = '{proximal}'"):
            make(proximal=proximal)
        return
    algorithm = make(**ARGUMENTS.get(name, {}), proximal=proximal)
    one, all_at_once = (step(algorithm, trainer_of, rows) for rows in (1, 64))
    for mine, theirs in zip(one, all_at_once, strict=True):
        for key in mine:
            assert mine[key] == pytest.approx(theirs[key], rel=2e-5, abs=2e-6), key
    assert one[0]["grad_norm"] > 0
