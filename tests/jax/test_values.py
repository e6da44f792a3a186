"""Critics and reward models: what they say of each token, how they learn, and what they are on disk; and the entropy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_x.algorithms import losses, preferences
from areal_x.algorithms.weighting import sequence_mean
from areal_x.batching.packing import Packed, pack
from areal_x.errors import UserError
from areal_x.protocols.trainer_config import ModelConfig, OptimizerConfig, TrainerConfig
from areal_x.types import Batch
from areal_x_jax.trainer import Trainer
from tests.models import MODELS, trajectories
from tests.thorough import further

MadeModel = Callable[[str], Path]
LENGTHS = (12, 7, 20, 15, 5, 18, 9, 20, 1, 16, 13, 6)
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, weight_decay=0.1, clip_norm=0.5, eps=1e-4)
STILL = OptimizerConfig(learning_rate=1e-30)


def make_trainer(directory: Path, **changes: Any) -> Trainer:
    defaults: dict[str, Any] = {"optimizer": OPTIMIZER, "micro_batch_rows": 2, "head_chunk": 32}
    return Trainer(TrainerConfig(**{**defaults, "model": ModelConfig(path=str(directory)), **changes}))


@pytest.fixture(scope="module")
def judge_dir_of(model_dir_of: MadeModel, tmp_path_factory: pytest.TempPathFactory) -> MadeModel:
    """The directory of a random sequence classifier with one label as transformers saves it."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        import torch
        from transformers import AutoConfig, AutoModelForSequenceClassification

        if name not in made:
            torch.manual_seed(len(name))
            config = AutoConfig.for_model(**MODELS[name], num_labels=1, pad_token_id=49)
            model = AutoModelForSequenceClassification.from_config(config)
            for parameter in model.parameters():
                torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.2)
            made[name] = tmp_path_factory.mktemp(name)
            model.save_pretrained(made[name])
        return made[name]

    return make


def scores_of_transformers(directory: Path, sequences: list[np.ndarray]) -> list[np.ndarray]:
    """Returns the classifier's score of each sequence after each of its tokens."""
    import torch
    from transformers import AutoModelForSequenceClassification

    torch.set_num_threads(1)
    model, found = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
    assert not any(found.values())
    with torch.no_grad():
        return [
            np.array([model(torch.tensor(s[None, : t + 1]).long()).logits.item() for t in range(len(s))]) for s in sequences
        ]


def sequences() -> list[np.ndarray]:
    """Without the last token of the vocabulary, which the classifiers take for padding."""
    return [t.tokens % 49 for t in trajectories(*LENGTHS)]


def packed_sequences() -> Packed:
    packed = pack(trajectories(*LENGTHS), 32)
    batch = packed.batch.replace(tokens=packed.spread_tokens([s.astype(np.float32) for s in sequences()]).astype(np.int32))
    return replace(packed, batch=batch)


def critic_batch() -> Batch:
    packed = packed_sequences()
    rng, batch = np.random.default_rng(0), packed.batch
    returns = packed.spread(rng.normal(size=len(LENGTHS)))
    weights = np.asarray(sequence_mean(batch.mask, batch.segment_ids), np.float32)
    return batch.replace(returns=returns, old_values=rng.normal(0, 0.1, batch.shape).astype(np.float32), weights=weights)


def preference_batch() -> Batch:
    """Pairs of which the chosen half ends with another token than the rejected."""
    rng, pairs = np.random.default_rng(0), []
    for i, t in enumerate(trajectories(*rng.integers(6, 15, 16))):
        t.tokens[-1] = 7 if i % 2 == 0 else 8
        pairs.append(t)
    batch = pack(pairs, 32, together=2).batch
    return batch.replace(weights=np.asarray(sequence_mean(batch.mask, batch.segment_ids), np.float32))


VALUE_CLIP = partial(losses.value_clip, clip=0.2)
LEARNING = {"value": (critic_batch, VALUE_CLIP), "reward": (preference_batch, preferences.reward_model_loss)}


