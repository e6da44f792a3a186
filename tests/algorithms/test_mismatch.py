"""The mismatch of trainer and engine by the age of a token, against numpy."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_x.algorithms.mismatch import LagMetrics, metrics_by_lag
from areal_x.batching.packing import pack
from areal_x.protocols.backends import create_trainer
from areal_x.protocols.trainer import is_max_reduced
from areal_x.protocols.trainer_config import ModelConfig, OptimizerConfig, TrainerConfig
from areal_x.types import NOT_THE_POLICY, Batch, Policy, Trajectory


def by_hand(logp: np.ndarray, batch: Batch, lags: int) -> dict[str, float]:
    found = {}
    sampled = batch.mask & (batch.versions != NOT_THE_POLICY)
    for lag in range(lags):
        d = [
            float(logp[at]) - float(batch.behavior_logp[at])
            for at in np.ndindex(batch.mask.shape)
            if sampled[at] and min(batch.ages[at], lags - 1) == lag
        ]
        if not d:
            continue
        r = np.exp(d)
        found[f"mismatch/tokens_lag{lag}"] = len(d) / batch.mask.sum()
        found[f"mismatch/kl_lag{lag}"] = np.mean(r - 1 - np.array(d))
        found[f"mismatch/largest_ratio_lag{lag}"] = np.max(np.maximum(r, 1 / r))
        found[f"mismatch/effective_share_lag{lag}"] = r.sum() ** 2 / (len(r) * (r**2).sum())
    return found


def reduced_by_lag(policy: Policy, batch: Batch, lags: int) -> dict[str, float]:
    """Reduced as a trainer does: the mean of each metric over masked tokens, or its maximum."""
    terms, metrics = LagMetrics(lags)(policy, batch)
    assert not terms.any()
    reduced = {
        name: x[batch.mask].max(initial=0) if is_max_reduced(name) else x[batch.mask].mean() for name, x in metrics.items()
    }
    return metrics_by_lag(reduced)


@given(st.integers(0, 2**32 - 1), st.integers(1, 4))
def test_each_lag_has_its_own_kl_largest_ratio_and_effective_sample_size(seed: int, lags: int) -> None:
    rng = np.random.default_rng(seed)
    shape = (3, 12)
    mask = rng.random(shape) < 0.7
    mask[0, 0] = True
    versions = np.where(rng.random(shape) < 0.2, NOT_THE_POLICY, rng.integers(0, 5, shape)).astype(np.int32)
    ages = np.where(versions == NOT_THE_POLICY, 0, 5 - versions).astype(np.int32)
    behavior = rng.normal(-2, 1, shape)
    logp = behavior + rng.normal(0, 0.5, shape)
    logp[~mask] = np.nan  # masked-out values are garbage
    ids = np.ones(shape, np.int32)
    batch = Batch(tokens=ids, segment_ids=ids, positions=ids, mask=mask, behavior_logp=behavior, versions=versions, ages=ages)
    found, expected = reduced_by_lag(Policy(logp=logp), batch, lags), by_hand(logp, batch, lags)
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert found[name] == pytest.approx(x, rel=1e-6), name


def test_without_a_difference_every_token_counts_in_full() -> None:
    ids, logp = np.ones((1, 4), np.int32), np.full((1, 4), -1.5)
    batch = Batch(tokens=ids, segment_ids=ids, positions=ids, mask=ids > 0, behavior_logp=logp, versions=ids, ages=0 * ids)
    names = ("tokens", "kl", "largest_ratio", "effective_share")
    assert reduced_by_lag(Policy(logp=logp), batch, 3) == {
        f"mismatch/{name}_lag0": x for name, x in zip(names, (1, 0, 1, 1), strict=True)
    }


def test_trainers_tell_it_of_the_whole_batch_whatever_the_micro_batches(backend: str, tiny_model_dir: Path) -> None:
    rng = np.random.default_rng(0)
    draw = [(rng.integers(2, 44, 3), rng.integers(2, 44, n)) for n in (5, 9, 2, 7, 4, 11)]
    trajectories = [Trajectory.from_completion(p, n, np.zeros(len(n)), rng.integers(0, 3, len(n))) for p, n in draw]
    batch = pack(trajectories, 16).batch
    of = partial(TrainerConfig, model=ModelConfig(str(tiny_model_dir)), optimizer=OptimizerConfig(learning_rate=1e-30))
    scorer = create_trainer(backend, of(precision="fp32"))
    logp = scorer.logprobs(batch)
    batch = batch.replace(
        behavior_logp=np.where(batch.mask, logp + rng.normal(0, 0.5, batch.shape), 0).astype(np.float32),
        ages=np.where(batch.versions >= 0, 2 - batch.versions, 0).astype(np.int32),
        weights=batch.mask.astype(np.float32),
    )
    expected = by_hand(logp, batch, 2)
    for rows in (1, 8):
        trainer = create_trainer(backend, of(precision="fp32", micro_batch_rows=rows))
        found = metrics_by_lag(trainer.update(batch, LagMetrics(2)))
        assert found.keys() == expected.keys()
        for name, x in expected.items():
            assert found[name] == pytest.approx(x, rel=2e-4), name
