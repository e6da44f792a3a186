"""Real SGLang servers prove the weights that their workers use, and faults that are put into them are named."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_x.engines.fleet.failures import WeightsDiffer
from areal_x.engines.fleet.proof.claims import Claiming, Claims, read_claims
from areal_x.engines.fleet.proof.judge import Verdict, judge, parsed
from areal_x.engines.fleet.proof.prover import question
from areal_x.engines.sglang.client import SGLangClient
from areal_x.engines.sglang.config import SGLangConfig
from areal_x.engines.sglang.engine import SGLangEngine
from areal_x.hf.model_dir import read_tensors
from areal_x.protocols.engine import EngineError, Request, SamplingParams
from areal_x.testing.models import write_model, write_tokenizer
from tests.engines.sglang.conftest import PYTHON
from tests.engines.vllm.test_vllm_proof import replace_tensor
from tests.models import MORE, write_config
from tests.servers import Run, Weights

pytestmark = [pytest.mark.sglang, pytest.mark.xdist_group("sglang")]

REQUEST = Request(np.arange(2, 14, dtype=np.int32), SamplingParams(max_tokens=5, temperature=0.0))
ATTENTION, MLP = "model.layers.1.self_attn.", "model.layers.1.mlp."
Tensors = dict[str, np.ndarray]


def claimed(engine: SGLangEngine) -> Claims:
    current = engine.stager.current
    assert current is not None
    claims = read_claims(current.folder)
    assert claims is not None
    return claims


async def proved(engine: SGLangEngine) -> Verdict:
    (client,), claims = engine._clients, claimed(engine)
    return judge(claims, [parsed(answer) for answer in await client.prove(question(claims))])


@pytest.mark.parametrize("full", [True, False])
def test_all_tensors_of_a_version_are_proved_by_the_worker_and_none_of_them_is_that_of_another(
    full: bool, sglang_engine: SGLangEngine, tiny_model_dir: Path, tmp_path: Path, run: Run
) -> None:
    before = run(sglang_engine.generate(REQUEST))
    sglang_engine.stager._claimed = 0 if full else 1
    run(sglang_engine.swap(sglang_engine.stage(Weights(tiny_model_dir, sglang_engine.version + 1))))
    claims = claimed(sglang_engine)
    assert claims.full is full
    (client,) = sglang_engine._clients
    reports = [parsed(answer) for answer in run(client.prove(question(claims)))]
    assert judge(claims, reports) == Verdict([], {}, {})
    other = Claiming(claims.version, full)
    for name, tensor in read_tensors(write_model(tmp_path / "other", seed=9)):
        other.add(name, tensor)
    assert {words.split()[0] for words in judge(other.done(), reports).differences} == set(claims.tensors)
    after = run(sglang_engine.generate(REQUEST))  # the question has changed nothing
    np.testing.assert_array_equal(after.logprobs, before.logprobs)


def exchanged(one: str, other: str) -> Callable[[Tensors], Tensors]:
    return lambda x: {one: x[other], other: x[one]}


def changed(name: str, change: Callable[[np.ndarray], Any]) -> Callable[[Tensors], Tensors]:
    def fault(x: Tensors) -> Tensors:
        tensor = x[name].copy()
        returned = change(tensor)
        return {name: tensor if returned is None else np.ascontiguousarray(returned)}

    return fault


def one_bit_less(x: np.ndarray) -> None:
    x.reshape(-1).view(np.uint32)[7] ^= 1


FAULTS: dict[str, Callable[[Tensors], Tensors]] = {
    "one bit of one number": changed(f"{ATTENTION}q_proj.weight", one_bit_less),
    "the keys of the layer before": lambda x: {f"{ATTENTION}k_proj.weight": x["model.layers.0.self_attn.k_proj.weight"]},
    "keys and values exchanged": exchanged(f"{ATTENTION}k_proj.weight", f"{ATTENTION}v_proj.weight"),
    "gate and up exchanged": exchanged(f"{MLP}gate_proj.weight", f"{MLP}up_proj.weight"),
    "two rows of the vocabulary exchanged": changed("model.embed_tokens.weight", lambda x: x[[1, 0, *range(2, len(x))]]),
    "columns in another order": changed(f"{MLP}down_proj.weight", lambda x: x[:, ::-1]),
    "a norm that is scaled": changed("model.norm.weight", lambda x: x * np.float32(1.5)),
    "one head's norm is 0": changed(f"{ATTENTION}q_norm.weight", np.zeros_like),
}


async def tamper(client: SGLangClient, *of_workers: Tensors) -> None:
    """Replaces tensors of a paused server behind the engine's back, through another of its own ways for weights. of_workers:
    what each worker is given."""
    import torch

    sent = [[(name, torch.tensor(x)) for name, x in tensors.items()] for tensors in of_workers]
    contents = [base64.b64encode(pickle.dumps(each, protocol=4)).decode() for each in sent]
    await client._control("/begin_weight_update", {})
    await client._control("/update_weights_from_tensor", {"serialized_named_tensors": contents})
    await client._control("/end_weight_update", {})


def test_each_fault_of_a_workers_weights_is_found_and_named_and_nothing_else_is(
    sglang_engine: SGLangEngine, tiny_model_dir: Path, run: Run
) -> None:
    sglang_engine.stager._claimed = 0
    run(sglang_engine.swap(sglang_engine.stage(Weights(tiny_model_dir, sglang_engine.version + 1))))
    (client,) = sglang_engine._clients
    assert isinstance(client, SGLangClient)
    right = dict(read_tensors(tiny_model_dir))

    async def found() -> dict[str, tuple[set[str], set[str]]]:
        await client.pause()
        each = {}
        for name, fault in FAULTS.items():
            wrong = fault(right)
            await tamper(client, wrong)
            each[name] = ({words.split()[0] for words in (await proved(sglang_engine)).differences}, set(wrong))
            await tamper(client, {tensor: right[tensor] for tensor in wrong})
        assert (await proved(sglang_engine)).differences == []
        await client.resume()
        return each

    each = run(found())
    assert {name: named for name, (named, _) in each.items()} == {name: put for name, (_, put) in each.items()}


def test_a_worker_answers_what_is_no_question_with_an_error_and_goes_on(sglang_engine: SGLangEngine, run: Run) -> None:
    (client,) = sglang_engine._clients
    for words in ("", "{", "[]", '{"version": 1}', '{"version": "x", "full": true, "tensors": {"model.norm.weight": [-1]}}'):
        (answer,) = run(client.prove(words))
        assert set(answer) == {"error"}, words
    assert run(sglang_engine.generate(REQUEST)).tokens.size


@pytest.fixture
def mixture(tmp_path: Path, run: Run) -> Iterator[SGLangEngine]:
    """A server of its own, of a mixture of experts, which a fault may end."""
    model = write_config(MORE["qwen3-moe"], tmp_path / "model")
    write_tokenizer(model)
    engine = SGLangEngine(SGLangConfig(context=64, concurrency=4, python=PYTHON), model, tmp_path)
    run(engine.start())
    yield engine
    run(engine.close())


@pytest.mark.loses(r"was quarantined: .*version 2: model.*experts.* has other numbers")
def test_a_mixtures_experts_are_proved_and_a_server_with_a_stale_one_is_quarantined(
    mixture: SGLangEngine, tmp_path: Path, run: Run
) -> None:
    run(mixture.swap(mixture.stage(Weights(mixture.model, 1))))
    assert run(proved(mixture)) == Verdict([], {}, {})
    stale = next(name for name in claimed(mixture).tensors if "experts.2.up_proj" in name)
    staged = mixture.stage(Weights(write_config(MORE["qwen3-moe"], tmp_path / "second", seed=1), 2)).files.result()
    replace_tensor(staged, dict(read_tensors(mixture.model))[stale], stale)
    with pytest.raises(WeightsDiffer, match=rf"version 2: {stale} has other numbers"):
        run(mixture.swap(staged))
    assert mixture.version == 1
    with pytest.raises(EngineError, match=f"no server is left: .* {stale}"):
        run(mixture.generate(REQUEST))


@pytest.mark.loses(r"was quarantined: .*version 2: .*worker [01] is wrong")
@pytest.mark.parametrize("stale", [0, 1])
def test_each_of_two_workers_proves_its_part_and_a_stale_one_is_found_and_named(
    stale: int, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = (write_model(tmp_path / f"{seed}", seed=seed) for seed in (1, 2))
    weights, before = dict(read_tensors(new)), dict(read_tensors(old))
    engine = SGLangEngine(SGLangConfig(context=64, concurrency=4, python=PYTHON, tensor=2), old, tmp_path)
    finish = SGLangClient.finish_update

    async def finish_without_one(self: SGLangClient, version: str) -> None:
        """One worker gets the weights before again."""
        await tamper(self, *(before if worker == stale else weights for worker in range(2)))
        await finish(self, version)

    async def publish() -> None:
        await engine.start()
        await engine.swap(engine.stage(Weights(old, 1)))
        (client,), claims = engine._clients, claimed(engine)
        reports = [parsed(answer) for answer in await client.prove(question(claims))]
        assert [{part.tensor for part in report.parts} for report in reports] == [claims.tensors.keys()] * 2
        assert judge(claims, reports) == Verdict([], {}, {})
        for report in reports:  # each alone has a part of the matrices
            assert any("published numbers" in words for words in judge(claims, [report]).differences)
        monkeypatch.setattr(SGLangClient, "finish_update", finish_without_one)
        engine.stager._claimed = 0
        words = rf"version 2: .*; worker {stale} is wrong \({len(weights) - 1} more differ\)"
        with pytest.raises(WeightsDiffer, match=words):
            await engine.swap(engine.stage(Weights(new, 2)))
        with pytest.raises(EngineError, match=rf"no server is left: .* worker {stale} is wrong"):
            await engine.generate(REQUEST)

    try:
        run(publish())
    finally:
        run(engine.close())
