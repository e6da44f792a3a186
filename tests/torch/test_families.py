"""Every family of models through the trainer: packed rows against transformers, trained, saved and read again."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

import areal_x_torch
from areal_x.algorithms import losses
from areal_x.algorithms.weighting import token_mean
from areal_x.batching.packing import pack
from areal_x.errors import UserError
from areal_x.hf import model_dir
from areal_x.hf.image_format import takes_images
from areal_x.protocols.trainer_config import ModelConfig, OptimizerConfig, TrainerConfig
from areal_x_torch import loading, model
from areal_x_torch.attention import sdpa
from areal_x_torch.flat_rows import flatten_rows
from areal_x_torch.segments import Segments
from tests.model_families import CASES, HYBRIDS
from tests.models import MODELS, MORE, SIZES, trajectories, write_config
from tests.thorough import further

LENGTHS = (23, 9, 17, 9, 2, 30)  # most are longer than the windows
CPU = torch.device("cpu")
BESIDE = (
    "model.vision_tower.",
    "model.embed_vision.",
    "vision_tower.",
    "vision_model.",
    "multi_modal_projector.",
)  # the language model of a multimodal one
FAMILIES = (
    MODELS
    | MORE
    | {
        "gemma2": {
            **SIZES,
            "model_type": "gemma2",
            "head_dim": 16,
            "sliding_window": 5,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
        # Positions are learnt: the only one here that a shift of all of a sequence's would change.
        "gpt2": {**SIZES, "model_type": "gpt2", "eos_token_id": 1, "bos_token_id": 1},
    }
)
# The first shape of each family that JAX trains too, all with gated delta rule layers, and all of Gemma 4.
SHAPES = {
    name: config for name, config in CASES.items() if name.endswith("-0") or name in HYBRIDS or name.startswith("gemma4_text")
}
FIRST = ("gpt_oss-0", "granite-0", "qwen3_next-0", "qwen3_5_text-1", "gemma4_text-4")
TRAINED = [*FAMILIES, *FIRST, *further(*(x for x in SHAPES if x not in FIRST))]
MIXTURES = ["qwen2-moe", "qwen3-moe", "qwen3-moe-tied", *further("qwen3_next-1")]


@pytest.fixture(scope="module")
def family_dir(tmp_path_factory):
    return cache(lambda name: write_config((FAMILIES | SHAPES)[name], tmp_path_factory.mktemp(name), seed=len(name)))


def trainer_of(directory, **changes):
    optimizer = OptimizerConfig(learning_rate=1e-2, eps=1e-2, weight_decay=0.1)
    return areal_x_torch.create_trainer(TrainerConfig(model=ModelConfig(str(directory)), optimizer=optimizer, **changes))


def learnable(row_length=40):
    packed = pack(trajectories(*LENGTHS), row_length)
    batch = packed.batch
    advantages = packed.spread(np.array([1.0, -1.0, 0.5, 2.0, -0.3, 0.7], np.float32))
    weights = np.asarray(token_mean(batch.mask, batch.segment_ids), np.float32)
    return batch.replace(proximal_logp=batch.behavior_logp, advantages=advantages, weights=weights)


def kind_of(directory):
    return AutoModelForImageTextToText if "vision_config" in model_dir.read_config(directory) else AutoModelForCausalLM


def plain(directory):
    """transformers' own model. Its SDPA leaves out what caps scores: the formula does not."""
    loaded = kind_of(directory).from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    loaded.get_input_embeddings().padding_idx = None  # it is a token like any other here
    return loaded


def flat_logits(of, sequences):
    """Returns logits of the sequences in one flat row, by our attention."""
    lengths = tuple(len(s) for s in sequences)
    tokens = torch.from_numpy(np.concatenate(sequences).astype(np.int64))
    positions = torch.cat([torch.arange(n) for n in lengths])
    hidden = model.hidden_states(of, model.PackedRow(tokens, positions, Segments.of(lengths, sdpa, CPU)))
    return model.head(of).logits(hidden).split(lengths)


def padded_logits(of, sequences):
    """Returns logits of the sequences in separate padded rows, with transformers' own masks."""
    longest = max(map(len, sequences))
    tokens = torch.stack([torch.from_numpy(np.pad(s, (0, longest - len(s))).astype(np.int64)) for s in sequences])
    real = torch.stack([(torch.arange(longest) < len(s)).long() for s in sequences])
    logits = of(tokens, attention_mask=real, use_cache=False).logits
    return [row[: len(s)] for row, s in zip(logits, sequences, strict=True)]


def alone_logits(of, sequences):
    return [of(torch.from_numpy(s.astype(np.int64))[None], use_cache=False).logits[0] for s in sequences]


def chosen(logits, sequences):
    """Log-probability of each sequence's tokens, 0 for its first."""
    found = []
    for rows, tokens in zip(logits, sequences, strict=True):
        after = torch.from_numpy(tokens[1:].astype(np.int64))[:, None]
        found.append(torch.cat([rows.new_zeros(1), rows[:-1].log_softmax(-1).gather(1, after)[:, 0]]))
    return found


def gradients(of):
    return {name: p.grad for name, p in of.named_parameters() if p.grad is not None}


def tolerance(name):
    """A chain of corrections to a state rounds more than attention does."""
    return 1e-4 if name in HYBRIDS else 1e-5


def loaded(directory):
    """As the trainer loads it on one device."""
    built = loading.build(directory, "policy")
    loading.materialize(built, CPU)
    loading.fill(built, directory)
    return built


