"""The bound in the queue's docstring, against every order of events that hypothesis generates."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_x.errors import ConfigError
from areal_x.rollout.queue import TrajectoryQueue
from areal_x.types import Group, Task

TASK = Task("t", "p")


class Driver:
    """A queue, with separate bookkeeping of what went in and came out."""

    def __init__(self, groups_per_step, max_staleness, window, version=0, next_ticket=0, pending=(), finished=None, order=()):
        self.queue = TrajectoryQueue(groups_per_step, max_staleness, window)
        self.finished = dict(finished or {})
        groups = [Group(TASK, ticket, admitted) for ticket, admitted in self.finished.items()]
        self.queue.begin(version, next_ticket, pending, groups, order)
        self.unfinished, self.dropped, self.consumed, self.ages, self.taken = {}, set(), [], [], []
        self.steps = self.out = version
        self.order = list(order)

    def admit(self):
        ticket = self.queue.admit()
        if ticket is not None:
            assert ticket not in {*self.unfinished, *self.finished, *self.dropped, *self.consumed}
            self.unfinished[ticket] = self.out
        return ticket

    def finish(self, ticket):
        self.queue.finish(ticket, Group(TASK, ticket, self.unfinished[ticket]))
        self.finished[ticket] = self.unfinished.pop(ticket)

    def drop(self, ticket):
        self.queue.drop(ticket)
        del self.unfinished[ticket]
        self.dropped.add(ticket)

    def take(self):
        ready, batch = self.queue.ready, self.queue.take()
        assert ready == (batch is not None)
        if batch is None:
            return None
        expected = self.order.pop(0) if self.order else None
        assert expected in (None, [group.ticket for group in batch])
        for group in batch:
            oldest = min([*self.unfinished, *self.finished])
            if expected is None:
                assert group.ticket < oldest + self.queue.window
                assert group.ticket == min(self.finished)
            self.ages.append(self.steps - self.finished.pop(group.ticket))
            assert self.ages[-1] <= bound(self.queue)
            self.consumed.append(group.ticket)
        self.steps += 1
        self.taken.append({group.ticket: group.admitted_version for group in batch})
        return [group.ticket for group in batch]

    def publish(self, version=None):
        self.out = self.steps if version is None else version
        self.queue.published(self.out)

    def moves(self):
        """All possible next events."""
        moves = [(self.finish, (t,)) for t in self.unfinished] + [(self.drop, (t,)) for t in self.unfinished]
        if self.queue.free > 0:
            moves.append((self.admit, ()))
        if len(self.finished) >= self.queue.groups_per_step:
            moves.append((self.take, ()))
        return moves + [(self.publish, (v,)) for v in range(self.out + 1, self.steps + 1)]


def bound(queue):
    return (queue.slots + queue.window - 2) // queue.groups_per_step


sizes = {"groups_per_step": st.integers(1, 4), "max_staleness": st.integers(0, 3), "window": st.integers(1, 9)}


@settings(max_examples=300, deadline=None)
@given(data=st.data(), **sizes)
def test_no_order_of_events_exceeds_the_bound_or_loses_a_group_or_stops(data, groups_per_step, max_staleness, window):
    driver = Driver(groups_per_step, max_staleness, window)
    for choice in data.draw(st.lists(st.integers(0, 10**6), min_size=20, max_size=150)):
        moves = driver.moves()
        assert moves, "nothing can happen any more"
        function, arguments = moves[choice % len(moves)]
        queue, ready = driver.queue, driver.queue.ready
        function(*arguments)
        assert queue.ready or not ready or function == driver.take  # nothing else undoes it
        held = len(driver.unfinished) + len(driver.finished) + (driver.steps - driver.out) * groups_per_step
        assert queue.free == queue.slots - held >= 0
        assert (queue.depth, queue.unfinished) == (len(driver.finished), len(driver.unfinished))
        assert queue.ages() == {t: driver.steps - v for t, v in sorted({**driver.unfinished, **driver.finished}.items())}
    assert queue.dropped == len(driver.dropped)
    assert sorted([*driver.consumed, *driver.dropped, *driver.unfinished, *driver.finished]) == list(range(queue.next_ticket))


def test_ages_stay_within_the_bound_in_ten_thousand_random_schedules_with_a_publication_under_way():
    """As the ring does it: the trainer publishes after each step and goes on; it waits for the publication before."""
    draw = random.Random(0)
    lagged = 0
    for _ in range(10_000):
        sizes = draw.randint(1, 4), draw.randint(0, 3), draw.randint(1, 9)
        driver, under_way = Driver(*sizes), False
        eager = draw.random()  # how soon an engine has new weights
        for _ in range(draw.randint(10, 60)):
            if under_way and (draw.random() < eager or not driver.unfinished):
                driver.publish()
                under_way = False
            while driver.queue.free > 0 and draw.random() < 0.9:
                driver.admit()
            if driver.unfinished and draw.random() < 0.8:
                driver.finish(draw.choice(list(driver.unfinished)))
            if draw.random() < 0.3 and driver.take() is not None:
                lagged += under_way
                if under_way:
                    driver.publish(driver.steps - 1)
                under_way = True
            assert driver.steps - driver.out <= 1 + under_way
    assert lagged > 1000  # steps were taken while weights were on their way


@settings(max_examples=200, deadline=None)
@given(data=st.data(), **sizes)
def test_when_all_have_finished_a_step_is_taken_or_a_slot_is_free_or_weights_are_due(
    data, groups_per_step, max_staleness, window
):
    driver = Driver(groups_per_step, max_staleness, window)
    for choice in data.draw(st.lists(st.integers(0, 10**6), max_size=60)):
        function, arguments = driver.moves()[choice % len(driver.moves())]
        function(*arguments)
    for ticket in list(driver.unfinished):
        driver.finish(ticket)
    assert (driver.take() is not None) or driver.queue.free > 0 or driver.steps > driver.out


def oldest_last(groups_per_step, max_staleness, window):
    """The adversary: the last group admitted before a publication finishes only when the window lets nothing else pass."""
    driver = Driver(groups_per_step, max_staleness, window)
    last = None
    while driver.queue.free:
        last = driver.admit()
    for _ in range(10 * (max_staleness + window)):
        for ticket in [t for t in driver.unfinished if t != last]:
            driver.finish(ticket)
        if driver.take() is None:
            driver.finish(last)
            assert driver.take()
            return driver
        driver.publish()
        while driver.queue.free:
            driver.admit()
    raise AssertionError("the slow group was never waited for")


@pytest.mark.parametrize(
    "groups_per_step, max_staleness, window", [(1, 0, 1), (4, 2, 1), (4, 2, 4), (4, 2, 9), (2, 3, 5), (3, 1, 7)]
)
def test_the_bound_is_reached(groups_per_step, max_staleness, window):
    driver = oldest_last(groups_per_step, max_staleness, window)
    assert max(driver.ages) == bound(driver.queue)


def test_a_window_of_one_is_strictly_first_in_first_out():
    driver = Driver(groups_per_step=2, max_staleness=1, window=1)
    for _ in range(4):
        driver.admit()
    for ticket in (3, 2, 1):
        driver.finish(ticket)
    assert driver.take() is None
    driver.finish(0)
    assert driver.take() == [0, 1]
    assert driver.take() == [2, 3]


def test_a_window_lets_finished_groups_pass_an_unfinished_one_and_no_further():
    driver = Driver(groups_per_step=2, max_staleness=2, window=3)
    for _ in range(6):
        driver.admit()
    for ticket in (5, 4, 3, 2):
        driver.finish(ticket)
    assert driver.take() is None  # only 2 lies less than 3 from the oldest, 0
    driver.finish(1)
    assert driver.take() == [1, 2]
    assert driver.take() is None
    driver.finish(0)
    assert driver.take() == [0, 3]


def test_a_step_is_taken_whole_or_not_at_all():
    driver = Driver(groups_per_step=3, max_staleness=0, window=1)
    tickets = [driver.admit() for _ in range(3)]
    driver.finish(tickets[0])
    assert driver.take() is None
    assert driver.queue.depth == 1


def test_without_staleness_nothing_is_admitted_between_a_step_and_its_publication():
    driver = Driver(groups_per_step=2, max_staleness=0, window=4)
    for step in range(3):
        tickets = [driver.admit(), driver.admit()]
        assert driver.admit() is None
        for ticket in tickets:
            driver.finish(ticket)
        assert driver.take() == tickets
        assert driver.admit() is None
        driver.publish()
        assert driver.ages[-2:] == [0, 0], step


def test_what_is_given_back_frees_its_slot_at_once_and_the_window_moves_on():
    driver = Driver(groups_per_step=1, max_staleness=0, window=1)
    driver.drop(driver.admit())
    driver.finish(driver.admit())
    assert driver.take() == [1]
    assert (driver.queue.dropped, driver.queue.consumed) == (1, 1)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), **sizes)
def test_a_restored_queue_gives_the_pending_tickets_again_first_and_keeps_the_bound(
    data, groups_per_step, max_staleness, window
):
    driver = Driver(groups_per_step, max_staleness, window)
    for choice in data.draw(st.lists(st.integers(0, 10**6), max_size=80)):
        function, arguments = driver.moves()[choice % len(driver.moves())]
        function(*arguments)
    driver.publish()
    pending = driver.queue.pending()
    assert pending == sorted([*driver.unfinished, *driver.finished])

    restored = Driver(groups_per_step, max_staleness, window, driver.steps, driver.queue.next_ticket, pending)
    assert restored.queue.pending() == pending
    again = [restored.admit() for _ in range(restored.queue.free)]
    assert again[: len(pending)] == pending
    assert again[len(pending) :] == list(range(driver.queue.next_ticket, restored.queue.next_ticket))
    for choice in data.draw(st.lists(st.integers(0, 10**6), max_size=80)):
        function, arguments = restored.moves()[choice % len(restored.moves())]
        function(*arguments)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), **sizes)
def test_a_run_that_goes_on_from_before_takes_the_same_steps_and_keeps_the_bound(data, groups_per_step, max_staleness, window):
    driver = Driver(groups_per_step, max_staleness, window)
    for choice in data.draw(st.lists(st.integers(0, 10**6), max_size=120)):
        function, arguments = driver.moves()[choice % len(driver.moves())]
        function(*arguments)
    again = data.draw(st.integers(0, len(driver.taken)))  # steps after the checkpoint
    lost = driver.taken[len(driver.taken) - again :]
    finished = {**driver.finished, **{ticket: version for step in lost for ticket, version in step.items()}}
    restored = Driver(
        groups_per_step,
        max_staleness,
        window,
        driver.steps - again,
        driver.queue.next_ticket,
        list(driver.unfinished),
        finished,
        [list(step) for step in lost],
    )
    for step in lost:  # though the engine does nothing
        assert restored.take() == list(step)
        restored.publish()
    for choice in data.draw(st.lists(st.integers(0, 10**6), min_size=20, max_size=80)):
        moves = restored.moves()
        assert moves, "nothing can happen any more"
        function, arguments = moves[choice % len(moves)]
        function(*arguments)
    earlier = [ticket for step in driver.taken[: len(driver.taken) - again] for ticket in step]
    known = [*earlier, *restored.consumed, *driver.dropped, *restored.dropped, *restored.queue.pending()]
    assert sorted(known) == list(range(restored.queue.next_ticket))


def test_fewer_slots_than_before_do_not_stop_a_resumed_run():
    queue = TrajectoryQueue(2, 0, 1)
    queue.begin(5, 9, [0, 8], [Group(TASK, ticket, 5) for ticket in range(1, 8)])
    assert queue.free < 0
    assert queue.take() is None
    assert queue.admit() == 0
    assert queue.admit() is None
    queue.finish(0, Group(TASK, 0, 5))
    for step, expected in enumerate(([0, 1], [2, 3], [4, 5], [6, 7]), 6):
        assert [group.ticket for group in queue.take()] == expected
        queue.published(step)
    assert queue.admit() == 8


def test_fewer_slots_do_not_stop_a_resumed_run_whose_oldest_groups_are_too_few_for_a_step():
    queue = TrajectoryQueue(groups_per_step=3, max_staleness=0)
    queue.begin(5, 11, [1, 2], [Group(TASK, ticket, 5) for ticket in (0, *range(3, 11))])
    assert queue.take() is None  # only 0 may be consumed before 1 and 2
    for ticket in (1, 2):
        assert queue.admit() == ticket
        assert queue.admit() is None
        queue.finish(ticket, Group(TASK, ticket, 5))
    assert [group.ticket for group in queue.take()] == [0, 1, 2]


def test_more_pending_tickets_than_slots_come_back_as_slots_become_free():
    driver = Driver(1, 0, 1, version=5, next_ticket=9, pending=[8, 3, 6])
    order = []
    for _ in range(4):
        order.append(driver.admit())
        assert driver.admit() is None
        driver.finish(order[-1])
        driver.take()
        driver.publish()
    assert order == [3, 6, 8, 9]


def test_the_order_of_calls_is_checked():
    queue = TrajectoryQueue(1, 0, 1)
    ticket = queue.admit()
    queue.finish(ticket, Group(TASK, ticket, 0))
    with pytest.raises(ValueError, match="ticket 0 is not in flight: it is finished"):
        queue.drop(ticket)
    queue.take()
    with pytest.raises(ValueError, match="ticket 0 is not in flight: it holds no slot"):
        queue.finish(ticket, Group(TASK, ticket, 0))
    with pytest.raises(
        ValueError, match="version 2 cannot be published: version 0 is already published and 1 steps were taken"
    ):
        queue.published(2)


@pytest.mark.parametrize(
    "arguments, binding", [((0, 0, 1), "groups_per_step"), ((1, -1, 1), "max_staleness"), ((1, 0, 0), "window")]
)
def test_sizes_that_cannot_work_are_refused_by_name(arguments, binding):
    with pytest.raises(ConfigError, match=rf"train\.{binding} = "):
        TrajectoryQueue(*arguments)
