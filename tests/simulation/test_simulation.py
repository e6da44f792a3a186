"""The virtual clock and the fake fleet, against schedules computed by hand; the real runner and queue under them."""

import asyncio
import math
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_x.errors import ConfigError
from areal_x.protocols.engine import Request, SamplingParams, Staged
from areal_x.rollout.episodes import TRAINING, seed_of
from areal_x.rollout.queue import TrajectoryQueue
from areal_x.run.journal import Journal
from areal_x.simulation import Attempt, Deadlock, FakeEngine, FakeTrainer, Speed, fixed, lognormal, run, simulate
from areal_x.simulation.balance import LeastLoaded

SHARED = Speed(prefill=math.inf, decode=lambda n: 8.0)  # 8 tokens a second, whoever shares them
LENGTHS = lognormal(50, 1.0, 400)


def request(seed=0, prompt=4, most=2**10):
    return Request(np.ones(prompt, np.int32), SamplingParams(max_tokens=most), seed)


def play(engine, *calls):
    """Makes each call (at second, seed); returns when each was answered, and the answers."""

    async def one(at, seed):
        await asyncio.sleep(at)
        completion = await engine.generate(request(seed))
        return asyncio.get_running_loop().time(), completion

    async def all_of_them():
        await engine.swap(Staged(0))
        return await asyncio.gather(*(one(*call) for call in calls))

    answered, seconds = run(all_of_them())
    assert seconds == max(when for when, _ in answered)
    return [when for when, _ in answered], [completion for _, completion in answered]


def seed_is_length(seed):
    return seed


# ---- the clock


def test_time_is_that_of_the_timers_alone_and_events_come_in_their_order():
    said = []

    async def say(at, what):
        await asyncio.sleep(at)
        said.append((asyncio.get_running_loop().time(), what))
        return what

    async def main():
        return await asyncio.gather(say(86400, "c"), say(0.5, "a"), say(3.25, "b"))

    assert run(main()) == (["c", "a", "b"], 86400)
    assert said == [(0.5, "a"), (3.25, "b"), (86400, "c")]


def test_a_limit_of_time_is_reached_in_virtual_seconds():
    async def main():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(600):
                await asyncio.sleep(601)

    assert run(main())[1] == 600


def test_waiting_for_what_cannot_come_is_an_error_and_no_waiting():
    async def main():
        await asyncio.Event().wait()

    with pytest.raises(Deadlock, match="no timer is left"):
        run(main())


# ---- the servers


def test_a_request_alone_takes_its_tokens_over_the_speed():
    assert play(FakeEngine(SHARED, length=seed_is_length), (1.0, 16))[0] == [1 + 16 / 8]


def test_two_requests_share_a_server_and_the_longer_goes_on_alone():
    # From second 1 both get 4 a second: the second's 8 tokens take 2 s, in which the first gets 8 of its remaining 16.
    assert play(FakeEngine(SHARED, length=seed_is_length), (0.0, 24), (1.0, 8))[0] == [4.0, 3.0]


def test_what_has_no_slot_waits_for_one_in_its_order():
    engine = FakeEngine(SHARED, concurrency=1, length=seed_is_length)
    assert play(engine, (0.0, 16), (0.5, 8), (0.25, 4))[0] == [2.0, 3.5, 2.5]


def test_a_second_server_takes_what_the_first_would_share():
    assert play(FakeEngine(SHARED, servers=2, length=seed_is_length), (0.0, 24), (1.0, 8))[0] == [3.0, 2.0]


def test_a_prompt_stops_the_decoding_of_its_server_while_it_is_read():
    speed = Speed(prefill=4.0, decode=lambda n: 8.0 * n)
    # 4 tokens of prompt each take 1 s: the first begins at 1, stands still from 1.5 to 2.5.
    assert play(FakeEngine(speed, length=seed_is_length), (0.0, 16), (1.5, 8))[0] == [4.0, 3.5]


def test_a_request_that_is_cancelled_leaves_its_share_to_the_others():
    async def main():
        engine = FakeEngine(SHARED, concurrency=2, length=seed_is_length)
        gone = [asyncio.create_task(engine.generate(request(800))), asyncio.create_task(engine.generate(request(800)))]
        await asyncio.sleep(1)
        waiting = asyncio.create_task(engine.generate(request(800)))
        stays = asyncio.create_task(engine.generate(request(16)))
        await asyncio.sleep(1)
        for task in (*gone, waiting):
            task.cancel()
        await stays

    assert run(main())[1] == 2 + 16 / 8


