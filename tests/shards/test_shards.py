"""The rollout in shards: the same groups as in one process, whichever shards are lost."""

from __future__ import annotations

import pickle
import re
import time
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from areal_x.errors import UserError
from areal_x.protocols.engine import EngineError
from areal_x.rollout.episodes import EpisodeSettings
from areal_x.rollout.queue import TrajectoryQueue
from areal_x.rollout.rollout import Rollout
from areal_x.rollout.runner import Runner
from areal_x.runtime import background
from areal_x.shards import shards as shards_module
from areal_x.shards.engine import ShardedEngine
from areal_x.shards.episodes import ShardedEpisodes
from areal_x.shards.messages import Finished
from areal_x.shards.shards import Shards
from areal_x.tasks.stream import TaskStream
from areal_x.types import Episode, Failed, Images, Scored, Trajectory
from tests.rollout.fakes import TASKS, Doing, FakeEngine, Plain
from tests.shards.fakes import Dying, FakeStager, Threads

SIZE, STEP = 3, 4


@contextmanager
def sharded(count, *, engine=FakeEngine, workflow=None, tasks=TASKS, greedy=False, seed=5, staleness=1, window=4, **more):
    """A rollout of so many shards; 0 is one without shards."""
    workflow = workflow or Plain()
    settings = EpisodeSettings(SIZE, seed=seed, greedy=greedy)
    queue, stream = TrajectoryQueue(STEP, staleness, window), TaskStream(tasks, shuffle=False)
    messages = []
    runner = partial(Runner, workflow=workflow, stream=stream, queue=queue, group_size=SIZE, seed=seed, greedy=greedy, **more)
    if count:
        places = Threads(settings, engine, workflow)
        shards = Shards(count, settings.attempts, places, messages.append)
        driver = ShardedEngine(shards, FakeStager(), 64)
        made = runner(driver, episodes=partial(ShardedEpisodes, shards, driver))
        found = SimpleNamespace(places=places, shards=shards, engine=driver)
    else:
        made, found = runner(engine()), SimpleNamespace()
    with Rollout(made) as rollout:
        found.rollout, found.messages = rollout, messages
        rollout.start()
        yield found


def steps(found, count, between=lambda step: None):
    """The groups of the first steps."""
    rollout, taken = found.rollout, []
    rollout.publish(SimpleNamespace(version=0))
    for step in range(1, count + 1):
        taken.append(rollout.take())
        between(step)
        rollout.publish(SimpleNamespace(version=step))
    return taken


def contents(taken):
    """What groups consist of, by ticket; not their versions, which depend on the clock."""
    return {
        group.ticket: (
            group.task.id,
            group.greedy_reward,
            [(e.outcome, [t.tokens.tolist() for t in e.trajectories]) for e in group.episodes],
        )
        for groups in taken
        for group in groups
    }


def agree(found, expected):
    """Compares the groups that both runs took: the window lets a few pass others."""
    common = found.keys() & expected.keys()
    assert len(common) >= len(expected) - STEP
    assert {ticket: found[ticket] for ticket in common} == {ticket: expected[ticket] for ticket in common}


def lose(many, number):
    """Ends the process of a shard, once it is ready."""
    seat = many.shards.seats[number]
    until(lambda: seat.is_ready)
    seat.remote.end()


def until(condition):
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_any_number_of_shards_makes_the_groups_of_one_process(count, greedy):
    with sharded(0, greedy=greedy) as one:
        expected = contents(steps(one, 5))
    with sharded(count, greedy=greedy) as many:
        agree(contents(steps(many, 5)), expected)
        asked = [len(engine.requests) for engine in many.places.engines]
    assert len(asked) == count
    assert min(asked) > 0


def test_a_lost_shard_is_opened_again_with_the_newest_weights_and_all_groups_are_those_of_one_process():
    with sharded(0) as one:
        expected = contents(steps(one, 6))
    with sharded(3) as many:
        taken = steps(many, 6, lambda step: lose(many, 1) if step == 2 else None)
        until(lambda: len(many.places.opened) == 4 and many.shards.seats[1].is_ready)
        reopened = many.places.opened[-1]
    agree(contents(taken), expected)
    assert [m for m in many.messages if "is lost" in m] == [
        "shard 1 is lost (the process is gone): its groups go to others, and it is opened again"
    ]
    assert reopened.calls[0] == ("open", (1, 1))
    method, (staged,) = reopened.calls[1]  # before it is given a group
    assert method == "swap"
    assert staged.version >= 2


