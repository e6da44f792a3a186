"""A step whose forward pass gives the proximal policy's log-probabilities learns what one after a pass of its own does."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_x.algorithms import corrections, losses, recipes
from areal_x.algorithms.algorithm import Algorithm
from areal_x.algorithms.mismatch import LagMetrics
from areal_x.batching.batch import Models, make_batches
from areal_x.batching.step_outputs import StepOutputs, complete
from areal_x.experiment import Experiment
from areal_x.monitor.trajectories import trained
from areal_x.protocols.trainer_config import LoRAConfig
from areal_x.replay import Replay
from areal_x.types import Turn
from tests.experiments import tiny_experiment
from tests.test_share_prompts import ROW, groups_of, trainer_of
from tests.thorough import further

BACKENDS = ["jax", "torch"]
SETTINGS: dict[str, tuple[Algorithm, dict[str, Any]]] = {
    "micro-batches of a row": (recipes.decoupled_ppo(high=2.0, entropy_coefficient=0.01), {"micro_batch_rows": 1}),
    "adapters and shared prompts": (
        recipes.gspo(corrections=partial(corrections.truncated, level="sequence"), entropy_coefficient=0.01),
        {"lora": LoRAConfig(rank=3)},
    ),
}


@pytest.mark.parametrize(
    "settings, backend",
    [
        ("micro-batches of a row", "jax"),
        *((name, "torch") for name in SETTINGS),
        *further(("adapters and shared prompts", "jax")),
    ],
)
def test_a_trainer_takes_the_same_step(settings: str, backend: str, model_dir_of: Callable[[str], Path]) -> None:
    algorithm, changes = SETTINGS[settings]
    found = []
    for own_pass in (False, True):
        trainer = trainer_of(model_dir_of("qwen3"), (backend, "auto"), **changes)
        make = partial(make_batches, groups_of(), algorithm, ROW, Models(trainer), version=1)
        (batch,) = make(share_prompts="lora" in changes, own_pass=own_pass)
        assert batch.shape[0] > 2  # several micro-batches
        loss = losses.combine(algorithm.step_loss(own_pass), losses.policy_gap, LagMetrics(2))
        row = trainer.update(batch, loss)
        found.append((row, dict(trainer.weights()), *complete([batch], algorithm, [StepOutputs(trainer.step_logprobs())])))
    (before, weights, known), (own, own_weights, completed) = found
    assert own == pytest.approx(before, rel=1e-5, abs=1e-6)
    assert own["ratio"] == pytest.approx(1.0, abs=1e-6)
    assert own["policy_gap"] > 0.1
    assert own["grad_norm"] > 0.05
    for name, x in weights.items():
        np.testing.assert_allclose(own_weights[name], x, rtol=0, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(completed.proximal_logp, np.where(known.mask, known.proximal_logp, 0), rtol=0, atol=1e-5)
    np.testing.assert_allclose(completed.weights, known.weights, rtol=1e-4)


# ---- whole runs


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many passes over a batch the trainers of either backend make, by kind."""
    counts: Counter[str] = Counter()

    def counting(method: str, made: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            counts[method] += 1
            return made(*arguments)

        return counted

    for backend in BACKENDS:
        trainer = importlib.import_module(f"areal_x_{backend}.trainer").Trainer
        for method in ("logprobs", "update"):
            monkeypatch.setattr(trainer, method, counting(method, getattr(trainer, method)))
    return counts


@pytest.fixture
def experiment(tiny_model_dir: Path, tmp_path: Path) -> Experiment:
    algorithm = recipes.decoupled_ppo(kl_coefficient=0.01)
    return tiny_experiment(tiny_model_dir, tmp_path / "runs", backend="torch", algorithm=algorithm, steps=2, max_staleness=1)


def turns_of(experiment: Experiment, said: list[str] | None = None) -> list[Turn]:
    turns = experiment.turns(experiment.open(), message=[].append if said is None else said.append)
    return [turn for turn in turns if turn.groups]


@pytest.mark.parametrize("backend", ["torch", *further("jax")])
def test_a_run_makes_no_pass_before_its_steps_and_reports_the_same(
    backend: str, experiment: Experiment, passes: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    run = replace(experiment, backend=backend, deterministic=True, steps=3)
    own = turns_of(run, said)
    assert passes == {"logprobs": 3, "update": 3}  # of the reference
    assert not any("forward pass" in line for line in said)
    again = Replay(**{**vars(run), "recorded": Path(run.runs) / "run", "name": "again"})
    losses_of = [[turn.metrics["loss"] for turn in turns] for turns in (own, turns_of(again))]
    assert losses_of[0] == losses_of[1]  # to the last bit
    passes.clear()
    monkeypatch.setattr(Algorithm, "uses_own_pass", lambda *_: False)
    before = turns_of(replace(run, name="before"))
    assert passes == {"logprobs": 6, "update": 3}
    timed = ("seconds", "per_second", "idle", "threads")
    for turn, expected in zip(own, before, strict=True):
        row, other = turn.metrics, expected.metrics
        assert row.keys() == other.keys()
        same = {key for key in row if not key.endswith(timed)}
        assert {key: row[key] for key in same} == pytest.approx({key: other[key] for key in same}, rel=1e-4, abs=1e-6)
        assert {"policy_gap", "ratio", "reference_kl"} <= same
        for one, same_one in zip(trained(turn), trained(expected), strict=True):
            where = one.trajectory.mask
            np.testing.assert_allclose(one.gaps[where], same_one.gaps[where], rtol=0, atol=1e-4)
    assert "mismatch/kl_lag0" in own[0].metrics


def test_a_run_that_needs_the_pass_makes_it_and_says_why_once(experiment: Experiment, passes: Counter[str]) -> None:
    said: list[str] = []
    turns_of(replace(experiment, algorithm=recipes.m2po()), said)
    assert passes == {"logprobs": 2, "update": 2}
    (line,) = [line for line in said if "forward pass" in line]
    assert line.endswith("importance_of_trusted looks at all sequences of an optimizer step together")


def test_later_optimizer_steps_on_a_batch_clip_around_the_policy_before_the_first(
    experiment: Experiment, passes: Counter[str]
) -> None:
    said: list[str] = []
    still = replace(experiment, algorithm=recipes.decoupled_ppo(), minibatches=2, max_staleness=0)
    learns = replace(still.trainer, optimizer=replace(still.trainer.optimizer, learning_rate=1e-2))
    ratios = [turn.metrics["ratio"] for turn in turns_of(replace(still, trainer=learns), said)]
    assert passes == {"logprobs": 4, "update": 4}
    assert all(abs(ratio - 1) > 1e-4 for ratio in ratios)  # half of it is of the second optimizer step
    (line,) = [line for line in said if "forward pass" in line]
    assert line.endswith("of the 2 optimizer steps on a batch, the first changes the policy")
