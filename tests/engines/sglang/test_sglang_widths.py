"""A real SGLang server of two workers, by the settings of its parallel sizes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from areal_x.engines.sglang.config import SGLangConfig
from areal_x.engines.sglang.engine import SGLangEngine
from tests.engines import conformance
from tests.engines.sglang.conftest import PYTHON
from tests.servers import Run, Weights

pytestmark = [pytest.mark.sglang, pytest.mark.xdist_group("sglang")]


def test_a_server_of_two_workers_samples_and_swaps_as_one_of_one_does(
    tiny_model_dir: Path, other_model_dir: Path, run: Run, tmp_path: Path
) -> None:
    config = SGLangConfig(context=256, concurrency=16, python=PYTHON, tensor=2)
    engine = SGLangEngine(config, tiny_model_dir, tmp_path / "logs", kept=True)

    async def compare() -> None:
        await engine.start()
        try:
            await engine.swap(await asyncio.to_thread(engine.stage, Weights(tiny_model_dir, 1)))
            trainer = Weights(other_model_dir, 2)
            await conformance.check_weights_swapped_in_flight(engine, tiny_model_dir, trainer, other_model_dir)
            await conformance.check_truncated_sampling(engine, other_model_dir, 5, 1.0, samples=100, deviations=12)
        finally:
            await engine.close()

    run(compare())
