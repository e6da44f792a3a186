"""Adapters that a trainer publishes to a real SGLang server, each version under a name of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from areal_x.engines.fleet.named_adapters import AdapterRoom
from areal_x.engines.scoring import server_scorer
from areal_x.engines.sglang.config import SGLangConfig
from areal_x.engines.sglang.engine import SGLangEngine
from areal_x.engines.vllm.config import VLLMConfig
from areal_x.hf.tokenizer import load_tokenizer
from areal_x.protocols.backends import create_trainer
from areal_x.protocols.engine import Completion, Request, SamplingParams
from areal_x.protocols.trainer import Trainer
from areal_x.protocols.trainer_config import ModelConfig, OptimizerConfig, TrainerConfig
from tests.engines.sglang.conftest import PYTHON
from tests.engines.vllm.test_vllm_lora import LORA, PROMPT, train, trainer_logp
from tests.engines.vllm.test_vllm_scorer import packed
from tests.servers import Run
from tests.tinker import served
from tests.tinker.served import Clients

pytestmark = [pytest.mark.sglang, pytest.mark.xdist_group("sglang")]


@pytest.fixture(scope="module")
def engine(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory, run: Run) -> Iterator[SGLangEngine]:
    config = SGLangConfig(context=256, concurrency=16, python=PYTHON)
    logs = tmp_path_factory.mktemp("sglang-lora")
    room = AdapterRoom(served.ROOM)  # for those of clients too
    engine = SGLangEngine(config, tiny_model_dir, logs, lambda line: None, LORA, sleeps=True, room=room)
    run(engine.start())
    yield engine
    run(engine.close())


def test_adapters_of_several_clients_are_sampled_at_once_each_at_its_own_version(
    engine: SGLangEngine, tiny_model_dir: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("areal_x_torch")
    (server,) = engine._servers
    for name in ("SGLANG_API_KEY", "SGLANG_ADMIN_API_KEY"):
        monkeypatch.setenv(name, server.key)
    config = SGLangConfig(urls=(server.url,), staging=str(tmp_path / "staging"))
    own = SGLangEngine(config, tiny_model_dir, tmp_path, lambda line: None, room=engine.room, kept=True)
    clients = Clients(own, tiny_model_dir, tmp_path)
    run(clients.start())
    try:
        run(served.answers_as_the_trainer(clients, seeds=False))
        run(served.answers_what_clients_ask(clients))
    finally:
        run(clients.close())
    assert run(engine._clients[0].adapters()) == []


@pytest.fixture(scope="module")
def trainer(tiny_model_dir: Path) -> Trainer:
    pytest.importorskip("torch")
    optimizer = OptimizerConfig(learning_rate=2e-2)
    return create_trainer("torch", TrainerConfig(model=ModelConfig(str(tiny_model_dir)), optimizer=optimizer, lora=LORA))


def scores_the_model_itself(engine: SGLangEngine, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server with adapters may be a reference, unlike vLLM's."""
    (server,) = engine._servers
    monkeypatch.setenv("SCORER_KEY", server.key)
    config = SGLangConfig(key_variable="SCORER_KEY")
    scorer = server_scorer([server.url], VLLMConfig(), config, load_tokenizer(model), 1.0)
    batch = packed([list(range(2, 40)), list(range(20, 2, -1))], 64)
    frozen = create_trainer("torch", TrainerConfig(model=ModelConfig(str(model)), frozen=True))
    np.testing.assert_allclose(scorer.logprobs(batch), frozen.logprobs(batch), atol=1e-4)


def test_a_published_adapter_has_the_trainers_logprobs_and_pauses_nothing(
    engine: SGLangEngine, trainer: Trainer, tiny_model_dir: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(trainer, 3)
    assert run(engine.swap(engine.stage(trainer))) == 0.0
    scores_the_model_itself(engine, tiny_model_dir, monkeypatch)
    completion = run(engine.generate(Request(PROMPT, SamplingParams(max_tokens=40))))
    np.testing.assert_array_equal(completion.versions, trainer.version)
    np.testing.assert_allclose(completion.logprobs, trainer_logp(trainer, completion), atol=1e-4)


@pytest.mark.parametrize("sleeps", [False, True])
def test_a_request_in_flight_ends_on_its_own_version_which_then_goes_with_its_folder(
    sleeps: bool, engine: SGLangEngine, trainer: Trainer, tmp_path: Path, run: Run
) -> None:
    """Also if the server sleeps meanwhile, which keeps the model's own weights."""
    train(trainer, 3)
    run(engine.swap(engine.stage(trainer)))
    first = trainer.version
    trainer.save(tmp_path / "first")
    train(trainer, 3)
    staged = engine.stage(trainer)

    async def through_a_swap() -> tuple[Completion, Completion, list[str]]:
        running = [asyncio.create_task(engine.generate(Request(PROMPT, SamplingParams(max_tokens=240)))) for _ in range(8)]
        await engine.generate(Request(PROMPT, SamplingParams(max_tokens=2)))
        if sleeps:
            await engine.sleep()
            await engine.wake()  # with the same adapter
            await engine.sleep()
        await engine.swap(staged)
        both = await engine._clients[0].adapters()
        assert not all(task.done() for task in running)
        return (await asyncio.gather(*running))[0], await engine.generate(Request(PROMPT, SamplingParams(max_tokens=20))), both

    before, after, both = run(through_a_swap())
    assert set(both) == {f"policy-{first}", f"policy-{first + 3}"}
    np.testing.assert_array_equal(after.versions, first + 3)
    np.testing.assert_allclose(after.logprobs, trainer_logp(trainer, after), atol=1e-4)
    np.testing.assert_array_equal(before.versions, first)
    assert np.abs(before.logprobs - trainer_logp(trainer, before)).max() > 0.1  # the versions differ
    trainer.save(tmp_path / "second")
    trainer.restore(tmp_path / "first")
    np.testing.assert_allclose(before.logprobs, trainer_logp(trainer, before), atol=1e-4)
    trainer.restore(tmp_path / "second")
    train(trainer, 1)
    run(engine.swap(engine.stage(trainer)))
    assert run(engine._clients[0].adapters()) == [f"policy-{first + 4}"]
    staging = engine.stager.staging
    assert staging is not None
    assert [folder.name for folder in staging.root.iterdir() if folder.is_dir()] == [f"v{first + 4:08d}"]
