"""The engine against a real vLLM server, compared with transformers' own forward pass."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from areal_x.engines.fleet.staging import StagedFiles
from areal_x.engines.vllm.client import VLLMClient
from areal_x.engines.vllm.config import VLLMConfig
from areal_x.engines.vllm.engine import VLLMEngine
from areal_x.errors import UserError
from areal_x.protocols.engine import Completion, EngineError, Request, SamplingParams
from tests.engines import conformance
from tests.engines.conformance import expected_logprobs
from tests.servers import Run, Weights
from tests.thorough import thorough

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("vllm")]

PROMPT = np.arange(2, 14, dtype=np.int32)


@pytest.mark.parametrize(
    "check",
    conformance.OF_SERVERS,
    ids=lambda check: check.__name__.removeprefix("check_"),
)
def test_it_does_what_every_engine_must(check: Any, vllm_engine: VLLMEngine, tiny_model_dir: Path, run: Run) -> None:
    run(check(vllm_engine, tiny_model_dir))


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(5, 1.0, 0.0), (0, 0.8, 0.0), (8, 0.7, 0.0), (0, 1.0, 0.9), (9, 0.8, 0.85)]
)
def test_truncated_sampling_is_what_every_engine_must_do(
    top_k: int, top_p: float, min_p: float, vllm_engine: VLLMEngine, tiny_model_dir: Path, run: Run
) -> None:
    run(conformance.check_truncated_sampling(vllm_engine, tiny_model_dir, top_k, top_p, min_p, deviations=12))


def test_requests_report_what_they_kept_beside_those_that_leave_nothing_out(vllm_engine: VLLMEngine, run: Run) -> None:
    run(conformance.check_requests_report_what_they_kept(vllm_engine))


def test_the_context_ends_a_completion_and_refuses_a_prompt(vllm_engine: VLLMEngine, run: Run) -> None:
    run(conformance.check_max_tokens_is_cut_to_the_room_left(vllm_engine))
    run(conformance.check_a_prompt_without_room_is_refused(vllm_engine, "vllm.context"))


def test_the_models_end_token_ends_nothing_unless_the_request_says_so(vllm_engine: VLLMEngine, run: Run) -> None:
    async def many() -> list[Completion]:
        sampling = SamplingParams(max_tokens=200, temperature=2.0)
        return await asyncio.gather(*(vllm_engine.generate(Request(PROMPT, sampling)) for _ in range(8)))

    completions = run(many())
    assert any(1 in completion.tokens for completion in completions)  # 1 is the end token of the model's config
    assert [len(completion.tokens) for completion in completions] == [200] * 8


def test_tokens_carry_the_version_that_was_published_last(vllm_engine: VLLMEngine, other_model_dir: Path, run: Run) -> None:
    trainer = Weights(other_model_dir, vllm_engine.version + 1)
    run(conformance.check_a_swap_leaves_no_prefix_of_the_old_weights(vllm_engine, trainer, other_model_dir))


def test_swaps_under_64_requests_lose_no_token_and_each_token_has_its_true_version_and_logprob(
    vllm_engine: VLLMEngine, tiny_model_dir: Path, other_model_dir: Path, run: Run
) -> None:
    requests = [
        Request(np.arange(2, 8 + i % 30, dtype=np.int32), SamplingParams(max_tokens=200 + i % 15, temperature=0.9))
        for i in range(64)
    ]

    async def generate_through_swaps(policy: dict[int, Path]) -> list[Completion]:
        running = [asyncio.create_task(vllm_engine.generate(request)) for request in requests]
        for version in sorted(policy)[1:]:
            await until_generating(vllm_engine, 20)
            assert await vllm_engine.swap(vllm_engine.stage(Weights(policy[version], version))) > 0
        return await asyncio.gather(*running)

    crossed = 0
    while crossed < len(requests) // 2:  # where this process gets no core, many end before the swaps
        first = vllm_engine.version
        policy = {first: tiny_model_dir, first + 1: other_model_dir, first + 2: tiny_model_dir}
        completions = run(generate_through_swaps(policy))
        assert [len(c.tokens) for c in completions] == [r.sampling.max_tokens for r in requests]
        for request, completion in list(zip(requests, completions, strict=True))[::8]:
            assert (np.diff(completion.versions) >= 0).all()
            by_version = [expected_logprobs(policy[version], request, completion) for version in sorted(policy)]
            np.testing.assert_allclose(completion.logprobs, np.choose(completion.versions - first, by_version), atol=1e-4)
        crossed = sum(set(c.versions) == set(policy) for c in completions)


async def until_generating(engine: VLLMEngine, tokens: int) -> None:
    """Returns when a later request has got its tokens: those in flight before it then have about as many."""
    await engine.generate(Request(PROMPT, SamplingParams(max_tokens=tokens)))


@pytest.mark.log_errors(
    "ValueError: refused to read weights from", "Exception: Call to collective_rpc method failed: refused to"
)
def test_a_folder_outside_the_staging_root_is_refused_and_generation_goes_on(
    vllm_engine: VLLMEngine, other_model_dir: Path, run: Run
) -> None:
    version = vllm_engine.version
    with pytest.raises(EngineError, match="outside the staging folder"):
        run(vllm_engine.swap(StagedFiles(folder=other_model_dir, version=version + 1)))
    completion = run(vllm_engine.generate(Request(PROMPT, SamplingParams(max_tokens=5))))
    np.testing.assert_array_equal(completion.versions, version)
    assert vllm_engine.version == version


def test_a_server_says_how_many_workers_it_has_and_forgets_who_sent_it_weights(given_url: tuple[str, str], run: Run) -> None:
    async def ask() -> int:
        client = VLLMClient(*given_url)
        await client.end_weight_transfer()
        workers = await client.workers()
        await client.close()
        return workers

    assert run(ask()) == 1


def test_given_urls_are_used_as_they_are_and_left_running(
    given_url: tuple[str, str], tiny_model_dir: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, key = given_url
    monkeypatch.setenv("MY_KEY", key)
    engine = VLLMEngine(VLLMConfig(urls=(url,), key_variable="MY_KEY"), tiny_model_dir, tmp_path)

    async def use() -> list[Completion]:
        await engine.start()
        try:
            await engine.swap(await asyncio.to_thread(engine.stage, Weights(tiny_model_dir, 1000)))
            requests = [Request(PROMPT, SamplingParams(max_tokens=n)) for n in (3, 4, 5)]
            return await asyncio.gather(*(engine.generate(request) for request in requests))
        finally:
            await engine.close()
            await engine.close()

    completions = run(use())
    assert [len(completion.tokens) for completion in completions] == [3, 4, 5]
    assert set(np.concatenate([completion.versions for completion in completions])) == {1000}
    assert engine.context == 256  # the server's own, where the model would allow 512
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_key_is_one_sentence(
    given_url: tuple[str, str], tiny_model_dir: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "wrong")
    engine = VLLMEngine(VLLMConfig(urls=(given_url[0],), key_variable="MY_KEY"), tiny_model_dir, tmp_path)
    with pytest.raises(UserError, match=r"refused the key: .* vllm\.key_variable"):
        run(engine.start())


def test_a_url_where_no_server_is_is_one_sentence(tiny_model_dir: Path, tmp_path: Path, run: Run) -> None:
    engine = VLLMEngine(VLLMConfig(urls=("http://127.0.0.1:1",)), tiny_model_dir, tmp_path)
    with pytest.raises(UserError, match=r"no vLLM server answers at http://127\.0\.0\.1:1"):
        run(engine.start())


@thorough
def test_a_server_that_dies_at_start_says_why_and_leaves_nothing(tiny_model_dir: Path, tmp_path: Path, run: Run) -> None:
    config = VLLMConfig(context=256, arguments=("--no-such-flag",), staging=str(tmp_path / "staging"))
    lines: list[str] = []
    engine = VLLMEngine(config, tiny_model_dir, tmp_path / "logs", lines.append)
    with pytest.raises(UserError, match=r"server 1 of 1 died at start: .*unrecognized arguments: --no-such-flag .*vllm-0\.log"):
        run(engine.start())
    assert engine._servers == []
    assert list((tmp_path / "staging").iterdir()) == []
    assert "vLLM server 1 of 1 is starting" in lines[0]
    run(engine.close())


@thorough
@pytest.mark.loses(r"^vLLM server 1 of 1 is lost ")
def test_a_server_killed_under_requests_takes_none_with_it_and_comes_back_with_the_newest_weights(
    given_url: tuple[str, str],
    tiny_model_dir: Path,
    other_model_dir: Path,
    tmp_path: Path,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server that the engine started; another one, which was running before, goes on."""
    url, key = given_url
    monkeypatch.setenv("MY_KEY", key)
    lines: list[str] = []
    config = VLLMConfig(context=256, slice_tokens=32, heartbeat_seconds=1.0, key_variable="MY_KEY")
    engine = VLLMEngine(config, tiny_model_dir, tmp_path, report=lines.append)
    requests = [Request(PROMPT[: 4 + i % 8], SamplingParams(max_tokens=200 + i)) for i in range(24)]

    async def kill_under_requests() -> tuple[list[Completion], Completion]:
        await engine.start()
        await engine.swap(engine.stage(Weights(tiny_model_dir, 1)))
        await engine.join(url)
        running = [asyncio.create_task(engine.generate(request)) for request in requests]
        await until_generating(engine, 5)
        for process in psutil.Process(engine._servers[0].process.pid).children():
            process.kill()
        while len(engine.fleet.serving()) == 2:
            await asyncio.sleep(0.01)
        await engine.swap(engine.stage(Weights(other_model_dir, 2)))
        completions = await asyncio.gather(*running)
        while len(engine.fleet.serving()) < 2:
            await asyncio.sleep(0.1)
        return completions, await engine.supervisor.replicas["vLLM server 1 of 1"].client.generate(
            PROMPT, SamplingParams(max_tokens=40)
        )

    try:
        completions, back = run(kill_under_requests())
    finally:
        run(engine.close())
    policy = {1: tiny_model_dir, 2: other_model_dir}
    assert [len(completion.tokens) for completion in completions] == [request.sampling.max_tokens for request in requests]
    for request, completion in zip(requests, completions, strict=True):
        assert set(completion.versions.tolist()) <= {1, 2}
        by_version = [expected_logprobs(policy[version], request, completion) for version in (1, 2)]
        np.testing.assert_allclose(completion.logprobs, np.choose(completion.versions - 1, by_version), atol=1e-4)
    np.testing.assert_array_equal(back.versions, 2)
    expected = expected_logprobs(other_model_dir, Request(PROMPT, SamplingParams()), back)
    np.testing.assert_allclose(back.logprobs, expected, atol=1e-4)
    assert any("vLLM server 1 of 1 is lost" in line for line in lines)
    assert lines[-1] == "vLLM server 1 of 1 serves again, with the weights of version 2"
