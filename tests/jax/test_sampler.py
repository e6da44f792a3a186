"""The JAX sampler, behind the embedded engine against transformers, and by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_x.errors import UserError
from areal_x.rollout.embedded import EmbeddedEngine
from areal_x.rollout.engine import SamplingParams
from areal_x.rollout.sampler import SlotRequest
from areal_x.trainer import ModelConfig, Trainer, TrainerConfig, create_trainer
from areal_x_jax import ring as rings
from areal_x_jax.chunks import packed
from areal_x_jax.draw import draw, uniform
from areal_x_jax.lanes import Sampler
from areal_x_jax.sampler import CPU_CHUNK
from tests.conftest import write_model
from tests.rollout import conformance

SLOTS, CONTEXT = 16, 384


@pytest.fixture(scope="module")
def trainer(tiny_model_dir: Path) -> Trainer:
    return create_trainer("jax", TrainerConfig(model=ModelConfig(path=str(tiny_model_dir))))


@pytest.fixture(scope="module")
def other_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("other"), seed=11)


@pytest.fixture(scope="module")
def engine_and_run(trainer: Trainer) -> Iterator[tuple[EmbeddedEngine, Callable[[Any], Any]]]:
    loop = asyncio.new_event_loop()
    engine = EmbeddedEngine(trainer.sampler(SLOTS, CONTEXT))
    loop.run_until_complete(engine.start())
    loop.run_until_complete(engine.swap(engine.stage(trainer)))
    yield engine, loop.run_until_complete
    loop.run_until_complete(engine.close())
    loop.close()


@pytest.fixture
def engine(engine_and_run) -> EmbeddedEngine:
    return engine_and_run[0]


@pytest.fixture
def run(engine_and_run) -> Callable[[Any], Any]:
    return engine_and_run[1]


def test_logprobs_are_those_of_a_full_forward(engine, run, tiny_model_dir) -> None:
    run(conformance.check_logprobs_are_those_of_a_full_forward(engine, tiny_model_dir))


def test_greedy_takes_the_most_likely_token(engine, run, tiny_model_dir) -> None:
    run(conformance.check_greedy_takes_the_most_likely_token(engine, tiny_model_dir))


def test_a_stop_token_ends_the_completion(engine, run, tiny_model_dir) -> None:
    run(conformance.check_a_stop_token_ends_the_completion_and_belongs_to_it(engine, tiny_model_dir))


@pytest.mark.parametrize("top_k, top_p", [(5, 1.0), (0, 0.6), (7, 0.8), (1, 1.0)])
def test_truncated_sampling(engine, run, tiny_model_dir, top_k, top_p) -> None:
    run(conformance.check_truncated_sampling(engine, tiny_model_dir, top_k, top_p))


def test_plain_sampling(engine, run, tiny_model_dir) -> None:
    run(conformance.check_truncated_sampling(engine, tiny_model_dir, top_k=0, top_p=1.0, samples=1000))


def test_a_cancelled_request_gives_its_place_to_others(engine, run, tiny_model_dir) -> None:
    run(conformance.check_a_cancelled_request_gives_its_place_to_others(engine, tiny_model_dir))


def test_a_prompt_without_room_is_refused(engine, run) -> None:
    run(conformance.check_a_prompt_without_room_is_refused(engine, "embedded.context"))


def test_max_tokens_is_cut_to_the_room_left(engine, run) -> None:
    run(conformance.check_max_tokens_is_cut_to_the_room_left(engine))


def test_weights_swapped_in_flight(engine, run, trainer, tiny_model_dir, other_dir) -> None:
    other = create_trainer("jax", TrainerConfig(model=ModelConfig(path=str(other_dir))))
    other.version = 1
    run(conformance.check_weights_swapped_in_flight(engine, tiny_model_dir, other, other_dir))
    run(engine.swap(engine.stage(trainer)))


# The sampler by itself.


@pytest.fixture(scope="module")
def sampler(trainer: Trainer) -> Sampler:
    return trainer.sampler(SLOTS, CONTEXT)


def slot_request(slot: int, prompt: int, most: int = 20, generated: int = 0, seed: int = 0, **sampling: Any) -> SlotRequest:
    tokens = np.random.default_rng(prompt).integers(2, 40, prompt).astype(np.int32)
    return SlotRequest(slot, tokens, generated, SamplingParams(max_tokens=most, **sampling), seed)


def to_the_end(sampler: Sampler, requests: list[SlotRequest], steps: int = 7) -> dict[int, tuple[list[int], list[float]]]:
    """What each slot says until all have finished."""
    sampler.fill(requests)
    said: dict[int, tuple[list[int], list[float]]] = {request.slot: ([], []) for request in requests}
    live = set(said)
    while live:
        decoded = sampler.decode(steps, sampler.slots)
        for slot in said:
            said[slot][0].extend(decoded.tokens[slot, : decoded.counts[slot]].tolist())
            said[slot][1].extend(decoded.logprobs[slot, : decoded.counts[slot]].tolist())
            if decoded.finished[slot]:
                live.remove(slot)
    return said


def test_a_completion_depends_neither_on_its_slot_nor_on_what_else_runs(sampler: Sampler, trainer: Trainer) -> None:
    """Alone (a compact decode), among fifteen others (a full one), in another slot, and after the ring has gone round."""
    sampler.load(trainer.snapshot())
    mine = {"prompt": 30, "most": 40, "seed": 2**40 + 5}
    tokens, logprobs = to_the_end(sampler, [slot_request(3, **mine)])[3]
    others = [slot_request(slot, 5 + 20 * slot, 10 + slot, seed=slot) for slot in range(SLOTS) if slot != 9]
    for requests in ([slot_request(9, **mine), *others], [*others, slot_request(9, **mine)], [slot_request(9, **mine)]):
        for _ in range(4):
            again, its_logprobs = to_the_end(sampler, requests)[9]
            assert again == tokens
            np.testing.assert_allclose(its_logprobs, logprobs, atol=1e-5)


def test_going_on_from_what_was_generated_draws_what_would_have_come(sampler: Sampler, trainer: Trainer) -> None:
    """What a swap of weights does: the same weights again change nothing."""
    sampler.load(trainer.snapshot())
    whole = slot_request(0, 150, 30, seed=4)
    tokens, logprobs = to_the_end(sampler, [whole])[0]
    so_far = np.concatenate([whole.tokens, np.array(tokens[:11], np.int32)])
    sampler.load(trainer.snapshot())
    rest, its_logprobs = to_the_end(sampler, [SlotRequest(5, so_far, 11, whole.sampling, whole.seed)])[5]
    assert rest == tokens[11:]
    np.testing.assert_allclose(its_logprobs, logprobs[11:], atol=1e-5)


def test_at_most_four_programs_whatever_the_lengths(trainer: Trainer) -> None:
    sampler = trainer.sampler(SLOTS, CONTEXT - 32)  # a capacity of its own, so that nothing is compiled yet
    before = sampler.programs
    sampler.load(trainer.snapshot())
    for prompt, count, kind in (
        (1, 16, {}),
        (300, 3, {"top_k": 3}),
        (CPU_CHUNK, 9, {"top_p": 0.5}),
        (17, 1, {"temperature": 0.0}),
    ):
        to_the_end(sampler, [slot_request(slot, prompt, 3 + slot, **kind) for slot in range(count)])
        sampler.load(trainer.snapshot())
    assert sampler.programs - before <= 4


def test_a_lane_returns_when_enough_of_its_slots_are_free(trainer: Trainer) -> None:
    sampler = Sampler(trainer.shape, SLOTS, CONTEXT, lanes=1)
    sampler.load(trainer.snapshot())
    sampler.fill([slot_request(slot, 5, 2 + slot) for slot in range(SLOTS)])
    decoded = sampler.decode(100, 3)
    assert decoded.finished.sum() == 3
    assert decoded.counts.tolist() == [2, 3] + [4] * (SLOTS - 2)
    sampler.free(list(range(3, SLOTS)))
    assert sampler.decode(10, 1).counts.sum() == 0


@pytest.mark.parametrize("lanes", [2, 4])
def test_any_number_of_lanes_draws_what_one_draws(trainer: Trainer, lanes: int) -> None:
    requests = [slot_request(slot, 3 + slot, 5 + 2 * slot, seed=slot) for slot in range(0, SLOTS, 2)]
    drawn = []
    for count in (1, lanes):
        sampler = Sampler(trainer.shape, SLOTS, CONTEXT, lanes=count)
        sampler.load(trainer.snapshot())
        drawn.append(to_the_end(sampler, requests))
    for slot, (tokens, logprobs) in drawn[0].items():
        assert drawn[1][slot][0] == tokens
        np.testing.assert_allclose(drawn[1][slot][1], logprobs, atol=1e-5)


def test_more_stop_tokens_than_it_holds_are_refused(sampler: Sampler, trainer: Trainer) -> None:
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
    parts, width = rings.columns(context)
    assert context <= parts * width < context + 16 * parts
    assert parts <= rings.MOST_PARTS


@pytest.mark.parametrize(
    "newest, lengths", [(0, (1, 1)), (5, (6, 3)), (130, (1, 67)), (130, (2, 68)), (3, (100, 1)), (191, (192, 9))]
)
def test_a_slot_sees_its_newest_columns_and_a_part_is_read_only_where_some_slot_sees_it(newest, lengths) -> None:
    ring = rings.empty(layers=1, slots=2, kv_heads=1, head_dim=2, context=192, dtype=jnp.float32)
    parts, width = rings.columns(192)
    expected = np.zeros((2, 192), bool)
    for slot, length in enumerate(lengths):
        expected[slot, [(newest - age) % 192 for age in range(length)]] = True
    seen = rings.visible(ring, jnp.int32(newest), jnp.asarray(lengths))
    assert (np.concatenate([bias for _, bias in seen], 1) == 0).tolist() == expected.tolist()
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
    ask = (jnp.full(rows, 0.7), jnp.full(rows, top_p), jnp.full(rows, top_k))
    uniforms = jnp.asarray(np.random.default_rng(0).uniform(size=rows), jnp.float32)
    tokens, logprobs = jax.jit(draw)(jnp.tile(logits, (rows, 1)), uniforms, *ask, jnp.array(top_k > 0))
    logits = logits.astype(np.float64) / 0.7
    plain = logits - np.log(np.exp(logits).sum())
    expected = conformance.truncated(plain, top_k, top_p)
    np.testing.assert_allclose(logprobs, np.log(expected[tokens]), atol=1e-5)
    assert conformance.chi_square(np.bincount(tokens, minlength=vocabulary), expected * rows) < 4


def test_an_extreme_uniform_still_draws_a_token_that_has_mass() -> None:
    logits = jnp.asarray(np.random.default_rng(1).normal(0, 30, (16, 400)), jnp.float32)
    for uniforms in (jnp.full(16, 2.0**-24), jnp.full(16, 1 - 2.0**-24)):
        _, logprobs = jax.jit(draw)(logits, uniforms, jnp.ones(16), jnp.full(16, 0.5), jnp.full(16, 9), jnp.array(True))
        assert np.isfinite(logprobs).all()