@pytest.mark.parametrize("name", TRAINED)
def test_one_flat_row_gives_what_transformers_gives_for_each_sequence_alone_and_padded(family_dir, name):
    sequences = [t.tokens for t in trajectories(*LENGTHS)]
    ours, theirs = loaded(family_dir(name)), plain(family_dir(name))
    found, alone, padded = (
        chosen(how(of, sequences), sequences)
        for how, of in ((flat_logits, ours), (alone_logits, theirs), (padded_logits, theirs))
    )
    for mine, one, other in zip(found, alone, padded, strict=True):
        torch.testing.assert_close(mine, one, atol=tolerance(name), rtol=1e-5)
        torch.testing.assert_close(mine, other, atol=tolerance(name), rtol=1e-5)
    slopes = torch.randn(sum(LENGTHS), generator=torch.Generator().manual_seed(0)) / sum(LENGTHS)
    for logp in (found, alone):
        (torch.cat(logp) * slopes).sum().backward()
    mine, expected = gradients(ours), gradients(theirs)
    assert mine.keys() == expected.keys()
    for parameter, gradient in expected.items():
        # Of Gemma 4's, transformers' own fp32 is as far from its float64.
        if name in HYBRIDS or name.startswith("gemma4"):
            assert (mine[parameter] - gradient).norm() < 2e-4 * gradient.norm(), parameter
        else:
            torch.testing.assert_close(mine[parameter], gradient, atol=1e-5, rtol=1e-4, msg=parameter)


@pytest.mark.parametrize("name", TRAINED)
def test_what_is_saved_after_a_step_says_the_same_in_transformers(family_dir, tmp_path, name):
    trainer, batch = trainer_of(family_dir(name), micro_batch_rows=1), learnable()
    before = trainer.logprobs(batch)
    trainer.update(batch, losses.ppo_clip)
    trainer.save(tmp_path)
    names = [{n for n, _ in model_dir.read_tensors(directory)} for directory in (tmp_path, family_dir(name))]
    assert names[0] == names[1] == {n for n, _ in trainer.weights()}
    # Which no gradient trains.
    learnt = {n for n in names[0] if not n.endswith((".e_score_correction_bias", ".layer_scalar"))}
    if model.has_vision(trainer.model):  # what nothing goes through stays as it is
        frozen = ("vision_tower.head.",) if takes_images(trainer.model.config) else BESIDE
        beside = {n for n in names[0] if n.startswith(frozen)}
        learnt -= beside
        first, last = (dict(model_dir.read_tensors(x, beside)) for x in (family_dir(name), tmp_path))
        assert beside or (takes_images(trainer.model.config) and "gemma3" not in name)
        assert all(np.array_equal(first[n], last[n]) for n in beside)
    assert {n for n, _ in model_dir.read_moments(tmp_path)} == {
        which + n for n in learnt for which in ("exp_avg.", "exp_avg_sq.")
    }
    _, info = kind_of(tmp_path).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    said = trainer.logprobs(batch)
    assert np.abs(said - before).max() > 1e-3  # it has learnt
    sequences = [t.tokens for t in trajectories(*LENGTHS)]
    with torch.no_grad():
        theirs = chosen(alone_logits(plain(tmp_path), sequences), sequences)
    for mine, one in zip(pack(trajectories(*LENGTHS), 40).gather(said), theirs, strict=True):
        np.testing.assert_allclose(mine, one.numpy(), atol=tolerance(name), rtol=1e-5)


@pytest.mark.parametrize("name", MIXTURES)
def test_a_restored_mixture_goes_on_bit_by_bit(family_dir, tmp_path, name):
    batch, first, second = learnable(), trainer_of(family_dir(name)), trainer_of(family_dir(name))
    first.update(batch, losses.ppo_clip)
    first.save(tmp_path)
    second.restore(tmp_path)
    assert first.update(batch, losses.ppo_clip) == second.update(batch, losses.ppo_clip)
    theirs = dict(second.weights())
    for name, x in first.weights():
        np.testing.assert_array_equal(x, theirs[name])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "lfm2", "layer_types": ["conv", "full_attention"]}, "mix the sequences"),
    ],
)
def test_what_a_flat_row_would_compute_wrongly_is_refused(tmp_path, changes, reason):
    with pytest.raises(UserError, match=reason):
        loading.build(write_config({**SIZES, **changes}, tmp_path), "policy")


@pytest.mark.parametrize("budget", [1, 20, 40, 1000])
def test_flat_rows_hold_each_token_once_and_sequences_whole(budget):
    packed = pack(trajectories(*LENGTHS), 40)
    rows = flatten_rows(packed.batch.segment_ids, budget)
    places = np.concatenate([row.places for row in rows])
    assert sorted(places) == np.flatnonzero(packed.batch.segment_ids).tolist()
    for row in rows:
        np.testing.assert_array_equal(row.take(packed.batch.positions), row.positions)
    assert sorted(n for row in rows for n in row.lengths) == sorted(LENGTHS)
    assert len(rows) <= -(-sum(LENGTHS) // budget)
    assert all(row.lengths.sum() <= budget + max(LENGTHS) / 2 or len(row.lengths) == 1 for row in rows)


def test_no_more_is_scored_at_once_than_a_micro_batch_holds(family_dir, monkeypatch):
    trainer, batch, plain_states, tokens = (
        trainer_of(family_dir("qwen3"), micro_batch_rows=1),
        learnable(),
        model.decoder_states,
        [],
    )

    def counting(of, row):
        tokens.append(len(row.tokens))
        return plain_states(of, row)

    monkeypatch.setattr(model, "decoder_states", counting)
    trainer.logprobs(batch)
    assert len(tokens) > 1
    assert max(tokens) < batch.shape[1] + max(LENGTHS) / 2
    assert sum(tokens) == sum(LENGTHS)


def test_rows_without_a_sequence_have_no_flat_row():
    assert flatten_rows(np.zeros((2, 8), np.int32), 100) == []
