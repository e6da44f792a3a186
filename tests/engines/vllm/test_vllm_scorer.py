"""A reference or teacher behind a URL computes the same numbers as a trainer of the same model, and sends no more requests than
it must."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from areal_x.algorithms.recipes import distill
from areal_x.batching.packing import pack
from areal_x.engines.embedded import EmbeddedConfig
from areal_x.engines.fleet.addresses import server_urls
from areal_x.engines.fleet.scorer import CONCURRENCY, PROBE, ServerScorer
from areal_x.engines.vllm.client import VLLMClient
from areal_x.engines.vllm.config import VLLMConfig
from areal_x.engines.vllm.engine import VLLMEngine
from areal_x.engines.vllm.responses import scores_from
from areal_x.errors import ConfigError, UserError
from areal_x.experiment import Experiment
from areal_x.hf.tokenizer import load_tokenizer
from areal_x.protocols.backends import create_trainer
from areal_x.protocols.engine import EngineError, SamplingParams
from areal_x.protocols.trainer import Trainer
from areal_x.protocols.trainer_config import ModelConfig, TrainerConfig
from areal_x.testing.models import CHARACTERS, write_model, write_tokenizer
from areal_x.types import Batch, Task, Trajectory
from areal_x.workflows.single_turn import SingleTurn
from tests.servers import Run


def packed(sequences: Sequence[Sequence[int]], row_length: int, rows_multiple: int = 1) -> Batch:
    arrays = [np.asarray(tokens, np.int32) for tokens in sequences]
    nothing = np.zeros(0, np.float32)
    return pack([Trajectory.from_completion(t, nothing, nothing, nothing) for t in arrays], row_length, rows_multiple).batch


def scorer_on(urls: Sequence[str], key: str | None, tokenizer: Any) -> ServerScorer:
    return ServerScorer([partial(VLLMClient, url, key) for url in urls], tokenizer)


# ---- a real server


@pytest.fixture(scope="module")
def trainer(tiny_model_dir: Path) -> Trainer:
    pytest.importorskip("areal_x_jax")
    return create_trainer("jax", TrainerConfig(model=ModelConfig(str(tiny_model_dir)), micro_batch_rows=4))


@pytest.fixture
def served(vllm_engine: VLLMEngine) -> tuple[str, str]:
    """Address and key of the shared server, which serves the tiny model."""
    (server,) = vllm_engine._servers
    return server.url, server.key


@pytest.mark.server
@pytest.mark.xdist_group("vllm")
def test_a_server_says_what_a_trainer_of_its_model_says(
    served: tuple[str, str], trainer: Trainer, tiny_model_dir: Path
) -> None:
    rng = np.random.default_rng(0)
    batch = packed([rng.integers(2, 40, n) for n in (1, 2, 64, 17, 5, 30, 1, 40, 23)], 64, rows_multiple=4)
    assert batch.segment_ids.max() > 2
    assert (batch.segment_ids[-1] == 0).all()
    scorer = scorer_on([served[0]], served[1], load_tokenizer(tiny_model_dir))
    np.testing.assert_allclose(scorer.logprobs(batch), trainer.logprobs(batch), atol=1e-4)


@pytest.mark.server
@pytest.mark.xdist_group("vllm")
def test_a_prompts_logprobs_are_those_of_temperature_1_whatever_is_asked_for(served: tuple[str, str], run: Run) -> None:
    async def score(**sampling: float) -> np.ndarray:
        client = VLLMClient(*served)
        try:
            body = {"model": "policy", "prompt": tokens, "max_tokens": 1, "prompt_logprobs": 0, **sampling}
            return scores_from(await client.calls.json("POST", "/v1/completions", body), tokens)
        finally:
            await client.close()

    tokens = list(range(2, 30))
    np.testing.assert_allclose(run(score(temperature=0.5, top_k=3)), run(score()), atol=1e-5)


@pytest.mark.server
@pytest.mark.xdist_group("vllm")
def test_a_sequence_as_long_as_the_servers_context_is_refused_and_one_less_is_scored(
    served: tuple[str, str], tiny_model_dir: Path
) -> None:
    scorer = scorer_on([served[0]], served[1], load_tokenizer(tiny_model_dir))
    assert (scorer.logprobs(packed([[3] * 255], 256))[0, 1:255] < 0).all()
    with pytest.raises(UserError, match=r"of 256 tokens does not fit .*--max-model-len 257 or more \(it has 256\)"):
        scorer.logprobs(packed([[3] * 256], 256))


@pytest.mark.server
@pytest.mark.xdist_group("vllm")
def test_tokens_outside_the_servers_vocabulary_are_named(served: tuple[str, str], tiny_model_dir: Path) -> None:
    scorer = scorer_on([served[0]], served[1], load_tokenizer(tiny_model_dir))
    with pytest.raises(EngineError, match="Token id 999 is out of vocabulary"):
        scorer.logprobs(packed([[3, 999, 4]], 8))


@pytest.mark.server
@pytest.mark.xdist_group("vllm")
def test_a_run_learns_from_a_teacher_behind_a_url(
    served: tuple[str, str], trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, key = served
    monkeypatch.setenv("TEACHER_KEY", key)
    student = write_model(tmp_path / "student", seed=7)
    experiment = distillation(student, tmp_path, teacher=url, vllm=VLLMConfig(key_variable="TEACHER_KEY"))
    (turn,) = [turn for turn in experiment.turns(experiment.open()) if turn.groups]
    batch = turn.batch
    assert turn.metrics["teacher_kl"] > 0.1
    np.testing.assert_allclose(batch.reference_logp, trainer.logprobs(batch), atol=1e-4)


def length(task: Task, text: str) -> float:
    return float(len(text))


def distillation(student: Path, tmp_path: Path, temperature: float = 1.0, **changes: Any) -> Experiment:
    return Experiment(
        dataset=[Task(str(i), f"{i}+{i}=") for i in range(4)],
        workflow=SingleTurn(reward=length, sampling=SamplingParams(max_tokens=8, temperature=temperature), reward_workers=1),
        algorithm=distill(),
        trainer=TrainerConfig(model=ModelConfig(str(student)), micro_batch_rows=4),
        embedded=EmbeddedConfig(slots=4),
        steps=1,
        groups_per_step=2,
        group_size=2,
        row_length=32,
        runs=str(tmp_path / "runs"),
        name="run",
        **changes,
    )


# ---- servers that answer as they are told


@dataclass
class Fake:
    """A server of the tiny model's tokenizer that scores token t as -t / 10, or (held) never answers. parent: of a second model
    that it serves. metrics: None where it counts nothing."""

    tokenizer: Any
    held: bool = False
    parent: str | None = None
    metrics: str | None = None
    prompts: list[list[int]] = field(default_factory=list)
    aborted: threading.Event = field(default_factory=threading.Event)

    async def models(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != "Bearer key":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return web.json_response({"data": [{"id": "model", "max_model_len": 100}, {"id": "adapter", "parent": self.parent}]})

    async def count(self, request: web.Request) -> web.Response:
        return web.Response(text=self.metrics, status=200 if self.metrics is not None else 404)

    async def tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        return web.json_response({"tokens": self.tokenizer.encode(body["prompt"], add_special_tokens=False)})

    async def complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert body["model"] == "model"
        self.prompts.append(body["prompt"])
        if self.held:
            try:
                await asyncio.Event().wait()
            finally:
                self.aborted.set()
        return web.json_response(answer(body["prompt"], [-token / 10 for token in body["prompt"]]))


def answer(tokens: Sequence[int], scores: Sequence[float | None]) -> dict[str, Any]:
    entries = [{str(token): {"logprob": score, "rank": 1}} for token, score in zip(tokens, scores, strict=True)]
    return {"choices": [{"text": "", "prompt_logprobs": [None, *entries[1:]]}]}


@dataclass
class Serving:
    fake: Fake
    url: str
    stop: Callable[[], None]


@pytest.fixture
def serve(tiny_model_dir: Path, run: Run) -> Iterator[Callable[..., Serving]]:
    """Starts a fake server."""
    runners = []

    async def start(fake: Fake) -> Serving:
        app = web.Application()
        app.add_routes([web.get("/v1/models", fake.models), web.post("/tokenize", fake.tokenize)])
        app.add_routes([web.post("/v1/completions", fake.complete), web.get("/metrics", fake.count)])
        runner = web.AppRunner(app, handler_cancellation=True)  # of requests whose client has gone
        await runner.setup()
        runners.append(runner)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return Serving(fake, f"http://127.0.0.1:{runner.addresses[0][1]}", lambda: run(runner.cleanup()))

    yield lambda **changes: run(start(Fake(load_tokenizer(tiny_model_dir), **changes)))
    for runner in runners:
        run(runner.cleanup())


def score(servers: Sequence[Serving], batch: Batch) -> np.ndarray:
    return scorer_on([server.url for server in servers], "key", servers[0].fake.tokenizer).logprobs(batch)


def test_answers_lie_where_their_tokens_lie(serve: Callable[..., Serving]) -> None:
    batch = packed([[5, 6, 7], [8], [9, 10], [11, 12, 13, 14]], 6, rows_multiple=3)
    first = batch.positions == 0
    np.testing.assert_allclose(score([serve()], batch), np.where(first, 0, -batch.tokens / 10), atol=1e-6)


def test_each_different_sequence_is_asked_for_once_and_one_of_one_token_never(serve: Callable[..., Serving]) -> None:
    server = serve()
    batch = packed([[5, 6], [5, 6], [5, 6, 7], [8], [5, 6]], 4)
    scores = score([server], batch)
    assert sorted(server.fake.prompts) == [[5, 6], [5, 6, 7]]
    np.testing.assert_allclose(scores[batch.positions == 1], -0.6, atol=1e-6)


def test_images_are_refused(serve: Callable[..., Serving]) -> None:
    batch = packed([[5, 6]], 4).replace(patches=np.zeros((1, 4, 6), np.float32))
    with pytest.raises(UserError, match="the batch has images, which servers do not score"):
        score([serve()], batch)


def test_rows_of_padding_alone_ask_for_nothing(serve: Callable[..., Serving]) -> None:
    server = serve()
    assert (score([server], packed([], 8)) == 0).all()
    assert server.fake.prompts == []


def test_each_request_goes_to_the_server_with_the_fewest_and_none_has_more_than_its_share(
    serve: Callable[..., Serving], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = servers = [serve(), serve()]
    scorer = scorer_on([server.url for server in servers], "key", first.fake.tokenizer)
    asked: Counter[str] = Counter()

    async def main() -> list[np.ndarray]:
        gates = {server.url: asyncio.Event() for server in servers}

        async def held(client: VLLMClient, model: str, tokens: Sequence[int]) -> np.ndarray:
            asked[client.url] += 1
            await gates[client.url].wait()
            return np.asarray(tokens, np.float32)

        async def settled() -> None:
            for _ in range(10 * CONCURRENCY):
                await asyncio.sleep(0)

        monkeypatch.setattr(VLLMClient, "score", held)
        scoring = asyncio.create_task(scorer._score([[i, i] for i in range(5 * CONCURRENCY)]))
        await settled()
        assert asked == {first.url: CONCURRENCY, second.url: CONCURRENCY}
        gates[second.url].set()
        await settled()
        assert asked == {first.url: CONCURRENCY, second.url: 4 * CONCURRENCY}
        gates[first.url].set()
        return await scoring

    assert [int(scores[0]) for scores in asyncio.run(main())] == list(range(5 * CONCURRENCY))


def test_it_can_be_asked_where_an_event_loop_runs(serve: Callable[..., Serving]) -> None:
    async def in_a_notebook() -> np.ndarray:
        return score([serve()], packed([[5, 6]], 2))

    np.testing.assert_allclose(asyncio.run(in_a_notebook()), [[0, -0.6]], atol=1e-6)


def test_an_interrupt_aborts_the_requests_and_leaves_no_thread(serve: Callable[..., Serving]) -> None:
    server = serve(held=True)
    scorer = scorer_on([server.url], "key", server.fake.tokenizer)

    def interrupt() -> None:
        while not server.fake.prompts:
            pass
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        scorer.logprobs(packed([[5, 6]], 2))
    thread.join()
    assert server.fake.aborted.wait(20)
    assert "scorer" not in [thread.name for thread in threading.enumerate()]


def test_a_server_that_is_gone_is_named(serve: Callable[..., Serving]) -> None:
    servers = [serve(), serve()]
    scorer = scorer_on([server.url for server in servers], "key", servers[0].fake.tokenizer)
    servers[1].stop()
    with pytest.raises(EngineError, match=f"no vLLM server answers at {servers[1].url}"):
        scorer.logprobs(packed([[5, 6], [7, 8]], 4))


def test_a_server_that_was_never_there_ends_the_start(serve: Callable[..., Serving]) -> None:
    with pytest.raises(UserError, match=r"no vLLM server answers at http://127\.0\.0\.1:1"):
        scorer_on(["http://127.0.0.1:1"], None, serve().fake.tokenizer)


def test_a_server_that_wants_another_key_is_one_sentence(serve: Callable[..., Serving]) -> None:
    server = serve()
    with pytest.raises(UserError, match=r"refused the key: .* vllm\.key_variable"):
        scorer_on([server.url], "another", server.fake.tokenizer)


def test_an_address_with_a_path_is_told_from_a_server(serve: Callable[..., Serving]) -> None:
    server = serve()
    with pytest.raises(UserError, match=r"does not offer /v1/models .* address without a path"):
        scorer_on([server.url + "/v1"], "key", server.fake.tokenizer)


def test_a_model_of_other_tokens_is_refused(serve: Callable[..., Serving], tmp_path: Path) -> None:
    write_tokenizer(tmp_path, CHARACTERS[::-1])
    other = load_tokenizer(tmp_path)
    assert len(other) == len(serve().fake.tokenizer)
    with pytest.raises(UserError, match="serves 'model', which tokenises text differently"):
        scorer_on([serve().url], "key", other)


def test_a_server_that_takes_adapters_is_refused_where_it_shows(serve: Callable[..., Serving]) -> None:
    batch = packed([[5, 6]], 2)
    score([serve(metrics="# TYPE vllm:num_requests_running gauge\n")], batch)
    for shown in ({"parent": "model"}, {"metrics": "# TYPE vllm:lora_requests_info gauge\n"}):
        with pytest.raises(UserError, match=r"has adapters enabled, and .*engine .*dies"):
            scorer_on([serve(**shown).url], "key", serve().fake.tokenizer)


def test_the_probe_holds_what_a_tokenizer_may_split_differently(tiny_model_dir: Path) -> None:
    assert len(set(load_tokenizer(tiny_model_dir).encode(PROBE))) > 15


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ({"choices": [{"text": "a"}]}, "does not score prompts"),
        (answer([5, 6], [0, -1]), "does not score prompts"),
        (answer([5, 6, 8], [0, -1, -1]), "omitted the log-probability"),
        (answer([5, 6, 7], [0, -1, -9999.0]), "omitted the log-probability"),
        (answer([5, 6, 7], [0, -1, None]), "omitted the log-probability"),
        (answer([5, 6, 7], [0, -1, 2.5]), "logits instead of log-probabilities"),
    ],
    ids=["none", "too few", "of other tokens", "minus infinity", "null", "a logit"],
)
def test_an_answer_without_every_log_probability_is_an_error(said: dict[str, Any], error: str) -> None:
    with pytest.raises(EngineError, match=error):
        scores_from(said, [5, 6, 7])


# ---- what a run is told


@pytest.mark.parametrize(
    ("given", "urls"),
    [
        ("http://127.0.0.1:8000", ("http://127.0.0.1:8000",)),
        (["http://a:1", "https://b"], ("http://a:1", "https://b")),
        ("Qwen/Qwen3-0.6B", ()),
        ("/models/qwen", ()),
        (str, ()),
        (None, ()),
    ],
)
def test_an_address_is_told_from_a_directory(given: Any, urls: tuple[str, ...]) -> None:
    assert server_urls("train.teacher", given) == urls


@pytest.mark.parametrize("given", [("http://a", "/models/qwen"), ()])
def test_a_list_of_anything_but_addresses_is_refused(given: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.teacher = .* http:// or https:// addresses"):
        distillation(tmp_path, tmp_path, teacher=given)


def test_a_server_is_no_teacher_of_what_is_sampled_at_another_temperature(tiny_model_dir: Path, tmp_path: Path) -> None:
    experiment = distillation(tiny_model_dir, tmp_path, temperature=0.8, teacher="http://127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"sampling\.temperature = 0\.8 .* must be 1\.0 .*\(a model directory"):
        next(experiment.turns(experiment.open()))
