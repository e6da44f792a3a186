"""A real vLLM server that gets deltas computes what one does that gets whole weights."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
import pytest

from areal_x.engines.fleet.proof.claims import read_claims
from areal_x.engines.fleet.proof.judge import judge, parsed
from areal_x.engines.fleet.proof.prover import question
from areal_x.engines.vllm.config import VLLMConfig
from areal_x.engines.vllm.engine import VLLMEngine
from areal_x.hf.model_dir import read_tensors, write_model
from areal_x.protocols.engine import Completion, Request, SamplingParams
from tests.engines.conformance import expected_logprobs
from tests.servers import Run, Weights
from tests.thorough import thorough

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("vllm")]

GREEDY = Request(np.arange(2, 14, dtype=np.int32), SamplingParams(max_tokens=40, temperature=0.0))


@dataclass
class Policy:
    """A trainer whose steps change a fiftieth of the numbers of each tensor, and that keeps each version's directory."""

    source: Path
    folder: Path
    version: int = 0
    directories: dict[int, Path] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.directories[0] = self.source

    def weights(self) -> Iterator[tuple[str, np.ndarray]]:
        return read_tensors(self.directories[self.version])

    def step(self) -> None:
        rng = np.random.default_rng(self.version)
        tensors = dict(self.weights())
        for x in tensors.values():
            x[rng.random(x.shape) < 0.02] *= np.float32(1.5)
        self.version += 1
        write_model(self.folder / f"{self.version}", self.source, tensors.items())
        self.directories[self.version] = self.folder / f"{self.version}"


def assert_of(completion: Completion, request: Request, policy: Policy) -> None:
    assert len(completion.tokens) == request.sampling.max_tokens
    assert (np.diff(completion.versions) >= 0).all()
    for version in set(completion.versions.tolist()):
        its = completion.versions == version
        expected = expected_logprobs(policy.directories[version], request, completion)
        np.testing.assert_allclose(completion.logprobs[its], expected[its], atol=1e-4)


def test_under_load_each_delta_is_proved_loses_nothing_and_gives_the_logprobs_of_whole_weights(
    vllm_engine: VLLMEngine, tiny_model_dir: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    (server,) = vllm_engine._servers
    monkeypatch.setenv("VLLM_API_KEY", server.key)
    said: list[str] = []
    cache = tmp_path / "cache"
    config = VLLMConfig(
        urls=(server.url,), delta=100, delta_cache=f"{cache}", staging=f"{tmp_path / 'staging'}", prove_every=1, concurrency=32
    )
    engine = VLLMEngine(config, tiny_model_dir, tmp_path, said.append)
    policy = Policy(tiny_model_dir, tmp_path)
    requests = [Request(np.arange(2, 8 + i, dtype=np.int32), SamplingParams(max_tokens=200)) for i in range(16)]

    async def through_swaps() -> list[Completion]:
        await engine.start()
        await engine.swap(engine.stage(policy))
        running = [asyncio.create_task(engine.generate(request)) for request in requests]
        for _ in range(4):
            await engine.generate(Request(GREEDY.tokens, SamplingParams(max_tokens=10)))  # the others go on meanwhile
            policy.step()
            assert await engine.swap(engine.stage(policy)) > 0
            assert engine.balance(0.0, 0.0)["published_share"] < 0.3
            staged = engine.stager.current
            assert staged is not None
            assert staged.base
            (claims, (client,)) = (read_claims(staged.folder), engine._clients)
            assert claims is not None
            assert claims.full
            verdict = judge(claims, [parsed(answer) for answer in await client.prove(question(claims))])
            assert verdict.differences == []
            assert verdict.unproved == {}
        return await asyncio.gather(*running)

    completions = run(through_swaps())
    try:
        assert said == []
        for request, completion in list(zip(requests, completions, strict=True))[::4]:
            assert_of(completion, request, policy)
        assert any(len(set(completion.versions.tolist())) > 2 for completion in completions)
        (made,) = cache.glob("*/*/*.safetensors")
        whole = dict(policy.weights())
        found = dict(read_tensors(made.parent))
        assert {name: x.tobytes() for name, x in found.items()} == {name: x.tobytes() for name, x in whole.items()}
        by_deltas = run(engine.generate(GREEDY))
    finally:
        run(engine.close())
    assert list(cache.iterdir()) == []
    run(vllm_engine.swap(vllm_engine.stage(Weights(policy.directories[4], vllm_engine.version + 1))))
    by_files = run(vllm_engine.generate(GREEDY))
    np.testing.assert_array_equal(by_deltas.tokens, by_files.tokens)
    np.testing.assert_array_equal(by_deltas.logprobs, by_files.logprobs)


@thorough
@pytest.mark.loses(r"^vLLM server 1 of 1 is lost ")
def test_a_server_that_was_restarted_gets_whole_weights_and_then_deltas_again(
    tiny_model_dir: Path, tmp_path: Path, run: Run
) -> None:
    said: list[str] = []
    config = VLLMConfig(
        context=256, concurrency=8, delta=100, delta_cache=f"{tmp_path / 'cache'}", prove_every=1, heartbeat_seconds=1.0
    )
    engine = VLLMEngine(config, tiny_model_dir, tmp_path, said.append)
    policy = Policy(tiny_model_dir, tmp_path)

    async def shares(steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            policy.step()
            await engine.swap(engine.stage(policy))
            found.append(engine.balance(0.0, 0.0)["published_share"])
        return found

    async def scenario() -> None:
        await engine.start()
        await engine.swap(engine.stage(policy))
        assert max(await shares(2)) < 0.3
        for process in psutil.Process(engine._servers[0].pid).children():
            process.kill()
        completion = await engine.generate(GREEDY)  # waits until the server is back
        assert set(completion.versions.tolist()) == {2}
        assert_of(completion, GREEDY, policy)
        assert [line for line in said if "whole" in line] == [
            "vLLM server 1 of 1 gets version 2 whole: the server does not have the version before"
        ]
        assert max(await shares(2)) < 0.3
        assert_of(await engine.generate(GREEDY), GREEDY, policy)
        assert sum("whole" in line for line in said) == 1

    try:
        run(scenario())
    finally:
        run(engine.close())
