"""The torch trainer's entropy, values and losses over pairs: against transformers, formulas by hand and other layouts."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from areal_x.algorithms import losses, preferences
from areal_x.algorithms.weighting import pair_mean, sequence_mean
from areal_x.errors import UserError
from areal_x.hf import model_dir
from areal_x.protocols.trainer_config import OptimizerConfig
from areal_x.types import Batch
from tests.torch.test_trainer import SMALL, VOCABULARY, all_weights, batch_of, save_model, sequences, trainer_of

FAMILIES = ("qwen3", "qwen2", "llama", "phi", "mistral")
# Rows of pairs: the lengths of each row's segments, chosen and rejected in turn.
PAIRS = [[6, 4, 3, 8], [9, 5], [2, 7, 5, 5], [4, 3, 3, 6]]


def save_classifier(directory, kind, labels=1):
    torch.manual_seed(1)
    config = AutoConfig.for_model(kind, **SMALL, num_labels=labels)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def policies(tmp_path_factory):
    root = tmp_path_factory.mktemp("policies")
    return {kind: save_model(root / kind, kind, tie_word_embeddings=kind == "qwen2") for kind in FAMILIES}


@pytest.fixture(scope="module")
def classifiers(tmp_path_factory):
    root = tmp_path_factory.mktemp("classifiers")
    return {kind: save_classifier(root / kind, kind) for kind in FAMILIES}


def batch_of_pairs(seed=0):
    """Packed rows of whole pairs, and where each segment lies: (row, start, length). The first of its tokens is the prompt."""
    rng = np.random.default_rng(seed)
    shape = len(PAIRS), max(map(sum, PAIRS)) + 1
    tokens = rng.integers(0, VOCABULARY, shape).astype(np.int32)
    ids, positions = (np.zeros(shape, np.int32) for _ in range(2))
    mask, where = np.zeros(shape, bool), []
    for row, lengths in enumerate(PAIRS):
        start = 0
        for i, length in enumerate(lengths):
            here = row, slice(start, start + length)
            ids[here], positions[here], mask[here] = i + 1, np.arange(length), np.arange(length) > 0
            where.append((row, start, length))
            start += length
    old, reference = (rng.normal(-3.5, 0.3, shape).astype(np.float32) for _ in range(2))
    weights = np.asarray(pair_mean(mask, ids), np.float32)
    return Batch(tokens, ids, positions, mask, proximal_logp=old, reference_logp=reference, weights=weights), where


def captured(trainer, batch, loss):
    """The batch-wide policy that the loss was given in an update with batches of any size, and the update's result."""
    seen = []

    def watching(policy, rows):
        seen.append((policy, rows))
        return loss(policy, rows)

    result = trainer.update(batch, watching)
    return seen, result


def nothing(policy, batch):
    """A loss that asks for nothing."""
    return torch.zeros(batch.tokens.shape), {}


def logits_of(directory, tokens):
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        return model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0].numpy().astype(np.float64)


def log_softmax(x):
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def score_after_each(model, tokens):
    """transformers' own score of each beginning of a sequence."""
    tokens = torch.from_numpy(tokens.astype(np.int64))[None]
    with torch.no_grad():
        return np.array([float(model(tokens[:, : t + 1]).logits) for t in range(tokens.shape[1])])


def classifier(directory):
    return AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32, num_labels=1).eval()


@pytest.mark.parametrize("rows_at_once", [1, 8])
def test_the_entropy_is_that_of_transformers_logits_where_a_token_is_trained_on(policies, rows_at_once):
    batch, packed = batch_of(sequences())
    trainer = trainer_of(policies["qwen3"], entropy=True, temperature=0.6, head_chunk=5, micro_batch_rows=rows_at_once)
    seen, _ = captured(trainer, batch, nothing)
    found = np.concatenate([policy.entropy.detach().numpy() for policy, _ in seen])
    assert found.dtype == np.float32
    assert (found[~batch.mask] == 0).all()
    for trajectory, ours in zip(sequences(), packed.gather(found), strict=True):
        logp = log_softmax(logits_of(policies["qwen3"], trajectory.tokens)[:-1] / 0.6)
        expected = np.where(trajectory.mask[1:], -(np.exp(logp) * logp).sum(-1), 0)
        np.testing.assert_allclose(ours[1:], expected, atol=1e-5)


