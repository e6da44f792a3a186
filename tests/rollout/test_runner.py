import asyncio
import re
from dataclasses import replace

import numpy as np
import pytest

from areal_x.algorithms.filters import varied
from areal_x.errors import ConfigError, TaskError, UserError
from areal_x.protocols.engine import EngineError, PromptTooLong, Request, SamplingParams
from areal_x.rollout.episode import first_of, run_episode
from areal_x.rollout.episodes import EVALUATION, seed_of
from areal_x.rollout.queue import TrajectoryQueue
from areal_x.rollout.runner import Runner
from areal_x.run.journal import Resumed
from areal_x.tasks.stream import TaskStream
from areal_x.types import Episode, Failed, Kept, Scored, TimedOut, Trajectory
from tests.rollout.fakes import TASKS, Doing, FakeEngine, Plain, until


def make(engine, workflow=None, *, groups_per_step=2, max_staleness=1, window=2, group_size=3, tasks=TASKS, **settings):
    stream = TaskStream(tasks, shuffle=False)
    queue = TrajectoryQueue(groups_per_step, max_staleness, window)
    return Runner(engine, workflow or Plain(), stream, queue, group_size=group_size, **settings)


def drive(test):
    """Runs `test(engine → runner)` on a loop, with the runner's task beside it, and ends the task."""

    async def run():
        running = []

        def begin(runner, version=0, state=None):
            runner.begin(version, state)
            running.append(asyncio.create_task(runner.run()))
            return running[-1]

        try:
            return await test(begin)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    return asyncio.run(run())


async def trajectory(engine, reward=1.0, seed=None):
    prompt = np.array([2, 3], np.int32)
    c = await engine.generate(Request(prompt, SamplingParams(), seed))
    return Trajectory.from_completion(prompt, c.tokens, c.logprobs, c.versions, reward)


def test_a_step_has_whole_groups_of_the_streams_tasks_in_order():
    async def test(begin):
        runner = make(FakeEngine())
        begin(runner)
        return await runner.take()

    groups = drive(test)
    assert [g.task.id for g in groups] == ["task 0", "task 1"]
    assert [g.ticket for g in groups] == [0, 1]
    assert all(len(g.episodes) == 3 and g.admitted_version == 0 for g in groups)
    for episode in (e for g in groups for e in g.episodes):
        assert episode.outcome == Scored(episode.trajectories[0].reward)


def test_seeds_are_those_of_run_ticket_episode_and_call_and_all_differ():
    async def twice(task, engine):
        await trajectory(engine)
        return [await trajectory(engine)]

    async def test(begin):
        engine = FakeEngine()
        runner = make(engine, Doing(twice), seed=7)
        begin(runner)
        await runner.take()
        return [r.seed for r in engine.requests]

    seeds = drive(test)
    every = {seed_of(7, 0, ticket, episode, call) for ticket in range(4) for episode in range(3) for call in range(2)}
    assert set(seeds) <= every
    assert len(set(seeds)) == len(seeds)
    assert len(every) == 24
    assert all(0 <= seed < 2**31 for seed in every)
    assert seed_of(7, EVALUATION, 0, 0, 0) not in every


def test_a_seed_that_the_workflow_chose_is_left_alone():
    async def chosen(task, engine):
        return [await trajectory(engine, seed=5)]

    async def test(begin):
        engine = FakeEngine()
        runner = make(engine, Doing(chosen))
        begin(runner)
        await runner.take()
        return {r.seed for r in engine.requests}

    assert drive(test) == {5}


def test_the_engine_is_kept_full_and_not_far_beyond():
    async def test(begin):
        engine = FakeEngine(concurrency=16, held=True)
        runner = make(engine, groups_per_step=20, max_staleness=3, group_size=3)
        begin(runner)
        await until(lambda: engine.waiting >= 16)
        for _ in range(50):
            await asyncio.sleep(0)
        return engine.waiting

    assert 16 <= drive(test) < 16 + 16 // 8 + 3


