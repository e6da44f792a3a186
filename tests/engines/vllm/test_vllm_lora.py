"""Adapters that a trainer publishes to a real vLLM server, each version under a name of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_x.batching.packing import pack
from areal_x.engines.fleet import probe
from areal_x.engines.fleet.named_adapters import AdapterRoom
from areal_x.engines.fleet.proof.claims import Claiming, read_claims
from areal_x.engines.fleet.proof.judge import judge, parsed
from areal_x.engines.fleet.proof.prover import question
from areal_x.engines.fleet.staging import StagedFiles
from areal_x.engines.vllm.config import VLLMConfig
from areal_x.engines.vllm.engine import VLLMEngine
from areal_x.errors import UserError
from areal_x.hf.tokenizer import load_tokenizer
from areal_x.protocols.backends import create_trainer
from areal_x.protocols.engine import Completion, EngineError, Request, SamplingParams
from areal_x.protocols.trainer import Trainer
from areal_x.protocols.trainer_config import LoRAConfig, ModelConfig, OptimizerConfig, TrainerConfig
from areal_x.types import Trajectory
from tests.engines.vllm.test_vllm_scorer import scorer_on
from tests.servers import Run
from tests.tinker import served
from tests.tinker.served import Clients

LORA = LoRAConfig(rank=4, alpha=8.0)
PROMPT = np.arange(2, 14, dtype=np.int32)
pytestmark = [pytest.mark.server, pytest.mark.xdist_group("vllm")]


def likelihood(policy: Any, batch: Any) -> Any:
    return -policy.logp * batch.mask, {}


def train(trainer: Trainer, updates: int) -> None:
    rng = np.random.default_rng(trainer.version)
    for _ in range(updates):
        tokens = [rng.integers(2, 40, 20) for _ in range(4)]
        batch = pack([Trajectory.from_completion(t[:4], t[4:], np.zeros(16), np.zeros(16)) for t in tokens], 32).batch
        trainer.update(batch.replace(weights=(batch.mask / batch.mask.sum()).astype(np.float32)), likelihood)


def trainer_logp(trainer: Trainer, completion: Completion) -> np.ndarray:
    """The trainer's log-probabilities of a completion of PROMPT."""
    tokens, nothing = completion.tokens, np.zeros(len(completion.tokens))
    packed = pack([Trajectory.from_completion(PROMPT, tokens, nothing, nothing)], 256)
    return packed.gather(trainer.logprobs(packed.batch))[0][len(PROMPT) :]


@pytest.fixture(scope="module")
def engine(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory, run: Run) -> Iterator[VLLMEngine]:
    config = VLLMConfig(context=256, concurrency=32, threads=1)
    engine = VLLMEngine(config, tiny_model_dir, tmp_path_factory.mktemp("vllm-lora"), lambda line: None, LORA)
    run(engine.start())
    yield engine
    run(engine.close())


@pytest.fixture(scope="module", params=["jax", "torch"])
def trainer(request: pytest.FixtureRequest, engine: VLLMEngine, tiny_model_dir: Path) -> Trainer:
    """A trainer of each backend in turn, whose versions continue after the last one's: the server knows them by their
    numbers."""
    pytest.importorskip(request.param)
    optimizer = OptimizerConfig(learning_rate=2e-2)
    config = TrainerConfig(model=ModelConfig(str(tiny_model_dir)), optimizer=optimizer, lora=LORA, micro_batch_rows=4)
    made = create_trainer(request.param, config)
    made.version = engine.version
    return made


@pytest.fixture
def published(engine: VLLMEngine, trainer: Trainer, run: Run) -> VLLMEngine:
    """The server with the trainer's adapter after a few more updates."""
    train(trainer, 3)
    assert run(engine.swap(engine.stage(trainer))) == 0.0
    return engine


