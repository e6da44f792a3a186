"""Adapters of several models and ranks on servers, whichever program serves: they answer as the trainer's own forward pass."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_x.engines.fleet.engine import FleetEngine
from areal_x.errors import UserError
from areal_x.hf.tokenizer import load_tokenizer
from areal_x.protocols.trainer_config import ModelConfig, OptimizerConfig, TrainerConfig
from areal_x.runtime.thread import OneThread
from areal_x.testing.models import CHARACTERS
from areal_x.tinker import requests
from areal_x.tinker.data import Datum
from areal_x.tinker.embedded_weights import EmbeddedWeights
from areal_x.tinker.host import TrainerHost
from areal_x.tinker.models import Model, Shape, Source
from areal_x.tinker.sampling import Samplers
from areal_x.tinker.served_weights import ServedWeights

STEP = OptimizerConfig(learning_rate=0.1, weight_decay=0.0, clip_norm=0.0)
SHAPES = (Shape(2), Shape(7, mlp=False))
PROMPT = list(range(2, 12))
ROOM = max(x.rank for x in SHAPES)


class Clients:
    """The models of several clients of a server of Tinker clients, which samples by an engine over servers."""

    def __init__(self, engine: FleetEngine[Any], base: Path, place: Path) -> None:
        config = TrainerConfig(model=ModelConfig(path=str(base)), row_length=128)
        self.host, self.thread, self.place = TrainerHost("torch", config), OneThread("tinker"), place
        self.engine = engine
        self.weights = ServedWeights(engine, self.host, self.thread, EmbeddedWeights(self.host, self.thread, 2))
        self.samplers = Samplers(self.host, self.thread, load_tokenizer(base), self.weights)
        self.base = Source("base", None, place / "base")
        self.models = [Model(str(i), shape, place / str(i), seed=i) for i, shape in enumerate(SHAPES)]
        self.whole = Model("whole", Shape(0), place / "whole")

    async def start(self) -> None:
        await self.weights.start(self.place)

    async def close(self) -> None:
        await self.samplers.close()
        self.thread.close()

    def trained(self, model: Model) -> Source:
        """Takes a step and returns a snapshot."""
        random = np.random.default_rng(model.seed + 10 * model.steps)
        tokens = random.integers(2, 40, 20).astype(np.int32)
        datum = Datum(tokens[:-1], tokens[1:, None], {"weights": np.ones((19, 1), np.float32)})
        self.host.forward(model, [datum], "cross_entropy", {}, True)
        self.host.step(model, STEP)
        place = self.place / f"{model.id} at {model.steps}"
        self.host.save(model, place / "state")
        return Source(place.name, model.shape, place, model, model.steps)

    async def snapshot(self, model: Model) -> Source:
        return await self.thread.run(self.trained, model)

    async def sample(self, source: Source, **asked: Any) -> Any:
        parameters = {"max_tokens": 12, "seed": 3, "stop": [], **asked.pop("parameters", {})}
        body = {
            "prompt": {"chunks": [{"tokens": PROMPT}]},
            "sampling_params": parameters,
            "num_samples": 2,
            "sampling_session_id": "s",
            "seq_id": 0,
            **asked,
        }
        request = requests.read(requests.Sample, json.dumps(body).encode())
        return (await self.samplers.sample(source, request, 0)).json()

    async def logp(self, source: Source, tokens: Sequence[int], k: int = 0) -> np.ndarray:
        """Returns the trainer's log-probabilities of a sequence's tokens, or of all tokens in the places of its last k."""
        whole = np.array(tokens, np.int32)
        targets = whole[1:, None]
        if k:
            targets = np.full((len(whole) - 1, self.host.vocabulary), -1, np.int32)
            targets[-k:] = np.arange(self.host.vocabulary)
        found = await self.thread.run(self.host.logprobs, source, whole, targets)
        return found[-k:] if k else found[:, 0]

    async def check(self, source: Source, answer: Any) -> list[float]:
        """Holds the log-probabilities of an answer to the trainer's, and returns those of its first sequence."""
        for sequence in answer["sequences"]:
            logp = await self.logp(source, PROMPT + sequence["tokens"])
            np.testing.assert_allclose(sequence["logprobs"], logp[len(PROMPT) - 1 :], atol=1e-4)
        first: list[float] = answer["sequences"][0]["logprobs"]
        return first

    async def on_servers(self) -> list[str]:
        return await self.engine._clients[0].adapters()


