"""Several adapters of a base that train and sample at once, against each alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_x.errors import UserError
from areal_x.hf import adapters, model_dir
from areal_x.hf.tokenizer import load_tokenizer
from areal_x.protocols.trainer_config import ModelConfig, OptimizerConfig, TrainerConfig
from areal_x.runtime.thread import OneThread
from areal_x.testing.models import write_model
from areal_x.tinker import embedded_weights, gathering, requests
from areal_x.tinker.data import Datum
from areal_x.tinker.embedded_weights import EmbeddedWeights
from areal_x.tinker.gathering import Gathering, shares
from areal_x.tinker.host import TrainerHost, Work
from areal_x.tinker.losses import LOSSES
from areal_x.tinker.models import Model, Shape, Source
from areal_x.tinker.sampling import Samplers

BACKENDS = ("torch", pytest.param("jax", marks=pytest.mark.thorough))  # which compiles for half a minute
# Half of the first moment after a first step is the gradient.
STEP = OptimizerConfig(learning_rate=0.05, beta1=0.5, beta2=0.9, eps=1.0, weight_decay=0.1, clip_norm=0.0)
SHAPES = (Shape(2), Shape(4), Shape(20, mlp=False), Shape(1, attention=False), Shape(4), Shape(2), Shape(3))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), num_hidden_layers=2)


@cache
def host_of(backend: str, base: Path) -> TrainerHost:
    pytest.importorskip(f"areal_x_{backend}")
    return TrainerHost(backend, TrainerConfig(model=ModelConfig(path=str(base)), row_length=64))


@pytest.fixture(params=BACKENDS)
def host(request: pytest.FixtureRequest, base: Path) -> TrainerHost:
    return host_of(request.param, base)


def datums(loss: str, seed: int, lengths: tuple[int, ...] = (5, 12, 7)) -> list[Datum]:
    """Sequences of which the second has targets beside its own."""
    random = np.random.default_rng(seed)
    found = []
    for index, count in enumerate(lengths):
        tokens = random.integers(2, 40, count).astype(np.int32)
        targets = np.append(tokens[1:], 5)[:, None].astype(np.int32)
        if index == 1:
            targets[:4, 0] = 0
        values = {
            "weights": random.uniform(-1, 2, targets.shape),
            "logprobs": random.uniform(-4, -3, targets.shape),
            "advantages": random.normal(size=targets.shape),
            "sequence_ratio_mask": np.arange(count)[:, None] >= 2,
        }
        found.append(Datum(tokens, targets, {x: values[x].astype(np.float32) for x in LOSSES[loss].inputs}))
    return found


def works(host: TrainerHost, place: Path, seed: int = 0) -> list[Work]:
    """A forward_backward of each loss, for as many adapters of other ranks and targets."""
    found = []
    for index, (loss, shape) in enumerate(zip(LOSSES, SHAPES, strict=True)):
        model = Model(loss, shape, place / loss, seed=index)
        found.append(Work(model, datums(loss, seed + index), loss, {}, True))
    return found


def state_of(host: TrainerHost, model: Model, place: Path) -> dict[str, np.ndarray]:
    host.save(model, place)
    return dict(adapters.read(place)) | dict(model_dir.read_moments(place))


def test_adapters_of_all_losses_and_several_ranks_at_once_equal_each_alone(host: TrainerHost, tmp_path: Path) -> None:
    models = [x.model for x in works(host, tmp_path / "at_once")]
    own_models = [x.model for x in works(host, tmp_path / "alone")]
    for number in range(2):
        at_once, alone = (
            [replace(x, model=model) for x, model in zip(works(host, tmp_path, 10 * number), of, strict=True)]
            for of in (models, own_models)
        )
        host.advance([(work, 1000) for work in at_once])
        for index, (one, own) in enumerate(zip(at_once, alone, strict=True)):
            logprobs, found = host.forward(own.model, own.datums, own.loss, {}, True)
            assert one.error is None
            for x, y in zip((*one.logprobs, *one.found.terms), (*logprobs, *found.terms), strict=True):
                np.testing.assert_allclose(x, y, atol=1e-5, rtol=1e-5)
            settings = replace(STEP, learning_rate=0.01 * (index + 1), clip_norm=float(index % 2))
            for model in (one.model, own.model):
                assert host.step(model, settings)["skipped"] == 0
            ours, theirs = (state_of(host, x.model, tmp_path / x.loss / str(i)) for i, x in enumerate((one, own)))
            assert ours.keys() == theirs.keys()
            for name, x in ours.items():
                most = 1e-5 * max(1.0, float(np.abs(x).max()))
                np.testing.assert_allclose(x, theirs[name], atol=most, rtol=1e-5, err_msg=f"{one.loss} {name}")
            moments = [x for name, x in ours.items() if name.startswith("exp_avg.")]
            assert max(float(np.abs(x).max()) for x in moments) > 1e-3  # there was a gradient
            assert all(
                x.shape[0 if "lora_A" in n else 1] == one.model.shape.rank for n, x in ours.items() if n.startswith("exp_avg.")
            )


def test_a_request_that_fails_leaves_the_others_and_its_own_gradient_alone(host: TrainerHost, tmp_path: Path) -> None:
    one, other, bad = works(host, tmp_path)[:3]
    bad.datums[-1].inputs["advantages"][:] = np.nan  # in its last datum
    outside = Work(
        Model("o", Shape(2), tmp_path / "o"),
        [Datum(one.datums[0].tokens + 100, one.datums[0].targets)],
        "cross_entropy",
        {},
        True,
    )
    longest = max(bad.datums, key=lambda x: len(x.tokens))
    host.advance([(one, 1000), (bad, len(longest.tokens)), (outside, 1000)])
    assert (one.error, bad.error is None, bad.done) == (None, True, False)
    assert "token 1" in str(outside.error)
    while not bad.done:
        host.advance([(other, 1000), (bad, 1000)] if not other.done else [(bad, 1000)])
    assert other.error is None
    assert "not finite" in str(bad.error)
    with pytest.raises(UserError, match="no gradient"):
        host.step(bad.model, STEP)
    before = state_of(host, one.model, tmp_path / "before")
    assert host.step(one.model, STEP)["grad_norm"] > 0
    assert any((x != before[name]).any() for name, x in state_of(host, one.model, tmp_path / "after").items())
    with pytest.raises(UserError, match="no gradient"):
        host.step(one.model, STEP)


def test_adapters_that_leave_memory_come_back_as_they_were(base: Path, tmp_path: Path) -> None:
    host = host_of("torch", base)
    small = TrainerHost("torch", host.model.config, resident_bytes=1)
    states = []
    for own in (host, small):
        place = tmp_path / str(own.resident_bytes)
        models = [Model(str(i), Shape(3 + i), place / str(i), seed=i) for i in range(3)]
        for number in range(2):
            for model in models:
                own.forward(model, datums("ppo", number), "ppo", {}, True)
            for model in models:
                own.step(model, STEP)
        own.create(Model("another", Shape(2), place / "another"))
        assert models[0].state.is_dir() == (own is small)
        states.append([state_of(own, model, place / f"saved {model.id}") for model in models])
    for expected, found in zip(*states, strict=True):
        assert all((found[name] == x).all() for name, x in expected.items())


def test_owners_share_a_pass_and_what_some_leave_is_for_others(tmp_path: Path) -> None:
    def work(tokens: int) -> Work:
        some = [Datum(np.zeros(10, np.int32), np.zeros((10, 1), np.int32))] * (tokens // 10)
        return Work(Model("m", Shape(2), tmp_path), some, "cross_entropy", {}, True)

    large, small, others = work(1000), work(20), [work(1000), work(1000)]
    assert [n for _, n in shares([("a", large)], 100)] == [100]
    assert [n for _, n in shares([("a", large), ("b", small)], 100)] == [80, 20]
    given = [n for _, n in shares([("a", large), ("b", others[0]), ("b", others[1])], 100)]
    assert (given[0], given[1], sum(given)) == (50, 25, 100)
    assert [len(large.take(n)) for n in (0, 9, 10, 35, 5000)] == [1, 1, 1, 3, 100]


def test_requests_that_wait_go_through_the_trainer_together_and_one_alone_waits_for_none(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathering, "MOST_WAIT", 60.0)  # whoever waited for nobody would wait for long
    monkeypatch.setattr(gathering, "WAIT_SHARE", 1e6)
    host, thread = host_of("torch", base), OneThread("tinker")
    every = works(host, tmp_path)
    for work in every:
        host.create(work.model)

    async def train() -> list[int]:
        gathered = Gathering(host, thread)
        counts = []
        for _ in range(2):  # the first of the second round waits for the others of the first
            tasks = []
            for index, work in enumerate(every):
                again = Work(work.model, work.datums, work.loss, {}, True)
                tasks.append(asyncio.create_task(gathered.forward(f"owner {index}", again)))
                if counts:
                    await asyncio.sleep(0.001)
            await asyncio.gather(*tasks)
            counts.append(gathered.passes)
        alone = Gathering(host, thread)
        for _ in range(3):
            await alone.forward("a", Work(every[0].model, every[0].datums, every[0].loss, {}, True))
        bad = Work(every[0].model, every[0].datums, "nothing", {}, True)
        with pytest.raises(UserError, match="there is no loss"):
            await alone.forward("a", bad)
        return [*counts, alone.passes]

    assert asyncio.run(asyncio.wait_for(train(), 50)) == [1, 2, 4]
    thread.close()


def test_a_request_with_passes_of_its_own_has_the_same_bits_whoever_else_trains(base: Path, tmp_path: Path) -> None:
    of_file = host_of("torch", base).model.config
    host, thread = TrainerHost("torch", of_file, exact="everything"), OneThread("tinker")
    host.pass_tokens = 20  # two passes each
    for place in ("alone", "among"):
        for work in works(host, tmp_path / place):
            host.create(work.model)

    async def train(given: list[Work], order: list[int]) -> int:
        gathered = Gathering(host, thread)
        await asyncio.gather(*(gathered.forward(f"owner {i}", given[i]) for i in order))
        return gathered.passes

    alone, among = works(host, tmp_path / "alone"), works(host, tmp_path / "among")
    for index in range(len(alone)):
        asyncio.run(train(alone, [index]))
    count = len(among)
    assert asyncio.run(train(among, [*range(count)][::-1])) == 2 * count
    for one, other in zip(alone, among, strict=True):
        states = []
        for work in (one, other):
            host.step(work.model, STEP)
            states.append(state_of(host, work.model, tmp_path / work.loss / work.model.directory.parent.name))
        assert all((x == states[1][name]).all() for name, x in states[0].items())
        assert all((x == y).all() for x, y in zip(one.logprobs, other.logprobs, strict=True))
    thread.close()


def sample_request(tokens: list[int]) -> requests.Sample:
    body: dict[str, Any] = {
        "prompt": {"chunks": [{"tokens": tokens}]},
        "sampling_params": {"max_tokens": 8, "seed": 3, "stop": []},
        "num_samples": 2,
        "sampling_session_id": "s",
        "seq_id": 0,
        "prompt_logprobs": True,
    }
    return requests.read(requests.Sample, json.dumps(body).encode())


def test_adapters_and_versions_of_them_are_sampled_together(
    host: TrainerHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sampler's log-probabilities of what each sampled are the trainer's."""
    monkeypatch.setattr(embedded_weights, "MOST_ADAPTERS", 1)  # so that those of the first requests make room for the others'
    models = [Model(str(i), Shape(rank, mlp=i != 1), tmp_path / str(i), seed=i) for i, rank in enumerate((2, 5, 20))]
    sources = [Source("base", None, tmp_path / "base")]
    sources += [saved(host, model, tmp_path, version) for version in range(2) for model in models]

    async def sample() -> list[Any]:
        thread = OneThread("tinker")
        samplers = Samplers(host, thread, load_tokenizer(host.base), EmbeddedWeights(host, thread, 8))
        tokens = list(range(2, 10))
        try:
            found = []
            for part in (sources[:4], sources[4:]):
                found += await asyncio.gather(*(samplers.sample(x, sample_request(tokens), 0) for x in part))
            assert len(samplers.weights._adapters) == 4  # type: ignore[attr-defined]  # these, and one of the first
            assert samplers.weights._swaps == 1  # type: ignore[attr-defined]  # the base, once
            again = await samplers.sample(sources[2], sample_request(tokens), 0)
        finally:
            await samplers.close()
            thread.close()
        return [*found, again]

    *found, again = (x.json() for x in asyncio.run(sample()))
    assert again["sequences"] == found[2]["sequences"]  # in other company
    check_samples(host, sources, found)