def test_before_the_first_version_the_model_itself_speaks(engine: VLLMEngine, tiny_model_dir: Path, run: Run) -> None:
    completion = run(engine.generate(Request(PROMPT, SamplingParams(max_tokens=20))))
    np.testing.assert_array_equal(completion.versions, 0)
    base = create_trainer("jax", TrainerConfig(model=ModelConfig(str(tiny_model_dir)), frozen=True))
    np.testing.assert_allclose(completion.logprobs, trainer_logp(base, completion), atol=1e-4)


@pytest.fixture
def clients(
    engine: VLLMEngine, tiny_model_dir: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Clients]:
    """Tinker's clients at the same server."""
    pytest.importorskip("areal_x_torch")
    (server,) = engine._servers
    monkeypatch.setenv("VLLM_API_KEY", server.key)
    config = VLLMConfig(urls=(server.url,), staging=str(tmp_path / "staging"))
    own = VLLMEngine(config, tiny_model_dir, tmp_path, lambda line: None, room=AdapterRoom(served.ROOM), kept=True)
    made = Clients(own, tiny_model_dir, tmp_path)
    run(made.start())
    yield made
    run(made.close())
    assert run(engine._clients[0].adapters()) == []


def test_adapters_of_several_clients_are_sampled_at_once_each_at_its_own_version(clients: Clients, run: Run) -> None:
    run(served.answers_as_the_trainer(clients, seeds=True))


@pytest.mark.thorough
def test_servers_answer_what_clients_ask_of_adapters(clients: Clients, run: Run) -> None:
    run(served.answers_what_clients_ask(clients))


def test_what_the_server_says_of_its_tokens_is_what_the_trainer_says(published: VLLMEngine, trainer: Trainer, run: Run) -> None:
    async def many() -> list[Completion]:
        request = Request(PROMPT, SamplingParams(max_tokens=40))
        return await asyncio.gather(*(published.generate(request) for _ in range(8)))

    for completion in run(many()):
        np.testing.assert_array_equal(completion.versions, trainer.version)
        np.testing.assert_allclose(completion.logprobs, trainer_logp(trainer, completion), atol=1e-4)


def test_the_server_proves_the_adapter_in_its_slot(published: VLLMEngine, trainer: Trainer, run: Run) -> None:
    current = published.stager.current
    assert current is not None
    claims = read_claims(current.folder)
    assert claims is not None
    assert claims.scale == LORA.scale
    assert claims.tensors.keys() == dict(trainer.adapter()).keys()
    verdict = judge(claims, [parsed(answer) for answer in run(published._clients[0].prove(question(claims)))])
    assert (verdict.differences, verdict.unproved, verdict.dtypes) == ([], {}, {})
    train(trainer, 1)
    newer = Claiming(claims.version, claims.full, scale=LORA.scale)
    for name, tensor in trainer.adapter():
        newer.add(name, tensor)
    verdict = judge(newer.done(), [parsed(answer) for answer in run(published._clients[0].prove(question(claims)))])
    assert {words.split()[0] for words in verdict.differences} == claims.tensors.keys()


def test_a_known_prompt_is_asked_beside_running_requests(published: VLLMEngine, trainer: Trainer, run: Run) -> None:
    prompt, name = probe.probe_prompt(40, published.context), f"policy-{trainer.version}"

    async def beside() -> tuple[np.ndarray, list[Completion]]:
        request = Request(PROMPT, SamplingParams(max_tokens=240))
        while True:
            running = [asyncio.create_task(published.generate(request)) for _ in range(12)]
            await published.generate(Request(PROMPT, SamplingParams(max_tokens=5)))  # then those have about as many
            said = await published._clients[0].probe(name, prompt.tolist())
            are_beside = not any(task.done() for task in running)  # else this process got no core for long
            completions = await asyncio.gather(*running)
            if are_beside:
                return said, completions

    said, completions = run(beside())
    np.testing.assert_allclose(said, probe.trainer_logp(trainer, prompt), atol=1e-4)
    for completion in completions:
        np.testing.assert_allclose(completion.logprobs, trainer_logp(trainer, completion), atol=1e-4)


