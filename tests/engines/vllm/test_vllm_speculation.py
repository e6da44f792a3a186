"""A real vLLM server that guesses tokens ahead, through the engine."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from areal_x.engines.vllm.config import VLLMConfig
from areal_x.engines.vllm.engine import VLLMEngine
from areal_x.protocols.engine import Request, SamplingParams
from areal_x.protocols.speculation import Speculation
from areal_x.testing.models import write_model
from tests.engines import conformance
from tests.servers import Run, Weights
from tests.thorough import thorough

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("vllm"), thorough]


@pytest.fixture(scope="module", params=["ngram", "draft"])
def engine(
    request: pytest.FixtureRequest, tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory, run: Run
) -> Iterator[VLLMEngine]:
    draft = tmp_path_factory.mktemp("draft")
    kinds = {
        "ngram": Speculation(method="ngram", tokens=3, longest=3, shortest=1),
        "draft": Speculation(method="draft", tokens=2, draft=str(write_model(draft, seed=3, num_hidden_layers=1))),
    }
    config = VLLMConfig(context=256, concurrency=32)
    engine = VLLMEngine(config, tiny_model_dir, tmp_path_factory.mktemp("logs"), speculation=kinds[request.param])
    run(engine.start())
    run(engine.swap(engine.stage(Weights(tiny_model_dir, 1))))
    yield engine
    run(engine.close())


def test_it_samples_what_every_engine_must_and_has_guessed(engine: VLLMEngine, tiny_model_dir: Path, run: Run) -> None:
    run(conformance.check_logprobs_are_those_of_a_full_forward(engine, tiny_model_dir))
    run(conformance.check_greedy_takes_the_most_likely_token(engine, tiny_model_dir))
    run(conformance.check_a_stop_token_ends_the_completion_and_belongs_to_it(engine, tiny_model_dir))
    run(conformance.check_a_cancelled_request_gives_its_place_to_others(engine, tiny_model_dir))


def test_tokens_after_guesses_are_distributed_as_the_model_says(engine: VLLMEngine, tiny_model_dir: Path, run: Run) -> None:
    """The second token after a prompt that repeats itself, which is guessed."""
    prompt, temperature = np.array([7, 8, 9, 10] * 3, np.int32), 0.4
    request = Request(prompt, SamplingParams(max_tokens=3, temperature=temperature))
    completions = run(conformance.all_of(engine, [request] * 800))
    first = np.array([c.tokens[0] for c in completions])
    commonest = np.bincount(first).argmax()
    second = np.array([c.tokens[1] for c in completions if c.tokens[0] == commonest])
    expected = np.exp(conformance.full_forward(tiny_model_dir, np.append(prompt, commonest), temperature)[-1])
    counts = np.bincount(second, minlength=len(expected))
    assert conformance.chi_square(counts, expected * len(second)) < 12  # without seeds, it samples anew in every run


def test_weights_are_swapped_between_guesses(engine: VLLMEngine, tiny_model_dir: Path, other_model_dir: Path, run: Run) -> None:
    """And the products of vLLM's linear layers, which it keeps, read them."""
    for old, new in pairwise((tiny_model_dir, other_model_dir, tiny_model_dir)):
        trainer = Weights(new, engine.version + 1)
        run(conformance.check_weights_swapped_in_flight(engine, old, trainer, new))