def test_the_groups_that_a_shard_holds_when_it_is_lost_are_made_by_another():
    engines = []

    def make():
        engines.append(FakeEngine(held=not engines))  # the first never answers
        return engines[-1]

    with sharded(2, engine=make, window=1) as many:
        many.rollout.publish(SimpleNamespace(version=0))
        held = next(seat for seat in many.shards.seats if engine_of(seat) is engines[0])
        until(lambda: engines[0].waiting)
        assert held.given
        held.remote.end()
        # In strict order, none may be missing.
        assert [group.ticket for group in many.rollout.take()] == list(range(STEP))


def engine_of(seat):
    return seat.remote.shard._parts.engine


def evaluated(found):
    found.rollout.publish(SimpleNamespace(version=0))
    return [episode.outcome for episode in found.rollout.evaluate(TASKS[:10])]


def test_an_evaluation_is_divided_among_all_shards():
    with sharded(0) as one, sharded(3) as many:
        assert evaluated(many) == evaluated(one)
        assert all("evaluate" in [method for method, _ in remote.calls] for remote in many.places.opened)


def test_the_tasks_of_an_evaluation_whose_shard_is_lost_are_answered_by_others():
    engines = []

    def make():
        engines.append(FakeEngine(held=not engines))  # the first never answers
        return engines[-1]

    with sharded(0) as one, sharded(2, engine=make) as many:
        expected = evaluated(one)
        held = next(remote for remote in many.places.opened if remote.shard._parts.engine is engines[0])
        answers = background.future(lambda: evaluated(many), name="evaluation")
        until(lambda: "evaluate" in [method for method, _ in held.calls])
        held.end()
        assert answers.result(120) == expected


def test_episodes_are_counted_over_all_shards_and_those_before_them():
    bad = ("task 1", "task 3")
    with sharded(2, workflow=Plain(bad=bad), tasks=TASKS[:8], failed_groups=100) as many:
        seat, counted = many.shards.seats[0], []

        def between(step):
            if step == 1:
                until(lambda: seat.counts.scored)
                counted.append(seat.counts.scored)
                lose(many, 0)

        taken = steps(many, 3, between)
        until(lambda: len(many.places.opened) == 3)
        assert seat.counts.scored >= counted[0]
        stats = many.rollout.stats()
    trained = sum(len(group.scored) for groups in taken for group in groups)
    assert stats.scored >= trained == 3 * STEP * SIZE
    assert stats.generated_tokens >= 5 * stats.scored
    assert {re.match(r"RuntimeError: (task \d) is bad", error)[1] for error in stats.errors} == set(bad)
    assert sum(stats.errors.values()) == stats.failed


def test_an_engine_that_is_lost_is_opened_again_and_its_groups_are_made_elsewhere():
    engines = []

    def make():
        engine = Dying() if not engines else FakeEngine()
        engines.append(engine)
        return engine

    with sharded(2, engine=make) as many:
        taken = steps(many, 3)
        until(lambda: len(engines) == 3 and len(many.shards.ready) == 2)
    assert all(not isinstance(e.outcome, Failed) for groups in taken for g in groups for e in g.episodes)
    assert any("no server is left" in message for message in many.messages)


def test_a_shard_that_is_lost_again_and_again_ends_the_run(monkeypatch):
    monkeypatch.setattr(shards_module, "FIRST_RETRY_SECONDS", 0.01)
    with (
        sharded(1, engine=Dying) as many,
        pytest.raises(EngineError, match=r"^shard 0 was lost 5 times in a row: no server is left"),
    ):
        steps(many, 1)


def test_a_shard_that_says_nothing_is_lost(monkeypatch):
    with sharded(2) as many:
        many.rollout.publish(SimpleNamespace(version=0))
        first = many.places.opened[0]
        until(lambda: len(many.shards.ready) == 2)
        monkeypatch.setattr(shards_module, "SILENT_SECONDS", 3.0)
        monkeypatch.setattr(first.shard, "news", lambda: time.sleep(6.0))
        # The other may be slow to answer, too.
        until(lambda: first.gone and len(many.places.opened) >= 3)
        monkeypatch.undo()
        until(lambda: len(many.shards.ready) == 2)
        assert any("(it was silent for 3 s)" in message for message in many.messages)


