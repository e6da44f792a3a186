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
from areal_x.protocols.sampler import Sampler
from areal_x.protocols.trainer import Trainer
from areal_x.protocols.trainer_config import ModelConfig, TrainerConfig
from areal_x.testing.conformance.helpers import sample_to_end, slot_request
from areal_x.testing.models import write_model
from tests.engines import conformance

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


@pytest.mark.parametrize("lanes", [1, 4])
def test_any_number_of_lanes_draws_what_two_draw(backend: str, trainer: Any, sampler: Sampler, lanes: int) -> None:
    requests = [slot_request(slot, 3 + slot, 5 + 2 * slot, seed=slot) for slot in range(0, SLOTS, 2)]
    expected = sample_to_end(sampler, requests)
    model = {"dtype": trainer.dtype} if backend == "torch" else {}
    other = type(sampler)(trainer.model if model else trainer.arch, SLOTS, CONTEXT, lanes=lanes, **model)
    other.load(trainer.snapshot())
    for slot, (tokens, logprobs) in sample_to_end(other, requests).items():
        assert tokens == expected[slot][0]
        np.testing.assert_allclose(logprobs, expected[slot][1], atol=1e-5)


def test_lanes_are_of_equal_size_and_none_is_tiny(monkeypatch) -> None:
    monkeypatch.setattr("areal_x.engines.lanes.cores.available", lambda: 8)
    assert [lanes_on_cpu(slots) for slots in (1, 8, 15, 16, 60, 64, 256)] == [1, 1, 1, 2, 6, 8, 8]


def test_slots_go_round_the_lanes(sampler: Lanes) -> None:
    sampler.fill([slot_request(slot, 4, 5) for slot in (0, 1, 2, 5)])
    assert [lane.decode(1, 8).counts.nonzero()[0].tolist() for lane in sampler.lanes] == [[0, 1], [0, 2]]
