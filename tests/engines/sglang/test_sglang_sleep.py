"""Servers that sleep and wake, against real SGLang servers, and the memory that their workers release on a CPU."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from areal_x.engines.sglang import cpu_sleep
from areal_x.engines.sglang.client import SGLangClient
from areal_x.engines.sglang.config import SGLangConfig
from areal_x.engines.sglang.engine import SGLangEngine
from areal_x.engines.sglang.server import cache_tokens
from areal_x.runtime.footprint import memory_bytes
from areal_x.testing.models import write_model
from tests.engines import turns
from tests.engines.sglang.conftest import PYTHON
from tests.engines.turns import MEBIBYTE, resident
from tests.servers import Run, Weights

real = [pytest.mark.sglang, pytest.mark.xdist_group("sglang")]
SERVED: dict[str, Any] = {"context": 256, "concurrency": 16, "python": PYTHON, "prove_every": 1}


def marked(function: Any) -> Any:
    for mark in real:
        function = mark(function)
    return function


def sleeping(model: Path, logs: Path, **settings: Any) -> SGLangEngine:
    return SGLangEngine(SGLangConfig(**SERVED | settings), model, logs, lambda _: None, sleeps=True)


async def checksums(engine: SGLangEngine) -> Any:
    """SGLang's own digests of the weights that the server has."""
    (client,) = engine._clients
    assert isinstance(client, SGLangClient)
    answer = await client._control("/weights_checker", {"action": "checksum"})
    return [worker["checksums"] for worker in answer["ranks"]]


@marked
def test_requests_go_on_after_a_sleep_that_drops_the_weights_with_and_without_new_ones(
    sglang_engine: SGLangEngine, tiny_model_dir: Path, other_model_dir: Path, run: Run
) -> None:
    turns.check_requests_go_on_after_a_sleep_that_drops_the_weights(
        sglang_engine, partial(checksums, sglang_engine), tiny_model_dir, other_model_dir, run
    )


@marked
@pytest.mark.parametrize(("backend", "max_staleness"), [("jax", 0), ("torch", 1)])
def test_a_trainer_and_a_server_take_turns_and_each_token_has_its_true_version_and_logprob(
    backend: str, max_staleness: int, tiny_model_dir: Path, tmp_path: Path
) -> None:
    """Each version is proved before the server that it wakes goes on."""
    pytest.importorskip(backend)
    engine = sleeping(tiny_model_dir, tmp_path)
    turns.check_each_token_has_its_true_version_and_logprob_in_turns(engine, backend, max_staleness, tiny_model_dir, tmp_path)


@marked
@pytest.mark.loses("SGLang server 1 of 1 is lost")
def test_a_server_that_dies_asleep_comes_back_in_the_servers_turn_and_answers_what_it_had(
    tiny_model_dir: Path, other_model_dir: Path, tmp_path: Path, run: Run
) -> None:
    engine = sleeping(tiny_model_dir, tmp_path, heartbeat_seconds=1.0)
    turns.check_a_server_that_dies_asleep_comes_back_in_the_servers_turn(engine, tiny_model_dir, other_model_dir, run)


@marked
@pytest.mark.parametrize("tensor", [1, 2])
def test_a_server_that_sleeps_has_given_its_caches_and_weights_back_to_the_operating_system(
    tensor: int, tmp_path: Path, run: Run
) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}
    layers = 4
    model = write_model(tmp_path / "model", num_hidden_layers=layers, **sizes)
    engine = sleeping(model, tmp_path, concurrency=64, tensor=tensor)
    held: dict[str, float] = {}

    def measure(name: str) -> None:
        parent = psutil.Process(engine._servers[0].pid)
        held[name] = memory_bytes([parent.pid, *(p.pid for p in parent.children(recursive=True))], 0) / MEBIBYTE

    async def sleep_and_wake() -> None:
        await engine.start()
        await engine.swap(await asyncio.to_thread(engine.stage, Weights(model, 1)))
        measure("awake")
        await engine.sleep()
        measure("asleep")
        await engine.wake()
        measure("awake again")

    try:
        run(sleep_and_wake())
        weights = (model / "model.safetensors").stat().st_size / MEBIBYTE
        caches = cache_tokens(engine.launch(0)) * 2 * 4 * layers * 4 * 64 / MEBIBYTE
    finally:
        run(engine.close())
    print(f"{held}, of which weights {weights:.0f} and caches {caches:.0f} MiB")
    assert held["awake"] - held["asleep"] > 0.95 * (weights + caches)
    assert 0.95 * weights < held["awake again"] - held["asleep"] < weights + caches / 2


def test_a_worker_on_a_cpu_gives_the_pages_of_all_its_caches_and_of_its_weights_back() -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(2048, 2048, bias=False)  # 16 MiB

    def buffers() -> list[Any]:
        return [torch.ones(2 * MEBIBYTE // 4), torch.ones(2 * MEBIBYTE // 4)]

    keys, values, latent = buffers(), buffers(), buffers()
    places = torch.ones(2 * MEBIBYTE // 4)
    full = SimpleNamespace(k_buffer=keys, v_buffer=values, k_scale_buffer=None, k_data_ptrs=places)
    pool = SimpleNamespace(size=8, full_kv_pool=full, swa_kv_pool=SimpleNamespace(kv_buffer=latent))
    runner = SimpleNamespace(token_to_kv_pool=pool, model=model)

    def held() -> list[float]:
        return [sum(map(resident, caches)) for caches in (keys, values, latent, [places], [model.weight])]

    assert held() == pytest.approx([4, 4, 4, 2, 16], abs=0.05)
    cpu_sleep.release_pages(runner, caches=True, weights=False)
    assert held() == pytest.approx([0, 0, 0, 2, 16], abs=0.05)
    cpu_sleep.release_pages(runner, caches=False, weights=True)
    assert held() == pytest.approx([0, 0, 0, 2, 0], abs=0.05)
    torch.nn.init.ones_(model.weight)
    keys[1].fill_(3)
    assert held() == pytest.approx([2, 0, 0, 2, 16], abs=0.05)
    assert float(model.weight.detach().mean() + keys[1].mean()) == 4
