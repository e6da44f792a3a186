"""Shared tokens are computed once, and what is learnt stays the same: both backends, every way to attend, whole runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_x.algorithms.recipes import dpo, grpo, ppo
from areal_x.batching.batch import Models, make_batches
from areal_x.check import check_backend
from areal_x.engines.fleet.scorer import sequences
from areal_x.errors import ConfigError
from areal_x.monitor.trajectories import trained
from areal_x.preflight.model import find_model
from areal_x.protocols.backends import create_trainer
from areal_x.protocols.trainer import Trainer
from areal_x.protocols.trainer_config import MeshConfig, ModelConfig, OptimizerConfig, TrainerConfig
from areal_x.protocols.tries import nodes
from areal_x.replay import Replay
from areal_x.types import Batch, Episode, Group, Scored, Task, Trajectory
from tests.conftest import QUICK, python_with
from tests.experiments import TASKS, tiny_experiment
from tests.kept import kept_with
from tests.thorough import further, thorough

ROW = 96
WAYS = [("jax", "dense"), ("jax", "blocked"), ("torch", "sdpa")]
NEITHER = [("jax", "auto"), ("torch", "auto")]
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, weight_decay=0.1, eps=1e-2)
# Adds -1e4 times the gradient: with so large an eps, AdamW's denominator is eps.
STEEPEST = OptimizerConfig(learning_rate=1e10, beta1=0.0, eps=1e6, weight_decay=0.0, clip_norm=0.0)
MODEL = "qwen3"


def groups_of(vocab: int = 50) -> list[Group]:
    """A group that a row does not hold, two that share one, one with a prompt too short to share, one whose contexts part, and
    agents whose calls go on from one another, or from one another's middle."""
    rng = np.random.default_rng(0)
    made = []
    sizes = ((40, (20, 14, 17, 22, 9)), (25, (6, 6, 3)), (30, (8, 6)), (3, (5, 4)))
    for ticket, (prompt, answers) in enumerate(sizes):
        begin = rng.integers(0, vocab, prompt)
        made.append(group_of(ticket, [begin] * len(answers), answers, rng, vocab))
    trunk = rng.integers(0, vocab, 20)
    turns = [np.append(trunk, rng.integers(0, vocab, n)) for n in (0, 12, 0)]
    made.append(group_of(len(sizes), turns, (5, 6, 7), rng, vocab))
    return [*made, agents_of(len(made), rng, vocab)]


def agents_of(ticket: int, rng: np.random.Generator, vocab: int) -> Group:
    """Episodes of three calls with their histories; the third call of one forgets the end of the second's answer."""
    prompt, episodes = rng.integers(0, vocab, 17), []
    for cut in (0, 4):
        context, trajectories = prompt, []
        for answer in (6, 12, 5):
            call = group_of(0, [context], (answer,), rng, vocab).episodes[0].trajectories[0]
            trajectories.append(call)
            context = np.append(call.tokens[: len(call) - cut * (answer == 12)], rng.integers(0, vocab, 4))
        episodes.append(Episode(Scored(float(rng.normal())), tuple(trajectories)))
    return Group(Task(str(ticket), ""), ticket, 0, tuple(episodes))


def group_of(ticket: int, contexts: list[Any], answers: tuple[int, ...], rng: np.random.Generator, vocab: int) -> Group:
    episodes = []
    for context, length in zip(contexts, answers, strict=True):
        tokens, logprobs = rng.integers(0, vocab, length), -rng.exponential(2.0, length)
        kept = kept_with(tokens, vocab, length) if length % 2 else None
        trajectory = Trajectory.from_completion(context, tokens, logprobs, np.zeros(length), 1.0, kept=kept)
        episodes.append(Episode(Scored(float(rng.normal())), (trajectory,)))
    return Group(Task(str(ticket), ""), ticket, 0, tuple(episodes))


def trainer_of(directory: Path, way: tuple[str, str], **changes: Any) -> Trainer:
    backend, attention = way
    pytest.importorskip(f"areal_x_{backend}")
    settings: dict[str, Any] = {"optimizer": OPTIMIZER, "micro_batch_rows": 2, "entropy": True, "share_prompts": True}
    model = ModelConfig(str(directory), attention)
    return create_trainer(backend, TrainerConfig(model=model, **settings | changes))


def batch_of(shares: bool, models: Any, algorithm: Any = None) -> Batch:
    (batch,) = make_batches(groups_of(), algorithm or grpo(), ROW, models, share_prompts=shares)
    return batch


def trained_values(batch: Batch, x: np.ndarray) -> np.ndarray:
    """The values of all trained tokens, however they are packed, in the order of their sampled log-probabilities."""
    mask = np.asarray(batch.mask)
    return np.asarray(x)[mask][np.argsort(np.asarray(batch.behavior_logp)[mask])]


