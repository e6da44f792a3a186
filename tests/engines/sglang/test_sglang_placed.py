"""SGLang servers that keepers start, here with a keeper in this process, and a program in the place of SGLang."""

from __future__ import annotations

import asyncio
import json
import pickle
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from areal_x.cluster.config import ClusterConfig
from areal_x.engines.fleet import server as servers
from areal_x.engines.fleet.folders import LOCK
from areal_x.engines.sglang import launcher
from areal_x.engines.sglang.config import SGLangConfig
from areal_x.engines.sglang.engine import SGLangEngine
from areal_x.engines.sglang.server import Launch
from areal_x.errors import UserError
from areal_x.testing.models import write_model
from tests.engines.fleet.keepers import LocalKeeper, keeping
from tests.engines.fleet.test_placed import HOST, start, wait_for
from tests.experiments import tiny_experiment

# An interpreter that answers what `installed` asks, and serves in place of the launcher.
STAND_IN = f"""#!{sys.executable}
import http.server, json, os, sys
if "-c" in sys.argv:
    print(json.dumps({{"sglang": "0.5.23", "torch": "2.9.1+cpu"}}))
    sys.exit()
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/ping" else 404)
        self.end_headers()
    def log_message(self, *_): ...
def argument(name):
    return sys.argv[sys.argv.index(name) + 1]
with open(os.environ["SEEN"], "w") as seen:
    json.dump({{"words": sys.argv, "environment": dict(os.environ)}}, seen)
print("the server prints its settings", flush=True)
http.server.HTTPServer((argument("--host"), int(argument("--port"))), Healthy).serve_forever()
"""


class FarKeeper(LocalKeeper):
    """A keeper that gets copies of what it is given."""

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        return super().call(method, *pickle.loads(pickle.dumps(arguments)))


@pytest.fixture
def keeper() -> Iterator[FarKeeper]:
    with keeping(FarKeeper, HOST) as keeper:
        yield keeper


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launch:
    python = tmp_path / "python"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    monkeypatch.setenv("PYTHONPATH", "/of the driver")
    (tmp_path / "staging").mkdir()
    (tmp_path / "staging" / LOCK).touch()
    log = tmp_path / "logs" / "sglang-0.log"
    return Launch(write_model(tmp_path / "model"), log, tmp_path / "staging", 128, 8, seed=3, threads=2, python=str(python))


def test_a_keeper_starts_the_launcher_with_the_nodes_interpreter_and_gives_it_the_key_alone(
    keeper: FarKeeper, launch: Launch, tmp_path: Path
) -> None:
    async def started() -> servers.StartedServer:
        server = await start(keeper, launch)
        await servers.wait_until_ready(server, launch, "the server", 60, lambda line: None)
        return server

    server = asyncio.run(started())
    seen = json.loads((tmp_path / "seen").read_text())
    words, environment = seen["words"], seen["environment"]
    assert words[:3] == [launch.python, "-P", launcher.__file__]
    assert words[words.index("--host") + 1] == HOST
    assert server.url == f"http://{HOST}:{words[words.index('--port') + 1]}"
    assert environment[launcher.KEY] == server.key
    assert environment["OMP_NUM_THREADS"] == "2"
    assert "PYTHONPATH" not in environment
    assert server.key not in " ".join(words)
    assert server.key not in launch.log.read_text()
    assert server.key not in repr(keeper.keeper._server)
    assert server.last_line() == "its log ends: the server prints its settings"
    server.terminate()
    wait_for(lambda: server.poll() is not None)
    again = asyncio.run(start(keeper, replace(launch, seed=4)))
    assert again.key != server.key
    again.stop()


def test_a_node_without_the_interpreter_is_named(keeper: FarKeeper, launch: Launch, tmp_path: Path) -> None:
    lacking = replace(launch, python=str(tmp_path / "nowhere" / "python"))
    sentence = r"^the node \S+ cannot start it: sglang\.python = .* under the same path on every machine that serves$"
    with pytest.raises(UserError, match=sentence):
        asyncio.run(start(keeper, lacking))


def test_a_driver_without_sglang_places_servers_that_compute_with_the_nodes_cores(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    nowhere = SGLangConfig(python=str(tmp_path / "nowhere"), servers=2, tensor=2)
    with pytest.raises(UserError, match=r"sglang\.python = .* cannot be run"):
        SGLangEngine(nowhere, model, tmp_path)
    placement = ClusterConfig(server_cpus=6)
    run = tiny_experiment(model, tmp_path, engine="sglang", cluster="ray", sglang=nowhere, placement=placement)
    assert run.places_servers
    starter: Any = object()
    trainer: Any = None
    engine = run.create_engine(model, trainer, run.workflow, tmp_path, print, starter)
    assert isinstance(engine, SGLangEngine)
    assert engine._starter is starter
    assert (engine.config.threads, engine.config.context) == (3, run.row_length)
