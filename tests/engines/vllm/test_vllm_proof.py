"""A real vLLM server proves the weights that its worker uses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from areal_x.engines.fleet.failures import WeightsDiffer
from areal_x.engines.fleet.proof.claims import Claiming, read_claims
from areal_x.engines.fleet.proof.judge import judge, parsed
from areal_x.engines.fleet.proof.prover import question
from areal_x.engines.fleet.staging import StagedFiles
from areal_x.engines.vllm.config import VLLMConfig
from areal_x.engines.vllm.engine import VLLMEngine
from areal_x.engines.vllm.proof.worker import PROVE
from areal_x.hf.model_dir import read_tensors
from areal_x.protocols.engine import EngineError, Request, SamplingParams
from areal_x.testing.models import write_model
from tests.servers import Run, Weights

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("vllm")]

REQUEST = Request(np.arange(2, 14, dtype=np.int32), SamplingParams(max_tokens=5))
TENSOR = "model.layers.1.self_attn.k_proj.weight"


@pytest.fixture
def second(
    vllm_engine: VLLMEngine, tiny_model_dir: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> Iterator[VLLMEngine]:
    """Another engine over the shared server, which may quarantine it."""
    (server,) = vllm_engine._servers
    monkeypatch.setenv("VLLM_API_KEY", server.key)
    engine = VLLMEngine(VLLMConfig(urls=(server.url,)), tiny_model_dir, tmp_path, lambda line: None)
    run(engine.start())
    yield engine
    run(engine.close())


@pytest.mark.parametrize("full", [True, False])
def test_all_tensors_of_a_version_are_proved_by_the_worker_and_none_of_them_is_that_of_another(
    full: bool, vllm_engine: VLLMEngine, tiny_model_dir: Path, tmp_path: Path, run: Run
) -> None:
    vllm_engine.stager._claimed = 0 if full else 1
    staged = vllm_engine.stage(Weights(tiny_model_dir, vllm_engine.version + 1))
    run(vllm_engine.swap(staged))
    current = vllm_engine.stager.current
    assert current is not None
    claims = read_claims(current.folder)
    assert claims is not None
    assert claims.full is full
    (client,) = vllm_engine._clients
    reports = [parsed(answer) for answer in run(client.prove(question(claims)))]
    verdict = judge(claims, reports)
    assert verdict.differences == []
    assert verdict.unproved == verdict.dtypes == {}
    other = Claiming(claims.version, full)
    for name, tensor in read_tensors(write_model(tmp_path / "other", seed=9)):
        other.add(name, tensor)
    found = {words.split()[0] for words in judge(other.done(), reports).differences}
    assert found == set(claims.tensors)


@pytest.mark.loses(rf"was quarantined: .*version 2: {TENSOR} has other numbers")
def test_a_server_that_was_given_a_stale_tensor_is_quarantined_and_generates_nothing_with_it(
    second: VLLMEngine, tmp_path: Path, run: Run
) -> None:
    run(second.swap(second.stage(Weights(write_model(tmp_path / "first", seed=3), 1))))
    before = run(second.generate(REQUEST))
    assert set(before.versions) == {1}
    staged = second.stage(Weights(write_model(tmp_path / "second", seed=4), 2)).files.result()
    replace_tensor(staged, load_file(tmp_path / "first" / "model.safetensors")[TENSOR])
    (client,) = second._clients
    with pytest.raises(WeightsDiffer, match=rf"version 2: {TENSOR} has other numbers"):
        run(second.swap(staged))
    assert second.version == 1
    assert run(client.is_paused())
    with pytest.raises(EngineError, match=f"no server is left: .* {TENSOR}"):
        run(second.generate(REQUEST))


def replace_tensor(staged: StagedFiles, tensor: np.ndarray, name: str = TENSOR) -> None:
    (file,) = staged.folder.glob("*.safetensors")
    tensors = load_file(file)
    assert not np.array_equal(tensors[name], tensor)
    save_file(tensors | {name: tensor}, file)


def test_a_worker_answers_what_is_no_question_with_an_error_and_goes_on(vllm_engine: VLLMEngine, run: Run) -> None:
    (client,) = vllm_engine._clients
    hostile = ["", "{", "[]", '{"version": 1}', '{"version": "x", "full": true, "tensors": {"model.norm.weight": [-1]}}']
    for words in hostile:
        (answer,) = run(client.prove(words))
        assert set(answer) == {"error"}, (PROVE, words)
    assert run(vllm_engine.generate(REQUEST)).tokens.size
