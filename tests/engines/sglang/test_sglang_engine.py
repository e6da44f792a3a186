"""The engine against a real SGLang server, compared with transformers' own forward pass."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_x.engines.sglang.client import SGLangClient
from areal_x.engines.sglang.config import SGLangConfig
from areal_x.engines.sglang.engine import SGLangEngine
from areal_x.protocols.engine import Completion, Request, SamplingParams
from tests.engines import conformance
from tests.engines.conformance import expected_logprobs
from tests.engines.load import Load
from tests.engines.sglang.conftest import PYTHON
from tests.engines.test_engines_agree import TRUNCATIONS, assert_on_policy, sample, trained
from tests.servers import Run, Weights

pytestmark = [pytest.mark.sglang, pytest.mark.xdist_group("sglang")]

PROMPT = np.arange(2, 14, dtype=np.int32)


@pytest.mark.parametrize(
    "check",
    conformance.OF_SERVERS,
    ids=lambda check: check.__name__.removeprefix("check_"),
)
def test_it_does_what_every_engine_must(check: Any, sglang_engine: SGLangEngine, tiny_model_dir: Path, run: Run) -> None:
    run(check(sglang_engine, tiny_model_dir))


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(5, 1.0, 0.0), (0, 0.8, 0.0), (0, 1.0, 0.3), (5, 1.0, 0.3), (1, 1.0, 0.0), (8, 0.3, 0.0), (0, 0.5, 0.85), (9, 0.8, 0.85)],
)
def test_truncated_sampling_is_what_every_engine_must_do(
    top_k: int, top_p: float, min_p: float, sglang_engine: SGLangEngine, tiny_model_dir: Path, run: Run
) -> None:
    run(conformance.check_truncated_sampling(sglang_engine, tiny_model_dir, top_k, top_p, min_p, deviations=12))


def test_requests_report_what_they_kept_beside_those_that_leave_nothing_out(sglang_engine: SGLangEngine, run: Run) -> None:
    run(conformance.check_requests_report_what_they_kept(sglang_engine))


@pytest.mark.parametrize("truncation", [*TRUNCATIONS, {"top_k": 8}, {"min_p": 0.05}], ids=str)
@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_the_server_and_the_trainer_truncate_alike(
    backend: str, truncation: dict[str, Any], sglang_engine: SGLangEngine, tiny_model_dir: Path, run: Run
) -> None:
    """Every request of a batch in the same way; the next test mixes them."""
    pytest.importorskip(backend)
    trainer = trained(backend, tiny_model_dir)
    trainer.version = sglang_engine.version + 1
    run(sglang_engine.swap(sglang_engine.stage(trainer)))
    assert_on_policy(trainer, run(sample(sglang_engine, **truncation)))


def test_requests_that_truncate_differently_are_served_side_by_side(
    sglang_engine: SGLangEngine, tiny_model_dir: Path, run: Run
) -> None:
    """Each as if it were alone: what its tokens were kept from is exactly its own truncation of the full forward pass."""
    each = [(0, 1.0, 0.0), (8, 0.3, 0.0), (0, 0.5, 0.6), (5, 1.0, 0.0), (0, 0.8, 0.0), (12, 0.9, 0.3), (0, 1.0, 0.3)]
    requests = [
        Request(PROMPT, SamplingParams(20, 0.7, top_k=top_k, top_p=top_p, min_p=min_p)) for top_k, top_p, min_p in each * 6
    ]
    for request, completion in zip(requests, run(conformance.all_of(sglang_engine, requests)), strict=True):
        sequence = np.concatenate([request.tokens, completion.tokens])
        table = conformance.full_forward(tiny_model_dir, sequence, 0.7)[len(PROMPT) - 1 : -1]
        sampling = request.sampling
        expected = [conformance.truncated(row, sampling.top_k, sampling.top_p, sampling.min_p) for row in table]
        mine = np.stack(expected)[np.arange(20), completion.tokens]
        np.testing.assert_allclose(completion.logprobs, np.log(mine), atol=1e-5)
        if completion.kept is not None:
            assert completion.kept.counts.tolist() == [np.count_nonzero(row) for row in expected]


def test_the_context_ends_a_completion_and_refuses_a_prompt(sglang_engine: SGLangEngine, run: Run) -> None:
    run(conformance.check_max_tokens_is_cut_to_the_room_left(sglang_engine))
    run(conformance.check_a_prompt_without_room_is_refused(sglang_engine, "sglang.context"))


def test_weights_are_swapped_in_flight(
    sglang_engine: SGLangEngine, tiny_model_dir: Path, other_model_dir: Path, run: Run
) -> None:
    trainer = Weights(other_model_dir, sglang_engine.version + 1)
    run(conformance.check_weights_swapped_in_flight(sglang_engine, tiny_model_dir, trainer, other_model_dir))


@pytest.mark.parametrize("stops", [(), (44,)], ids=["no stop token", "a stop token that never comes"])
def test_the_models_end_token_ends_nothing_unless_the_request_says_so(
    stops: tuple[int, ...], sglang_engine: SGLangEngine, tiny_model_dir: Path, run: Run
) -> None:
    """Though SGLang ends a completion with it whenever the request names any stop token."""
    sampling = SamplingParams(max_tokens=200, temperature=2.0, stop_token_ids=stops)
    request = Request(PROMPT, sampling)
    completions = run(conformance.all_of(sglang_engine, [request] * 8))
    assert any(1 in completion.tokens for completion in completions)  # 1 is the end token of the model's config
    assert [len(completion.tokens) for completion in completions] == [200] * 8
    for completion in completions:
        np.testing.assert_allclose(completion.logprobs, expected_logprobs(tiny_model_dir, request, completion), atol=1e-4)


def test_tokens_carry_the_version_that_was_published_last_and_no_prefix_survives(
    sglang_engine: SGLangEngine, other_model_dir: Path, run: Run
) -> None:
    trainer = Weights(other_model_dir, sglang_engine.version + 1)
    run(conformance.check_a_swap_leaves_no_prefix_of_the_old_weights(sglang_engine, trainer, other_model_dir))


def test_a_server_that_leaves_hands_its_requests_over_with_their_tokens(sglang_engine: SGLangEngine, run: Run) -> None:
    (client,) = sglang_engine._clients
    greedy = SamplingParams(max_tokens=200, temperature=0.0)

    async def handed_over() -> list[Completion]:
        running = [asyncio.create_task(client.generate(PROMPT, greedy)) for _ in range(4)]
        await client.generate(PROMPT, SamplingParams(max_tokens=8))
        await client.hand_over()
        return await asyncio.gather(*running)

    parts = run(handed_over())
    whole = run(sglang_engine.generate(Request(PROMPT, greedy)))
    for part in parts:
        assert part.finish_reason == "abort"
        assert 0 < len(part.tokens) < 200
        assert part.tokens.tolist() == whole.tokens[: len(part.tokens)].tolist()
        assert set(part.versions.tolist()) == {sglang_engine.version}


def test_no_request_is_lost_while_weights_are_swapped_twenty_times(
    sglang_engine: SGLangEngine, tiny_model_dir: Path, other_model_dir: Path, run: Run
) -> None:
    models: dict[int, Path] = {sglang_engine.version: tiny_model_dir}

    async def swaps() -> Load:
        load = Load(sglang_engine, 64)
        for number in range(20):
            version = sglang_engine.version + 1
            models[version] = (other_model_dir, tiny_model_dir)[number % 2]
            staged = await asyncio.to_thread(sglang_engine.stage, Weights(models[version], version))
            await sglang_engine.swap(staged)
            await load.more(30)
        await load.end()
        return load

    load = run(swaps())
    assert len(load.done) >= 500
    assert load.check(models) >= 500


def test_a_server_joins_and_another_leaves_under_load_and_no_request_is_lost(
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    tiny_model_dir: Path,
    other_model_dir: Path,
    sglang_engine: SGLangEngine,
) -> None:
    """A server of its own, the shared one that joins it, and stays alone."""
    (shared,) = sglang_engine._servers
    monkeypatch.setenv("SGLANG_API_KEY", shared.key)
    engine = SGLangEngine(SGLangConfig(context=256, concurrency=16, python=PYTHON), tiny_model_dir, tmp_path, lambda _: None)
    models = {1: tiny_model_dir, 2: other_model_dir, 3: tiny_model_dir}
    sent: dict[str, int] = {}
    generate = SGLangClient.generate

    async def counted(client: SGLangClient, *arguments: Any, **named: Any) -> Completion:
        sent[client.url] = sent.get(client.url, 0) + 1
        return await generate(client, *arguments, **named)

    monkeypatch.setattr(SGLangClient, "generate", counted)

    async def publish(version: int) -> None:
        await engine.swap(await asyncio.to_thread(engine.stage, Weights(models[version], version)))

    async def come_and_go() -> Load:
        await engine.start()
        (own,) = engine._servers
        await publish(1)
        load = Load(engine, 24)
        await load.more(30)
        await engine.join(shared.url)
        await load.until(lambda: sent.get(shared.url, 0) > 30)
        await publish(2)
        await load.more(30)
        await engine.leave(own.url)
        assert own.poll() is not None, "it ends as soon as it has left"
        assert set(engine.supervisor.replicas) == {f"the SGLang server at {shared.url}"}
        await publish(3)
        await load.more(30)
        await load.end()
        return load

    try:
        load = run(come_and_go())
    finally:
        run(engine.close())
    assert load.check(models) > 0
    assert {version for _, completion in load.done for version in completion.versions.tolist()} == {1, 2, 3}