def test_an_episode_that_is_being_judged_leaves_its_place_in_the_engine_to_another():
    async def test(begin):
        judged = asyncio.Event()

        async def slow_judge(task, engine):
            answer = await trajectory(engine)
            await judged.wait()
            return [answer]

        engine = FakeEngine(concurrency=2)
        runner = make(engine, Doing(slow_judge), groups_per_step=10, max_staleness=0, group_size=2)
        begin(runner)
        await until(lambda: len(engine.requests) == 20)  # every slot's, while no judge has answered
        assert runner.queue.depth == 0
        judged.set()
        return len(await runner.take())

    assert drive(test) == 10


def test_slots_bound_what_is_admitted_and_publication_frees_them():
    async def test(begin):
        engine = FakeEngine()
        runner = make(engine, max_staleness=0, window=1)
        begin(runner)
        first = await runner.take()
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(engine.requests) == 6  # two groups of three, and no more before the next weights are out
        engine.version = 1
        runner.published(1)
        return first, await runner.take()

    first, second = drive(test)
    assert [g.admitted_version for g in first + second] == [0, 0, 1, 1]


def test_a_groups_age_counts_from_its_admission_whatever_was_published_meanwhile():
    async def test(begin):
        release, began = asyncio.Event(), []

        async def some_are_slow(task, engine):
            if task.id in ("task 2", "task 3"):
                began.append(task.id)
                await release.wait()
            return [await trajectory(engine)]

        runner = make(FakeEngine(concurrency=20), Doing(some_are_slow), max_staleness=1, window=1)
        begin(runner)
        first = await runner.take()
        await until(lambda: len(began) == 6)
        runner.published(1)
        release.set()
        return first + await runner.take()

    assert [(g.task.id, g.admitted_version) for g in drive(test)] == [(f"task {i}", 0) for i in range(4)]


def test_failures_are_counted_and_never_trained_on_and_the_rest_of_the_group_stays():
    async def sometimes(task, engine):
        answer = await trajectory(engine)
        *_, index = engine.key
        if index == 0:
            raise ZeroDivisionError("division\nby zero")
        return Failed("no answer found") if index == 1 else [answer]

    async def test(begin):
        runner = make(FakeEngine(concurrency=1), Doing(sometimes), group_size=3)
        begin(runner)
        groups = await runner.take()
        return groups, runner.stats()

    groups, stats = drive(test)
    for group in groups:
        assert len(group.episodes) == 3
        assert len(group.scored) == len(group.rewards) == 1
        assert [type(e.outcome) for e in group.episodes] == [Failed, Failed, Scored]
        assert [len(e.trajectories) for e in group.episodes] == [0, 0, 1]
    raised, other = sorted(stats.errors)
    assert re.fullmatch(r"ZeroDivisionError: division by zero \(.*test_runner\.py:\d+ in sometimes\)", raised)
    assert other == "no answer found"
    kept = [e.outcome.traceback for group in groups for e in group.episodes if isinstance(e.outcome, Failed)]
    assert sum('raise ZeroDivisionError("division' in text for text in kept) == 1  # once an error, with the first
    assert sum(stats.errors.values()) == stats.failed == 2 * stats.scored


def test_an_episode_is_bounded_in_time():
    async def hangs_once(task, engine):
        if task.id == "task 0":
            await asyncio.Event().wait()
        return [await trajectory(engine)]

    async def test(begin):
        runner = make(FakeEngine(), Doing(hangs_once), episode_seconds=0.05)
        begin(runner)
        groups = await runner.take()
        return groups, runner.stats()

    groups, stats = drive(test)
    assert stats.timed_out == 3
    assert stats.errors == {"ended after 0.05 seconds": 3}
    assert "task 0" not in [g.task.id for g in groups]


