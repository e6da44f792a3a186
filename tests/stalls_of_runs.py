"""Stalls of the trainer's side: the ring's calls, checkpoints, the journal, the processes of a cluster."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from areal_x import build
from areal_x.cluster import connection, on_ray
from areal_x.cluster.gang import Room
from areal_x.protocols.engine import Completion
from areal_x.rollout.queue import TrajectoryQueue
from areal_x.rollout.rollout import Rollout
from areal_x.rollout.runner import Runner
from areal_x.run import checkpoint
from areal_x.run.journal import FILE, Journal
from areal_x.runtime import waits
from areal_x.tasks.stream import TaskStream
from areal_x.types import Group, Task
from tests.experiments import tiny_experiment
from tests.rollout.fakes import TASKS, Doing, FakeEngine, Plain
from tests.stalls import Stall, stall

TRAINER = SimpleNamespace(version=0)


@asynccontextmanager
async def rollout(engine: Any, *, begun: bool = True, workflow: Any = None, **changes: Any) -> AsyncIterator[Rollout]:
    """Over the engine, publishing begun; every call of it blocks and is for a thread."""
    queue = TrajectoryQueue(1, changes.pop("max_staleness", 0))
    models = changes.pop("models", None)
    runner = Runner(engine, workflow or Plain(), TaskStream(TASKS), queue, group_size=1, **changes)
    made = Rollout(runner, models=models)
    try:
        if begun:
            await asyncio.to_thread(made.start)
            await asyncio.to_thread(made.publish, TRAINER, 0)
        yield made
    finally:
        await asyncio.to_thread(made.close)


class Gated(FakeEngine):
    """One of its methods stalls."""

    def __init__(self, stall: Stall, method: str) -> None:
        super().__init__()
        inner = getattr(self, method)

        async def gated(*arguments: Any) -> Any:
            await stall.held()
            return await inner(*arguments)

        def staged(*arguments: Any) -> Any:
            stall.hold()
            return inner(*arguments)

        setattr(self, method, staged if method == "stage" else gated)


@stall("the engine to start")
async def _(stall: Stall) -> None:
    async with rollout(Gated(stall, "start"), begun=False) as made:
        await stall.threaded(made.start, "the run")
        await asyncio.to_thread(made.publish, TRAINER, 0)


async def turn(stall: Stall, what: str, engine: Any, models: Any) -> None:
    """A step of a rollout that takes turns with models, one of which stalls."""
    async with rollout(engine, begun=False, models=models) as made:
        await asyncio.to_thread(made.start)

        def step() -> list[Group]:
            made.publish(TRAINER, 0)
            return made.take()

        assert len(await stall.threaded(step, "the trainer", what)) == 1


def models_with(**methods: Any) -> Any:
    return SimpleNamespace(**{"rest": lambda: None, "wake": lambda: None, "device_bytes": lambda: 0, **methods})


@stall("the engine to sleep")
async def _(stall: Stall) -> None:
    await turn(stall, "the engine to sleep", Gated(stall, "sleep"), models_with())


@stall("its state to return to its devices")
async def _(stall: Stall) -> None:
    await turn(stall, "its state to return to its devices", FakeEngine(), models_with(wake=stall.hold))


@stall("its state to leave its devices")
async def _(stall: Stall) -> None:
    first = iter([True])  # before the engine starts

    def rest() -> None:
        if not next(first, False):
            stall.hold()

    await turn(stall, "its state to leave its devices", FakeEngine(), models_with(rest=rest))


@stall("the weights of version {} to be staged")
async def _(stall: Stall) -> None:
    async with rollout(Gated(stall, "stage"), begun=False) as made:
        await asyncio.to_thread(made.start)
        await stall.threaded(lambda: made.publish(TRAINER, 0), "the trainer", "the weights of version 0 to be staged")
        assert len(await asyncio.to_thread(made.take)) == 1


@stall("the engine to take version {}")
async def _(stall: Stall) -> None:
    async with rollout(Gated(stall, "swap"), begun=False) as made:
        await asyncio.to_thread(made.start)
        await stall.threaded(lambda: made.publish(TRAINER, 0), "the trainer", "the engine to take version 0")
        assert len(await asyncio.to_thread(made.take)) == 1


@stall("the groups of step {}")
async def _(stall: Stall) -> None:
    async with rollout(Gated(stall, "generate")) as made:
        who = r"the trainer has waited \d+ s for the groups of step 1 \(0 of 1 are finished; the oldest in flight is group 0 "
        task = asyncio.create_task(asyncio.to_thread(made.take))
        await stall.said("the trainer", who.partition(" s for ")[2] + r"\(task task \d+\): 1 waits for the engine\)")
        stall.release()
        assert len(await task) == 1


@stall("the engine")
async def _(stall: Stall) -> None:
    async with rollout(Gated(stall, "generate")) as made:
        await stall.said(r"group 0, episode 0 \(task task \d+\)", r"the engine \(call 1, a prompt of 3 tokens\)")
        stall.release()
        assert len(await asyncio.to_thread(made.take)) == 1


@stall("its workflow")
async def _(stall: Stall) -> None:
    async def work(task: Task, engine: Any) -> Any:
        await stall.held()
        return await Plain().run(task, engine)

    async with rollout(FakeEngine(), workflow=Doing(work)) as made:
        await stall.said(r"group 0, episode 0 \(task task \d+\)", r"its workflow \(Doing\)")
        stall.release()
        assert len(await asyncio.to_thread(made.take)) == 1


@stall("room for another group")
async def _(stall: Stall) -> None:
    async with rollout(Gated(stall, "generate")) as made:
        await stall.idle("the rollout")
        stall.release()
        assert len(await asyncio.to_thread(made.take)) == 1


@stall("an iteration of the rollout's loop")
async def _(stall: Stall) -> None:
    async with rollout(FakeEngine()) as made:
        assert made._loop is not None
        made._loop.call_soon_threadsafe(stall.hold)  # a callback that blocks
        stats = await stall.threaded(made.stats, "the trainer")
        assert stats.failed == 0


@stall("the evaluation")
async def _(stall: Stall) -> None:
    engine = FakeEngine()
    async with rollout(engine) as made:
        await asyncio.to_thread(made.take)  # the next group waits for its version
        engine.generate = Gated(stall, "generate").generate  # type: ignore[method-assign]
        missing = r"the evaluation \(2 answers are missing: tasks task 0, task 1\)"
        episodes = await stall.threaded(lambda: made.evaluate(TASKS[:2]), "the trainer", missing)
        assert len(episodes) == 2


class InTurn(FakeEngine):
    """Answers the first wave of requests at once, and the second when a stall is released."""

    def __init__(self, stall: Stall) -> None:
        super().__init__()
        self.stall, self.waves = stall, 0

    def submit(self, requests: Any) -> list[asyncio.Future[Completion]]:
        self.waves += 1
        return [asyncio.ensure_future(self.answer(request, self.waves)) for request in requests]

    async def answer(self, request: Any, wave: int) -> Completion:
        if wave == 2:
            await self.stall.held()
        return await self.generate(request)


@stall("the groups that were admitted before version {}")
async def _(stall: Stall) -> None:
    calls: list[str] = []

    async def twice(task: Task, engine: Any) -> Any:
        calls.append(task.id)
        if len(calls) > 1:  # the second group calls again
            await Plain().run(task, engine)
        return await Plain().run(task, engine)

    workflow = Doing(twice)
    async with rollout(InTurn(stall), workflow=workflow, max_staleness=1, deterministic=True) as made:
        await asyncio.to_thread(made.take)
        unfinished = r"the groups that were admitted before version 1 \(0 of 1 are finished; the oldest in flight is group 1"
        await stall.threaded(lambda: made.publish(TRAINER, 1), "the publication", unfinished)


@stall("the rollout to end")
async def _(stall: Stall) -> None:
    async with rollout(Gated(stall, "close")) as made:
        await stall.threaded(made.close, "the run")


@stall("the trainer's step {}")
async def _(stall: Stall) -> None:
    model = stall.request.getfixturevalue("tiny_model_dir")
    experiment = tiny_experiment(model, stall.folder, steps=1, groups_per_step=1, group_size=2, workflow=Plain())
    experiment.create_engine = lambda *_: FakeEngine()  # type: ignore[method-assign]

    def learn(*_: Any) -> dict[str, float]:  # nothing, so that nothing is compiled
        stall.hold()
        return {"skipped": 0.0}

    experiment.learn = learn  # type: ignore[method-assign]
    patch = stall.request.getfixturevalue("monkeypatch")
    patch.setattr(waits, "SILENCE_SECONDS", 0.1)  # sooner than the test's own watch
    run = experiment.open()
    messages: list[str] = []
    turns = await stall.threaded(
        lambda: list(experiment.turns(run, message=messages.append)), "the run", "the trainer's step 1"
    )
    assert turns[-1].metrics["step"] == 1
    assert "the trainer's step 1" in (run / "logs" / waits.FILE).read_text()
    assert any("the trainer's step 1" in message for message in messages)  # and the display


# ---- checkpoints and the journal


def written(folder: Path) -> None:
    (folder / "weights").write_text("weights")


@stall("the checkpoint of step {} to be written")
async def _(stall: Stall) -> None:
    def write(folder: Path) -> None:
        stall.hold()
        written(folder)

    with checkpoint.Saver(stall.folder, 1, print) as saver:
        await stall.threaded(lambda: saver.save(4, write, {}), "the run", "the checkpoint of step 4 to be written")
    assert checkpoint.steps(stall.folder) == [4]


@stall("the export of step {} to be written")
async def _(stall: Stall) -> None:
    stall.request.getfixturevalue("monkeypatch").setattr(build, "write_whole", stall.hold)
    policy = SimpleNamespace(weights=dict)
    parts: Any = SimpleNamespace(run=stall.folder, models=SimpleNamespace(policy=policy), source=stall.folder, head="policy")
    await stall.threaded(lambda: build.Parts.export(parts, 5), "the run", "the export of step 5 to be written")


@stall("the checkpoint before to be completed")
async def _(stall: Stall) -> None:
    def write(folder: Path) -> checkpoint.Wait:
        written(folder)
        return stall.hold

    with checkpoint.Saver(stall.folder, 1, print) as saver:
        saver.save(4, write, {})
        await stall.threaded(saver.wait, "the run")
    assert checkpoint.steps(stall.folder) == [4]


@contextmanager
def locked(folder: Path) -> Iterator[sqlite3.Connection]:
    """Another program has the journal."""
    other = sqlite3.connect(folder / FILE, check_same_thread=False)
    other.execute("BEGIN EXCLUSIVE")
    try:
        yield other
    finally:
        other.close()


@stall("the journal to be written")
async def _(stall: Stall) -> None:
    with Journal(stall.folder) as journal, locked(stall.folder) as other:
        journal.admitted(Group(TASKS[0], 0, 0), 0)
        flushing = asyncio.create_task(asyncio.to_thread(journal.flush))
        await stall.said("the run", rf"the journal to be written \(\d entries of {journal.path} are left\)")
        other.rollback()
        await flushing


@stall("the journal to be closed")
async def _(stall: Stall) -> None:
    journal = Journal(stall.folder)
    with locked(stall.folder) as other:
        journal.admitted(Group(TASKS[0], 0, 0), 0)
        closing = asyncio.create_task(asyncio.to_thread(journal.__exit__))
        await stall.said("the run")
        other.rollback()
        await closing


@stall("entries")
async def _(stall: Stall) -> None:
    with Journal(stall.folder) as journal:
        await stall.idle("the journal")
        journal.admitted(Group(TASKS[0], 0, 0), 0)
        journal.flush()


# ---- processes of a cluster


@contextmanager
def slow_ray(stall: Stall) -> Iterator[None]:
    """Replaces Ray's calls by some that end when the stall is released."""
    ray = pytest.importorskip("ray")
    patch = stall.request.getfixturevalue("monkeypatch").setattr

    def wait(references: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        return (references, []) if stall.gate.wait(timeout) else ([], references)

    patch(ray, "wait", wait)
    patch(ray, "get", lambda reference: reference)
    patch(ray, "nodes", lambda: [{"Alive": True, "Resources": {"CPU": 2.0}}])
    patch(ray, "available_resources", lambda: {"CPU": 1.0})
    patch(ray, "init", stall.hold)
    patch(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    patch(ray, "is_initialized", lambda: False)
    patch(ray, "shutdown", lambda: None)
    try:
        yield
    finally:
        stall.release()


def gang_of(size: int) -> on_ray.RayGang:
    gang = on_ray.RayGang.__new__(on_ray.RayGang)
    gang._name, gang._size, gang._lost, gang._ended, gang._watch = "rank", size, None, True, None
    gang._group = SimpleNamespace(ready=object)
    return gang


@stall("the processes that train")
async def _(stall: Stall) -> None:
    with slow_ray(stall):
        answers = asyncio.create_task(asyncio.to_thread(gang_of(2)._results, ["a", "b"]))
        await stall.said("the run", r"the processes that train \(\[0, 1\] have not answered\)")
        stall.release()
        assert await answers == ["a", "b"]


@stall("room for {} processes in the cluster")
async def _(stall: Stall) -> None:
    with slow_ray(stall):
        placed = asyncio.create_task(asyncio.to_thread(gang_of(2)._wait_for_room, Room()))
        await stall.said("the run", r"room for 2 processes in the cluster \(2 CPU wanted, 1 free\)")
        stall.release()
        await placed


@stall("the Ray cluster")
async def _(stall: Stall) -> None:
    def connect() -> None:
        with connection.connected(1):
            pass

    with slow_ray(stall):
        patch = stall.request.getfixturevalue("monkeypatch")
        patch.delenv("RAY_ADDRESS", raising=False)
        connecting = asyncio.create_task(asyncio.to_thread(connect))
        await stall.said("the run")
        stall.release()
        await connecting