def test_a_process_in_which_a_shard_cannot_be_opened_is_ended(monkeypatch):
    monkeypatch.setattr(shards_module, "FIRST_RETRY_SECONDS", 0.01)
    made = []

    def make():
        made.append(FakeEngine())
        if len(made) in (2, 3):
            raise UserError("the node has no room")
        return made[-1]

    with sharded(1, engine=make) as many:
        taken = steps(many, 3, lambda step: lose(many, 0) if step == 1 else None)
        assert len(taken) == 3
        assert [remote.gone for remote in many.places.opened] == [True, True, True, False]


def test_a_mistake_of_the_user_ends_the_run():
    async def wrong(task, engine):
        raise UserError("the tool is not installed")

    with sharded(2, workflow=Doing(wrong)) as many, pytest.raises(UserError, match=r"^the tool is not installed"):
        steps(many, 1)


def test_a_shard_that_cannot_be_opened_is_said_at_the_start():
    def make():
        raise UserError("no node sees the model")

    with pytest.raises(UserError, match=r"^no node sees the model"), sharded(2, engine=make):
        pass


def test_weights_reach_every_shard_and_what_is_staged_is_kept_until_then():
    with sharded(3) as many:
        steps(many, 2)
        until(lambda: all(engine.version == 2 for engine in many.places.engines))
        calls = many.engine._stager.calls
    assert calls == ["open", ("keep", 0), ("keep", 1), ("keep", 2), "close", "remove"]
    assert many.engine.version == 2


def test_what_a_shard_did_is_in_a_lane_of_its_own_once_and_on_the_drivers_clock():
    with sharded(1) as many:
        began = time.perf_counter()
        steps(many, 2)
        found = many.engine.spans()
        ended = time.perf_counter()
        again = {span.arguments["ticket"] for _, span in many.engine.spans() if span.name == "episode"}
    assert {lane for lane, _ in found} == {"shard 0"}
    assert {"episode", "generate"} <= {span.name for _, span in found}
    for _, span in found:
        assert began - 0.1 < span.start <= span.end < ended + 0.1  # the clocks are read one after the other
    whole = [x.arguments["ticket"] for _, x in found if x.name == "episode"]
    assert again.isdisjoint(ticket for ticket in whole if whole.count(ticket) == SIZE)


def test_no_group_is_older_than_the_bound_while_shards_are_lost():
    with sharded(3, staleness=1, window=2) as many:
        taken = steps(many, 8, lambda step: lose(many, step % 2) if step % 3 == 0 else None)
    bound = (2 * STEP + 2 - 2) // STEP
    for step, groups in enumerate(taken):
        for group in groups:
            assert step - group.admitted_version <= bound
            for episode in group.episodes:
                for trajectory in episode.trajectories:
                    assert np.all(trajectory.versions[trajectory.mask] >= group.admitted_version)


def test_the_episodes_of_a_group_travel_with_one_copy_of_its_images():
    """Also where each has a copy of its own and, in a conversation, further ones."""

    def shown(number):
        shared, own = (np.random.default_rng(seed).normal(size=(64, 50)).astype(np.float32) for seed in (0, 1 + number % 4))
        images = Images(np.concatenate([shared, own]), np.array([[1, 8, 8]] * 2, np.int32))
        tokens = np.arange(4, dtype=np.int32)
        return Trajectory.from_completion(tokens[:3], tokens[3:], np.zeros(1), np.zeros(1), images=images)

    text = replace(shown(0), images=None)
    episodes = (*(Episode(Scored(1.0), (shown(i), text)) for i in range(8)), Episode(Failed("no")))
    one = 64 * 50 * 4
    message = pickle.dumps([Finished(0, episodes, None), Finished(1, episodes[-1:], 0.5)])
    assert 5 * one < len(message) < 5.5 * one
    found, other = pickle.loads(message)
    assert (other.episodes, other.greedy_reward) == (episodes[-1:], 0.5)
    assert found.episodes[-1] == episodes[-1]
    for sent, back in zip(episodes[:-1], found.episodes[:-1], strict=True):
        assert back.trajectories[1].images is None
        for name in ("patches", "grids"):
            theirs = getattr(back.trajectories[0].images, name)
            np.testing.assert_array_equal(theirs, getattr(sent.trajectories[0].images, name))
    assert found.episodes[0].trajectories[0].images is found.episodes[4].trajectories[0].images