def test_a_workflows_own_timeout_and_cancelled_wait_are_failures_not_the_runs_end():
    async def mischief(task, engine):
        if task.id == "task 0":
            raise TimeoutError("my own")
        if task.id == "task 1":
            future = asyncio.get_running_loop().create_future()
            future.cancel()
            await future
        return [await trajectory(engine)]

    async def test(begin):
        runner = make(FakeEngine(), Doing(mischief), group_size=1)
        begin(runner)
        await runner.take()
        return runner.stats()

    stats = drive(test)
    assert (stats.failed, stats.timed_out, stats.given_back) == (2, 0, 2)
    assert any(text.startswith("TimeoutError: my own (") for text in stats.errors)


def test_a_group_that_no_filter_keeps_is_given_back_and_the_next_task_takes_its_place():
    async def test(begin):
        runner = make(FakeEngine(), filters=[lambda g: True, lambda g: int(g.task.id.split()[1]) % 2 == 1])
        begin(runner)
        steps = [await runner.take()]
        runner.published(1)
        steps.append(await runner.take())
        return [g.task.id for step in steps for g in step], runner.stats().given_back, runner.state()

    tasks, given_back, state = drive(test)
    assert tasks == ["task 1", "task 3", "task 5", "task 7"]
    assert given_back >= 4
    assert all(position >= 8 for _, position in state["unfinished"])


def test_a_group_without_a_scored_episode_is_given_back():
    async def test(begin):
        runner = make(FakeEngine(), Plain(bad=("task 0", "task 2")))
        begin(runner)
        return [g.task.id for g in await runner.take()], runner.stats()

    tasks, stats = drive(test)
    assert tasks == ["task 1", "task 3"]
    assert stats.failed == 6


def test_a_run_in_which_nothing_can_be_scored_ends_with_the_first_error():
    async def test(begin):
        runner = make(FakeEngine(), Plain(bad=tuple(t.id for t in TASKS)), failed_groups=3)
        begin(runner)
        with pytest.raises(UserError, match=r"none of 3 groups in a row had a scored episode.*RuntimeError: task 0 is bad"):
            await runner.take()

    drive(test)


def test_after_a_success_the_run_is_ten_times_as_patient_but_not_for_ever():
    bad = tuple(t.id for t in TASKS[1:])

    async def test(begin):
        runner = make(FakeEngine(), Plain(bad=bad), groups_per_step=2, group_size=1, failed_groups=2)
        begin(runner)
        with pytest.raises(UserError, match="none of 20 groups in a row"):
            await runner.take()

    drive(test)


def rewarded(reward):
    """A workflow whose episodes have the reward that a function of the task gives."""

    async def run(task, engine):
        return [await trajectory(engine, reward(task))]

    return Doing(run)


def test_a_run_whose_filter_gives_everything_back_warns_and_ends_naming_the_filter_and_the_rewards():
    said = []

    async def test(begin):
        same = rewarded(lambda task: float(len(task.id) % 2))
        runner = make(FakeEngine(), same, filters=(varied,), groups_per_step=2, message=said.append)
        begin(runner)
        with pytest.raises(
            UserError, match=r"^128 groups in a row .* the filter varied \(rewards seen: 0, 1\), so there is nothing"
        ):
            await runner.take()
        return runner.stats().given_back

    assert drive(test) == 127  # the last one ended the run
    assert [text.split(" because")[0] for text in said] == [f"{n} groups in a row were dropped" for n in (16, 32, 64)]
    assert "after 128 the run ends (train.filtered_groups)" in said[0]


def test_groups_that_are_kept_now_and_then_and_groups_that_fail_do_not_end_a_filtered_run():
    kept = {f"task {n}" for n in range(0, 50, 8)}

    async def test(begin):
        def reward(task):
            if int(task.id.split()[1]) % 2:
                raise RuntimeError("no answer")
            return 1.0

        runner = make(FakeEngine(), rewarded(reward), filters=(lambda group: group.task.id in kept,), filtered_groups=4)
        begin(runner)
        taken = []
        for step in range(1, 6):
            taken += [group.task.id for group in await runner.take()]
            runner.published(step)
        return taken

    assert len(set(drive(test)) & kept) == 7


