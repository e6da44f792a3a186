"""One real vLLM server for all tests of a session, and an event loop that outlives each test."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_x.engines.vllm.client import VLLMClient
from areal_x.engines.vllm.config import VLLMConfig
from areal_x.engines.vllm.engine import VLLMEngine
from areal_x.hf.model_dir import read_tensors, write_model
from areal_x.testing import models
from tests.engines.fleet.watching import Watch, declared, watching
from tests.optimizer_moments import write_adamw_state

# Uses only characters of the tiny model.
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ message['role'][0] }}>{{ message['content'] }}.{% endfor %}{% if add_generation_prompt %}a>{% endif %}"
)
Run = Callable[[Coroutine[Any, Any, Any]], Any]


@dataclass
class Weights:
    """The part of a trainer that an engine's `stage` uses: a model directory's tensors, and a version."""

    directory: Path
    version: int

    def weights(self) -> Iterator[tuple[str, np.ndarray]]:
        return read_tensors(self.directory)


@pytest.fixture(scope="session", autouse=True)
def watch() -> Iterator[Watch]:
    """Watches every engine of the session; a problem after the last test fails that test."""
    with watching() as watch:
        yield watch
        watch.check((), (), None)


@pytest.fixture(autouse=True)
def nothing_is_lost_unasked(watch: Watch, request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test in which servers are lost or log errors without its declaring so (tests.engines.fleet.watching)."""
    folder = request.getfixturevalue("tmp_path") if "tmp_path" in request.fixturenames else None
    yield
    watch.check(declared(request.node, "loses"), declared(request.node, "log_errors"), folder)


@pytest.fixture(scope="session")
def run() -> Iterator[Run]:
    """Runs a coroutine to its end on an event loop in another thread, as a run's rollout does."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield lambda coroutine: asyncio.run_coroutine_threadsafe(coroutine, loop).result(600)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture(scope="session")
def other_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with other weights."""
    return models.write_model(tmp_path_factory.mktemp("other"), seed=5)


@pytest.fixture(scope="session")
def vllm_server(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory, run: Run) -> Iterator[VLLMEngine]:
    """An engine over one real server of the tiny model, started once. Tests use `vllm_engine`, whose weights are known."""
    checkpoint = tmp_path_factory.mktemp("checkpoint")  # as a trainer saves it, with its optimizer's state
    write_model(checkpoint, tiny_model_dir, read_tensors(tiny_model_dir))
    write_adamw_state(
        checkpoint, ((name, x, x) for name, x in read_tensors(tiny_model_dir)), {"version": 1, "optimizer": "adamw"}
    )
    (checkpoint / "chat_template.jinja").write_text(TEMPLATE)
    engine = VLLMEngine(VLLMConfig(context=256, concurrency=128), checkpoint, tmp_path_factory.mktemp("vllm"), kept=True)
    run(engine.start())
    yield engine
    run(engine.close())


@pytest.fixture
def vllm_engine(vllm_server: VLLMEngine, tiny_model_dir: Path, run: Run) -> VLLMEngine:
    """The shared server with the tiny model's own weights, under a version that no earlier test used."""
    staged = vllm_server.stage(Weights(tiny_model_dir, vllm_server.version + 1))
    run(vllm_server.swap(staged))
    return vllm_server


@pytest.fixture
def given_url(vllm_engine: VLLMEngine, run: Run) -> Any:
    """The running server's address and key; afterwards it belongs to the shared engine again."""
    (server,) = vllm_engine._servers
    yield server.url, server.key

    async def give_back() -> None:
        client = VLLMClient(server.url, server.key)
        await client.init_weight_transfer({"staging_root": str(vllm_engine.stager.staging.root)})
        await client.close()

    run(give_back())
