"""What a real SGLang server is protected from, and what becomes of one that dies."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from areal_x.engines.fleet.failures import ServerRefused
from areal_x.engines.fleet.http import Pool
from areal_x.engines.sglang import launcher
from areal_x.engines.sglang.config import SGLangConfig
from areal_x.engines.sglang.engine import SGLangEngine
from areal_x.errors import TaskError, UserError
from areal_x.hf.model_dir import read_tensors
from areal_x.preflight.servers import check_sglang_servers
from areal_x.protocols.engine import Request, SamplingParams
from tests.engines.conformance import expected_logprobs
from tests.engines.sglang.conftest import PYTHON
from tests.processes import lives
from tests.servers import Run, Weights

pytestmark = [pytest.mark.sglang, pytest.mark.xdist_group("sglang")]

PROMPT = np.arange(2, 14, dtype=np.int32)
GREEDY = Request(PROMPT, SamplingParams(max_tokens=20, temperature=0.0))


def family(engine: SGLangEngine) -> list[psutil.Process]:
    """All processes of an engine's servers, without their watchdogs."""
    found = [child for server in engine._servers for child in psutil.Process(server.pid).children(recursive=True)]
    return [process for process in found if "sglang" in " ".join(process.cmdline()).lower()]


def test_no_endpoint_but_signs_of_life_answers_without_the_key_and_nobody_can_read_it(
    sglang_engine: SGLangEngine, run: Run
) -> None:
    (server,) = sglang_engine._servers

    async def statuses(key: str | None) -> dict[str, int]:
        pool = Pool(server.url, key)
        paths = [
            *("/generate", "/update_weights_from_disk", "/update_weight_version", "/pause_generation", "/abort_request"),
            *("/flush_cache", "/load_lora_adapter", "/continue_generation", "/begin_weight_update", "/v1/chat/completions"),
        ]
        found = {path: (await pool.request("POST", path, b"{}"))[0] for path in paths if key != server.key}
        found |= {path: (await pool.request("GET", path, None))[0] for path in ("/server_info", "/model_info", "/v1/models")}
        pool.close()
        return found

    for key in (None, "another"):
        assert set(run(statuses(key)).values()) == {401}
    assert 401 not in run(statuses(server.key)).values()
    processes = family(sglang_engine)
    assert len(processes) >= 3  # serves, schedules, detokenises
    assert not any(server.key in word for process in processes for word in process.cmdline())
    assert server.key not in server.log.read_text()


def test_what_would_kill_the_server_or_leave_it_half_loaded_is_refused_before(
    sglang_engine: SGLangEngine, tiny_model_dir: Path, tmp_path: Path, run: Run
) -> None:
    before, version = run(sglang_engine.generate(GREEDY)), sglang_engine.version
    with pytest.raises(TaskError, match="vocabulary"):
        run(sglang_engine.generate(Request(np.int32([3, 10**6]), SamplingParams())))

    class Fewer(Weights):
        def weights(self) -> Iterator[tuple[str, np.ndarray]]:
            return (item for item in read_tensors(self.directory) if "layers.0.self_attn.q_proj" not in item[0])

    class Wider(Weights):
        def weights(self) -> Iterator[tuple[str, np.ndarray]]:
            return ((name, np.repeat(x, 2, 0) if "norm" in name else x) for name, x in read_tensors(self.directory))

    for kind, words in ((Fewer, "lack .*q_proj"), (Wider, "other shapes")):
        staged = sglang_engine.stage(kind(tiny_model_dir, version + 1))
        with pytest.raises(ServerRefused, match=words):
            run(sglang_engine.swap(staged))
    after = run(sglang_engine.generate(GREEDY))
    assert sglang_engine.version == version
    assert (after.tokens.tolist(), set(after.versions.tolist())) == (before.tokens.tolist(), {version})


def test_check_finds_a_running_server_and_refuses_another_key(
    sglang_engine: SGLangEngine, monkeypatch: pytest.MonkeyPatch, tiny_model_dir: Path, tmp_path: Path, run: Run
) -> None:
    (server,) = sglang_engine._servers
    config = SGLangConfig(urls=(server.url,))
    monkeypatch.setenv("SGLANG_API_KEY", server.key)
    assert check_sglang_servers(config) == f"1 answer, with a context of {256 + 1}"
    other = SGLangEngine(config, tiny_model_dir, tmp_path, lambda line: None)
    monkeypatch.setenv("SGLANG_API_KEY", "another")
    with pytest.raises(UserError, match=r"refused the key .* sglang\.key_variable"):
        check_sglang_servers(config)
    with pytest.raises(UserError, match=r"refused the key"):
        run(other.start())
    assert "will be started, by SGLang 0.5." in check_sglang_servers(SGLangConfig(python=PYTHON))


@pytest.mark.loses(r"is lost \(.*restarted")
def test_a_killed_servers_requests_are_answered_by_its_next_process_and_no_process_is_left(
    tiny_model_dir: Path, other_model_dir: Path, tmp_path: Path, run: Run
) -> None:
    config = SGLangConfig(context=256, concurrency=8, python=PYTHON, heartbeat_seconds=1.0, slice_tokens=32)
    engine = SGLangEngine(config, tiny_model_dir, tmp_path, lambda line: None)

    async def through_a_death() -> list[psutil.Process]:
        await engine.start()
        try:
            await engine.swap(await asyncio.to_thread(engine.stage, Weights(other_model_dir, 1)))
            first = family(engine)
            requests = [Request(PROMPT, SamplingParams(max_tokens=230, temperature=0.0))] * 8
            running = [asyncio.create_task(engine.generate(request)) for request in requests]
            await engine.generate(Request(PROMPT, SamplingParams(max_tokens=2)))
            commands = {process: process.cmdline() for process in first}  # of all, before the others end with one
            for process, words in commands.items():
                if launcher.__file__ in words or "sglang::scheduler" in " ".join(words):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
            for request, completion in zip(requests, await asyncio.gather(*running), strict=True):
                assert (len(completion.tokens), set(completion.versions.tolist())) == (230, {1})
                np.testing.assert_allclose(
                    completion.logprobs, expected_logprobs(other_model_dir, request, completion), atol=1e-4
                )
            return [*first, *family(engine)]
        finally:
            await engine.close()

    processes = run(through_a_death())
    assert len({process.pid for process in processes}) >= 6
    assert not any(map(lives, processes))


def test_samples_of_a_server_that_samples_by_seeds_differ(tiny_model_dir: Path, tmp_path: Path, run: Run) -> None:
    """A request without a seed would get the same one as every other."""
    arguments = ("--enable-deterministic-inference",)
    config = SGLangConfig(context=256, concurrency=8, python=PYTHON, arguments=arguments)
    engine = SGLangEngine(config, tiny_model_dir, tmp_path, lambda line: None)

    async def sample() -> list[tuple[int, ...]]:
        await engine.start()
        try:
            request = Request(PROMPT, SamplingParams(max_tokens=20))
            with pytest.raises(UserError, match=r"sampling\.min_p = 0\.1 ends the SGLang server"):
                await engine.generate(Request(PROMPT, SamplingParams(min_p=0.1)))
            found = await asyncio.gather(*(engine.generate(request) for _ in range(8)))
            return [tuple(completion.tokens.tolist()) for completion in found]
        finally:
            await engine.close()

    assert len(set(run(sample()))) == 8
