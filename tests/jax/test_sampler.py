"""Properties of the JAX sampler alone; those of every sampler are in areal_x.testing.conformance.test_sampler."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_x.batching.packing import pack
from areal_x.errors import UserError
from areal_x.protocols.backends import create_trainer
from areal_x.protocols.trainer import Trainer
from areal_x.protocols.trainer_config import ModelConfig, TrainerConfig
from areal_x.testing.conformance.helpers import sample_to_end, slot_request
from areal_x.testing.models import write_model
from areal_x.types import Trajectory
from areal_x_jax import kv_cache, sampling
from areal_x_jax.lane import CPU_CHUNK
from areal_x_jax.prefill_chunks import packed
from areal_x_jax.sampler import Sampler
from areal_x_jax.sampling import uniform
from tests.engines import conformance
from tests.launching import finished
from tests.models import DIVISIBLE, write_config
from tests.thorough import further, thorough

from .sampling import sample

SLOTS, CONTEXT = 16, 384


@pytest.fixture(scope="module")
def trainer(tiny_model_dir: Path) -> Trainer:
    return create_trainer("jax", TrainerConfig(model=ModelConfig(path=str(tiny_model_dir))))


def test_at_most_five_programs_whatever_the_lengths_and_two_for_rows_that_leave_tokens_out(trainer: Trainer) -> None:
    sampler = trainer.sampler(SLOTS, CONTEXT - 32)  # a capacity of its own, so that nothing is compiled yet
    before = sampler.programs
    sampler.load(trainer.snapshot())

    def compiled(*rounds: tuple[int, int, dict[str, Any]]) -> int:
        for prompt, count, kind in rounds:
            sample_to_end(sampler, [slot_request(slot, prompt, 3 + slot, **kind) for slot in range(count)])
            sampler.load(trainer.snapshot())
        return sampler.programs - before

    assert compiled((1, 16, {}), (300, 3, {}), (CPU_CHUNK, 9, {}), (17, 1, {"temperature": 0.0})) <= 5
    assert compiled((1, 16, {"top_p": 0.5}), (300, 3, {"top_k": 3}), (17, 9, {"min_p": 0.1}), (5, 2, {"top_k": 2})) <= 7


def test_a_prompt_that_several_have_is_read_once_in_a_lane(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[list[int]] = []

    def packing(prompts: list[tuple[int, int, np.ndarray]], *how: int) -> Any:
        read.append(sorted(len(tokens) for _, _, tokens in prompts))
        return packed(prompts, *how)

    monkeypatch.setattr("areal_x_jax.lane.packed", packing)
    sampler = Sampler(trainer.arch, 8, 128, lanes=1)
    sampler.load(trainer.snapshot())
    sampler.fill([slot_request(slot, prompt, 4) for slot, prompt in enumerate((33, 20, 33, 33, 20))])
    assert read == [[19, 32]]


def test_nothing_longer_is_drawn_than_the_model_was_made_for(tmp_path: Path) -> None:
    directory = write_model(tmp_path, max_position_embeddings=24)
    sampler = create_trainer("jax", TrainerConfig(model=ModelConfig(path=str(directory)))).sampler(SLOTS, CONTEXT)
    assert sampler.context == 24


def test_a_lane_returns_when_enough_of_its_slots_are_free(trainer: Trainer) -> None:
    sampler = Sampler(trainer.arch, SLOTS, CONTEXT, lanes=1)
    sampler.load(trainer.snapshot())
    sampler.fill([slot_request(slot, 5, 2 + slot) for slot in range(SLOTS)])
    decoded = sampler.decode(100, 3)
    assert decoded.finished.sum() == 3
    assert decoded.counts.tolist() == [2, 3] + [4] * (SLOTS - 2)
    sampler.free(list(range(3, SLOTS)))
    assert sampler.decode(10, 1).counts.sum() == 0


def test_more_stop_tokens_than_it_holds_are_refused(trainer: Trainer) -> None:
    sampler = trainer.sampler(SLOTS, CONTEXT)
    sampler.load(trainer.snapshot())
    with pytest.raises(UserError, match="17 stop tokens"):
        sampler.fill([slot_request(0, 5, stop_token_ids=tuple(range(17)))])


def test_chunks_hold_every_token_once_and_only_the_first_piece_continues() -> None:
    lengths = [5, 0, 300, CPU_CHUNK, 1, 90]
    capacity = 512
    sequences = [(slot, 500 + slot, np.arange(n) + 1000 * slot) for slot, n in enumerate(lengths)]
    seen: dict[int, dict[int, int]] = {slot: {} for slot in range(len(lengths))}
    for chunk in packed(sequences, CPU_CHUNK, capacity):
        for i in range(chunk.count):
            span = slice(chunk.first[i], chunk.first[i] + chunk.length[i])
            assert (chunk.piece[span] == i).all()
            past = chunk.past if i == 0 else 0
            assert chunk.positions[span].tolist() == list(range(past, past + chunk.length[i]))
            for token, column in zip(chunk.tokens[span], chunk.start[i] + np.arange(chunk.length[i]), strict=True):
                seen[chunk.slot[i]][column % capacity] = token
    for slot, column, tokens in sequences:
        assert seen[slot] == {(column + i) % capacity: token for i, token in enumerate(tokens)}


@pytest.mark.parametrize("context", [1, 40, 96, 288, 1000, 32768])
def test_the_ring_holds_a_context(context: int) -> None:
    parts, width = kv_cache.columns(context)
    assert context <= parts * width < context + 16 * parts
    assert parts <= kv_cache.MOST_PARTS


@pytest.mark.parametrize(
    "newest, lengths", [(0, (1, 1)), (5, (6, 3)), (130, (1, 67)), (130, (2, 68)), (3, (100, 1)), (191, (192, 9))]
)
def test_a_slot_sees_its_newest_columns_and_a_part_is_read_only_where_some_slot_sees_it(newest, lengths) -> None:
    cache = kv_cache.empty([(1, 2, 2)], slots=2, context=192, dtype=jnp.float32)
    parts, width = kv_cache.columns(192)
    expected = np.zeros((2, 192), bool)
    for slot, length in enumerate(lengths):
        expected[slot, [(newest - age) % 192 for age in range(length)]] = True
    seen = kv_cache.visible(cache, jnp.int32(newest), jnp.asarray(lengths))
    assert (np.concatenate([bias[:, 0, 0] for _, bias in seen], 1) == 0).tolist() == expected.tolist()
    assert [bool(used) for used, _ in seen] == [expected[:, p * width : (p + 1) * width].any() for p in range(parts)]


# Drawing.


def test_uniforms_are_uniform_and_independent_of_neighbouring_seeds_and_counts() -> None:
    seeds, counts = np.meshgrid(np.arange(500), np.arange(500), indexing="ij")
    seed = jnp.stack([jnp.asarray(seeds.ravel(), jnp.uint32), jnp.zeros(seeds.size, jnp.uint32)], 1)
    drawn = np.asarray(jax.jit(uniform)(seed, jnp.asarray(counts.ravel()))).reshape(500, 500)
    assert drawn.min() > 0
    assert drawn.max() < 1
    for first, second in ((drawn[:, :-1], drawn[:, 1:]), (drawn[:-1], drawn[1:])):
        cells = np.histogram2d(first.ravel(), second.ravel(), 16, ((0, 1), (0, 1)))[0].ravel()
        assert abs(conformance.chi_square(cells, np.full(256, cells.sum() / 256))) < 4
    high = seed.at[:, 1].set(1)
    assert np.abs(np.corrcoef(np.asarray(uniform(high, jnp.asarray(counts.ravel()))), drawn.ravel())[0, 1]) < 0.01


@pytest.mark.parametrize("vocabulary", [17, 700])  # one block of the cumulative sum, and several
@pytest.mark.parametrize("top_k, top_p", [(0, 1.0), (12, 0.9)])
def test_draws_follow_the_distribution(vocabulary: int, top_k: int, top_p: float) -> None:
    rows = 4000
    logits = np.random.default_rng(vocabulary).normal(0, 2, vocabulary).astype(np.float32)
    truncation = sampling.Truncation(jnp.full(rows, top_p), jnp.full(rows, top_k), jnp.zeros(rows)) if top_k else None
    uniforms = jnp.asarray(np.random.default_rng(0).uniform(size=rows), jnp.float32)
    tokens, logprobs, _ = jax.jit(sampling.sample)(jnp.tile(logits, (rows, 1)), uniforms, jnp.full(rows, 0.7), truncation)
    logits = logits.astype(np.float64) / 0.7
    plain = logits - np.log(np.exp(logits).sum())
    expected = conformance.truncated(plain, top_k, top_p)
    np.testing.assert_allclose(logprobs, np.log(expected[tokens]), atol=1e-5)
    assert conformance.chi_square(np.bincount(tokens, minlength=vocabulary), expected * rows) < 4


def test_an_extreme_uniform_still_draws_a_token_that_has_mass() -> None:
    logits = jnp.asarray(np.random.default_rng(1).normal(0, 30, (16, 400)), jnp.float32)
    for uniforms in (jnp.full(16, 2.0**-24), jnp.full(16, 1 - 2.0**-24)):
        truncation = sampling.Truncation(jnp.full(16, 0.5), jnp.full(16, 9), jnp.zeros(16))
        _, logprobs, _ = jax.jit(sampling.sample)(logits, uniforms, jnp.ones(16), truncation)
        assert np.isfinite(logprobs).all()


@pytest.mark.parametrize("name", ["qwen2-moe-between", *further("qwen2-tied-yarn", "llama3", "mistral-window", "gemma3")])
def test_what_every_family_draws_has_the_probability_that_its_trainer_gives(
    name: str, model_dir_of: Callable[[str], Path]
) -> None:
    """Prompts that begin in one chunk and end in another, and answers that leave a window's first tokens behind."""
    trainer = create_trainer("jax", TrainerConfig(model=ModelConfig(path=str(model_dir_of(name)))))
    sampler = trainer.sampler(4, 2 * CPU_CHUNK)
    sampler.load(trainer.snapshot())
    requests = [slot_request(slot, length, 12) for slot, length in enumerate((CPU_CHUNK + 9, 3, 40, 1))]
    said = sample_to_end(sampler, requests)
    for request in requests:
        tokens, logprobs = said[request.slot]
        answer, drawn_at = np.asarray(tokens, np.int32), np.asarray(logprobs, np.float32)
        drawn = pack([Trajectory.from_completion(np.asarray(request.tokens), answer, drawn_at, np.zeros(len(answer)))], 128)
        np.testing.assert_allclose(drawn.gather(trainer.logprobs(drawn.batch))[0][len(request.tokens) :], logprobs, atol=1e-4)


@thorough
@pytest.mark.parametrize("key_heads", [4, 1])
def test_a_mesh_draws_what_one_device_draws_each_group_with_its_own_slots(key_heads: int, tmp_path: Path) -> None:
    """One head is fewer than a group's devices."""
    directory = write_config(DIVISIBLE["even"] | {"num_key_value_heads": key_heads}, tmp_path / "model")
    file = tmp_path / "drawn.json"
    command = [sys.executable, "-m", "tests.jax.sampling", str(directory), str(file), json.dumps({"fsdp": 4, "tensor": 2})]
    finished(command, 1, 8, tmp_path)
    found, alone = json.loads(file.read_text()), sample(directory, {})
    assert found["devices"] == list(range(8))
    assert found["share"] == [0.5] * 4
    assert found["compiled_again"] == found["guesses_compiled_again"] == 0
    for said in (found["first"], found["again"], *found["guessed"]):
        for (tokens, logprobs), (expected, of_expected) in zip(said, alone["first"], strict=True):
            assert tokens == expected
            np.testing.assert_allclose(logprobs, of_expected, atol=1e-4)
