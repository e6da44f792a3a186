"""The thread around engine and runner, called as an experiment calls it."""

import asyncio
import gc
import json
import os
import signal
import threading
import weakref
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from areal_x.errors import UserError
from areal_x.protocols.engine import EngineError
from areal_x.rollout.queue import TrajectoryQueue
from areal_x.rollout.rollout import Published, Rollout
from areal_x.rollout.runner import Runner
from areal_x.run.journal import Resumed
from areal_x.runtime import loop
from areal_x.simulation import FakeTrainer
from areal_x.tasks.stream import TaskStream
from areal_x.types import Failed, Scored
from tests.rollout.fakes import TASKS, Doing, FakeEngine, Plain


@contextmanager
def rollout(engine=None, workflow=None, *, groups_per_step=2, max_staleness=1, window=2, seed=0, **settings):
    stream, queue = TaskStream(TASKS, seed), TrajectoryQueue(groups_per_step, max_staleness, window)
    runner = Runner(engine or FakeEngine(), workflow or Plain(), stream, queue, group_size=2, seed=seed, **settings)
    with Rollout(runner) as made:
        yield made
    assert "rollout" not in [thread.name for thread in threading.enumerate()]


def steps(made, trainer, count):
    for _ in range(count):
        groups = made.take()
        yield groups
        trainer.version += 1
        made.publish(trainer)


def test_the_ring_turns_and_no_group_is_older_than_the_bound():
    trainer = FakeTrainer()
    with rollout() as made:
        made.start()
        assert made.publish(trainer).paused_seconds == 0.25
        for groups in steps(made, trainer, 12):
            assert len(groups) == 2
            for group in groups:
                assert 0 <= trainer.version - group.admitted_version <= (4 + 2 - 2) // 2
                for episode in group.episodes:
                    versions = episode.trajectories[0].versions
                    assert group.admitted_version <= versions.max() <= trainer.version
        stats = made.stats()
    assert stats.scored >= 48
    assert stats.generated_tokens == 5 * stats.scored


def test_without_staleness_every_token_is_of_the_version_that_is_trained():
    trainer = FakeTrainer(version=40)  # a trainer that was trained before is published as it is
    with rollout(max_staleness=0, window=1) as made:
        made.start()
        made.publish(trainer)
        for groups in steps(made, trainer, 4):
            versions = [e.trajectories[0].versions[-5:] for g in groups for e in g.episodes]
            assert {int(v) for v in np.concatenate(versions)} == {trainer.version}


def test_nothing_is_generated_before_the_engine_has_the_trainers_weights():
    engine = FakeEngine()
    with rollout(engine) as made:
        made.start()
        assert made.stats().unfinished == 0
        assert engine.requests == []
        made.publish(FakeTrainer())
        made.take()
    assert engine.calls == ["start", "stage", "swap", "close"]


def test_weights_are_staged_on_the_callers_thread_and_swapped_on_the_rollouts():
    threads = {}

    class Watched(FakeEngine):
        def stage(self, trainer, version=None):
            threads["stage"] = threading.current_thread().name
            return super().stage(trainer, version)

        async def swap(self, staged):
            threads["swap"] = threading.current_thread().name
            return await super().swap(staged)

    with rollout(Watched()) as made:
        made.start()
        assert isinstance(made.publish(FakeTrainer()), Published)
    assert threads == {"stage": threading.current_thread().name, "swap": "rollout"}


class SlowSwaps(FakeEngine):
    """Swaps wait for a gate, from the second on. failing: they raise behind it."""

    def __init__(self, failing=False):
        super().__init__()
        self.door, self.swapping, self.failing = threading.Event(), threading.Event(), failing

    async def swap(self, staged):
        if self.calls.count("swap"):
            self.swapping.set()
            try:
                while not self.door.is_set():
                    await asyncio.sleep(0.001)
            except asyncio.CancelledError:
                self.calls.append("given up")
                raise
            if self.failing:
                raise EngineError("no server took the weights")
        return await super().swap(staged)


@contextmanager
def publishing(engine, **settings):
    """A rollout one of whose groups was trained on, and whose engine is taking version 1."""
    trainer = FakeTrainer()
    with rollout(engine, **settings) as made:
        made.start()
        made.publish(trainer)
        made.take()
        trainer.version = 1
        made.publish(trainer, wait=False)
        assert engine.swapping.wait(60)
        yield made


