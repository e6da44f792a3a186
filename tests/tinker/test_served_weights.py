"""Which adapters are on servers, and for how long. No server."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from areal_x.engines.fleet.named_adapters import AdapterRoom
from areal_x.engines.vllm.config import VLLMConfig
from areal_x.errors import ConfigError, UserError
from areal_x.protocols.engine import Request, SamplingParams
from areal_x.protocols.trainer_config import LoRAConfig
from areal_x.tinker import served_weights
from areal_x.tinker.models import ABOUT, Shape, Source
from areal_x.tinker.served_weights import ServedWeights, create_engine


class Engine:
    """Holds names, of which no two are the same."""

    def __init__(self) -> None:
        self.room = AdapterRoom(8)
        self.config = VLLMConfig(urls=("http://127.0.0.1:9",))
        self.held: dict[str, str] = {}
        self.added = 0
        self.door = asyncio.Event()
        self.door.set()

    async def add_adapter(self, directory: Path) -> str:
        await self.door.wait()
        self.added += 1
        self.held[f"a{self.added}"] = (directory / "weights").read_text()
        return f"a{self.added}"

    async def remove_adapter(self, name: str) -> None:
        del self.held[name]

    async def generate(self, request: Request) -> str | None:
        return None if request.adapter is None else self.held[request.adapter]

    async def close(self) -> None: ...


def saved(place: Path, name: str, expires: float | None = None, created: float = 1.0) -> Source:
    """Saves a checkpoint, whose weights are its name and time."""
    directory = place / name
    (directory / "state").mkdir(parents=True, exist_ok=True)
    (directory / "state" / "weights").write_text(f"{name} of {created}")
    (directory / ABOUT).write_text(json.dumps({"created": created, "expires": expires}))
    return Source(f"{name}@{created}", Shape(4), directory, created=created)


async def sample(weights: ServedWeights, source: Source) -> Any:
    async with weights.holding(source) as generate:
        return (await generate([Request(SimpleNamespace(), SamplingParams())]))[0]  # type: ignore[arg-type]


def weights_of(engine: Engine) -> ServedWeights:
    whole: Any = SimpleNamespace(close=engine.close)
    return ServedWeights(engine, SimpleNamespace(), SimpleNamespace(), whole)  # type: ignore[arg-type]


def test_adapters_stay_while_they_are_used_and_the_oldest_beyond_the_limit_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_weights, "MOST_ADAPTERS", 2)

    async def work() -> None:
        engine = Engine()
        weights = weights_of(engine)
        sources = {name: saved(tmp_path, name) for name in "abcde"}
        async with weights.holding(sources["a"]):
            for name in "bcdce":
                assert await sample(weights, sources[name]) == f"{name} of 1.0"
            assert {x[0] for x in engine.held.values()} == set("acde")  # b was used longest ago
            assert (await sample(weights, sources["a"]), engine.added) == ("a of 1.0", 5)
        assert await sample(weights, sources["b"]) == "b of 1.0"
        assert ({x[0] for x in engine.held.values()}, engine.added) == (set("eab"), 6)
        assert await sample(weights, Source("base", None, tmp_path)) is None
        await weights.close()  # the servers are not ours
        assert engine.held == {}

    asyncio.run(asyncio.wait_for(work(), 10))


def test_a_checkpoint_that_is_replaced_or_expires_leaves_the_servers_and_answers_for_no_other(tmp_path: Path) -> None:
    async def work() -> None:
        engine = Engine()
        weights = weights_of(engine)
        old = saved(tmp_path, "a")
        assert await sample(weights, old) == "a of 1.0"
        new = saved(tmp_path, "a", created=2.0)
        assert await sample(weights, new) == "a of 2.0"
        assert [*engine.held.values()] == ["a of 2.0"]
        for gone in (old, saved(tmp_path, "b", expires=time.time() - 1), Source("c", Shape(4), tmp_path / "c")):
            assert not gone.is_there()
            with pytest.raises(UserError, match="are gone"):
                await sample(weights, gone)
        assert [*engine.held.values()] == ["a of 2.0"]
        expiring = saved(tmp_path, "d", expires=time.time() + 1000)
        assert await sample(weights, expiring) == "d of 1.0"
        saved(tmp_path, "d", expires=time.time() - 1)
        await weights._remove_unused()
        assert [*engine.held.values()] == ["a of 2.0"]

    asyncio.run(asyncio.wait_for(work(), 10))


def test_an_adapter_comes_once_for_requests_at_once_also_if_the_first_of_them_is_cancelled(tmp_path: Path) -> None:
    async def work() -> None:
        engine = Engine()
        weights, source = weights_of(engine), saved(tmp_path, "a")
        engine.door.clear()
        tasks = [asyncio.create_task(sample(weights, source)) for _ in range(3)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        engine.door.set()
        assert await asyncio.gather(*tasks[1:]) == ["a of 1.0"] * 2
        assert engine.added == 1

    asyncio.run(asyncio.wait_for(work(), 10))


def test_ranks_and_experts_that_servers_have_no_room_for_are_refused_in_a_sentence(tmp_path: Path) -> None:
    async def work() -> None:
        weights = weights_of(Engine())
        weights.check(Shape(8))
        with pytest.raises(UserError, match=r"up to rank 8, and not of rank 9: .* --max-rank 9"):
            weights.check(Shape(9))
        with pytest.raises(UserError, match="up to rank 8"):
            await sample(weights, Source("a", Shape(9), tmp_path))

    asyncio.run(asyncio.wait_for(work(), 10))
    lora = LoRAConfig(targets=("q_proj", "experts.gate_up_proj"))
    with pytest.raises(ConfigError, match=r"lora\.targets .* without experts\.gate_up_proj"):
        create_engine(VLLMConfig(), lora, AdapterRoom(8), tmp_path, tmp_path, print)
