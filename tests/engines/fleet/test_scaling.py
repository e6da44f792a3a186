"""How many servers a run has: the policy alone, and on a virtual clock with work and nodes that change."""

from __future__ import annotations

import asyncio
import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from areal_x.engines.fleet.scaling import ROLLOUT_IDLE, STEPS, TRAINER_IDLE, Scaling, Seen, changes
from areal_x.simulation.clock import run

SHARES = st.floats(0, 1)


def idle(generation: float, training: float, serving: int) -> tuple[float, float]:
    """The idle shares of a step that waits for the slower of both, of so many seconds of one server and of the trainer."""
    seconds = max(generation / serving, training)
    return 1 - training / seconds, 1 - generation / serving / seconds


def settled(scaling: Scaling, generation: float, training: float, steps: int = 200) -> list[int]:
    """The number of servers in each step, if what is wanted is there in the next step."""
    numbers = []
    for _ in range(steps):
        numbers.append(scaling.wanted)
        scaling.step(*idle(generation, training, scaling.wanted), scaling.wanted)
    return numbers


def test_one_more_is_wanted_after_five_steps_in_which_the_trainer_waits() -> None:
    scaling = Scaling(1, 3)
    assert [scaling.step(TRAINER_IDLE + 0.01, 0.0, 1) for _ in range(STEPS - 1)] == [None] * (STEPS - 1)
    assert scaling.step(TRAINER_IDLE + 0.01, 0.0, 1) == (
        "1 servers generate, and the trainer waits 11% of the time: one more is wanted"
    )
    assert scaling.wanted == 2


def test_one_slow_step_changes_nothing() -> None:
    scaling = Scaling(1, 3)
    for step in range(30):
        scaling.step(1.0 if step % STEPS == 0 else 0.0, 0.0, 1)
    assert scaling.wanted == 1


def test_one_leaves_only_if_the_others_suffice() -> None:
    for servers, rests, wanted in ((2, 0.45, 2), (2, 0.51, 1), (3, 0.33, 3), (3, 0.34, 2), (9, ROLLOUT_IDLE, 9), (9, 0.31, 8)):
        scaling = Scaling(1, 9)
        scaling.wanted = servers
        for _ in range(STEPS):
            scaling.step(0.0, rests, servers)
        assert scaling.wanted == wanted


def test_where_both_wait_for_each_other_more_servers_are_wanted() -> None:
    scaling = Scaling(1, 2)  # synchronous: the trainer waits, and then generation does
    for _ in range(50):
        scaling.step(0.5, 0.5, scaling.wanted)
    assert scaling.wanted == 2


def test_another_one_is_wanted_when_all_that_were_asked_for_serve() -> None:
    scaling = Scaling(1, 9)
    for _ in range(10 * STEPS):
        scaling.step(0.5, 0.0, 1)
    assert scaling.wanted == 2


@pytest.mark.parametrize(("starting", "wanted"), [(False, 1), (True, 2)])
def test_one_without_a_place_is_not_wanted_when_the_trainer_waits_no_longer_and_one_that_starts_is(
    starting: bool, wanted: int
) -> None:
    """A server that starts slows the trainer beside it."""
    scaling = Scaling(1, 3)
    for _ in range(STEPS):
        scaling.step(0.5, 0.0, 1)
    assert scaling.wanted == 2
    for _ in range(10 * STEPS):
        scaling.step(0.0, 0.7, 1, starting)
    assert scaling.wanted == wanted


def test_one_that_starts_is_given_up_if_the_others_could_do_the_work_of_one_of_them() -> None:
    scaling = Scaling(1, 3)
    scaling.wanted = 3
    for _ in range(STEPS):
        scaling.step(0.0, 0.7, 2, True)
    assert scaling.wanted == 1


def test_a_server_that_was_taken_away_does_not_come_back() -> None:
    for scaling in (Scaling(2, 2), Scaling(1, 2)):
        scaling.wanted = 2
        scaling.fewer()
        for serving in (1, 2):
            for _ in range(3 * STEPS):
                scaling.step(0.9, 0.0, serving)
            assert scaling.wanted == 1


@given(st.floats(0.1, 100), st.floats(0.1, 100), st.integers(1, 4), st.integers(0, 8), st.data())
def test_a_run_whose_work_does_not_change_settles_on_enough_servers(
    generation: float, training: float, least: int, more: int, data: st.DataObject
) -> None:
    scaling = Scaling(least, least + more)
    scaling.wanted = data.draw(st.integers(least, least + more))
    numbers = settled(scaling, generation, training)
    changes = [(a, b) for a, b in itertools.pairwise(numbers) if a != b]
    assert len({a < b for a, b in changes}) <= 1, "it went one way alone"
    assert len(changes) <= more
    last = numbers[-1]
    waits, rests = idle(generation, training, last)
    assert waits <= TRAINER_IDLE + 1e-9 or last == least + more
    if rests > max(ROLLOUT_IDLE, 1 / last) + 1e-9:
        assert last == least


