"""Every loss through a whole trainer with differently packed batches: for tests, and for a benchmark that prints it.

`python -m tests.packing_invariance POLICY JUDGE TEACHER PACKINGS` prints the result of `measure` with JAX on all its devices.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from array_api_compat import array_namespace

from areal_x.algorithms import losses, preferences
from areal_x.algorithms.distillation import generalized_jsd
from areal_x.algorithms.weighting import pair_mean, sequence_mean
from areal_x.batching.packing import pack
from areal_x.hf import model_dir
from areal_x.protocols.backends import create_trainer
from areal_x.protocols.trainer import Trainer
from areal_x.protocols.trainer_config import ModelConfig, OptimizerConfig, TrainerConfig
from areal_x.testing.models import write_model
from areal_x.types import Batch, Policy, Trajectory
from tests.conftest import python_with

POLICY = {
    "reinforce": losses.reinforce,
    "ppo_clip": partial(losses.ppo_clip, dual_clip=3.0),
    "gspo": losses.gspo,
    "gmpo": losses.gmpo,
    "sapo": losses.sapo,
    "cispo": losses.cispo,
    "dro": losses.dro,
    "dppo_tv": losses.dppo_tv,
    "kpop": losses.kpop,
    "kl_penalty": partial(losses.kl_penalty, coefficient=0.1),
    "entropy_bonus": partial(losses.entropy_bonus, coefficient=0.1),
    "sft": losses.sft,
    "sampled_reverse_kl": losses.sampled_reverse_kl,
    "clipped_reverse_kl": partial(losses.clipped_reverse_kl, clip=0.2),
    "divergence": losses.divergence,
    "dpo": preferences.dpo_loss,
    "ipo": preferences.ipo_loss,
}
LOSSES: dict[str, dict[str, Any]] = {
    "policy": POLICY,
    "value": {"value_clip": losses.value_clip},
    "reward": {"reward_model": preferences.reward_model_loss},
}
PAIRS = ("dpo", "ipo", "reward_model")
ALL = tuple(name for names in LOSSES.values() for name in names)
STILL = OptimizerConfig(learning_rate=1e-30)
DIVERGENCE = partial(generalized_jsd, beta=0.5)

SEQUENCES, TOKENS = 64, 512  # a few rows stay empty
PACKINGS = ((1, 16), (2, 16), (4, 32), (8, 16))  # number of micro-batches, length of rows


@cache
def chosen(head: str) -> Callable[[Policy, Batch], Any]:
    """All losses of a head as one, so that a trainer compiles one step. A batch's `ages`, which no loss reads, are the number
    of the loss whose terms count; the others' terms and gradients are 0. The metrics are those of all losses."""

    def loss(policy: Policy, batch: Batch) -> Any:
        xp = array_namespace(batch.ages)
        terms, metrics = 0, {}
        for number, (name, one) in enumerate(LOSSES[head].items()):
            own, said = one(policy, batch)
            terms = terms + xp.where(batch.ages == number, own, xp.zeros_like(own))
            metrics |= {f"{name}/{metric}": x for metric, x in said.items()}
        return terms, metrics

    return loss


def sequences() -> list[Trajectory]:
    """Random sequences, sampled at about the probability that a random model with 44 tokens gives them."""
    rng = np.random.default_rng(0)
    made = []
    for _ in range(SEQUENCES):
        prompt, answer = rng.integers(2, 40, rng.integers(1, 4)), rng.integers(2, 40, rng.integers(1, 6))
        made.append(Trajectory.from_completion(prompt, answer, rng.normal(-4, 0.5, len(answer)), np.zeros(len(answer))))
    return made