def test_failures_between_filtered_groups_do_not_keep_a_run_from_ending():
    async def test(begin):
        def reward(task):
            if int(task.id.split()[1]) % 2:
                raise RuntimeError("no answer")
            return 1.0

        runner = make(FakeEngine(), rewarded(reward), filters=(varied,), filtered_groups=6)
        begin(runner)
        with pytest.raises(UserError, match=r"^6 groups in a row .* \(rewards seen: 1\)"):
            await runner.take()

    drive(test)


def test_greedy_answers_that_always_fail_end_the_run():
    class Greedily(Plain):
        async def run(self, task, engine):
            if self.sampling.temperature == 0:
                raise RuntimeError("no greedy answer")
            return await super().run(task, engine)

    async def test(begin):
        runner = make(FakeEngine(), Greedily(), greedy=True, filtered_groups=5)
        begin(runner)
        with pytest.raises(UserError, match=r"^5 groups in a row were dropped because of the lack of a scored greedy answer"):
            await runner.take()

    drive(test)


def test_nothing_ends_a_run_in_which_others_decide_but_it_says_that_groups_are_given_back():
    said = []

    class Opened(Doing):
        open_ended = True

    async def test(begin):
        workflow = Opened(rewarded(lambda task: 1.0).function)
        runner = make(FakeEngine(), workflow, filters=(varied,), filtered_groups=8, message=said.append)
        running = begin(runner)
        await until(lambda: runner.stats().given_back > 20)
        assert not running.done()

    drive(test)
    assert len(said) == 3


@pytest.mark.parametrize("error", [EngineError("the server died"), UserError("no chat template")])
def test_errors_that_are_not_the_episodes_end_the_run_and_every_episode(error):
    async def test(begin):
        engine = FakeEngine(held=True)
        runner = make(engine)
        running = begin(runner)
        await until(lambda: engine.waiting >= 8)
        engine.error = error
        engine.gate.set()
        with pytest.raises(type(error), match=str(error)):
            await runner.take()
        assert running.done()
        assert engine.waiting == 0

    drive(test)


def outcome_of(raised, **row):
    """The outcome of an episode whose workflow raises this, or returns it."""

    async def run(task, engine):
        if isinstance(raised, BaseException):
            raise raised
        return raised

    return asyncio.run(run_episode(Doing(run), TASKS[0], None, 60.0, **row)).outcome


def test_a_workflow_that_loses_what_truncated_sampling_kept_ends_the_run():
    tokens, kept = np.arange(3, dtype=np.int32), Kept(np.array([2, 1, 1], np.int32), np.array([0, 5, 1, 2], np.int32))
    told, untold = (
        Trajectory.from_completion(np.zeros(1, np.int32), tokens, np.zeros(3), np.zeros(3), 1.0, kept=x) for x in (kept, None)
    )
    written = replace(untold, versions=np.full(4, -1))  # by no policy, such as a demonstration

    def outcome(made, **sampling):
        class Sampled(Doing):
            def sampling_params(self):
                return SamplingParams(**sampling)

        async def run(task, engine):
            return [made]

        return asyncio.run(run_episode(Sampled(run), TASKS[0], None, 60.0, **row)).outcome

    row = {"row_length": 8}
    for made, sampling in (
        (told, {"top_p": 0.9}),
        (untold, {}),
        (written, {"top_p": 0.9}),
        (untold, {"temperature": 0.0, "top_k": 2}),
    ):
        assert outcome(made, **sampling) == Scored(1.0)
    with pytest.raises(UserError, match=r"pass kept = completion\.kept"):
        outcome(untold, top_p=0.9)
    row = {}  # not trained on
    assert outcome(untold, top_p=0.9) == Scored(1.0)