def test_whole_models_are_sampled_with_their_own_weights(host: TrainerHost, tmp_path: Path) -> None:
    """Which the engine has one after the other, while requests for several wait."""
    models = [Model(str(i), Shape(0), tmp_path / str(i), seed=i) for i in range(2)]
    sources = [*(saved(host, model, tmp_path, model.seed) for model in models), Source("base", None, tmp_path / "base")]

    async def sample() -> list[Any]:
        thread = OneThread("tinker")
        samplers = Samplers(host, thread, load_tokenizer(host.base), EmbeddedWeights(host, thread, 8))
        try:
            asked = (samplers.sample(x, sample_request(list(range(2, 10))), 0) for x in sources * 2)
            return [x.json() for x in await asyncio.gather(*asked)]
        finally:
            await samplers.close()
            thread.close()

    first, again = np.array_split(np.array(asyncio.run(sample()), object), 2)
    check_samples(host, sources, first)
    assert [x["sequences"] for x in again] == [x["sequences"] for x in first]


def saved(host: TrainerHost, model: Model, place: Path, seed: int) -> Source:
    """Trains for a step, whose weights are to be sampled from. seed: of its data."""
    host.forward(model, datums("cross_entropy", seed), "cross_entropy", {}, True)
    host.step(model, replace(STEP, learning_rate=1.0))
    directory = place / f"{model.id} at {model.steps}"
    host.save(model, directory / "state")
    return Source(directory.name, model.shape, directory, model, model.steps)


def check_samples(host: TrainerHost, sources: Sequence[Source], found: Sequence[Any]) -> None:
    """Holds the log-probabilities of what was sampled from each to the trainer's."""
    different = set()
    for source, result in zip(sources, found, strict=True):
        for sequence in result["sequences"]:
            tokens = np.array([*range(2, 10), *sequence["tokens"]], np.int32)
            scored = host.logprobs(source, tokens, tokens[1:, None])[-len(sequence["tokens"]) :, 0]
            np.testing.assert_allclose(sequence["logprobs"], scored, atol=1e-4)
        different.add(tuple(result["sequences"][0]["logprobs"]))
    assert len(different) == len(sources)