class AnyMeasurements(RuleBasedStateMachine):
    """Whatever is measured, and however many servers there happen to be."""

    def __init__(self) -> None:
        super().__init__()
        self.scaling, self.steps, self.grew_at = Scaling(2, 6), 0, -STEPS

    @rule(trainer=SHARES, rollout=SHARES, serving=st.integers(0, 8))
    def step(self, trainer: float, rollout: float, serving: int) -> None:
        before = self.scaling.wanted
        reason = self.scaling.step(trainer, rollout, serving)
        self.steps += 1
        after = self.scaling.wanted
        assert (reason is None) == (after == before)
        assert after <= before + 1
        if after > before:
            assert self.steps - self.grew_at >= STEPS, "the last one was measured for five steps"
            assert serving >= before, "what was asked for had come"
            self.grew_at = self.steps
        if after < before:
            assert after >= min(before, serving) - 1

    @rule(shares=st.tuples(SHARES, SHARES), serving=st.integers(1, 8))
    def same(self, shares: tuple[float, float], serving: int) -> None:
        for _ in range(STEPS):
            self.step(*shares, serving)

    @invariant()
    def bounds(self) -> None:
        assert 2 <= self.scaling.wanted <= 6


AnyMeasurements.TestCase.settings = settings(stateful_step_count=60)
TestAnyMeasurements = AnyMeasurements.TestCase


@given(
    st.lists(st.tuples(st.floats(1, 40), st.floats(1, 20)), min_size=1, max_size=4),
    st.floats(0, 300),
    st.floats(0, 100),
)
@settings(deadline=None)
def test_servers_follow_the_work_on_a_virtual_clock(
    phases: list[tuple[float, float]], start_seconds: float, leave_seconds: float
) -> None:
    """Servers take their time to start and to leave, and steps go on meanwhile. phases: seconds of one server's generation and
    of training in a step."""
    most = 5

    async def attempt() -> None:
        scaling, serving = Scaling(1, most), 1
        coming: set[asyncio.Task[None]] = set()

        async def change(seconds: float, by: int) -> None:
            nonlocal serving
            await asyncio.sleep(seconds)
            serving += by

        for generation, training in phases:
            for _ in range(20 * STEPS + math.ceil(most * max(start_seconds, leave_seconds) / training)):
                await asyncio.sleep(max(generation / serving, training))
                scaling.step(*idle(generation, training, serving), serving)
                coming = {task for task in coming if not task.done()}
                if not coming and scaling.wanted != serving:
                    more = scaling.wanted > serving
                    coming.add(asyncio.create_task(change(start_seconds if more else leave_seconds, 1 if more else -1)))
            assert scaling.wanted == serving
            waits, rests = idle(generation, training, serving)
            assert serving == most or waits <= TRAINER_IDLE + 1e-9
            assert serving == 1 or rests <= max(ROLLOUT_IDLE, 1 / serving) + 1e-9

    run(attempt())


SERVERS = st.lists(
    st.builds(Seen, st.integers(0, 99).map(str), st.booleans(), st.just(False), st.booleans(), st.integers(0, 9)),
    max_size=6,
    unique_by=lambda server: server.name,
)


@given(SERVERS, st.integers(1, 6))
def test_as_many_stay_as_are_wanted_and_the_last_that_serves_among_them(servers: list[Seen], wanted: int) -> None:
    add, leave = changes(servers, wanted)
    stay = [server for server in servers if server.name not in leave]
    assert len([server for server in stay if not server.departs]) + add == wanted
    assert not add or all(server.departs for server in servers if server.name in leave), "none comes while another goes"
    assert any(server.serves for server in stay) == any(server.serves for server in servers)
    if any(server.serves and not server.departs for server in stay):
        assert not any(server.departs for server in stay), "their nodes go, and others serve"


@pytest.mark.parametrize(
    ("servers", "wanted", "expected"),
    [
        ([Seen("a"), Seen("b"), Seen("c")], 2, (0, ["c"])),
        ([Seen("a", requests=3), Seen("b", requests=1), Seen("c", requests=2)], 1, (0, ["b", "c"])),
        ([Seen("a"), Seen("b", serves=False), Seen("c")], 2, (0, ["b"])),
        ([Seen("a"), Seen("b", serves=False), Seen("c", serves=False, final=True)], 2, (0, ["c"])),
        ([Seen("a", departs=True)], 1, (1, [])),
        ([Seen("a", departs=True), Seen("b", serves=False)], 1, (0, [])),
        ([Seen("a", departs=True), Seen("b")], 1, (0, ["a"])),
        ([Seen("a", departs=True), Seen("b")], 2, (1, ["a"])),
        ([Seen("a", serves=False, departs=True)], 1, (1, ["a"])),
    ],
)
def test_who_leaves(servers: list[Seen], wanted: int, expected: tuple[int, list[str]]) -> None:
    assert changes(servers, wanted) == expected
