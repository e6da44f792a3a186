"""A gateway on the loop of another thread, as in a run, and sessions over scripted models."""

from __future__ import annotations

import pytest

from areal_x.agents.gateway import Gateway
from tests.agents.gateway.scripted import RUN, Letters, Scripted, Talk


@pytest.fixture(scope="module")
def gateway(run):
    served = Gateway()
    run(served.start())
    yield served
    run(served.close())


@pytest.fixture
def talk(gateway, run):
    """Opens sessions: talk("what the model says", limits=…, context=…, held=…, sampling=…)."""
    opened = []

    def begin(says="hello", *, limits=None, sampling=RUN, on=gateway, renderer=None, **engine):
        async def open_one():
            scripted = Scripted(says, **engine)
            return Talk(on.open(scripted, renderer or Letters(), sampling, limits), scripted, run)

        opened.append(run(open_one()))
        return opened[-1]

    yield begin
    for one in opened:
        one.close()