def test_these_groups_share_in_every_way() -> None:
    alone, shared = (batch_of(shares, Models(None)) for shares in (False, True))
    assert alone.parents is None
    assert shared.shape[0] < alone.shape[0]
    of_rows = [nodes(parents, ids) for parents, ids in zip(shared.parents, shared.segment_ids, strict=True)]
    branching = [np.unique(of_row.parents[of_row.parents >= 0]) for of_row in of_rows]
    above = [of_row.parents[found] for of_row, found in zip(of_rows, branching, strict=True)]
    assert any((found >= 0).any() for found in above)  # a branch of a branch
    assert any((found < 0).sum() > 1 for found in above)  # two tries of a row
    begins = [row[:40].tolist() for row in shared.tokens]
    assert begins.count(groups_of()[0].episodes[0].trajectories[0].tokens[:40].tolist()) == 2  # of one group in two rows
    np.testing.assert_array_equal(trained_values(alone, alone.weights), trained_values(shared, shared.weights))
    np.testing.assert_array_equal(trained_values(alone, alone.advantages), trained_values(shared, shared.advantages))


@pytest.mark.parametrize("way", [*WAYS[1:], *further((WAYS[0],))], ids="-".join)
@pytest.mark.parametrize("name", ["qwen3", *further("qwen3-tied", "qwen2")])  # each shares keys among another number of heads
def test_log_probabilities_and_gradients_are_those_of_whole_sequences(
    way: tuple[str, str], name: str, model_dir_of: Callable[[str], Path]
) -> None:
    of_each = []
    for shares in (False, True):
        trainer = trainer_of(model_dir_of(name), way, optimizer=STEEPEST)
        batch = batch_of(shares, Models(trainer), grpo(proximal="recompute", entropy_coefficient=0.01))
        before = {tensor: x.copy() for tensor, x in trainer.weights()}
        row = trainer.update(batch, grpo(entropy_coefficient=0.01).loss)
        gradient = {tensor: x - before[tensor] for tensor, x in trainer.weights()}
        of_each.append((trained_values(batch, batch.proximal_logp), row, gradient))
    (logp, row, gradient), (logp_shared, row_shared, gradient_shared) = of_each
    np.testing.assert_allclose(logp_shared, logp, atol=1e-5)
    assert row_shared == pytest.approx(row, rel=1e-5, abs=1e-6)
    for tensor, x in gradient.items():
        assert np.linalg.norm(gradient_shared[tensor] - x) <= 1e-5 * np.linalg.norm(x) > 0, tensor


@pytest.mark.parametrize("way", NEITHER, ids="-".join)
def test_a_critic_and_its_targets_are_those_of_whole_sequences(
    way: tuple[str, str], model_dir_of: Callable[[str], Path]
) -> None:
    algorithm, of_each = ppo(), []
    for shares in (False, True):
        policy = trainer_of(model_dir_of(MODEL), way)
        critic = trainer_of(model_dir_of(MODEL), way, head="value", entropy=False)
        critic.update(batch_of(shares, Models(policy, None, critic), algorithm), algorithm.value_loss)  # whose score began as 0
        batch = batch_of(shares, Models(policy, None, critic), algorithm)
        said = [trained_values(batch, x) for x in (batch.old_values, batch.advantages, batch.returns)]
        of_each.append((*said, critic.update(batch, algorithm.value_loss)))
    (*alone, row), (*shared, row_shared) = of_each
    assert np.abs(alone[0]).max() > 1e-3
    for x, y in zip(alone, shared, strict=True):
        np.testing.assert_allclose(y, x, atol=1e-4)
    assert row_shared == pytest.approx(row, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("way", NEITHER, ids="-".join)
def test_micro_batches_of_one_row_give_the_same(way: tuple[str, str], model_dir_of: Callable[[str], Path]) -> None:
    found = []
    for rows in (1, 8):
        trainer = trainer_of(model_dir_of(MODEL), way, micro_batch_rows=rows)
        batch = batch_of(True, Models(trainer), grpo(proximal="recompute"))
        found.append((trained_values(batch, batch.proximal_logp), trainer.update(batch, grpo().loss)["grad_norm"]))
    np.testing.assert_allclose(found[0][0], found[1][0], atol=1e-5)
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-4)


def log_probabilities(directory: Path, shares: bool, context: int) -> list[float]:
    """By JAX, of all trained tokens, on a mesh that splits rows in so many parts."""
    trainer = trainer_of(directory, ("jax", "auto"), mesh=MeshConfig(context=context))
    return trained_values(batch := batch_of(shares, Models(None)), trainer.logprobs(batch)).tolist()


@thorough
def test_a_mesh_that_splits_rows_gives_the_same(model_dir_of: Callable[[str], Path]) -> None:
    pytest.importorskip("areal_x_jax")
    directory = model_dir_of(MODEL)
    program = "import sys, json, pathlib; from tests.test_share_prompts import log_probabilities as f; "
    program += "print(json.dumps(f(pathlib.Path(sys.argv[1]), True, 2)))"
    on_mesh = json.loads(python_with(4, "-c", program, str(directory), **QUICK).splitlines()[-1])
    np.testing.assert_allclose(on_mesh, log_probabilities(directory, False, 1), atol=1e-5)