def test_every_token_has_the_version_that_was_there_when_it_was_done():
    async def main():
        engine = FakeEngine(Speed(math.inf, lambda n: 8.0, swap_seconds=0.5), length=seed_is_length)
        await engine.swap(Staged(5))
        running = asyncio.create_task(engine.generate(request(16)))
        await asyncio.sleep(0.6875)  # 5.5 tokens: the half one is done again under the new weights
        assert await engine.swap(Staged(6)) == 0.5
        await asyncio.sleep(0.25)  # 2 more
        await engine.swap(Staged(7))
        return await running, engine.version

    (completion, version), seconds = run(main())
    assert completion.versions.tolist() == [5] * 5 + [6] * 2 + [7] * 9
    assert (version, seconds) == (7, 3 * 0.5 + 16 / 8)


def test_after_a_swap_the_caches_of_what_runs_are_computed_again():
    async def main():
        engine = FakeEngine(Speed(8.0, lambda n: 8.0), length=seed_is_length)
        await engine.swap(Staged(0))
        running = asyncio.create_task(engine.generate(request(16)))
        await asyncio.sleep(1.5)  # half a second for the prompt of 4, then 8 tokens
        await engine.swap(Staged(1))
        await running

    assert run(main())[1] == 0.5 + 16 / 8 + (4 + 8) / 8


def test_a_completion_is_cut_where_the_request_or_the_context_ends():
    async def main():
        engine = FakeEngine(SHARED, context=10, length=seed_is_length)
        await engine.swap(Staged(0))
        return [await engine.generate(request(n, most=most)) for n, most in ((3, 9), (20, 5), (20, 9))]

    said, _ = run(main())
    assert [(len(c.tokens), c.finish_reason) for c in said] == [(3, "stop"), (5, "length"), (6, "length")]


def test_lengths_depend_on_the_seed_alone_and_have_the_mean_that_was_asked_for():
    length = lognormal(300, 0.5, 10**9)
    drawn = [length(seed) for seed in range(20_000)]
    assert drawn == [lognormal(300, 0.5, 10**9)(seed) for seed in range(20_000)]
    error = 300 * math.sqrt(math.exp(0.5**2) - 1) / math.sqrt(len(drawn))
    assert abs(fmean(drawn) - 300) < 4 * error
    assert np.std(np.log(drawn)) == pytest.approx(0.5, abs=0.02)
    assert max(lognormal(300, 2.0, 1000)(seed) for seed in range(1000)) == 1000


@settings(max_examples=100, deadline=None)
@given(servers=st.integers(1, 5), moves=st.lists(st.integers(0, 9), max_size=60))
def test_a_request_always_goes_to_a_server_with_the_fewest(servers, moves):
    router, held = LeastLoaded(servers), []
    for move in moves:
        if move < 6 or not held:
            before = list(router.in_flight)
            held.append(router.acquire())
            assert before[held[-1]] == min(before)
        else:
            router.release(held.pop(move % len(held)))
        assert router.in_flight == [held.count(server) for server in range(servers)]


def test_speeds_that_cannot_be_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"speed\.prefill = 0"):
        Speed(0, lambda n: 1.0)


# ---- the ring


def test_without_staleness_generation_and_training_take_turns():
    speed = Speed(math.inf, lambda n: 8.0 * n, swap_seconds=0.25)
    engine = FakeEngine(speed, concurrency=8, length=fixed(16))
    rows = simulate(engine, FakeTrainer(3.0, 1.0), steps=3, groups_per_step=2, group_size=4, max_staleness=0)
    # Nothing is admitted before the engine has the weights of the step before.
    assert [row["wait_seconds"] for row in rows] == [2.0, 0.25 + 2.0, 0.25 + 2.0]
    assert [row["seconds"] for row in rows] == [2.0 + 3.0 + 1.0, 0.25 + 2.0 + 3.0 + 1.0, 0.25 + 2.0 + 3.0 + 1.0]
    assert [row["staleness_max"] for row in rows] == [0] * 3
    assert [row["slot_seconds"] for row in rows] == [8 * 2.0] * 3


