"""Real vLLM servers of models in block-scaled fp8, on CPUs with tiles for matrices (AMX)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from areal_x.engines.vllm.config import VLLMConfig
from areal_x.engines.vllm.engine import VLLMEngine
from areal_x.hf.model_dir import read_config
from areal_x.protocols.engine import Request, SamplingParams
from areal_x.testing.models import write_tokenizer
from tests.engines.conformance import expected_logprobs
from tests.engines.fp8_families import rounded
from tests.engines.vllm.test_vllm_families import printed
from tests.hf.test_fp8_weights import FP8_MODELS
from tests.models import write_config
from tests.servers import Run, Weights
from tests.thorough import further, run_values, thorough

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="vLLM's kernels for fp8 on a CPU need AMX"),
]


@pytest.fixture(scope="module")
def reports(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    asked = run_values(request, "name")
    yield from printed(["tests.engines.fp8_families", *(x for x in FP8_MODELS if x in asked)], tmp_path_factory)


@pytest.mark.xdist_group("vllm-families")
@pytest.mark.parametrize("name", further(*FP8_MODELS))
def test_a_server_computes_with_the_rounded_weights_that_it_begins_with_and_that_a_swap_brings(
    name: str, reports: dict[str, Any]
) -> None:
    report = reports[name]
    assert report.get("error") is None
    assert max(report["before"], report["after"]) < 2 < 4 < report["rounding"]
    assert report["begun"] == 0
    assert report["unnoticed"] == []


@thorough
def test_a_run_publishes_in_fp8_to_servers_that_it_starts_so(tmp_path: Path, run: Run) -> None:
    old, new = (write_config(FP8_MODELS["qwen3"], tmp_path / f"{seed}", seed=seed) for seed in (1, 2))
    write_tokenizer(old)
    config = VLLMConfig(context=64, concurrency=4, quantization="fp8", staging=f"{tmp_path / 'staging'}")
    engine = VLLMEngine(config, old, tmp_path)
    run(engine.start())
    try:
        assert read_config(engine.stager.served_model)["quantization_config"]["quant_method"] == "fp8"
        staged = engine.stage(Weights(new, 1))
        run(engine.swap(staged))
        request = Request(np.arange(2, 14, dtype=np.int32), SamplingParams(max_tokens=30))
        completion = run(engine.generate(request))
    finally:
        run(engine.close())
    assert set(completion.versions.tolist()) == {1}
    gaps = [
        np.abs(completion.logprobs - expected_logprobs(model, request, completion)).mean()
        for model in (rounded(new, tmp_path / "rounded"), new, old)
    ]
    assert gaps[0] < 0.5 * gaps[1] < 0.5 * gaps[2]
