"""Online training: slots, labels, late and missing rewards, weights that change under a conversation."""

from __future__ import annotations

import asyncio
import json
import os
import stat

import numpy as np
import pytest
from transformers import AutoTokenizer

from areal_x.agents.client import SessionError, session
from areal_x.agents.gateway.session_state import SessionLimits
from areal_x.agents.online import EpisodeSlot, EpisodeSlots, Online, PlaceholderTasks, online_tasks
from areal_x.rollout.queue import TrajectoryQueue
from areal_x.rollout.runner import Runner
from areal_x.tasks.stream import TaskStream
from areal_x.types import Scored, TimedOut
from areal_x.workflows.learned_reward import LearnedReward
from tests.agents.test_agent import ask
from tests.rollout.fakes import FakeEngine, Plain, until


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir):
    return AutoTokenizer.from_pretrained(tiny_model_dir)


# ---- slots: which episode gets which session


def slots(*groups):
    made = EpisodeSlots()
    for group in groups:
        made.wait(EpisodeSlot(group, None, None))
    return made


def taken(made, *labels):
    """Returns the groups whose slots are taken, in turn; None if there was none."""
    return [slot and slot.group for slot in map(made.take, labels)]


def test_whoever_comes_takes_the_seat_that_waits_longest():
    assert taken(slots("a", "a", "b"), None, None, None, None) == ["a", "a", "b", None]


def test_sessions_of_one_label_are_one_group_and_no_others():
    assert taken(slots("a", "a", "b", "b"), "x", "y", "x", "y", "x") == ["a", "b", "a", "b", None]


def test_a_label_never_joins_a_group_that_somebody_without_one_is_in():
    assert taken(slots("a", "a", "b", "b"), None, "x", "x", None) == ["a", "b", "b", "a"]
    assert taken(slots("a", "a"), None, "x", None) == ["a", None, "a"]


def test_somebody_without_a_label_never_joins_a_group_that_has_one():
    assert taken(slots("a", "a", "b"), "x", None, None, "x") == ["a", "b", None, "a"]


def test_a_label_whose_group_is_full_begins_another():
    assert taken(slots("a", "b"), "x", "x") == ["a", "b"]


def test_a_seat_that_was_given_up_is_nobodys():
    made = EpisodeSlots()
    first, second = EpisodeSlot("a", None, None), EpisodeSlot("b", None, None)
    made.wait(first)
    made.wait(second)
    made.leave(first)
    assert made.take(None) is second


def test_places_are_as_many_tasks_as_one_likes_and_take_no_room():
    places = online_tasks(1 << 40)
    assert len(places) == 1 << 40
    assert places[7].id == "place-7"
    assert places[-1].id == f"place-{(1 << 40) - 1}"
    assert [task.id for task in places[3:5]] == ["place-3", "place-4"]
    with pytest.raises(IndexError):
        PlaceholderTasks(3)[3]


# ---- a run that serves


class Serving:
    """A runner over a fake engine whose episodes wait for clients; sessions are opened from threads, as programs would."""

    def __init__(self, tokenizer, address, group_size=1, groups=2, staleness=0, **settings):
        self.engine = FakeEngine(context=512)
        self.address = address
        self.workflow = Online(address_file=str(address), **settings).setup(tokenizer)
        queue = TrajectoryQueue(groups, staleness)
        stream = TaskStream(online_tasks(100), 0)
        self.runner = Runner(
            self.engine, self.workflow, stream, queue, group_size=group_size, episode_seconds=0.05, failed_groups=1
        )

    async def __aenter__(self):
        self.engine.version = 1
        self.runner.begin(1)
        self.running = asyncio.create_task(self.runner.run())
        await until(self.address.exists)
        return self

    async def __aexit__(self, *_):
        self.running.cancel()
        await asyncio.wait([self.running])
        await self.workflow.close()

    def somebody(self, reward=1.0, label=None, wait_seconds=60.0, calls=1):
        """Opens a session, sends requests and gives a reward, on a thread."""

        def come():
            with session(self.address, wait_seconds, label) as episode:
                for i in range(calls):
                    ask(episode.base_url, episode.key, f"{i}+1=")
                if reward is not None:
                    episode.reward(reward)

        return asyncio.to_thread(come)


def test_steps_are_made_of_sessions_as_they_come(tokenizer, tmp_path):
    async def main():
        async with Serving(tokenizer, tmp_path / "address.json") as serving:
            for step in (1, 2):
                await asyncio.gather(serving.somebody(0.25), serving.somebody(0.75))
                groups = await serving.runner.take()
                assert sorted(reward for group in groups for reward in group.rewards) == [0.25, 0.75]
                serving.runner.published(step + 1)
            assert serving.runner.stats().failed == 0

    asyncio.run(main())


def test_the_address_is_for_its_owner_alone(tokenizer, tmp_path):
    async def main():
        async with Serving(tokenizer, tmp_path / "address.json") as serving:
            file = serving.address
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
            assert set(json.loads(file.read_text())) == {"url", "key"}

    asyncio.run(main())


def test_attempts_at_one_task_are_one_group(tokenizer, tmp_path):
    async def main():
        async with Serving(tokenizer, tmp_path / "address.json", group_size=2) as serving:
            await asyncio.gather(*(serving.somebody(r, label) for r, label in [(1, "x"), (2, "y"), (3, "x"), (4, "y")]))
            groups = await serving.runner.take()
            assert sorted(sorted(group.rewards) for group in groups) == [[1, 3], [2, 4]]

    asyncio.run(main())