@pytest.mark.parametrize("name", MODELS)
def test_a_reward_is_what_transformers_classifier_says_of_the_sequence_up_to_the_token(
    name: str, judge_dir_of: MadeModel
) -> None:
    packed = packed_sequences()
    ours = make_trainer(judge_dir_of(name), head="reward").values(packed.batch)
    for value, expected in zip(packed.gather(ours), scores_of_transformers(judge_dir_of(name), sequences()), strict=True):
        np.testing.assert_allclose(value, expected, atol=1e-4)
    assert ours.shape == packed.batch.shape
    assert ours.dtype == np.float32
    assert not ours[packed.batch.segment_ids == 0].any()


def test_a_value_is_what_is_said_of_the_tokens_before_it(judge_dir_of: MadeModel) -> None:
    packed = packed_sequences()
    ours = make_trainer(judge_dir_of("qwen3"), head="value").values(packed.batch)
    for value, scores in zip(packed.gather(ours), scores_of_transformers(judge_dir_of("qwen3"), sequences()), strict=True):
        np.testing.assert_allclose(value, [0, *scores[:-1]], atol=1e-4)
    assert not ours[packed.batch.segment_ids == 0].any()


@pytest.mark.parametrize("head", ["value", "reward"])
def test_packed_rows_give_what_each_sequence_alone_gives(head: str, judge_dir_of: MadeModel) -> None:
    trainer = make_trainer(judge_dir_of("qwen2"), head=head)
    packed = packed_sequences()
    for values, s in zip(packed.gather(trainer.values(packed.batch)), sequences(), strict=True):
        row = np.zeros((1, 20), np.int32)
        row[0, : len(s)] = s
        here = np.arange(20)[None] < len(s)
        batch = Batch(tokens=row, segment_ids=here.astype(np.int32), positions=np.where(here, np.arange(20), 0), mask=here)
        np.testing.assert_allclose(values, trainer.values(batch)[0, : len(s)], atol=1e-5)


@pytest.mark.parametrize("head", ["value", "reward"])
def test_updates_lower_the_loss(head: str, model_dir_of: MadeModel) -> None:
    make_batch, loss = LEARNING[head]
    trainer, batch = make_trainer(model_dir_of("qwen3"), head=head), make_batch()
    learned = [trainer.update(batch, loss)["loss"] for _ in range(8)]
    assert trainer.version == 8
    assert learned[-1] < 0.7 * learned[0]
    if head == "reward":
        assert learned[0] == pytest.approx(np.log(2))  # of two answers about which the model says nothing


class TorchCritic:
    """The same training in torch: the critic's error of sequences one by one, clipping, AdamW with decay on matrices."""

    def __init__(self, directory: Path) -> None:
        import torch
        from transformers import AutoModelForSequenceClassification

        self.model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32)
        named = list(self.model.named_parameters())
        decayed = [p for _, p in named if p.ndim >= 2], [p for _, p in named if p.ndim < 2]
        groups = [{"params": p, "weight_decay": decay} for p, decay in zip(decayed, (0.1, 0.0), strict=True)]
        rates = {"lr": OPTIMIZER.learning_rate, "betas": (OPTIMIZER.beta1, OPTIMIZER.beta2), "eps": OPTIMIZER.eps}
        self.optimizer = torch.optim.AdamW(groups, **rates)

    def step(self, batch: Batch) -> tuple[float, float]:
        import torch

        total = torch.zeros(())
        for row in range(batch.shape[0]):
            for segment in range(1, batch.segment_ids[row].max() + 1):
                here = batch.segment_ids[row] == segment
                hidden = self.model.model(torch.tensor(batch.tokens[row][here][None]).long()).last_hidden_state[0]
                values = torch.cat([torch.zeros(1), self.model.score(hidden)[:-1, 0]])
                returns, old = torch.tensor(batch.returns[row][here]), torch.tensor(batch.old_values[row][here])
                clipped = old + torch.clamp(values - old, -0.2, 0.2)
                terms = torch.maximum((values - returns) ** 2, (clipped - returns) ** 2) / 2
                total = total + (terms * torch.tensor(batch.weights[row][here]))[torch.tensor(batch.mask[row][here])].sum()
        self.optimizer.zero_grad()
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), OPTIMIZER.clip_norm)
        self.optimizer.step()
        return float(total.detach()), float(norm)


