"""Servers that sleep and wake, against a real vLLM server, and the memory that its workers release on a CPU."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from areal_x.engines.vllm import cpu_sleep
from areal_x.engines.vllm.client import vllm_client
from areal_x.engines.vllm.config import VLLMConfig
from areal_x.engines.vllm.engine import VLLMEngine
from areal_x.errors import UserError
from tests.engines import turns
from tests.engines.turns import MEBIBYTE, resident
from tests.servers import Run
from tests.thorough import further, thorough


async def checksums(engine: VLLMEngine) -> Any:
    """vLLM's own digests of the weights that the server has."""
    (replica,) = engine.supervisor.replicas.values()
    body = {"method": "compute_weight_checksums"}
    answer = await vllm_client(replica).calls.json("POST", "/collective_rpc", body)
    return answer["results"]


@pytest.mark.server
@pytest.mark.xdist_group("vllm")
def test_requests_go_on_after_a_sleep_that_drops_the_weights_with_and_without_new_ones(
    vllm_engine: VLLMEngine, tiny_model_dir: Path, other_model_dir: Path, run: Run
) -> None:
    turns.check_requests_go_on_after_a_sleep_that_drops_the_weights(
        vllm_engine, partial(checksums, vllm_engine), tiny_model_dir, other_model_dir, run
    )


@pytest.mark.server
@pytest.mark.xdist_group("vllm")
@pytest.mark.parametrize(("backend", "max_staleness"), [("jax", 0), ("torch", 1), *further(("jax", 1), ("torch", 0))])
def test_a_trainer_and_a_server_take_turns_and_each_token_has_its_true_version_and_logprob(
    backend: str,
    max_staleness: int,
    given_url: tuple[str, str],
    tiny_model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MY_KEY", given_url[1])
    engine = VLLMEngine(VLLMConfig(urls=(given_url[0],), key_variable="MY_KEY"), tiny_model_dir, tmp_path, sleeps=True)
    turns.check_each_token_has_its_true_version_and_logprob_in_turns(engine, backend, max_staleness, tiny_model_dir, tmp_path)


@pytest.mark.server
@pytest.mark.xdist_group("vllm")
def test_nothing_joins_servers_that_take_turns_with_the_trainer(vllm_engine: VLLMEngine, run: Run) -> None:
    vllm_engine.sleeps = True
    try:
        with pytest.raises(UserError, match=r"cannot join: with train\.colocate = True"):
            run(vllm_engine.join("http://127.0.0.1:9"))
    finally:
        vllm_engine.sleeps = False


@thorough
@pytest.mark.server
@pytest.mark.xdist_group("vllm")
@pytest.mark.loses("vLLM server 1 of 1 is lost")
def test_a_server_that_dies_asleep_comes_back_in_the_servers_turn_and_answers_what_it_had(
    tiny_model_dir: Path, other_model_dir: Path, tmp_path: Path, run: Run
) -> None:
    config = VLLMConfig(context=256, heartbeat_seconds=1.0)
    engine = VLLMEngine(config, tiny_model_dir, tmp_path, lambda _: None, sleeps=True)
    turns.check_a_server_that_dies_asleep_comes_back_in_the_servers_turn(engine, tiny_model_dir, other_model_dir, run)


def test_a_worker_on_a_cpu_gives_the_pages_of_caches_and_weights_back_and_can_fill_them_again() -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(2048, 4096, bias=False))  # 32 MiB
    model[0].cpu_linear = torch.nn.functional.linear
    torch.nn.init.ones_(model[0].weight)
    caches = [[torch.ones(16 * MEBIBYTE // 4)], torch.ones(16 * MEBIBYTE // 4)]
    worker = SimpleNamespace(model_runner=SimpleNamespace(kv_caches=caches), get_model=lambda: model)

    weight = model[0].weight

    assert [resident(x) for x in (weight, caches[0][0], caches[1])] == pytest.approx([32, 16, 16], abs=0.01)
    cpu_sleep.sleep(worker, level=1)
    assert [resident(x) for x in (weight, caches[0][0], caches[1])] == pytest.approx([32, 0, 0], abs=0.01)
    assert weight.min() == 1  # on the host already
    cpu_sleep.sleep(worker, level=2)
    assert resident(weight) == pytest.approx(0, abs=0.01)
    assert not model[0].weight.flatten()[4096:-4096].any()  # all whole pages
    with pytest.raises(RuntimeError, match="not loaded again"):
        model[0].cpu_linear()
    cpu_sleep.wake_up(worker)
    with torch.no_grad():
        model[0].weight.fill_(2)
    caches[1].fill_(3)
    assert [resident(x) for x in (weight, caches[0][0], caches[1])] == pytest.approx([32, 0, 16], abs=0.01)
    assert float(model[0].weight.detach().mean() + caches[1].mean()) == 5