def test_old_garbage_is_collected_when_weights_are_published(monkeypatch):
    monkeypatch.setattr(loop, "COLLECT_SECONDS", 0.0)
    trainer = FakeTrainer()
    gc.disable()
    try:
        with rollout() as made:
            made.start()
            made.publish(trainer)
            ring = threading.Event()
            ring.itself = ring
            garbage = weakref.ref(ring)
            gc.collect(1)  # it becomes old
            del ring
            for _ in steps(made, trainer, 1):
                assert garbage() is not None
            assert garbage() is None
    finally:
        gc.enable()


def test_the_trainer_goes_on_while_the_engine_takes_its_weights():
    engine, trainer = SlowSwaps(), FakeTrainer()
    with rollout(engine, max_staleness=1) as made:
        made.start()
        made.publish(trainer)
        first = made.take()
        trainer.version = 1
        published = made.publish(trainer, wait=False)
        assert published.paused_seconds == 0.25  # of version 0
        assert engine.swapping.wait(60)
        second = made.take()  # it was admitted before
        assert engine.version == 0
        assert made._look(lambda: made.runner.queue.version) == 0  # no slot is free before the weights are out
        engine.door.set()
        trainer.version = 2
        made.publish(trainer)
        assert engine.version == 2
        assert engine.calls[-4:] == ["stage", "swap", "stage", "swap"]  # one after the other
        third = made.take()
    assert {group.admitted_version for group in [*first, *second]} == {0}
    assert not {group.ticket for group in first} & {group.ticket for group in [*second, *third]}


def test_an_evaluation_waits_for_the_weights():
    engine = SlowSwaps()
    with publishing(engine) as made:
        threading.Timer(0.05, engine.door.set).start()
        (episode,) = made.evaluate(TASKS[:1])
    assert episode.trajectories[0].versions.max() == 1


def test_a_publication_that_fails_beside_the_training_ends_what_waits_for_its_slots():
    engine = SlowSwaps(failing=True)
    with publishing(engine, max_staleness=0, window=1) as made:
        engine.door.set()
        with pytest.raises(EngineError, match="no server took the weights"):
            made.take()
        with pytest.raises(EngineError, match="no server took the weights"):
            made.publish(FakeTrainer(version=1))


def test_a_rollout_that_is_closed_gives_up_a_publication_before_it_closes_the_engine():
    engine = SlowSwaps()
    with publishing(engine):
        pass
    assert engine.version == 0
    assert engine.calls[-2:] == ["given up", "close"]


def test_weights_that_the_swap_reads_from_the_trainer_are_waited_for():
    class Live(FakeEngine):
        def stage(self, trainer, version=None):
            return replace(super().stage(trainer, version), reads_trainer=True)

    engine, trainer = Live(), FakeTrainer()
    with rollout(engine) as made:
        made.start()
        made.publish(trainer, wait=False)
        assert engine.version == 0
        made.take()
        trainer.version = 1
        made.publish(trainer, wait=False)
        assert engine.version == 1


def test_evaluation_runs_beside_the_rollout_greedily_and_in_order():
    engine = FakeEngine()
    with rollout(engine) as made:
        made.start()
        made.publish(FakeTrainer())
        episodes = made.evaluate(TASKS[:5])
        assert len(made.take()) == 2
    assert all(isinstance(episode.outcome, Scored) for episode in episodes)
    assert sum(request.sampling.temperature == 0 for request in engine.requests) == 5


def test_a_resumed_rollout_loses_and_repeats_no_task():
    trainer, consumed = FakeTrainer(), []
    with rollout(window=3) as made:
        made.start()
        made.publish(trainer)
        for groups in steps(made, trainer, 3):
            consumed += groups
        state = json.loads(json.dumps(made.state()))
    assert {"position", "next_ticket", "unfinished"} == set(state)
    with rollout(window=3) as made:
        made.start(Resumed(state["position"], state["next_ticket"], dict(state["unfinished"])))
        made.publish(trainer)
        for groups in steps(made, trainer, 5):
            consumed += groups
        rest = [ticket for ticket, _ in made.state()["unfinished"]]
    tickets = [group.ticket for group in consumed]
    assert len(tickets) == 16
    assert sorted(tickets + rest) == list(range(16 + len(rest)))
    expected = TaskStream(TASKS, 0)
    assert all(group.task == expected.task_at(group.ticket) for group in consumed)


