"""Updates that break off: nothing is sampled from parts of two policies. On a real server of a model with a tied head, which a
process of its own started and is killed at the end."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest

from areal_x.engines.fleet.manifest import MANIFEST
from areal_x.engines.fleet.replica import ExternalServer
from areal_x.engines.fleet.staging import CopiedWeights, StagedFiles
from areal_x.engines.vllm.client import VLLMClient
from areal_x.engines.vllm.config import VLLMConfig
from areal_x.engines.vllm.engine import VLLMEngine
from areal_x.protocols.engine import Completion, EngineError, Request, SamplingParams
from areal_x.testing.models import write_model
from tests.engines.conformance import expected_logprobs
from tests.engines.fleet.watching import LOGS, Watch
from tests.servers import Run, Weights
from tests.thorough import thorough

pytestmark = [thorough, pytest.mark.server, pytest.mark.xdist_group("vllm-torn")]

LONG = Request(np.arange(2, 14, dtype=np.int32), SamplingParams(max_tokens=450))
SHORT = Request(np.arange(2, 14, dtype=np.int32), SamplingParams(max_tokens=5))
WRONG = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def other_tied_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("other"), tie_word_embeddings=True, seed=5)


OWNER = """
import asyncio, json, sys
from pathlib import Path
from areal_x.engines.vllm.config import VLLMConfig
from areal_x.engines.vllm.engine import VLLMEngine

