"""Servers of a shard prove the weights that the driver staged, with the claims that came with them. Scripted servers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from areal_x.engines.fleet.probe import probe_prompt
from areal_x.engines.fleet.proof.claims import CLAIMS
from areal_x.engines.fleet.stager import Stager
from areal_x.engines.vllm.config import VLLMConfig
from areal_x.protocols.engine import EngineError
from areal_x.shards.parts import ShardEngine
from tests.engines.vllm.test_vllm_spread import DIFFERS, STALE, URLS, Told
from tests.servers import Weights


async def published(model: Path, folder: Path, damage: str = "") -> ShardEngine:
    """A shard's engine after version 2, which the driver staged. damage: what its claims are overwritten with."""
    config = VLLMConfig(urls=URLS[:2], staging=str(folder))
    driver = Stager(
        config,
        model,
        lora=None,
        scorer=None,
        probe_prompt=lambda: probe_prompt(40, 64),
        report=print,
        prove_every=config.prove_every,
    )
    driver.open()
    engine = ShardEngine(config, model, folder, print)
    try:
        await engine.start()
        staged = await driver.written(driver.stage(Weights(model, 2), 2))
        if damage:
            (staged.folder / CLAIMS).write_text(damage)
        await engine.swap(staged)
        return engine
    finally:
        await engine.close()
        await driver.close()
        driver.remove_files()


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Told]:
    servers = {url: Told(url) for url in URLS}
    monkeypatch.setattr("areal_x.engines.vllm.engine.VLLMClient", lambda url, key, transfer: servers[url])
    return [servers[url] for url in URLS[:2]]


def test_the_servers_of_a_shard_prove_what_the_driver_claims(told: list[Told], tiny_model_dir: Path, tmp_path: Path) -> None:
    engine = asyncio.run(published(tiny_model_dir, tmp_path))
    assert engine.version == 2
    assert [server.proved for server in told] == [[(2, True, True)]] * 2
    assert [server.paused for server in told] == [False, False]


@pytest.mark.loses(rf":2 was quarantined: .* {DIFFERS}")
def test_a_server_of_a_shard_that_has_other_weights_is_quarantined(
    told: list[Told], tiny_model_dir: Path, tmp_path: Path
) -> None:
    told[1].stale = STALE
    asyncio.run(published(tiny_model_dir, tmp_path))
    assert [server.paused for server in told] == [False, True]


def test_claims_that_were_damaged_on_the_way_end_the_publication(
    told: list[Told], tiny_model_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(EngineError, match=CLAIMS):
        asyncio.run(published(tiny_model_dir, tmp_path, "{}"))