def test_the_gradient_of_an_entropy_bonus_is_that_of_plain_autograd(policies):
    batch, packed = batch_of(sequences())
    result = trainer_of(policies["qwen2"], entropy=True, micro_batch_rows=1, head_chunk=4).update(
        batch, losses.combine(losses.sft, partial(losses.entropy_bonus, coefficient=0.5))
    )
    model = AutoModelForCausalLM.from_pretrained(policies["qwen2"], dtype=torch.float32).eval()
    total = 0.0
    for trajectory, weight in zip(sequences(), packed.gather(batch.weights), strict=True):
        tokens = torch.from_numpy(trajectory.tokens.astype(np.int64))
        of_all = model(tokens[None]).logits[0].log_softmax(-1)[:-1]
        logp, entropy = of_all.gather(1, tokens[1:, None])[:, 0], -(of_all.exp() * of_all).sum(-1)
        total = total + (torch.from_numpy(weight[1:] * trajectory.mask[1:]) * (-logp - 0.5 * entropy)).sum()
    total.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert result["loss"] == pytest.approx(total.item(), abs=1e-5)
    assert result["grad_norm"] == pytest.approx(float(norm), rel=1e-5)


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_critics_value_of_a_token_is_the_score_of_what_came_before_it(classifiers, kind):
    batch, packed = batch_of(sequences())
    values = trainer_of(classifiers[kind], head="value", micro_batch_rows=1).values(batch)
    assert values.dtype == np.float32
    assert (values[batch.segment_ids == 0] == 0).all()
    model = classifier(classifiers[kind])
    for trajectory, ours in zip(sequences(), packed.gather(values), strict=True):
        scores = score_after_each(model, trajectory.tokens)
        assert np.abs(scores).max() > 1e-3
        np.testing.assert_allclose(ours, [0, *scores[:-1]], atol=1e-5)


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_reward_models_value_of_a_token_is_the_score_up_to_and_with_it(classifiers, kind):
    batch, packed = batch_of(sequences())
    values = trainer_of(classifiers[kind], head="reward", micro_batch_rows=1).values(batch)
    assert (values[batch.segment_ids == 0] == 0).all()
    model = classifier(classifiers[kind])
    for trajectory, ours in zip(sequences(), packed.gather(values), strict=True):
        np.testing.assert_allclose(ours, score_after_each(model, trajectory.tokens), atol=1e-5)


@pytest.mark.parametrize("head", ["value", "reward"])
@pytest.mark.parametrize("rows_at_once", [1, 8])
def test_a_loss_is_given_the_values_of_masked_tokens_and_nothing_else(classifiers, head, rows_at_once):
    batch, _ = batch_of(sequences())
    trainer = trainer_of(classifiers["qwen3"], head=head, micro_batch_rows=rows_at_once)
    expected = np.where(batch.mask, trainer.values(batch), 0)
    seen, _ = captured(trainer, batch, nothing)
    assert all(policy.logp is None and policy.entropy is None for policy, _ in seen)
    np.testing.assert_allclose(np.concatenate([p.values.detach().numpy() for p, _ in seen]), expected, atol=1e-6)


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_language_model_becomes_a_critic_whose_score_is_zero(policies, kind):
    trainer = trainer_of(policies[kind], head="value")
    weights, before = all_weights(trainer), all_weights(trainer_of(policies[kind]))
    np.testing.assert_array_equal(weights.pop("score.weight"), np.zeros((1, SMALL["hidden_size"]), np.float32))
    kept = {name: x for name, x in before.items() if not name.startswith("lm_head.")}
    assert weights.keys() == kept.keys()
    for name, x in weights.items():
        np.testing.assert_array_equal(x, kept[name])
    assert not trainer.values(batch_of(sequences())[0]).any()


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_saved_critic_is_a_sequence_classifier_of_transformers(policies, kind, tmp_path):
    batch, packed = batch_of(sequences())
    trainer = trainer_of(policies[kind], head="reward")
    for _ in range(2):  # at first only the score has a gradient
        trainer.update(batch.replace(returns=batch.advantages, old_values=batch.advantages), losses.value_clip)
    trainer.save(tmp_path)
    model, info = AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.config.num_labels == 1
    for trajectory, ours in zip(sequences(), packed.gather(trainer.values(batch)), strict=True):
        np.testing.assert_allclose(ours, score_after_each(model.eval(), trajectory.tokens), atol=1e-6)


def test_a_directory_that_does_not_fit_the_head_is_refused(policies, classifiers, tmp_path):
    with pytest.raises(UserError, match="is a Qwen3ForSequenceClassification"):
        trainer_of(classifiers["qwen3"])
    with pytest.raises(UserError, match="3 labels"):
        trainer_of(save_classifier(tmp_path / "labels", "qwen3", labels=3), head="reward")
    tensors = dict(model_dir.read_tensors(policies["llama"]))
    tensors["extra.weight"] = tensors.pop("model.norm.weight")
    model_dir.write_model(tmp_path / "cut", policies["llama"], tensors.items())
    with pytest.raises(UserError, match=r"missing: model\.norm\.weight; left over: extra\.weight\)"):
        trainer_of(tmp_path / "cut", head="value")


def steps(directory, batch, loss, rows_at_once, count=1, **changes):
    trainer = trainer_of(directory, micro_batch_rows=rows_at_once, **changes)
    return [trainer.update(batch, loss) for _ in range(count)], all_weights(trainer)


@pytest.mark.parametrize(("head", "loss"), [("value", losses.value_clip), ("reward", preferences.reward_model_loss)])
def test_a_few_updates_lower_the_loss_of_a_critic_and_of_a_reward_model(policies, head, loss):
    batch, _ = batch_of_pairs()
    returns = np.where(batch.mask, np.sin(batch.tokens), 0).astype(np.float32)
    batch = batch.replace(returns=returns, old_values=returns)
    optimizer = OptimizerConfig(learning_rate=3e-3, weight_decay=0.0)
    results, _ = steps(policies["qwen3"], batch, loss, 8, 12, head=head, optimizer=optimizer)
    assert results[-1]["loss"] < 0.7 * results[0]["loss"]