async def main():
    model, logs, staging = map(Path, sys.argv[1:])
    config = VLLMConfig(context=512, concurrency=8, staging=str(staging), arguments=("--num-gpu-blocks-override", "64"))
    engine = VLLMEngine(config, model, logs, report=lambda line: None)
    await engine.start()
    (server,) = engine._servers
    print(json.dumps({"pid": server.process.pid, "url": server.url, "key": server.key}), flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@dataclass(frozen=True)
class Owned:
    """A server, and the process that started it."""

    owner: subprocess.Popen[str]
    pid: int  # of the server's guard
    url: str
    key: str
    staging: Path


@pytest.fixture(scope="module")
def server(tied_model_dir: Path, tmp_path_factory: pytest.TempPathFactory, watch: Watch) -> Iterator[Owned]:
    folder = tmp_path_factory.mktemp("vllm")
    logs, staging = folder / "logs", folder / "staging"
    words = [sys.executable, "-c", OWNER, str(tied_model_dir), str(logs), str(staging)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as owner:
        try:
            assert owner.stdout is not None
            started = json.loads(owner.stdout.readline())
            (log,) = logs.glob(LOGS)
            watch.logs.setdefault(log, 0)
            yield Owned(owner, staging=staging, **started)
        finally:
            owner.kill()


@pytest.fixture
def engine(
    server: Owned, tied_model_dir: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> Iterator[VLLMEngine]:
    """An engine over the same server, as an external one, so that it is not restarted when it is lost."""
    monkeypatch.setenv("VLLM_API_KEY", server.key)
    engine = VLLMEngine(VLLMConfig(urls=(server.url,), heartbeat_seconds=1.0), tied_model_dir, tmp_path)
    run(engine.start())
    run(engine.swap(engine.stage(Weights(tied_model_dir, 1))))
    yield engine
    run(engine.close())


def assert_of(completion: Completion, request: Request, policies: dict[int, Path]) -> None:
    assert len(completion.tokens) == request.sampling.max_tokens
    by_version = {version: expected_logprobs(directory, request, completion) for version, directory in policies.items()}
    expected = [by_version[version][i] for i, version in enumerate(completion.versions.tolist())]
    np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


def test_a_tied_head_says_what_new_weights_say(engine: VLLMEngine, other_tied_dir: Path, run: Run) -> None:
    run(engine.swap(engine.stage(Weights(other_tied_dir, 2))))
    assert_of(run(engine.generate(LONG)), LONG, {2: other_tied_dir})


def damaged(copied: CopiedWeights, how: str) -> StagedFiles:
    """In two files, of which the second is wrong."""
    from safetensors.numpy import load_file, save_file

    staged = copied.files.result()
    (file,) = staged.folder.glob("*.safetensors")
    tensors = load_file(file)
    second = {name: tensors.pop(name) for name in list(tensors) if name.startswith("model.layers.1.")}
    if how == "a wrong shape":
        second[WRONG] = np.zeros((3, 5), np.float32)
    if how == "a part is missing":
        del second["model.layers.1.self_attn.k_proj.weight"]
    save_file(tensors, file)
    save_file(second, staged.folder / "00001.safetensors")
    (staged.folder / MANIFEST).write_text(
        json.dumps({file.name: file.stat().st_size for file in staged.folder.glob("*.safetensors")})
    )
    if how == "cut short":
        with (staged.folder / "00001.safetensors").open("r+b") as opened:
            opened.truncate(opened.seek(0, 2) // 2)
    return staged


@pytest.mark.log_errors("")
@pytest.mark.loses("it stays paused until it has whole weights")
@pytest.mark.parametrize("how", ["a wrong shape", "a part is missing"])
def test_a_server_whose_update_broke_off_draws_nothing_until_it_has_whole_weights(
    how: str, engine: VLLMEngine, tied_model_dir: Path, other_tied_dir: Path, run: Run
) -> None:
    (replica,) = engine.supervisor.replicas.values()
    staged = damaged(engine.stage(Weights(other_tied_dir, 2)), how)

    async def break_off() -> list[Completion]:
        assert isinstance(replica.origin, ExternalServer)
        client = replica.origin.connect()
        # One of somebody else, which stays with the server through all of it, and one of the engine, which is drawn again.
        running = [asyncio.create_task(client.generate(LONG.tokens, LONG.sampling)), asyncio.create_task(engine.generate(LONG))]
        await engine.generate(SHORT)
        with pytest.raises(EngineError, match="it stays paused until it has whole weights"):
            await engine.swap(staged)
        assert engine.fleet.serving() == []
        try:
            return await asyncio.gather(*running)
        finally:
            await client.close()

    for completion in run(break_off()):
        assert_of(completion, LONG, {1: tied_model_dir})
    assert engine.version == 1
    run(engine.swap(engine.stage(Weights(other_tied_dir, 3))))
    assert_of(run(engine.generate(SHORT)), SHORT, {3: other_tied_dir})


@pytest.mark.log_errors("cannot be read", "SafetensorError: ")
def test_a_file_that_was_cut_short_is_refused_before_anything_stops(
    engine: VLLMEngine, tied_model_dir: Path, other_tied_dir: Path, run: Run
) -> None:
    staged = damaged(engine.stage(Weights(other_tied_dir, 2)), "cut short")

    async def refuse() -> Completion:
        running = asyncio.create_task(engine.generate(LONG))
        await engine.generate(SHORT)
        with pytest.raises(EngineError, match=r"00001\.safetensors cannot be read"):
            await engine.swap(staged)
        assert len(engine.fleet.serving()) == 1
        return await running

    assert_of(run(refuse()), LONG, {1: tied_model_dir})


@pytest.mark.log_errors("already active")
def test_a_server_left_in_the_middle_of_an_update_by_a_run_that_was_killed_is_used_by_the_next(
    server: Owned, tied_model_dir: Path, other_tied_dir: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", server.key)
    engine = VLLMEngine(VLLMConfig(urls=(server.url,)), tied_model_dir, tmp_path)

    async def next_run() -> Completion:
        client = VLLMClient(server.url, server.key)
        try:
            await client.pause()
            await client.start_update()
            await engine.start()
            assert await client.is_paused()
            await engine.swap(await asyncio.to_thread(engine.stage, Weights(other_tied_dir, 1)))
            return await engine.generate(SHORT)
        finally:
            await client.close()
            await engine.close()

    assert_of(run(next_run()), SHORT, {1: other_tied_dir})


def test_a_run_killed_with_sigkill_leaves_no_server_and_no_weights(server: Owned) -> None:
    guard = psutil.Process(server.pid)
    processes = [guard, *guard.children(recursive=True)]
    assert len(processes) >= 3  # the guard, the front end, the engine
    assert server.staging.is_dir()
    server.owner.kill()
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert alive == []
    assert list(server.staging.iterdir()) == []
