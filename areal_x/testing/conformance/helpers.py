"""Batches, losses and comparisons of the suite."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from array_api_compat import array_namespace

from areal_x.batching.packing import Packed, pack
from areal_x.hf import model_dir
from areal_x.protocols.backends import create_trainer
from areal_x.protocols.engine import SamplingParams
from areal_x.protocols.sampler import Sampler, SlotRequest
from areal_x.protocols.trainer import Trainer
from areal_x.protocols.trainer_config import ModelConfig, OptimizerConfig, TrainerConfig
from areal_x.types import Batch, Kept, Policy, Trajectory

STILL = OptimizerConfig(learning_rate=1e-30, weight_decay=0.0)
LENGTHS = (12, 7, 20, 15, 2, 18, 9, 1, 11, 16, 13, 6)
ROW = 32
TOLERANCE = 1e-4


def make_trainer(backend: str, directory: Path, **changes: Any) -> Trainer:
    """Returns a trainer in fp32 whose head computes logits in chunks."""
    defaults: dict[str, Any] = {"micro_batch_rows": 2, "head_chunk": 32, "precision": "fp32"}
    defaults["model"] = ModelConfig(path=str(directory))
    return create_trainer(backend, TrainerConfig(**{**defaults, **changes}))


def write_scorer(directory: Path, source: Path) -> Path:
    """Writes a sequence classifier with one label: the model of `source` with a random score."""
    tensors = dict(model_dir.read_tensors(source))
    width = tensors.pop("lm_head.weight").shape[1]
    score = np.random.default_rng(0).normal(0, 0.1, (1, width)).astype(np.float32)
    tensors["score.weight"] = score
    model_dir.write_model(directory, source, tensors.items(), head="value")
    return directory


def trajectories(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> list[Trajectory]:
    """Returns random sequences with prompts of at most three tokens."""
    rng = np.random.default_rng(seed)
    made = []
    for length in lengths:
        prompt = min(3, length - 1) if length > 1 else 1
        answer = length - prompt
        tokens = rng.integers(2, 40, length).astype(np.int32)
        logp = rng.normal(-4, 0.5, answer).astype(np.float32)
        made.append(
            Trajectory.from_completion(
                tokens[:prompt], tokens[prompt:], logp, np.zeros(answer, np.int32)
            )
        )
    return made


def packed_batch(
    row_length: int = ROW, rows_multiple: int = 1, order: list[int] | None = None
) -> tuple[Any, Packed]:
    """Returns a batch with an advantage for each sequence and a random weight for each token, and
    how it is packed. order: of the sequences; their advantages and weights go with them."""
    made, rng = trajectories(), np.random.default_rng(1)
    advantages = rng.normal(0.5, 1.0, len(made))
    weights = [rng.uniform(0.01, 0.1, len(t)).astype(np.float32) for t in made]
    order = list(range(len(made))) if order is None else order
    packed = pack([made[i] for i in order], row_length, rows_multiple)
    batch = packed.batch
    return batch.replace(
        proximal_logp=batch.behavior_logp,
        advantages=packed.spread(advantages[order]),
        weights=packed.spread_tokens([weights[i] for i in order]) * batch.mask,
    ), packed


def policy_gradient(policy: Policy, batch: Batch) -> tuple[Any, dict[str, Any]]:
    """REINFORCE, with metrics that are wrong if a trainer reduces them wrongly: "one" is 1 for each
    token, "garbage" is not finite behind the mask, and "largest_token" is reduced by max."""
    xp = array_namespace(policy.logp)
    zeros = xp.zeros_like(policy.logp)
    advantages = xp.where(batch.mask, batch.advantages, zeros)
    terms = -advantages * policy.logp
    return terms, {
        "one": zeros + 1,
        "garbage": zeros + batch.advantages / batch.mask,
        "largest_token": xp.astype(batch.tokens, zeros.dtype),
    }


def squared_error(policy: Policy, batch: Batch) -> tuple[Any, dict[str, Any]]:
    """The squared error of values, a loss for the heads "value" and "reward"."""
    xp = array_namespace(policy.values)
    error = policy.values - xp.where(batch.mask, batch.returns, xp.zeros_like(policy.values))
    return xp.where(batch.mask, error**2, xp.zeros_like(error)), {}


def weights_of(trainer: Trainer) -> dict[str, np.ndarray]:
    return {name: np.array(x, np.float32) for name, x in trainer.weights()}


def assert_equal_weights(one: Trainer, other: Trainer) -> None:
    theirs = weights_of(other)
    for name, x in weights_of(one).items():
        np.testing.assert_array_equal(x, theirs[name], err_msg=name)


def slot_request(
    slot: int, prompt: int, most: int = 20, generated: int = 0, seed: int = 0, **sampling: Any
) -> SlotRequest:
    """Returns a request for a random prompt of so many tokens, the same for the same number."""
    tokens = np.random.default_rng(prompt).integers(2, 40, prompt).astype(np.int32)
    params = SamplingParams(max_tokens=most, **sampling)
    return SlotRequest(slot, tokens, generated, params, seed)


def sample_to_end(
    sampler: Sampler, requests: list[SlotRequest], steps: int = 7
) -> dict[int, tuple[list[int], list[float]]]:
    """Returns tokens and log-probabilities of each slot once all have finished."""
    return {
        slot: (tokens, logprobs)
        for slot, (tokens, logprobs, _) in sample_with_kept(sampler, requests, steps).items()
    }


def sample_with_kept(
    sampler: Sampler, requests: list[SlotRequest], steps: int = 7
) -> dict[int, tuple[list[int], list[float], Kept | None]]:
    """Returns the same, and what was kept at each token (None if nothing was reported)."""
    sampler.fill(requests)
    found: dict[int, tuple[list[int], list[float], list[Kept]]] = {
        r.slot: ([], [], []) for r in requests
    }
    live = set(found)
    while live:
        decoded = sampler.decode(steps, sampler.slots)
        for slot, (tokens, logprobs, kept) in found.items():
            count = decoded.counts[slot]
            tokens.extend(decoded.tokens[slot, :count].tolist())
            logprobs.extend(decoded.logprobs[slot, :count].tolist())
            if count and slot in decoded.kept:
                kept.append(decoded.kept[slot])
            if decoded.finished[slot]:
                live.remove(slot)
    return {
        slot: (tokens, logprobs, Kept.joined(kept) if kept else None)
        for slot, (tokens, logprobs, kept) in found.items()
    }


def each(packed: Packed, x: np.ndarray) -> Iterator[tuple[Trajectory, np.ndarray]]:
    """Yields each sequence with what a packed array holds of it."""
    yield from zip(trajectories(), packed.gather(x), strict=True)