@pytest.mark.parametrize("rows_at_once", [1, 2, 3])
@pytest.mark.parametrize(
    ("head", "loss"),
    [
        ("value", losses.value_clip),
        ("reward", preferences.reward_model_loss),
        ("policy", preferences.dpo_loss),
        ("policy", losses.gspo),
    ],
)
def test_micro_batches_do_not_change_a_step_of_any_head(policies, classifiers, head, loss, rows_at_once):
    batch, _ = batch_of_pairs()
    values = np.random.default_rng(1).normal(size=batch.shape).astype(np.float32)
    batch = batch.replace(advantages=values, returns=values, old_values=values / 2)
    directory = (policies if head == "policy" else classifiers)["qwen3"]
    (expected,), expected_weights = steps(directory, batch, loss, 8, head=head)
    (found,), found_weights = steps(directory, batch, loss, rows_at_once, head=head)
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
    for name, x in found_weights.items():
        np.testing.assert_allclose(x, expected_weights[name], atol=1e-6)


@pytest.mark.parametrize("rows_at_once", [1, 2, 3, 8])
def test_a_reward_models_loss_is_that_of_each_pairs_two_scores(classifiers, rows_at_once):
    batch, where = batch_of_pairs()
    (result,), _ = steps(classifiers["llama"], batch, preferences.reward_model_loss, rows_at_once, head="reward")
    model = classifier(classifiers["llama"])
    scores = [score_after_each(model, batch.tokens[row, start : start + n])[-1] for row, start, n in where]
    margins = np.array(scores[::2]) - np.array(scores[1::2])
    assert result["loss"] == pytest.approx(np.log1p(np.exp(-margins)).mean(), abs=1e-6)


def segment_logps(directory, batch, where):
    """Yields each segment's log-probabilities, without the first token's, from transformers' logits."""
    for row, start, n in where:
        tokens = batch.tokens[row, start : start + n]
        logp = log_softmax(logits_of(directory, tokens)[:-1])
        yield row, slice(start + 1, start + n), logp[np.arange(n - 1), tokens[1:]]


@pytest.mark.parametrize("rows_at_once", [1, 2, 3, 8])
def test_a_dpo_loss_is_that_of_each_pairs_two_answers(policies, rows_at_once):
    batch, where = batch_of_pairs()
    (result,), _ = steps(policies["mistral"], batch, preferences.dpo_loss, rows_at_once)
    gains = [(logp - batch.reference_logp[row, at]).sum() for row, at, logp in segment_logps(policies["mistral"], batch, where)]
    margins = 0.1 * (np.array(gains[::2]) - np.array(gains[1::2]))
    assert np.abs(margins).max() > 0.1
    assert result["loss"] == pytest.approx(np.log1p(np.exp(-margins)).mean(), abs=1e-6)


@pytest.mark.parametrize("rows_at_once", [1, 2, 3, 8])
def test_a_sequences_ratio_is_that_of_the_sequence_alone(policies, rows_at_once):
    batch, where = batch_of_pairs()
    weights = np.asarray(sequence_mean(batch.mask, batch.segment_ids), np.float32)
    batch = batch.replace(advantages=np.ones_like(weights), weights=weights)
    loss = partial(losses.gspo, clip_low=10, clip_high=10)
    (result,), _ = steps(policies["qwen3"], batch, loss, rows_at_once)
    logps = segment_logps(policies["qwen3"], batch, where)
    ratios = [np.exp((logp - batch.proximal_logp[row, at]).mean()) for row, at, logp in logps]
    assert result["loss"] == pytest.approx(-np.mean(ratios), rel=1e-5)


def test_a_loss_sees_the_packed_rows_themselves(policies):
    batch, _ = batch_of_pairs()
    seen, _ = captured(trainer_of(policies["qwen3"], micro_batch_rows=3), batch, preferences.dpo_loss)
    assert [len(rows.tokens) for _, rows in seen] == [2, 2]
    for name in ("tokens", "segment_ids", "positions", "mask", "reference_logp", "weights"):
        found = np.concatenate([getattr(rows, name).numpy() for _, rows in seen])
        np.testing.assert_array_equal(found, getattr(batch, name))


def test_rows_that_hold_no_sequence_change_nothing(policies):
    batch, _ = batch_of_pairs()
    wider = batch.map(lambda x: np.concatenate([np.zeros_like(x[:1]), x, np.zeros_like(x[:2])]))
    (expected,), _ = steps(policies["qwen3"], batch, preferences.dpo_loss, 1)
    (found,), _ = steps(policies["qwen3"], wider, preferences.dpo_loss, 1)
    assert found == expected
    empty, trainer = batch.map(np.zeros_like), trainer_of(policies["qwen3"])
    assert not trainer.logprobs(empty).any()
    assert trainer.update(empty, preferences.dpo_loss)["loss"] == 0