def test_with_staleness_the_trainer_waits_no_more_when_generation_is_faster():
    speed = Speed(math.inf, lambda n: 8.0 * n)
    engine = FakeEngine(speed, concurrency=8, length=fixed(16))
    rows = simulate(engine, FakeTrainer(2.5, 0.5), steps=6, groups_per_step=2, group_size=4, max_staleness=1)
    assert [row["wait_seconds"] for row in rows] == [2.0] + [0.0] * 5
    assert [row["staleness_max"] for row in rows] == [0] + [1] * 5


def test_the_trainers_time_may_depend_on_what_it_is_given():
    engine = FakeEngine(SHARED, length=fixed(16))
    trainer = FakeTrainer(lambda groups: sum(len(e.trajectories[0]) for g in groups for e in g.episodes) / 8)
    (row,) = simulate(engine, trainer, steps=1, groups_per_step=1, group_size=2, workflow=Attempt(prompt_tokens=8))
    assert row["update_seconds"] == pytest.approx(2 * (8 + 16) / 8)


def fleet(servers=6, seed=0, **changes):
    engine = FakeEngine(Speed(2000, lambda n: n / (0.02 + 0.002 * n), 0.3), servers=servers, concurrency=4, length=LENGTHS)
    ring = {"steps": 12, "groups_per_step": 5, "group_size": 3, "max_staleness": 2, "window": 4} | changes
    return simulate(engine, FakeTrainer(4.0, 0.5), seed=seed, **ring)


@settings(max_examples=15, deadline=None)
@given(
    servers=st.integers(1, 12),
    seed=st.integers(0, 99),
    groups_per_step=st.integers(1, 6),
    max_staleness=st.integers(0, 3),
    window=st.integers(1, 9),
)
def test_no_fleet_exceeds_the_bound_on_staleness(servers, seed, groups_per_step, max_staleness, window):
    sizes = {"groups_per_step": groups_per_step, "max_staleness": max_staleness, "window": window}
    bound = (TrajectoryQueue(**sizes).slots + window - 2) // groups_per_step
    seen = []

    def watch(groups):
        for group in groups:
            versions = [e.trajectories[0].versions for e in group.episodes]
            oldest = min(v[v >= 0].min() for v in versions)
            assert group.admitted_version <= oldest
            assert all((np.diff(v) >= 0).all() for v in versions)
        seen.extend(group.ticket for group in groups)

    rows = fleet(servers, seed, **sizes, watch=watch)
    assert max(row["staleness_max"] for row in rows) <= bound
    assert len(set(seen)) == len(seen) == 12 * groups_per_step


def test_the_same_seed_is_the_same_run_and_another_is_another():
    assert fleet(seed=1) == fleet(seed=1)
    assert fleet(seed=1) != fleet(seed=2)


def test_slow_answers_are_trained_on_as_often_as_they_are_drawn():
    consumed = []
    fleet(steps=40, watch=lambda groups: consumed.extend(groups))
    trained = {g.ticket: [int(e.trajectories[0].mask.sum()) for e in g.episodes] for g in consumed}
    assert max(trained) < 40 * 5 + 4  # what was drawn before the last and is not here may be as much as the window
    for ticket, lengths in trained.items():
        assert lengths == [LENGTHS(seed_of(0, TRAINING, ticket, episode, 0)) for episode in range(3)]
    missing = set(range(max(trained))) - set(trained)
    assert len(missing) < 4


def test_the_journal_has_what_the_simulated_trainer_consumed(tmp_path):
    consumed = []
    with Journal(tmp_path) as journal:
        fleet(steps=4, recorder=journal, watch=consumed.append)
        journal.flush()
        for step, groups in enumerate(consumed, 1):
            recorded = journal.groups_of(step)
            assert [group.ticket for group in recorded] == [group.ticket for group in groups]
            for ours, theirs in zip(groups, recorded, strict=True):
                for a, b in zip(ours.episodes, theirs.episodes, strict=True):
                    np.testing.assert_array_equal(a.trajectories[0].versions, b.trajectories[0].versions)
                    np.testing.assert_array_equal(a.trajectories[0].tokens, b.trajectories[0].tokens)