LOST, TOO_LONG, BUG = EngineError("lost"), PromptTooLong("a prompt of 9 tokens leaves no room"), KeyError("x")


@pytest.mark.parametrize(
    "error",
    [TOO_LONG, TaskError("no such picture"), BUG, ExceptionGroup("several", [BUG, ExceptionGroup("inner", [TOO_LONG])])],
    ids=str,
)
def test_what_speaks_of_one_task_or_one_episode_fails_the_episode(error):
    assert type(first_of(error)).__name__ in outcome_of(error).error


@pytest.mark.parametrize(
    "error",
    [LOST, UserError("no key"), ExceptionGroup("several", [BUG, ExceptionGroup("inner", [TOO_LONG, LOST])])],
    ids=str,
)
def test_what_speaks_of_the_run_ends_it_also_out_of_a_group_of_exceptions(error):
    with pytest.raises((EngineError, UserError)) as raised:
        outcome_of(error)
    assert raised.value is first_of(error)


def test_an_engine_that_is_lost_under_a_workflows_task_group_ends_the_run():
    async def several(task, engine):
        async with asyncio.TaskGroup() as calls:
            for _ in range(3):
                calls.create_task(trajectory(engine))
        return []

    async def test(begin):
        engine = FakeEngine()
        engine.error = EngineError("the server died")
        runner = make(engine, Doing(several), failed_groups=100)
        begin(runner)
        with pytest.raises(EngineError, match="the server died"):
            await runner.take()

    drive(test)


def test_a_trajectory_that_fits_no_row_is_a_failed_episode():
    def of(length):
        tokens = np.ones(length, np.int32)
        return Trajectory.from_completion(tokens[:1], tokens[1:], np.zeros(length - 1), np.zeros(length - 1), reward=1.0)

    assert isinstance(outcome_of([of(8), of(8)], row_length=8), Scored)
    assert "a trajectory of 9 tokens does not fit into a row" in outcome_of([of(2), of(9)], row_length=8).error
    assert isinstance(outcome_of([of(4), of(4)], row_length=8, together=2), Scored)
    assert "a set of 2 trajectories of 9 tokens" in outcome_of([of(5), of(4)], row_length=8, together=2).error
    assert (
        "without tokens"
        in outcome_of([Trajectory(*(np.zeros(0, kind) for kind in (np.int32, bool, np.float32, np.int32)), 1.0)]).error
    )


def test_a_held_out_answer_that_fits_no_row_fails_alone():
    async def long(task, engine):
        tokens = np.ones(9 if task.id == "task 1" else 8, np.int32)
        return [Trajectory.from_completion(tokens[:1], tokens[1:], tokens[1:] * 0.0, tokens[1:] * 0, reward=1.0)]

    async def test(begin):
        return await make(FakeEngine(), row_length=8).evaluate(TASKS[:3], Doing(long))

    assert [type(episode.outcome) for episode in drive(test)] == [Scored, Failed, Scored]


def test_what_a_workflow_keeps_is_part_of_the_state_and_given_back_before_any_episode():
    counts = {}

    class Counting(Plain):
        def state(self):
            return dict(counts)

        def restore(self, state):
            assert counts == {}
            counts.update(state)

        async def run(self, task, engine):
            counts[task.id] = counts.get(task.id, 0) + 1
            return await super().run(task, engine)

    async def test(begin):
        workflow = Counting()
        runner = make(FakeEngine(), workflow)
        begin(runner, 0, Resumed(workflow={"task 0": 7}))
        await runner.take()
        return runner.state()

    assert drive(test)["workflow"]["task 0"] == 7 + 3


