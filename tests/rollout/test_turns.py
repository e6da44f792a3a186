"""Turns of trainer and engine on the same accelerators, as a rollout takes them."""

import asyncio
import threading
from contextlib import contextmanager

import numpy as np
import pytest

from areal_x.protocols.engine import EngineError
from areal_x.rollout.queue import TrajectoryQueue
from areal_x.rollout.rollout import Rollout
from areal_x.rollout.runner import Runner
from areal_x.rollout.time_limits import TimeLimits
from areal_x.simulation import FakeTrainer
from areal_x.simulation.clock import run
from areal_x.tasks.stream import TaskStream
from areal_x.types import Scored
from tests.rollout.fakes import TASKS, FakeEngine, Plain, until

STEP = ["engine sleeps", "models wake", "stage", "models rest", "swap"]


class Sleeping(FakeEngine):
    """An engine whose requests are answered while it is awake alone. at_first: how many it answers before it sleeps."""

    def __init__(self, at_first=1000):
        super().__init__()
        self.slept, self.at_first = asyncio.Event(), at_first

    async def generate(self, request):
        self.at_first -= 1
        if self.at_first < 0:
            await self.slept.wait()
        return await super().generate(request)

    async def sleep(self):
        self.gate.clear()
        self.slept.set()
        self.calls.append("engine sleeps")

    async def wake(self):
        self.calls.append("engine wakes")
        self.gate.set()

    async def swap(self, staged):
        paused = await super().swap(staged)
        self.slept.clear()
        self.gate.set()
        return paused


class Resting:
    """Models that tell the engine's list of calls when they move. interrupted: the next time that they wake."""

    def __init__(self, calls):
        self.calls = calls
        self.interrupted = False

    def rest(self):
        self.calls.append("models rest")

    def wake(self):
        if self.interrupted:
            self.interrupted = False
            raise KeyboardInterrupt
        self.calls.append("models wake")

    def device_bytes(self):
        return 0


@contextmanager
def turns(engine, *, max_staleness, **settings):
    runner = Runner(engine, Plain(), TaskStream(TASKS, 0), TrajectoryQueue(2, max_staleness), group_size=2, **settings)
    with Rollout(runner, models=Resting(engine.calls)) as made:
        made.start()
        made.publish(FakeTrainer())
        yield made


def test_the_engine_sleeps_from_the_groups_of_a_step_until_the_models_rest():
    engine = Sleeping()
    with turns(engine, max_staleness=0) as made:
        assert engine.calls == ["models rest", "start", *STEP]
        for version in (1, 2):
            engine.calls.clear()
            assert len(made.take()) == 2
            assert engine.calls == STEP[:2]
            assert engine.waiting == 0  # nothing is in flight without staleness
            made.publish(FakeTrainer(version=version), wait=False)
            made.finish_publication()
            assert engine.calls == STEP
        metrics = made.balance(0.0, 0.0)
    assert metrics.keys() == {"sleep_seconds", "wake_seconds", "rest_seconds", "asleep_seconds"}
    assert metrics["asleep_seconds"] >= metrics["wake_seconds"] + metrics["rest_seconds"] > 0


def test_requests_in_flight_wait_for_the_trainer_and_are_answered_by_the_next_version():
    engine = Sleeping(at_first=4)
    # The other two groups' episodes are in flight all the while, and their limit is shorter than the turn.
    with turns(engine, max_staleness=1, episode_seconds=0.5) as made:
        groups = made.take()
        made._call(asyncio.wait_for(until(lambda: engine.waiting == 4), 60))
        beyond = threading.Event()
        made._loop.call_soon_threadsafe(made._loop.call_later, 0.6, beyond.set)
        assert beyond.wait(60)  # the loop has gone past the limit
        assert made._look(lambda: engine.waiting) == 4
        made.publish(FakeTrainer(version=1))
        groups += made.take()
        assert made.stats().timed_out == 0
    assert [group.ticket for group in groups] == [0, 1, 2, 3]
    for group in groups:
        assert all(isinstance(episode.outcome, Scored) for episode in group.episodes)
        versions = np.concatenate([e.trajectories[0].versions[-5:] for e in group.episodes])
        assert set(versions) == {0 if group.ticket < 2 else 1}
        assert group.admitted_version == 0