@pytest.mark.parametrize("way", [("jax", "blocked"), ("torch", "sdpa"), *further((WAYS[0],))], ids="-".join)
def test_windows_count_positions(way: tuple[str, str], model_dir_of: Callable[[str], Path]) -> None:
    logp = []
    for shares in (False, True):
        trainer = trainer_of(model_dir_of("mistral-window"), way)
        batch = batch_of(shares, Models(trainer), grpo(proximal="recompute"))
        logp.append(trained_values(batch, batch.proximal_logp))
    np.testing.assert_allclose(logp[1], logp[0], atol=1e-5)


def test_both_refuse_models_that_see(model_dir_of: Callable[[str], Path]) -> None:
    for way in NEITHER:
        with pytest.raises(ConfigError, match=r"train\.share_prompts = True .*vision tower"):
            trainer_of(model_dir_of("qwen3_vl"), way)


def test_what_cannot_share_is_refused_before_the_run(
    tiny_model_dir: Path, model_dir_of: Callable[[str], Path], tmp_path: Path
) -> None:
    make = partial(tiny_experiment, tiny_model_dir, tmp_path, share_prompts=True)
    with pytest.raises(ConfigError, match=r"train\.share_prompts = True .*pairs"):
        make(algorithm=dpo(), engine="none")
    with pytest.raises(ConfigError, match=r"train\.share_prompts = True .*trainer\.replay_experts"):
        make(trainer=TrainerConfig(replay_experts=True), engine="vllm")
    sees = model_dir_of("qwen3_vl")
    with pytest.raises(ConfigError, match=r"train\.share_prompts = True .*vision tower"):
        check_backend(make(backend="jax"), find_model(str(sees)))


def test_a_server_is_asked_for_whole_sequences() -> None:
    batch = batch_of(True, Models(None))
    asked = [batch.tokens[row, place].tolist() for row, place in sequences(batch)]
    whole = [t.tokens.tolist() for g in groups_of() for e in g.episodes for t in e.trajectories]
    longest = [x for x in whole if not any(y[: len(x)] == x for y in whole if y is not x)]
    assert len(longest) < len(whole)
    assert sorted(asked) == sorted(longest)
    alone = batch_of(False, Models(None))
    assert sorted(whole) == sorted(alone.tokens[row, place].tolist() for row, place in sequences(alone))


# ---- whole runs


LONG = [replace(task, prompt=f"what does this come to, added up: {task.prompt}") for task in TASKS]


def metrics_of(directory: Path, runs: Path, **changes: Any) -> tuple[list[dict[str, float]], list[Any]]:
    """The metrics that two steps wrote, and their turns."""
    experiment = tiny_experiment(directory, runs, dataset=LONG, row_length=128, steps=2, **changes)
    turns = list(experiment.turns(experiment.open()))
    return [turn.metrics for turn in turns[1:]], turns[1:]


@pytest.mark.parametrize("name", ["torch", *further("jax")])
def test_a_run_learns_as_without_and_says_what_it_saved(name: str, tiny_model_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip(f"areal_x_{name}")
    alone, _ = metrics_of(tiny_model_dir, tmp_path / "alone", backend=name)
    shared, turns = metrics_of(tiny_model_dir, tmp_path / "shared", backend=name, share_prompts=True)
    # How far the rollout of the next step is by now depends on the machine's speed.
    timed = {"queue_depth", "generated_tokens", "scored"}
    timed |= {key for key in alone[0] if key.endswith(("seconds", "per_second", "idle", "threads"))}
    for before, after, turn in zip(alone, shared, turns, strict=True):
        same = before.keys() - timed
        assert {key: after[key] for key in same} == pytest.approx({key: before[key] for key in same}, rel=1e-3, abs=1e-5)
        prompt = len(LONG[0].prompt)
        assert after["saved_tokens"] == prompt * 2 * (4 - 1)  # of 2 groups of 4
        assert "saved_tokens" not in before
        assert np.count_nonzero(turn.batch.segment_ids) == after["packed_tokens"] - after["saved_tokens"]


def test_a_run_is_replayed_to_the_last_bit_and_shown(tiny_model_dir: Path, tmp_path: Path) -> None:
    experiment = tiny_experiment(tiny_model_dir, tmp_path, dataset=LONG, row_length=128, steps=2, share_prompts=True)
    run = experiment.run()
    turns = []
    again = Replay(**{**vars(experiment), "recorded": run.directory, "name": "again"})
    for turn in again.turns(again.open()):
        turns.append(turn)
    assert [turn.metrics["loss"] for turn in turns[1:]] == [row["loss"] for row in run.metrics[1:]]
    for one in trained(turns[1]):
        assert len(one.advantages) == len(one.trajectory)
        assert len(np.unique(one.advantages[one.trajectory.mask])) == 1
