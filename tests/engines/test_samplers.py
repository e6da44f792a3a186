"""Both backends' samplers: behind the embedded engine against transformers, and by themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_x.engines.embedded import EmbeddedEngine
from areal_x.engines.lanes import Lanes, lanes_on_cpu
from areal_x.protocols.backends import create_trainer
from areal_x.protocols.sampler import Sampler, SlotRequest
from areal_x.protocols.trainer import Trainer
from areal_x.protocols.trainer_config import ModelConfig, TrainerConfig
from tests.conftest import write_model
from tests.engines import conformance
from tests.engines.conformance import slot_request, to_the_end

SLOTS, CONTEXT = 16, 384


def trainer_of(backend: str, directory: Path) -> Trainer:
    return create_trainer(backend, TrainerConfig(model=ModelConfig(path=str(directory))))


@pytest.fixture(scope="module")
def trainer(backend: str, tiny_model_dir: Path) -> Trainer:
    return trainer_of(backend, tiny_model_dir)


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


def test_attempts_at_one_prompt_say_together_what_each_says_alone(trainer: Trainer) -> None:
    sampler = trainer.sampler(SLOTS, CONTEXT)
    sampler.load(trainer.snapshot())
    # In any order, of two prompts, one of a single token, beside others; the last after its neighbours.
    prompts = (33, 20, 33, 1, 33, 20, 50, 1, 33, 33)
    requests = [slot_request(slot, prompt, 9 + slot % 3, seed=slot) for slot, prompt in enumerate(prompts)]
    alone = {slot: said for request in requests for slot, said in to_the_end(sampler, [request]).items()}
    for slot, (tokens, logprobs) in to_the_end(sampler, requests).items():
        assert tokens == alone[slot][0]
        np.testing.assert_allclose(logprobs, alone[slot][1], atol=1e-4)


def test_tokens_of_one_completion_are_drawn_independently(trainer: Trainer) -> None:
    """The tiny model finds all tokens nearly equally likely: one random number for all positions would sample one token for
    all."""
    sampler = trainer.sampler(SLOTS, CONTEXT)
    sampler.load(trainer.snapshot())
    for tokens, _ in to_the_end(sampler, [slot_request(slot, 3, 200, seed=slot) for slot in range(4)]).values():
        counts = np.bincount(tokens)
        assert np.count_nonzero(counts) > 25
        assert counts.max() < 0.2 * len(tokens)


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


def test_weights_swapped_in_flight(engine, run, backend, trainer, tiny_model_dir, other_dir) -> None:
    other = trainer_of(backend, other_dir)
    other.version = 1
    run(conformance.check_weights_swapped_in_flight(engine, tiny_model_dir, other, other_dir))
    run(engine.swap(engine.stage(trainer)))


# The sampler by itself.


@pytest.fixture(scope="module")
def whole_sampler(trainer: Trainer) -> Sampler:
    return trainer.sampler(SLOTS, CONTEXT)


@pytest.fixture
def sampler(whole_sampler: Sampler, trainer: Trainer) -> Sampler:
    """One sampler for all tests, as it compiles; each test starts with empty slots."""
    whole_sampler.load(trainer.snapshot())
    return whole_sampler


def test_a_completion_depends_neither_on_its_slot_nor_on_what_else_runs(sampler: Sampler) -> None:
    """Alone (in few rows), among fifteen others, in another slot, and after JAX's ring buffer has wrapped around."""
    mine = {"prompt": 30, "most": 40, "seed": 2**40 + 5}
    tokens, logprobs = to_the_end(sampler, [slot_request(3, **mine)])[3]
    others = [slot_request(slot, 5 + 20 * slot, 10 + slot, seed=slot) for slot in range(SLOTS) if slot != 9]
    for requests in ([slot_request(9, **mine), *others], [*others, slot_request(9, **mine)], [slot_request(9, **mine)]):
        for _ in range(4):
            again, its_logprobs = to_the_end(sampler, requests)[9]
            assert again == tokens
            np.testing.assert_allclose(its_logprobs, logprobs, atol=1e-5)