def test_the_limits_of_episodes_run_again_after_the_trainers_turn():
    engine = Sleeping(at_first=4)  # the first step's; those of the second are answered by nothing
    with turns(engine, max_staleness=0, episode_seconds=0.1, failed_groups=1000) as made:
        made.take()
        made.publish(FakeTrainer(version=1))
        made._call(asyncio.wait_for(until(lambda: made.runner.stats().timed_out), 60))


def test_an_interrupted_turn_is_taken_again_with_the_same_groups():
    engine = Sleeping()
    with turns(engine, max_staleness=0) as made:
        made._models.interrupted = True
        with pytest.raises(KeyboardInterrupt):
            made.take()
        engine.calls.clear()
        assert [group.ticket for group in made.take()] == [0, 1]
        assert engine.calls == STEP[:2]


def test_an_evaluation_in_the_trainers_turn_gives_the_accelerators_back():
    engine = Sleeping()
    with turns(engine, max_staleness=0) as made:
        made.take()
        engine.calls.clear()
        (episode,) = made.evaluate(TASKS[:1])
        assert isinstance(episode.outcome, Scored)
        assert engine.calls == ["models rest", "engine wakes", *STEP[:2]]


def finished(made, groups):
    """Waits until so many groups are there."""
    made._call(asyncio.wait_for(until(lambda: made.runner.queue.depth == groups), 60))


def test_the_engine_sleeps_on_while_the_groups_of_the_next_step_are_there():
    engine = Sleeping()
    with turns(engine, max_staleness=2) as made:
        ages, measured = [], []
        for version in range(1, 7):  # the slots hold three steps, so every third publication is of new weights
            if engine.version == version - 1:
                finished(made, 6)
                engine.calls.clear()
            groups = made.take()
            for group in groups:
                versions = np.concatenate([e.trajectories[0].versions[-5:] for e in group.episodes])
                assert set(versions) == {group.admitted_version} <= {0, 3}
                ages.append(version - 1 - group.admitted_version)
            assert engine.calls == STEP[:2]  # since the last wake
            cost = made.publish(FakeTrainer(version=version), wait=False)
            made.finish_publication()
            measured.append((cost.paused_seconds, *sorted(made.balance(0.0, 0.0))))
            assert engine.calls == (STEP[:2] if version % 3 else STEP)
    assert ages == [0, 0, 1, 1, 2, 2] * 2  # within the bound
    began, ended = ("sleep_seconds", "wake_seconds"), ("asleep_seconds", "rest_seconds")
    # Each pause is reported once, by the step after its own, and a turn by the steps that begin and end it.
    assert measured == [(0.25, *began), (0.0,), (0.0, *ended)] * 2


def test_what_needs_the_newest_weights_wakes_the_engine_with_them():
    def put_off(version):
        finished(made, 4)
        made.take()
        made.publish(FakeTrainer(version=version), wait=False)
        assert engine.version == version - 1
        engine.calls.clear()

    engine = Sleeping()
    with turns(engine, max_staleness=1) as made:
        put_off(1)
        (episode,) = made.evaluate(TASKS[:1])
        assert set(episode.trajectories[0].versions[-5:]) == {1}
        assert engine.calls == STEP[2:]
        put_off(2)
        made.publish(FakeTrainer(version=2))
        assert (engine.version, engine.calls) == (2, STEP[2:])


def test_an_engine_that_cannot_sleep_ends_the_step():
    class Sleepless(Sleeping):
        async def sleep(self):
            if self.version == 0:
                raise EngineError("it does not sleep")

    with turns(Sleepless(), max_staleness=0) as made, pytest.raises(EngineError, match="does not sleep"):
        made.take()


def test_limits_count_the_time_outside_of_turns_alone():
    async def body():
        loop, limits, ended = asyncio.get_running_loop(), TimeLimits(), []

        async def limited(seconds):
            try:
                async with limits.limited(seconds) as limit:
                    await asyncio.sleep(100)
            except TimeoutError:
                assert limit.expired()
                ended.append((seconds, loop.time() - began))

        began = loop.time()
        running = [asyncio.create_task(limited(seconds)) for seconds in (3.0, 8.0)]
        await asyncio.sleep(2)
        limits.stop()
        limits.stop()
        running.append(asyncio.create_task(limited(5.0)))
        running.append(asyncio.create_task(limited(None)))
        await asyncio.sleep(10)
        assert ended == []
        limits.go_on()
        limits.go_on()
        await asyncio.wait(running)
        assert ended == [(3.0, 13.0), (5.0, 17.0), (8.0, 18.0)]
        assert not limits._left

    run(body())