def test_a_resumed_run_draws_what_the_first_would_have_drawn():
    async def first(begin):
        engine = FakeEngine()
        runner = make(engine, window=4, seed=3)
        begin(runner)
        await runner.take()
        runner.published(1)
        state = runner.state()
        await until(lambda: runner.queue.unfinished == 0 and runner.queue.free == 0)
        return state, [await runner.take(), await runner.take()]

    async def second(begin):
        runner = make(FakeEngine(), window=4, seed=3)
        begin(runner, 1, Resumed(state["position"], state["next_ticket"], dict(state["unfinished"])))
        await until(lambda: runner.queue.unfinished == 0 and runner.queue.free == 0)
        return [await runner.take(), await runner.take()], runner.state()

    state, expected = drive(first)
    resumed, later = drive(second)
    assert state["unfinished"], "the first run had nothing in flight"
    for a, b in zip([g for s in expected for g in s], [g for s in resumed for g in s], strict=True):
        assert (a.ticket, a.task) == (b.ticket, b.task)
        for x, y in zip(a.episodes, b.episodes, strict=True):
            np.testing.assert_array_equal(x.trajectories[0].tokens, y.trajectories[0].tokens)
    assert (
        later["position"] == later["next_ticket"] == 6
    )  # two steps that were taken, and the four slots of the unpublished next


def test_several_trajectories_make_one_episode_with_their_mean_reward():
    async def two(task, engine):
        return [await trajectory(engine, 1.0), await trajectory(engine, 0.5)]

    async def test(begin):
        runner = make(FakeEngine(), Doing(two))
        begin(runner)
        return (await runner.take())[0].episodes[0]

    episode = drive(test)
    assert episode.outcome == Scored(0.75)
    assert [t.reward for t in episode.trajectories] == [1.0, 0.5]


@pytest.mark.parametrize("reward", [None, float("nan"), float("inf")])
def test_a_trajectory_without_a_finite_reward_is_a_failure(reward):
    async def test(begin):
        async def unscored(task, engine):
            return [await trajectory(engine, reward)]

        runner = make(FakeEngine(), Doing(unscored), failed_groups=1)
        begin(runner)
        with pytest.raises(UserError, match="every trajectory needs a finite reward"):
            await runner.take()

    drive(test)


def test_evaluation_gives_one_outcome_a_task_in_order_and_at_most_concurrency_at_once():
    peak = 0

    async def watched(task, engine):
        nonlocal peak
        peak = max(peak, engine.engine.waiting + 1)
        if task.id == "task 3":
            raise ValueError("no")
        await trajectory(engine)
        return Episode(Scored(float(task.id.split()[1]), {"length": 5.0}))

    async def test(begin):
        runner = make(FakeEngine(concurrency=4))
        return await runner.evaluate(TASKS[:20], Doing(watched))

    outcomes = [episode.outcome for episode in drive(test)]
    assert re.fullmatch(r"ValueError: no \(.*test_runner\.py:\d+ in watched\)", outcomes[3].error)
    assert [o for i, o in enumerate(outcomes) if i != 3] == [Scored(float(i), {"length": 5.0}) for i in range(20) if i != 3]
    assert peak <= 4


def test_evaluation_ends_with_the_engines_error():
    async def test(begin):
        engine = FakeEngine()
        engine.error = EngineError("the server died")
        with pytest.raises(EngineError, match="the server died"):
            await make(engine).evaluate(TASKS, Plain())

    drive(test)


def test_timed_out_outcomes_of_the_workflow_are_counted_as_such():
    async def test(begin):
        async def slow_reward(task, engine):
            await trajectory(engine)
            return TimedOut(2.0)

        runner = make(FakeEngine(), Doing(slow_reward), failed_groups=1)
        begin(runner)
        with pytest.raises(UserError, match="ended after 2 seconds"):
            await runner.take()
        assert runner.stats().timed_out >= 3

    drive(test)


@pytest.mark.parametrize("setting", ["group_size", "episode_seconds", "failed_groups"])
def test_settings_that_cannot_work_are_refused_by_name(setting):
    with pytest.raises(ConfigError, match=rf"train\.{setting} = 0"):
        make(FakeEngine(), **{setting: 0})