def test_a_server_with_adapters_is_refused_as_a_reference(published: VLLMEngine, tiny_model_dir: Path) -> None:
    (server,) = published._servers
    with pytest.raises(
        UserError, match=r"has adapters enabled, and .*engine .*dies.*: start a separate server without --enable-lora"
    ):
        scorer_on([server.url], server.key, load_tokenizer(tiny_model_dir))


def test_a_request_in_flight_ends_on_its_own_version_which_then_goes(
    published: VLLMEngine, trainer: Trainer, tmp_path: Path, run: Run
) -> None:
    async def through_a_swap() -> tuple[Completion, Completion, list[str]] | None:
        """Returns None if the machine was too slow: the request in flight has ended before the swap."""
        running = asyncio.create_task(published.generate(Request(PROMPT, SamplingParams(max_tokens=200))))
        await published.generate(Request(PROMPT, SamplingParams(max_tokens=20)))  # then that has about as many
        await published.swap(staged)
        both = await held()
        if not running.done():
            swapped_first = await published.generate(Request(PROMPT, SamplingParams(max_tokens=20)))
            return await running, swapped_first, both
        return None

    async def held() -> list[str]:
        return await published._clients[0].adapters()

    for _ in range(5):
        first = trainer.version
        trainer.save(tmp_path / f"first-{first}")
        train(trainer, 3)
        staged = published.stage(trainer)
        if (found := run(through_a_swap())) is not None:
            break
    assert found is not None
    before, after, both = found
    assert set(both) == {f"policy-{first}", f"policy-{first + 3}"}
    np.testing.assert_array_equal(after.versions, first + 3)
    np.testing.assert_allclose(after.logprobs, trainer_logp(trainer, after), atol=1e-4)
    assert len(before.tokens) == 200
    np.testing.assert_array_equal(before.versions, first)
    later = np.abs(before.logprobs - trainer_logp(trainer, before)).max()
    assert later > 0.1  # the versions differ
    trainer.save(tmp_path / "second")
    trainer.restore(tmp_path / f"first-{first}")
    np.testing.assert_allclose(before.logprobs, trainer_logp(trainer, before), atol=1e-4)
    trainer.restore(tmp_path / "second")

    train(trainer, 1)
    run(published.swap(published.stage(trainer)))
    assert run(held()) == [f"policy-{first + 4}"]
    folders = [folder.name for folder in published.stager.staging.root.iterdir() if folder.is_dir()]
    assert folders == [f"v{first + 4:08d}"]


@pytest.mark.log_errors(
    "FileNotFoundError: .*adapter_config.json", "LoRAAdapterNotFoundError: Loading lora policy-10000 failed"
)
def test_a_damaged_adapter_is_lost_with_the_servers_words_and_the_newest_goes_on(
    published: VLLMEngine, trainer: Trainer, tmp_path: Path, run: Run
) -> None:
    with pytest.raises(EngineError, match="No adapter found"):
        run(published.swap(StagedFiles(folder=tmp_path / "nothing", version=10_000)))
    completion = run(published.generate(Request(PROMPT, SamplingParams(max_tokens=5))))
    np.testing.assert_array_equal(completion.versions, trainer.version)


def test_adapters_that_another_run_left_on_a_server_are_unloaded(
    published: VLLMEngine,
    trainer: Trainer,
    tiny_model_dir: Path,
    tmp_path: Path,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (server,) = published._servers
    monkeypatch.setenv("VLLM_API_KEY", server.key)
    other = VLLMEngine(VLLMConfig(urls=(server.url,)), tiny_model_dir, tmp_path, lambda line: None, LORA)

    async def begin() -> list[str]:
        await other.start()
        left = await other._clients[0].adapters()
        await other.close()
        return left

    assert run(begin()) == []
    (folder,) = (folder for folder in published.stager.staging.root.iterdir() if folder.is_dir())
    run(published._clients[0].load_adapter(f"policy-{trainer.version}", folder))  # for the next trainer, as it was
