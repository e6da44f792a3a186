"""One real SGLang server for all tests of a session. Its environment is its own: `make sglang` builds it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_x.engines.sglang.config import SGLangConfig
from areal_x.engines.sglang.engine import SGLangEngine
from tests.servers import Run, Weights

PYTHON = os.environ.get("SGLANG_PYTHON", str(Path(__file__).parents[3] / ".venv-sglang" / "bin" / "python"))


@pytest.fixture(scope="session")
def sglang_server(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory, run: Run) -> Iterator[SGLangEngine]:
    """An engine over one real server of the tiny model, started once. Tests use `sglang_engine`, whose weights are known."""
    config = SGLangConfig(context=256, concurrency=128, python=PYTHON)
    engine = SGLangEngine(config, tiny_model_dir, tmp_path_factory.mktemp("sglang"))
    run(engine.start())
    yield engine
    run(engine.close())


@pytest.fixture
def sglang_engine(sglang_server: SGLangEngine, tiny_model_dir: Path, run: Run) -> SGLangEngine:
    """The shared server with the tiny model's own weights, under a version that no earlier test used."""
    staged = sglang_server.stage(Weights(tiny_model_dir, sglang_server.version + 1))
    run(sglang_server.swap(staged))
    return sglang_server
