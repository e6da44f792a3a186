"""A vLLM server that is killed under clients of Tinker: the adapters that they sample from are loaded again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest

pytest.importorskip("areal_x_torch")

from areal_x.engines.fleet.named_adapters import AdapterRoom
from areal_x.engines.vllm.config import VLLMConfig
from areal_x.engines.vllm.engine import VLLMEngine
from areal_x.testing.models import write_model
from tests.servers import Run
from tests.tinker import served
from tests.tinker.served import Clients

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("vllm"), pytest.mark.thorough]


@pytest.mark.timeout(300)
@pytest.mark.loses(r"vLLM server 1 of 1 is lost \(")
def test_a_server_that_is_started_again_has_the_adapters_of_before(tmp_path: Path, run: Run) -> None:
    base = write_model(tmp_path / "base", num_hidden_layers=1)
    config = VLLMConfig(context=128, concurrency=16, threads=1, staging=str(tmp_path / "staging"))
    lines: list[str] = []
    engine = VLLMEngine(config, base, tmp_path / "logs", lines.append, room=AdapterRoom(served.ROOM), kept=True)
    clients = Clients(engine, base, tmp_path)

    async def work() -> None:
        await clients.start()
        sources = [clients.base, *[await clients.snapshot(model) for model in clients.models]]
        before = await asyncio.gather(*(clients.sample(x) for x in sources))
        (server,) = engine._servers
        for process in psutil.Process(server.pid).children(recursive=True):
            process.kill()
        after = await asyncio.gather(*(clients.sample(x) for x in sources))
        assert engine._servers[0].pid != server.pid
        for source, one, other in zip(sources, before, after, strict=True):
            await clients.check(source, other)
            assert [x["tokens"] for x in one["sequences"]] == [x["tokens"] for x in other["sequences"]]
        assert len(await clients.on_servers()) == len(served.SHAPES)

    try:
        run(work())
    finally:
        run(clients.close())
    assert any("serves again" in line for line in lines)