@pytest.mark.parametrize("error", [EngineError("the server died"), UserError("no chat template")])
def test_what_ends_the_rollout_is_raised_where_groups_are_taken(error):
    engine = FakeEngine()
    with rollout(engine) as made:
        made.start()
        made.publish(FakeTrainer())
        made.take()
        engine.error = error
        with pytest.raises(type(error), match=str(error)):
            for _ in steps(made, FakeTrainer(), 5):
                pass
    assert engine.calls[-1] == "close"


def test_an_engine_that_does_not_start_is_closed_and_says_why():
    class Broken(FakeEngine):
        async def start(self):
            raise EngineError("port in use")

    engine = Broken()
    made = Rollout(Runner(engine, Plain(), TaskStream(TASKS), TrajectoryQueue(1, 0), group_size=1))
    with pytest.raises(EngineError, match="port in use"):
        made.start()
    assert engine.calls == ["close"]
    assert "rollout" not in [thread.name for thread in threading.enumerate()]


def test_close_is_safe_before_the_start_and_twice_and_ends_what_is_in_flight():
    engine, closed = FakeEngine(held=True), []

    class Closing(Plain):
        async def close(self):
            closed.append(True)

    with rollout(engine, Closing()) as made:
        made.close()
        made.start()
        made.publish(FakeTrainer())
        while engine.waiting == 0:
            made.stats()
        made.close()
        assert engine.waiting == 0
        made.close()
        with pytest.raises(RuntimeError, match=r"call start\(\) first"):
            made.take()
        assert made.stats().scored == 0
    assert closed == [True]
    assert engine.calls.count("close") == 1


def test_a_workflow_that_cannot_close_does_not_keep_the_engine_open():
    class Stuck(Plain):
        async def close(self):
            raise OSError("stuck")

    engine = FakeEngine()
    with pytest.raises(OSError, match="stuck"), rollout(engine, Stuck()) as made:
        made.start()
    assert engine.calls == ["start", "close"]


def test_an_interrupt_while_waiting_for_groups_loses_none():
    engine = FakeEngine(held=True)
    with rollout(engine) as made:
        made.start()
        made.publish(FakeTrainer())

        def interrupt():
            while made._taking is None:
                pass
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            made.take()
        thread.join()
        made._loop.call_soon_threadsafe(engine.gate.set)
        while not made._taking.done():  # the groups are there before anyone asks again
            made.stats()
        assert [group.ticket for group in made.take()] == [0, 1]


def test_it_works_where_a_loop_already_runs_as_in_a_notebook():
    async def cell():
        trainer = FakeTrainer()
        with rollout() as made:
            made.start()
            made.publish(trainer)
            return [len(groups) for groups in steps(made, trainer, 2)], made.evaluate(TASKS[:2])

    sizes, episodes = asyncio.run(cell())
    assert sizes == [2, 2]
    assert not any(isinstance(episode.outcome, Failed) for episode in episodes)


def test_it_is_started_once():
    with rollout() as made:
        made.start()
        with pytest.raises(RuntimeError, match="already started"):
            made.start()


def test_failures_are_shown_and_a_run_of_nothing_else_ends():
    async def fails(task, engine):
        raise ValueError("reward service is away")

    with rollout(workflow=Doing(fails)) as made:
        made.start()
        made.publish(FakeTrainer())
        with pytest.raises(UserError, match="ValueError: reward service is away"):
            made.take()
        stats = made.stats()
    assert stats.failed >= 6
    ((text, count),) = stats.errors.items()
    assert text.startswith("ValueError: reward service is away (")
    assert count == stats.failed


def test_servers_come_and_go_through_the_rollout_where_the_engine_has_any():
    class Servers(FakeEngine):
        async def join(self, url):
            self.calls.append(("join", url, threading.current_thread().name))

        async def leave(self, url):
            self.calls.append(("leave", url, threading.current_thread().name))

    with rollout(Servers()) as made:
        made.start()
        made.join("http://127.0.0.1:1")
        made.leave("http://127.0.0.1:1")
        assert made.engine.calls[1:3] == [(name, "http://127.0.0.1:1", "rollout") for name in ("join", "leave")]
    with rollout() as made:
        made.start()
        with pytest.raises(UserError, match=r"train\.engine = 'vllm' or 'sglang' alone"):
            made.join("http://127.0.0.1:1")