def test_a_critics_updates_are_those_of_torch(judge_dir_of: MadeModel) -> None:
    trainer, theirs = make_trainer(judge_dir_of("qwen3"), head="value"), TorchCritic(judge_dir_of("qwen3"))
    batch = critic_batch()
    for _ in range(3):
        learned, (loss, norm) = trainer.update(batch, VALUE_CLIP), theirs.step(batch)
        assert learned["loss"] == pytest.approx(loss, rel=1e-5)
        assert learned["grad_norm"] == pytest.approx(norm, rel=1e-4)
    ours = dict(trainer.weights())
    for tensor, parameter in theirs.model.named_parameters():
        np.testing.assert_allclose(ours[tensor], parameter.detach().numpy(), atol=2e-5, err_msg=tensor)


@pytest.mark.parametrize("name", ["qwen3", "qwen3-tied", *further(*list(MODELS)[2:])])
def test_what_was_saved_gives_the_same_scores_in_transformers_and_here(
    name: str, model_dir_of: MadeModel, tmp_path: Path
) -> None:
    trainer, packed = make_trainer(model_dir_of(name), head="reward"), packed_sequences()
    for _ in range(2):
        trainer.update(critic_batch(), VALUE_CLIP)
    trainer.save(tmp_path)
    ours = trainer.values(packed.batch)
    for value, expected in zip(packed.gather(ours), scores_of_transformers(tmp_path, sequences()), strict=True):
        assert np.abs(expected).max() > 1e-2
        np.testing.assert_allclose(value, expected, atol=1e-4)
    np.testing.assert_array_equal(make_trainer(tmp_path, head="reward").values(packed.batch), ours)


def test_a_policy_and_a_judge_do_not_take_each_others_states(model_dir_of: MadeModel, tmp_path: Path) -> None:
    policy, critic = make_trainer(model_dir_of("qwen3")), make_trainer(model_dir_of("qwen3"), head="value")
    policy.save(tmp_path / "policy")
    critic.save(tmp_path / "critic")
    with pytest.raises(UserError, match=r"is of another model: its exp_avg\.lm_head\.weight has no place"):
        critic.restore(tmp_path / "policy")
    with pytest.raises(UserError, match=r"is of another model: its exp_avg\.score\.weight has no place"):
        policy.restore(tmp_path / "critic")
    with pytest.raises(UserError, match="a policy needs a causal language model"):
        make_trainer(tmp_path / "critic")


def test_in_bf16_values_are_near_those_in_fp32(judge_dir_of: MadeModel) -> None:
    batch = critic_batch()
    low, high = (make_trainer(judge_dir_of("qwen3"), head="value", precision=p).values(batch) for p in ("bf16", "fp32"))
    assert 1e-4 < np.abs(low - high).max() < 0.2
    assert low.dtype == np.float32


def test_a_bonus_raises_the_entropy(model_dir_of: MadeModel) -> None:
    optimizer = OptimizerConfig(learning_rate=1e-3)
    trainer = make_trainer(model_dir_of("qwen3"), entropy=True, optimizer=optimizer)
    bonus = partial(losses.entropy_bonus, coefficient=1.0)
    entropies = [trainer.update(critic_batch(), bonus)["entropy"] for _ in range(4)]
    assert entropies == sorted(entropies)
    assert entropies[-1] > entropies[0] + 0.01