def test_slots_filled_while_others_run_say_what_they_would_say_alone(sampler: Sampler, trainer: Trainer) -> None:
    """Continuous batching, step by step: rows move into the gaps of those that finish, and new ones follow."""
    rng = np.random.default_rng(0)
    shapes = rng.integers(1, 60, (40, 2)).tolist()
    requests = [slot_request(0, prompt, most, seed=i) for i, (prompt, most) in enumerate(shapes)]
    waiting, free = list(enumerate(requests)), list(range(5))
    running: dict[int, int] = {}
    said: dict[int, list[int]] = {i: [] for i in range(len(requests))}
    while waiting or running:
        admitted = []
        while waiting and free:
            i, request = waiting.pop(0)
            running[free[0]] = i
            admitted.append(SlotRequest(free.pop(0), request.tokens, 0, request.sampling, request.seed))
        sampler.fill(admitted)
        decoded = sampler.decode(16, 1)
        for slot, i in list(running.items()):
            said[i] += decoded.tokens[slot, : decoded.counts[slot]].tolist()
            if decoded.finished[slot]:
                free.append(slot)
                del running[slot]
    assert [len(tokens) for tokens in said.values()] == [most for _, most in shapes]
    alone = trainer.sampler(1, CONTEXT)
    alone.load(trainer.snapshot())
    for i, request in enumerate(requests):
        assert to_the_end(alone, [request], steps=32)[0][0] == said[i]


def test_going_on_from_what_was_generated_draws_what_would_have_come(sampler: Sampler, trainer: Trainer) -> None:
    """A swap of weights refills slots: with the same weights nothing changes."""
    whole = slot_request(0, 150, 30, seed=4)
    tokens, logprobs = to_the_end(sampler, [whole])[0]
    so_far = np.concatenate([whole.tokens, np.array(tokens[:11], np.int32)])
    sampler.load(trainer.snapshot())
    rest, its_logprobs = to_the_end(sampler, [SlotRequest(5, so_far, 11, whole.sampling, whole.seed)])[5]
    assert rest == tokens[11:]
    np.testing.assert_allclose(its_logprobs, logprobs[11:], atol=1e-5)


def test_a_slot_filled_again_or_freed_forgets_what_it_held(sampler: Sampler) -> None:
    tokens, logprobs = to_the_end(sampler, [slot_request(2, 9, seed=7)])[2]
    sampler.fill([slot_request(2, 33, seed=1), slot_request(4, 12, seed=2)])
    sampler.decode(3, SLOTS)
    sampler.free([4, 11])  # slot 11 holds nothing
    again, its_logprobs = to_the_end(sampler, [slot_request(2, 9, seed=7)])[2]
    assert again == tokens
    np.testing.assert_allclose(its_logprobs, logprobs, atol=1e-5)
    assert sampler.decode(3, SLOTS).counts.tolist() == [0] * SLOTS


def test_decode_returns_when_enough_slots_are_free(sampler: Sampler) -> None:
    sampler.fill([slot_request(slot, 5, 2 + slot) for slot in range(SLOTS)])
    decoded = sampler.decode(100, 3)
    assert decoded.finished.sum() >= 3
    assert decoded.counts.max() < 2 + SLOTS // 2
    assert sampler.decode(100, SLOTS).counts.tolist() == [2 + slot - said for slot, said in enumerate(decoded.counts)]


def test_a_sampler_without_weights_and_a_sequence_without_room_are_refused(sampler: Sampler, trainer: Trainer) -> None:
    with pytest.raises(RuntimeError, match="load a snapshot"):
        trainer.sampler(2, 8).fill([slot_request(0, 3)])
    with pytest.raises(ValueError, match="no room"):
        sampler.fill([slot_request(0, CONTEXT)])


@pytest.mark.parametrize("lanes", [1, 4])
def test_any_number_of_lanes_draws_what_two_draw(backend: str, trainer: Any, sampler: Sampler, lanes: int) -> None:
    requests = [slot_request(slot, 3 + slot, 5 + 2 * slot, seed=slot) for slot in range(0, SLOTS, 2)]
    expected = to_the_end(sampler, requests)
    model = {"dtype": trainer.dtype} if backend == "torch" else {}
    other = type(sampler)(trainer.model if model else trainer.arch, SLOTS, CONTEXT, lanes=lanes, **model)
    other.load(trainer.snapshot())
    for slot, (tokens, logprobs) in to_the_end(other, requests).items():
        assert tokens == expected[slot][0]
        np.testing.assert_allclose(logprobs, expected[slot][1], atol=1e-5)


def test_lanes_are_of_equal_size_and_none_is_tiny(monkeypatch) -> None:
    monkeypatch.setattr("areal_x.engines.lanes.cores.available", lambda: 8)
    assert [lanes_on_cpu(slots) for slots in (1, 8, 15, 16, 60, 64, 256)] == [1, 1, 1, 2, 6, 8, 8]


def test_slots_go_round_the_lanes(sampler: Lanes) -> None:
    sampler.fill([slot_request(slot, 4, 5) for slot in (0, 1, 2, 5)])
    assert [lane.decode(1, 8).counts.nonzero()[0].tolist() for lane in sampler.lanes] == [[0, 1], [0, 2]]
