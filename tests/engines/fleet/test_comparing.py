"""The comparison of servers after a publication, with servers that are stand-ins."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from areal_x.engines.fleet import supervisor as supervisors
from areal_x.engines.fleet.fleet import State
from areal_x.engines.fleet.supervisor import Supervisor
from areal_x.engines.vllm.config import VLLMConfig
from areal_x.protocols.engine import EngineError


async def nothing(*_: Any) -> Any: ...


@pytest.mark.loses(r"s7 was quarantined")
def test_few_servers_are_asked_at_a_time_and_all_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisors, "COMPARED_AT_ONCE", 4)
    asked: list[str] = []
    at_once: list[int] = []
    under_way: set[str] = set()

    async def score(replica: Any) -> Any:
        under_way.add(replica.name)
        at_once.append(len(under_way))
        asked.append(replica.name)
        for _ in range(3):  # others would begin meanwhile
            await asyncio.sleep(0)
        under_way.remove(replica.name)
        if replica.name == "s3":
            raise EngineError("it does not answer")
        return np.full(8, 5.0 if replica.name == "s7" else 1.0, np.float32)

    async def compare() -> Supervisor:
        supervisor = Supervisor(VLLMConfig(), print, nothing, nothing, score, lambda: None)
        for number in range(30):
            replica: Any = SimpleNamespace(name=f"s{number}", ours=True)
            supervisor.add(replica)
        for name in supervisor.fleet.due(time.monotonic()):
            supervisor.fleet.reached(name)
            supervisor.fleet.accepted(name, 0, time.monotonic())
        supervisor.compare()
        assert supervisor._comparing is not None
        await supervisor._comparing
        return supervisor

    supervisor = asyncio.run(compare())
    assert sorted(asked) == sorted(f"s{number}" for number in range(30))
    assert max(at_once) == 4
    states = {name: member.state for name, member in supervisor.fleet.members.items()}
    assert states.pop("s7") is State.QUARANTINED
    assert set(states.values()) == {State.READY}
    assert supervisor._consensus is not None
    np.testing.assert_array_equal(supervisor._consensus[1], np.ones(8))