@pytest.mark.timeout(60)  # a group that is held up is waited for for ever
def test_a_label_that_never_comes_again_holds_nothing_up(tokenizer, tmp_path):
    """Its group continues with the sessions that it has, and its slot is free for another."""

    async def main():
        settings = {"group_size": 3, "groups": 1, "group_seconds": 0.2}
        async with Serving(tokenizer, tmp_path / "address.json", **settings) as serving:
            await asyncio.gather(serving.somebody(1.0, "x"), serving.somebody(0.0, "x"))
            (group,) = await serving.runner.take()
            assert sorted(group.rewards) == [0.0, 1.0]
            assert [e.outcome for e in group.episodes if not isinstance(e.outcome, Scored)] == [TimedOut(0.2)]
            serving.runner.published(2)
            await serving.somebody(reward=None, label="y")  # a group of which nothing can be learnt is given back
            await until(lambda: serving.runner.stats().given_back == 1)
            await asyncio.gather(*(serving.somebody(0.5, "z") for _ in range(3)))
            (group,) = await serving.runner.take()
            assert group.rewards == [0.5] * 3

    asyncio.run(main())


def test_a_group_waits_for_its_first_session_as_long_as_it_takes():
    """The time of the others starts only when a session has ended."""

    async def main():
        made, slot = EpisodeSlots(), EpisodeSlot("a", None, asyncio.get_running_loop().create_future())
        made.wait(slot)
        made.close_after("b", 0.0)
        await asyncio.sleep(0)
        assert not slot.taken.done()
        made.close_after("a", 0.0)
        assert await slot.taken is None
        assert made.take(None) is None

    asyncio.run(main())


def test_a_learned_reward_around_sessions_waits_as_they_do(tokenizer):
    assert LearnedReward(Online(), "nowhere").open_ended
    assert not LearnedReward(Plain(), "nowhere").open_ended


def test_a_session_without_a_reward_gives_its_place_to_the_next_and_ends_nothing(tokenizer, tmp_path):
    async def main():
        limits = SessionLimits(idle_seconds=0.2)
        async with Serving(tokenizer, tmp_path / "address.json", groups=1, limits=limits) as serving:
            for _ in range(3):
                await serving.somebody(reward=None)
            left = await asyncio.to_thread(session, serving.address)  # and never touched again
            await until(lambda: serving.runner.stats().timed_out == 1)
            with pytest.raises(SessionError):
                await asyncio.to_thread(left.reward, 1.0)
            await serving.somebody(0.5)
            (group,) = await serving.runner.take()
            assert group.rewards == [0.5]
            assert serving.runner.stats().failed == 3

    asyncio.run(main())


def test_weights_change_under_a_conversation_without_an_error(tokenizer, tmp_path):
    async def main():
        async with Serving(tokenizer, tmp_path / "address.json", groups=1, staleness=1) as serving:
            opened = await asyncio.to_thread(session, serving.address)
            await asyncio.to_thread(ask, opened.base_url, opened.key, "1+1=")
            serving.engine.version = 2
            await asyncio.to_thread(ask, opened.base_url, opened.key, "2+2=")
            await asyncio.to_thread(opened.end, 1.0)
            (group,) = await serving.runner.take()
            (episode,) = group.episodes
            assert isinstance(episode.outcome, Scored)
            assert [set(t.versions[t.mask].tolist()) for t in episode.trajectories] == [{1}, {2}]

    asyncio.run(main())


def test_who_comes_too_early_is_told_to_wait(tokenizer, tmp_path):
    async def main():
        async with Serving(tokenizer, tmp_path / "address.json", groups=1) as serving:
            opened = await asyncio.to_thread(session, serving.address)
            with pytest.raises(SessionError, match="no episode waits") as refused:
                await asyncio.to_thread(session, serving.address, 0.0)
            assert refused.value.status == 503
            await asyncio.to_thread(ask, opened.base_url, opened.key)
            await asyncio.to_thread(opened.end, 1.0)
            assert len(await serving.runner.take()) == 1
            serving.runner.published(2)
            await serving.somebody()

    asyncio.run(main())


def test_a_session_is_found_in_the_environment_of_a_program_that_a_run_started(monkeypatch):
    monkeypatch.setitem(os.environ, "AREAL_X_SESSION_URL", "http://127.0.0.1:1/sessions/a")
    monkeypatch.setitem(os.environ, "AREAL_X_SESSION_KEY", "secret")
    found = session()
    assert (found.url, found.base_url) == ("http://127.0.0.1:1/sessions/a", "http://127.0.0.1:1/sessions/a/v1")
    assert found.environment["ANTHROPIC_BASE_URL"] == found.url
    assert "secret" not in repr(found)


def test_what_was_generated_under_a_label_is_what_is_trained_on(tokenizer, tmp_path):
    async def main():
        async with Serving(tokenizer, tmp_path / "address.json", groups=1) as serving:
            await serving.somebody(1.0, "task", calls=2)
            (group,) = await serving.runner.take()
            said = [np.random.default_rng(request.seed).integers(2, 40, 5) for request in serving.engine.requests]
            for tokens, trajectory in zip(said, group.episodes[0].trajectories, strict=True):
                np.testing.assert_array_equal(trajectory.tokens[trajectory.mask], tokens)

    asyncio.run(main())
