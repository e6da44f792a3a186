"""Recorded experts, and the log-probabilities that transformers computes when routed to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from areal_x.batching.packing import Packed, pack
from areal_x.types import Batch, Trajectory
from tests.models import SIZES, log_softmax, reference_model, trajectories

# Recordings that do not fit a model of two layers that choose two of four experts: their shape per token, their largest number,
# and words of the error.
REFUSED = [
    ((3, 2), 3, "another model"),
    ((2, 1), 3, "another model"),
    ((2, 2), 4, "has 4 experts"),
    (None, 0, "these have none"),
]


# Of layers behind a dense one, with routers of sigmoids, biases and groups.
SIGMOIDS = {**SIZES, "model_type": "glm4_moe", "head_dim": 8, "moe_intermediate_size": 24, "n_routed_experts": 4}
SIGMOIDS |= {"num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.7}


def sigmoid_imbalance(directory: Path, made: Sequence[Trajectory]) -> float:
    """What the routers of transformers' model of SIGMOIDS choose for these sequences, as `expert_imbalance` measures it."""
    import torch

    model, seen = reference_model(directory), []  # of each sequence, scores as shares and choices
    model.model.layers[1].mlp.gate.register_forward_hook(
        lambda _, __, found: seen.append((found[0].sigmoid().detach().numpy(), found[2].numpy()))
    )
    for one in made:
        model(torch.tensor(one.tokens[None]).long())
    scores, chosen = (np.concatenate(x) for x in zip(*seen, strict=True))
    share = np.bincount(chosen.ravel(), minlength=4) / len(chosen)
    return 4 * float((share * (scores / scores.sum(-1, keepdims=True)).mean(0)).sum())


def batch_of_others(shape: tuple[int, int] | None, largest: int) -> Batch:
    """A sequence whose recorded experts are all `largest`, in this shape per token; without experts for None."""
    (one,) = trajectories(8)
    if shape is not None:
        one = replace(one, experts=np.full((8, *shape), largest, np.int16))
    return pack([one], 8).batch


def replayed_logprobs(directory: Path, tokens: np.ndarray, experts: np.ndarray) -> np.ndarray:
    """Log-probability of each token under transformers, 0 for the first, with its routers forced to choose these experts."""
    import torch

    model = reference_model(directory)

    def choose(layer: int) -> Any:
        def hook(router: Any, _: Any, routed: tuple[Any, ...]) -> tuple[Any, ...]:
            logits, _, chosen = routed
            given = torch.tensor(experts[:, layer]).long()
            chosen = torch.where(given >= 0, given, chosen)
            sigmoid = hasattr(router, "e_score_correction_bias")
            weights = (torch.sigmoid(logits) if sigmoid else torch.softmax(logits, -1)).gather(-1, chosen)
            if router.norm_topk_prob:
                weights = weights / weights.sum(-1, keepdim=True)
            return logits, weights * router.routed_scaling_factor if sigmoid else weights, chosen

        return hook

    for number, layer in enumerate(model.model.layers):
        if hasattr(layer.mlp, "gate"):  # else it is dense
            layer.mlp.gate.register_forward_hook(choose(number))
    with torch.no_grad():
        logits = model(torch.tensor(tokens[None]).long()).logits[0].numpy()
    return np.append(0, log_softmax(logits)[np.arange(len(tokens) - 1), tokens[1:]])


def assert_replays(trainer: Any, free: Any, directory: Path, made: Sequence[Trajectory], packed: Packed) -> None:
    """The trainer says of packed trajectories what transformers does with their recorded experts. free: another trainer, whose
    routers choose."""
    found = trainer.logprobs(packed.batch)
    for one, said in zip(made, packed.gather(found), strict=True):
        of_one = np.full((len(one), 2, 2), -1) if one.experts is None else one.experts
        np.testing.assert_allclose(said, replayed_logprobs(directory, one.tokens, of_one), atol=1e-4)
    assert np.abs(free.logprobs(packed.batch) - found).max() > 0.1


def recorded(length: int, seed: int, count: int = 4, layers: int = 2) -> np.ndarray:
    """Two random experts of `count` in each layer for every token but the last."""
    rng = np.random.default_rng(seed)
    drawn = rng.permuted(np.broadcast_to(np.arange(count), (length, layers, count)), axis=-1)[..., :2].astype(np.int16)
    drawn[-1] = -1
    return drawn
