"""Properties of the torch sampler alone; those of every sampler are in areal_x.testing.conformance.test_sampler."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from areal_x.protocols.backends import create_trainer
from areal_x.protocols.trainer import Trainer
from areal_x.protocols.trainer_config import ModelConfig, TrainerConfig
from areal_x.testing.conformance.helpers import sample_to_end, slot_request
from areal_x_torch import prefill
from areal_x_torch import sampler as sampling
from areal_x_torch.decode_step import NextLogits
from areal_x_torch.flat_rows import group_by_length
from areal_x_torch.sampler import Sampler
from areal_x_torch.sampling import RowSampling, sample, uniform
from tests.engines import conformance
from tests.models import DELTA, FULL, RULE

SLOTS, CONTEXT = 16, 384
# A state beside keys and values.
HYBRID = DELTA | {"head_dim": 8, "layer_types": [RULE, FULL]}


def trainer_of(directory: Path) -> Trainer:
    return create_trainer("torch", TrainerConfig(model=ModelConfig(path=str(directory))))


@pytest.fixture
def sampler(tiny_model_dir: Path) -> Sampler:
    trainer = trainer_of(tiny_model_dir)
    sampler = trainer.sampler(SLOTS, CONTEXT)
    sampler.load(trainer.snapshot())
    return sampler


@pytest.mark.parametrize("chunk, together", [(512, 8192), (16, 8192), (1, 8192), (50, 60)])
def test_the_chunks_of_a_prefill_do_not_matter(sampler: Sampler, monkeypatch, chunk, together) -> None:
    requests = [slot_request(slot, prompt, 6, seed=slot) for slot, prompt in enumerate((1, 2, 17, 50, 51, 130, 33))]
    expected = sample_to_end(sampler, requests)
    monkeypatch.setattr(prefill, "CHUNK", chunk)
    monkeypatch.setattr(sampling, "PREFILL", together)
    for slot, (tokens, logprobs) in sample_to_end(sampler, requests).items():
        assert tokens == expected[slot][0]
        np.testing.assert_allclose(logprobs, expected[slot][1], atol=1e-5)


def test_a_prompt_that_several_have_is_read_once_in_a_lane(sampler: Sampler, monkeypatch) -> None:
    read: list[int] = []

    def reading(model: Any, cache: Any, first: int, requests: Any, *more: Any) -> list[int]:
        read.extend(len(request.tokens) - 1 for request in requests)
        return prefill.prefill(model, cache, first, requests, *more)

    monkeypatch.setattr(sampling, "prefill", reading)
    sampler.lanes[0].fill([slot_request(slot, prompt, 4) for slot, prompt in enumerate((33, 20, 33, 33, 20))])
    assert sorted(read) == [19, 32]


CHUNKED = {"head_dim": 8, "attention_chunk_size": 6, "floor_scale": 4, "num_local_experts": 2, "intermediate_size_mlp": 48}
CHUNKED |= {"no_rope_layer_interval": 2, "attn_scale": 0.5}
SHARED_KEYS = {
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
SHARED_KEYS |= {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8}
SHARED_KEYS |= {"vocab_size_per_layer_input": 40}


@pytest.mark.parametrize(
    "kind, changes",
    [
        ("qwen2", {"tie_word_embeddings": True}),
        ("llama", {}),
        ("phi", {}),  # a bias in the head, LayerNorm, half-rotated heads
        ("mistral", {"sliding_window": 7}),
        ("qwen3", {"head_dim": 8, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
        ("gemma", {"head_dim": 8}),
        ("olmo2", {}),
        ("llama4_text", CHUNKED),  # and factors of queries that grow with their positions
        ("gemma4_text", SHARED_KEYS),
        ("qwen3_5_text", HYBRID),
        ("qwen3_next", HYBRID | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
    ],
)
def test_it_samples_any_model_whose_attention_goes_through_transformers_interface(tmp_path, monkeypatch, kind, changes) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    monkeypatch.setattr(prefill, "CHUNK", 8)
    torch.manual_seed(0)
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 40}
    more = {"num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **small | more | changes)).save_pretrained(tmp_path)
    trainer = trainer_of(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that it decodes without a graph
        sampler = trainer.sampler(4, 64)
    sampler.load(trainer.snapshot())
    requests = [slot_request(slot, prompt, 20, seed=slot) for slot, prompt in enumerate((3, 21, 10))]
    for slot, (tokens, logprobs) in sample_to_end(sampler, requests).items():
        prompt = requests[slot].tokens
        table = conformance.full_forward(tmp_path, np.concatenate([prompt, tokens]))
        expected = table[np.arange(len(prompt) - 1, len(prompt) + len(tokens) - 1), tokens]
        np.testing.assert_allclose(logprobs, expected, atol=1e-4)


def fails(step: NextLogits, example: Any, **_: Any) -> Any:
    raise RuntimeError("the shape depends on the data")


def keeps_what_it_saw(step: NextLogits, example: Any, **_: Any) -> Any:
    return lambda token, *rest: step(*example).mean(0).expand(len(token), -1)


@pytest.mark.parametrize("trace, reason", [(fails, "depends on the data"), (keeps_what_it_saw, "other logits")])
def test_a_model_that_cannot_be_traced_is_sampled_as_it_is(tiny_model_dir, monkeypatch, trace, reason) -> None:
    trainer = trainer_of(tiny_model_dir)
    expected = trainer.sampler(2, 64)
    monkeypatch.setattr(torch.jit, "trace", trace)
    with pytest.warns(UserWarning, match=f"Qwen3ForCausalLM without a graph.*{reason}"):
        sampler = trainer.sampler(2, 64)
    for each in (expected, sampler):
        each.load(trainer.snapshot())
    assert isinstance(sampler.lanes[0]._step, NextLogits)
    said = [sample_to_end(each, [slot_request(0, 9, 12, seed=1)])[0] for each in (expected, sampler)]
    assert said[0][0] == said[1][0]
    np.testing.assert_allclose(said[0][1], said[1][1], atol=1e-5)


def test_bf16_weights_are_sampled_in_bf16_with_log_probabilities_in_fp32(tiny_model_dir) -> None:
    config = TrainerConfig(model=ModelConfig(path=str(tiny_model_dir)), precision="bf16")
    trainer = create_trainer("torch", config)
    sampler = trainer.sampler(2, 64)
    sampler.load(trainer.snapshot())
    assert {p.dtype for p in sampler.model.parameters()} == {torch.bfloat16}
    request = slot_request(0, 9, 12, seed=1)
    tokens, logprobs = sample_to_end(sampler, [request])[0]
    table = conformance.full_forward(tiny_model_dir, np.concatenate([request.tokens, tokens]))
    np.testing.assert_allclose(logprobs, table[np.arange(8, 20), tokens], atol=0.3)


# Drawing.


def test_uniforms_are_uniform_and_independent_of_neighbouring_seeds_and_counts() -> None:
    seed = np.stack([np.arange(500), np.zeros(500)], 1).astype(np.uint32)
    counts = np.broadcast_to(np.arange(500), (500, 500))
    drawn = uniform(seed, counts)
    assert drawn.min() > 0
    assert drawn.max() < 1
    for first, second in ((drawn[:, :-1], drawn[:, 1:]), (drawn[:-1], drawn[1:])):
        cells = np.histogram2d(first.ravel(), second.ravel(), 16, ((0, 1), (0, 1)))[0].ravel()
        assert abs(conformance.chi_square(cells, np.full(256, cells.sum() / 256))) < 4
    seed[:, 1] = 1  # the seed's upper 32 bits
    assert np.abs(np.corrcoef(uniform(seed, counts).ravel(), drawn.ravel())[0, 1]) < 0.01


def test_both_backends_draw_with_the_same_numbers() -> None:
    jax_draw = pytest.importorskip("areal_x_jax.sampling")
    rng = np.random.default_rng(0)
    seed, count = rng.integers(0, 2**32, (100, 2), dtype=np.uint32), rng.integers(0, 10**6, 100)
    np.testing.assert_array_equal(uniform(seed, count), np.asarray(jax_draw.uniform(seed, count)))


@pytest.mark.parametrize("vocabulary", [17, 700])
@pytest.mark.parametrize("top_k, top_p", [(0, 1.0), (12, 0.9)])
def test_draws_follow_the_distribution(vocabulary: int, top_k: int, top_p: float) -> None:
    rows = 4000
    logits = np.random.default_rng(vocabulary).normal(0, 2, vocabulary).astype(np.float32)
    no_min_p, cpu = np.zeros(rows), torch.device("cpu")
    how = RowSampling.of(np.full(rows, 0.7), np.full(rows, top_p), np.full(rows, top_k), no_min_p, cpu)
    uniforms = torch.from_numpy(np.random.default_rng(0).uniform(size=(rows, 1)).astype(np.float32))
    tokens, logprobs, kept = sample(torch.from_numpy(np.tile(logits, (rows, 1))), uniforms, how)
    assert (kept is None) == (not top_k)
    tokens, logprobs = tokens.numpy(), logprobs.numpy()
    logits = logits.astype(np.float64) / 0.7
    expected = conformance.truncated(logits - np.log(np.exp(logits).sum()), top_k, top_p)
    np.testing.assert_allclose(logprobs, np.log(expected[tokens]), atol=1e-5)
    assert conformance.chi_square(np.bincount(tokens, minlength=vocabulary), expected * rows) < 4


def test_rows_that_ask_for_different_things_get_each_its_own() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).repeat(4, 1)
    logits = torch.cat([logits, logits[:1]])
    top_p, top_k, min_p = np.array([1, 0.6, 1, 1, 1.0]), np.array([2, 0, 1, 0, 0]), np.array([0, 0, 0, 0, 0.31])
    how = RowSampling.of(np.array([0, 1, 1, 2, 1.0]), top_p, top_k, min_p, torch.device("cpu"))
    tokens, logprobs, kept = sample(logits, torch.full((5, 1), 0.99), how)
    hot = np.sqrt([0.5, 0.3, 0.15, 0.05])
    assert tokens.tolist() == [0, 1, 0, 3, 1]
    assert kept is not None
    assert kept.sum(-1).tolist() == [0, 2, 1, 0, 2]  # 0.15 is less than 0.31 of 0.5
    expected = [0.5, 0.3 / 0.8, 1.0, hot[3] / hot.sum(), 0.3 / 0.8]
    np.testing.assert_allclose(logprobs.exp(), expected, rtol=1e-5)


def test_an_extreme_uniform_still_draws_a_token_that_has_mass() -> None:
    logits = torch.from_numpy(np.random.default_rng(1).normal(0, 30, (16, 400)).astype(np.float32))
    for kwargs in ({"top_p": np.full(16, 0.5), "top_k": np.full(16, 9)}, {"top_p": np.ones(16), "top_k": np.zeros(16, int)}):
        how = RowSampling.of(np.ones(16), min_p=np.zeros(16), device=torch.device("cpu"), **kwargs)
        for extreme in (2.0**-24, 1 - 2.0**-24):
            _, logprobs, _ = sample(logits, torch.full((16, 1), extreme), how)
            assert torch.isfinite(logprobs).all()


def test_groups_by_length_hold_each_once_within_the_budget() -> None:
    lengths = np.random.default_rng(0).integers(1, 300, 200)
    for budget in (1, 300, 1000, 10**6):
        groups = group_by_length(lengths, budget)
        assert sorted(np.concatenate(groups).tolist()) == list(range(200))
        longest = [lengths[group].max() for group in groups]
        assert longest == sorted(longest, reverse=True)
        assert all(len(group) == 1 or len(group) * most <= budget for group, most in zip(groups, longest, strict=True))