async def answers_as_the_trainer(clients: Clients, seeds: bool) -> None:
    """seeds: whether the servers take any."""
    sources = [clients.base, *[await clients.snapshot(model) for model in clients.models]]
    found = await asyncio.gather(*(clients.sample(source) for source in sources * 2))
    logprobs = [await clients.check(*pair) for pair in zip(sources * 2, found, strict=True)]
    assert len({round(x[0], 3) for x in logprobs[:3]}) == 3 or not seeds
    if seeds:
        assert [x["sequences"] for x in found[:3]] == [x["sequences"] for x in found[3:]]
        assert all(one["tokens"] != other["tokens"] for one, other in (x["sequences"] for x in found))
    names = await clients.on_servers()
    assert len(names) == len(SHAPES)

    # A new version beside the old one, whose name it has not.
    newer = await clients.snapshot(clients.models[0])
    both = await asyncio.gather(*(clients.sample(source) for source in (newer, sources[1], newer)))
    for source, answer in zip((newer, sources[1], newer), both, strict=True):
        await clients.check(source, answer)
    now = await clients.on_servers()
    assert (len(now), set(names) <= set(now)) == (len(SHAPES) + 1, True)
    old, new = [(await clients.logp(source, PROMPT))[-1] for source in (sources[1], newer)]
    assert abs(old - new) > 0.01

    # Another one takes its place, and then its snapshot is gone.
    first = sources[1]
    shutil.rmtree(first.directory)
    shutil.copytree(newer.directory, first.directory)
    assert not seeds or (await clients.sample(first))["sequences"] == found[1]["sequences"]
    shutil.rmtree(first.directory)
    await clients.weights._remove_unused()
    left = await clients.on_servers()
    assert (len(left), set(left) < set(now)) == (len(SHAPES), True)
    with pytest.raises(UserError, match="are gone"):
        await clients.sample(first)
    assert clients.engine.stager.staging is not None
    links = [x.name for x in clients.engine.stager.staging.root.glob("adapter-*")]
    assert sorted(links) == sorted(left)


async def answers_what_clients_ask(clients: Clients) -> None:
    """What is asked beside tokens: log-probabilities of the prompt, the most likely tokens, texts that end a sequence."""
    for source in (clients.base, await clients.snapshot(clients.models[1])):
        answer = await clients.sample(
            source, prompt_logprobs=True, topk_prompt_logprobs=3, topk_sample_logprobs=2, prompt_logprobs_last_n=2
        )
        logp = await clients.logp(source, PROMPT, k=2)
        for row, expected in zip(answer["topk_prompt_logprobs"][-2:], logp, strict=True):
            assert [x[0] for x in row] == np.argsort(-expected)[:3].tolist()
            np.testing.assert_allclose([x[1] for x in row], np.sort(expected)[::-1][:3], atol=1e-4)
        np.testing.assert_allclose(answer["prompt_logprobs"][-2:], logp[[0, 1], PROMPT[-2:]], atol=1e-5)
        for sequence in answer["sequences"]:
            likeliest = [row[0] for row in sequence["topk_logprobs"]]
            assert all(x[1] >= own - 1e-4 for x, own in zip(likeliest, sequence["logprobs"], strict=True))
        greedy = await clients.sample(source, parameters={"temperature": 0.0})
        tokens = greedy["sequences"][0]["tokens"]
        text = CHARACTERS[tokens[3] - 2]
        cut = await clients.sample(source, parameters={"temperature": 0.0, "stop": text})
        assert cut["sequences"][0]["tokens"] == tokens[: tokens.index(tokens[3]) + 1]
        assert cut["sequences"][0]["stop_reason"] == "stop"
        truncated = await clients.sample(source, parameters={"top_k": 3, "temperature": 0.7})
        assert all(x <= 1e-6 for x in truncated["sequences"][0]["logprobs"])
    with pytest.raises(UserError, match=f"up to rank {ROOM}, and not of rank 9"):
        clients.weights.check(Shape(9))
    whole = await clients.snapshot(clients.whole)  # by the embedded engine
    await clients.check(whole, await clients.sample(whole))