def batch_of(head: str, name: str, shuffle: int = 0, row_length: int = 16) -> Batch:
    """The same sequences with their advantages and the like, for the loss `name`. shuffle: seed of their order; 0 keeps it."""
    trajectories, rng, order = sequences(), np.random.default_rng(1), np.random.default_rng(shuffle)
    advantages = rng.normal(1.0, 0.8, SEQUENCES)
    noise = [rng.normal(0, 0.3, len(t)).astype(np.float32) for t in trajectories]
    together = 2 if name in PAIRS else 1
    sets = np.arange(SEQUENCES).reshape(-1, together)
    places = (order.permutation(sets) if shuffle else sets).reshape(-1)
    packed = pack([trajectories[i] for i in places], row_length, TOKENS // row_length, together)
    batch, jitter = packed.batch, packed.spread_tokens([noise[i] for i in places])
    weigh = pair_mean if name in PAIRS else sequence_mean
    batch = batch.replace(
        proximal_logp=batch.behavior_logp + jitter * batch.mask,
        reference_logp=batch.behavior_logp - jitter * batch.mask,
        ages=np.full(batch.shape, list(LOSSES[head]).index(name), np.int32),
        advantages=packed.spread(advantages[places]),
        returns=jitter,
        old_values=-jitter,
        weights=weigh(batch.mask, batch.segment_ids).astype(np.float32),
    )
    rows = order.permutation(len(batch.tokens)) if shuffle else slice(None)
    return batch.map(lambda x: x[rows])


def make_trainer(backend: str, directories: Sequence[Path], head: str, **settings: Any) -> Trainer:
    """directories: the policy's, a model's with a `score`, and the teacher's (see `model_directories`)."""
    policy, judge, teacher = map(str, directories)
    if head == "policy":
        settings |= {"model": ModelConfig(policy), "entropy": True, "teacher": teacher, "divergence": DIVERGENCE}
    else:
        settings |= {"model": ModelConfig(judge), "head": head}
    return create_trainer(backend, TrainerConfig(**settings))


def model_directories(directory: Path) -> tuple[Path, Path, Path]:
    """Writes a policy, a critic or reward model (the policy with a random `score` in place of its head), and a teacher."""
    policy, judge, teacher = (directory / name for name in ("policy", "judge", "teacher"))
    write_model(policy)
    write_model(teacher, seed=1)
    tensors = dict(model_dir.read_tensors(policy))
    width = tensors.pop("lm_head.weight").shape[1]
    tensors["score.weight"] = np.random.default_rng(0).normal(0, 0.1, (1, width)).astype(np.float32)
    model_dir.write_model(judge, policy, tensors.items(), head="value")
    return policy, judge, teacher


def measure(
    backend: str, directories: Sequence[Path], packings: Sequence[tuple[int, int]] = PACKINGS, devices: int = 1
) -> dict[str, list[tuple[float, float]]]:
    """Value and gradient norm of each loss in each packing. Packings also differ in the order of sequences and rows."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ALL}
    for head, names in LOSSES.items():
        for count, length in packings:
            at_once = TOKENS // length // count // devices
            trainer = make_trainer(backend, directories, head, micro_batch_rows=at_once, optimizer=STILL)
            for name in names:
                row = trainer.update(batch_of(head, name, count - 1, length), chosen(head))
                found[name].append((row["loss"], row["grad_norm"]))
    return found


def measure_on_four_devices(
    directories: Sequence[Path], packings: Sequence[tuple[int, int]] = PACKINGS
) -> dict[str, list[tuple[float, float]]]:
    """The result of `measure` in a process whose JAX has four devices and the same compiler settings."""
    import jax

    compiled = {"JAX_DISABLE_MOST_OPTIMIZATIONS": str(int(jax.config.values["jax_disable_most_optimizations"]))}
    said = python_with(4, "-m", "tests.packing_invariance", *map(str, directories), json.dumps(packings), **compiled)
    devices, found = json.loads(said.splitlines()[-1])
    assert devices == 4
    return {name: [(loss, norm) for loss, norm in pairs] for name, pairs in found.items()}


def deviations(found: Sequence[tuple[float, float]], expected: tuple[float, float]) -> tuple[float, float]:
    """The largest relative deviations of the loss and of the gradient norm."""
    numbers = np.array(found)
    assert np.isfinite(numbers).all()
    assert expected[1] > 0
    loss, norm = np.abs(numbers / np.array(expected) - 1).max(0)
    return float(loss), float(norm)


if __name__ == "__main__":
    import jax

    *directories, packings = sys.argv[1:]
    devices = jax.device_count()
    print(json.dumps([devices, measure("jax", [*map(Path, directories)], json.loads(packings), devices)]))
