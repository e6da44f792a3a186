"""Gradients of random models under random settings: JAX, torch and transformers' autograd find the same."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_x.algorithms import losses
from areal_x.algorithms.weighting import sequence_mean
from areal_x.batching.packing import pack
from areal_x.protocols.backends import create_trainer
from areal_x.protocols.trainer_config import ModelConfig, OptimizerConfig, TrainerConfig
from areal_x.types import Trajectory
from tests.models import QWEN3, SIZES, reference_model, write_config
from tests.thorough import further

torch = pytest.importorskip("torch")

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 8},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1},
    "qwen3": {"head_dim": QWEN3["head_dim"]},
    "mistral": {"head_dim": 8},
    "gemma3_text": {"head_dim": 16},
}


def random_config(rng: np.random.Generator) -> dict[str, Any]:
    family, heads = str(rng.choice(list(FAMILIES))), int(rng.choice([2, 4]))
    return {
        **SIZES,
        **FAMILIES[family],
        "model_type": family,
        "num_hidden_layers": int(rng.integers(1, 4)),
        "num_attention_heads": heads,
        "num_key_value_heads": int(rng.choice([count for count in (1, 2, 4) if heads % count == 0])),
        "tie_word_embeddings": bool(rng.integers(2)),
        "rope_theta": float(10 ** rng.uniform(2, 6)),
        "rms_norm_eps": float(10 ** rng.uniform(-6, -4)),
        "sliding_window": int(rng.integers(2, 12)) if family in ("qwen2", "mistral", "gemma3_text") else None,
    }


def gradient_of_transformers(
    directory: Path, trajectories: list[Trajectory], anchors: list[np.ndarray], advantages: np.ndarray, how: dict[str, float]
) -> tuple[float, float, list[np.ndarray]]:
    """The loss as its paper has it, of each sequence alone; the norm of its gradient; and each answer's log-probabilities."""
    model, total, outputs = reference_model(directory), 0.0, []
    for trajectory, anchor, advantage in zip(trajectories, anchors, advantages, strict=True):
        logits = model(torch.tensor(trajectory.tokens[None]).long()).logits[0, :-1] / how["temperature"]
        logp = logits.log_softmax(-1).gather(1, torch.tensor(trajectory.tokens[1:, None]).long())[:, 0]
        logp, count = logp[torch.tensor(trajectory.mask[1:])], int(trajectory.mask.sum())
        ratio = (logp - torch.tensor(anchor)).exp()
        clipped = ratio.clamp(1 - how["clip_low"], 1 + how["clip_high"])
        total = total - torch.minimum(ratio * advantage, clipped * advantage).sum() / count / len(trajectories)
        outputs.append(logp.detach().numpy())
    total.backward()
    norm = torch.sqrt(sum((p.grad**2).sum() for p in model.parameters() if p.grad is not None))
    return float(total.detach()), float(norm.detach()), outputs


@pytest.mark.parametrize("seed", [0, *further(1, 2, 3, 4)])
def test_a_random_models_gradient_is_transformers_own(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    directory = write_config(random_config(rng), tmp_path, seed=seed)
    how = {"temperature": rng.uniform(0.6, 1.5), "clip_low": rng.uniform(0.05, 0.4), "clip_high": rng.uniform(0.05, 0.4)}
    trajectories = []
    for _ in range(int(rng.integers(3, 9))):
        prompt, answer = rng.integers(2, 40, rng.integers(1, 9)), rng.integers(2, 40, rng.integers(1, 14))
        trajectories.append(Trajectory.from_completion(prompt, answer, np.zeros(len(answer)), np.zeros(len(answer))))
    advantages = rng.normal(0.5, 1, len(trajectories))
    nothing = [np.zeros(int(t.mask.sum()), np.float32) for t in trajectories]
    _, _, outputs = gradient_of_transformers(directory, trajectories, nothing, advantages, how)
    anchors = [(x + rng.normal(0, 0.2, len(x))).astype(np.float32) for x in outputs]
    loss, norm, _ = gradient_of_transformers(directory, trajectories, anchors, advantages, how)

    packed = pack(trajectories, int(rng.integers(24, 64)))
    anchored = packed.spread_tokens(
        [np.concatenate([np.zeros(len(t) - len(x)), x]) for t, x in zip(trajectories, anchors, strict=True)]
    )
    batch = packed.batch
    weights = sequence_mean(batch.mask, batch.segment_ids).astype(np.float32)
    batch = batch.replace(behavior_logp=anchored, proximal_logp=anchored, advantages=packed.spread(advantages), weights=weights)
    clip = partial(losses.ppo_clip, clip_low=how["clip_low"], clip_high=how["clip_high"])
    rows = int(rng.integers(1, 4))
    for backend in ("jax", "torch"):
        pytest.importorskip(f"areal_x_{backend}")
        config = TrainerConfig(
            model=ModelConfig(str(directory)),
            optimizer=OptimizerConfig(learning_rate=1e-30),
            micro_batch_rows=rows,
            temperature=how["temperature"],
        )
        trainer = create_trainer(backend, config)
        for x, expected in zip(packed.gather(trainer.logprobs(batch)), outputs, strict=True):
            np.testing.assert_allclose(x[len(x) - len(expected) :], expected, atol=2e-4)
        row = trainer.update(batch, clip)
        assert row["loss"] == pytest.approx(loss, rel=1e-3, abs=1e-5), backend
        assert row["grad_norm"] == pytest.approx(norm, rel=1e-3), backend
