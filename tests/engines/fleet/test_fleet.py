"""The fleet's decisions in any order of events, with a clock that the test turns."""

from __future__ import annotations

from collections.abc import ItemsView

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from areal_x.engines.fleet.fleet import (
    ERRORS,
    LONGEST_RETRY_SECONDS,
    MISSES,
    STEADY_SECONDS,
    TRIES,
    Fleet,
    Member,
    State,
)
from areal_x.engines.fleet.routing import BLOCK, HOLDERS, Loads, Prefixes, choose, prefixes_of

SILENCE = 100.0


def ready(*names: str, ours: bool = True, version: int = 0) -> Fleet:
    fleet = Fleet(version, SILENCE)
    for name in names:
        fleet.join(name, ours, 0.0)
    for name in fleet.due(0.0):
        come_back(fleet, name, 0.0)
    fleet.messages()
    return fleet


def come_back(fleet: Fleet, name: str, now: float) -> bool:
    fleet.reached(name)
    return fleet.accepted(name, fleet.target, now)


def place(fleet: Fleet, *requests: int) -> list[str | None]:
    for request in requests:
        fleet.enter(request)
    return [fleet.route(request, {}, 0, 0.0) for request in requests]


def test_what_a_lost_server_had_waits_again_and_goes_to_another() -> None:
    fleet = ready("a", "b")
    assert place(fleet, 1, 2, 3) == ["a", "b", "a"]
    fleet.lost("a", "it died", 1.0)
    assert fleet.placed == {1: None, 2: "b", 3: None}
    assert [fleet.route(request, {}, 0, 1.0) for request in (1, 3)] == ["b", "b"]
    assert fleet.messages() == ["a is lost (it died): its requests go to others, and it is restarted in 1 s"]


class Counted(dict[str, Member]):
    """Counts how often all servers are gone through."""

    gone_through = 0

    def items(self) -> ItemsView[str, Member]:
        self.gone_through += 1
        return super().items()


def test_no_event_of_one_server_goes_through_all() -> None:
    """So that starting, checking and losing N servers costs O(N)."""
    fleet = Fleet(0, SILENCE)
    fleet.members = members = Counted()
    fleet.join("a", True, 0.0)
    (name,) = fleet.due(0.0)
    members.gone_through = 0
    assert come_back(fleet, name, 0.0)
    assert place(fleet, 1) == ["a"]
    fleet.heartbeat("a", True, 1.0)
    fleet.failed(1, "a", "broken", 1.0)
    fleet.updated("a", 1.0)
    fleet.lost("a", "it died", 2.0)
    fleet.join("b", True, 0.0)
    fleet.leave("b", 0.0)
    assert not fleet.serves("a")
    assert members.gone_through == 0


def test_a_late_answer_of_a_lost_server_does_not_count() -> None:
    fleet = ready("a", "b")
    place(fleet, 1)
    fleet.lost("a", "it hangs", 1.0)
    assert not fleet.answered(1, "a", 2.0)
    assert fleet.route(1, {}, 0, 2.0) == "b"
    fleet.failed(1, "a", "broken", 3.0)
    assert fleet.placed == {1: "b"}
    assert fleet.answered(1, "b", 4.0)
    assert fleet.placed == {}


def test_a_server_that_misses_a_heartbeat_gets_nothing_new_and_is_lost_after_some() -> None:
    fleet = ready("a", "b")
    place(fleet, 1)
    fleet.heartbeat("a", False, 1.0)
    assert fleet.members["a"].state is State.SUSPECT
    assert place(fleet, 2, 3) == ["b", "b"]
    assert fleet.placed[1] == "a"
    fleet.heartbeat("a", True, 2.0)
    assert place(fleet, 4) == ["a"]
    for second in range(MISSES):
        fleet.heartbeat("a", False, 3.0 + second)
    assert fleet.members["a"].state is State.DOWN
    assert fleet.placed[1] is fleet.placed[4] is None


def test_servers_that_sleep_are_not_lost_for_their_silence_and_none_is_started_meanwhile() -> None:
    fleet = ready("a", "b", "c")
    place(fleet, 1, 2, 3)
    fleet.sleep()
    fleet.lost("b", "it died", 1.0)
    fleet.heartbeat("a", True, 2 * SILENCE)
    assert fleet.serving() == ["a", "c"]
    assert fleet.due(2 * SILENCE) == []
    for second in range(MISSES):  # one that is gone is lost all the same
        fleet.heartbeat("c", False, 2 * SILENCE + second)
    assert fleet.serving() == ["a"]
    fleet.wake(3 * SILENCE)
    fleet.heartbeat("a", True, 3.9 * SILENCE)
    assert fleet.serving() == ["a"]
    assert fleet.due(3 * SILENCE) == ["b", "c"]
    fleet.heartbeat("a", True, 4.1 * SILENCE)
    assert fleet.serving() == []
    fleet.sleep()
    fleet.wake(9 * SILENCE)
    assert fleet.none_since == 9 * SILENCE  # the time without a server begins anew too


def test_a_server_that_answers_heartbeats_but_fails_every_request_is_lost() -> None:
    fleet = ready("a")
    for second in range(ERRORS):
        assert place(fleet, second) == ["a"]
        fleet.failed(second, "a", "500", float(second))
        fleet.heartbeat("a", True, float(second))
    assert fleet.members["a"].state is State.DOWN


def test_an_answer_between_makes_errors_start_from_nothing() -> None:
    fleet = ready("a")
    for request in range(3 * ERRORS):
        assert place(fleet, request) == ["a"]
        if request % ERRORS == ERRORS - 1:
            fleet.answered(request, "a", 1.0)
        else:
            fleet.failed(request, "a", "500", 1.0)
            fleet.heartbeat("a", True, 1.0)
    assert fleet.members["a"].state is State.READY


def test_a_server_is_silent_when_it_answers_none_of_its_requests_and_not_when_it_has_none() -> None:
    fleet = ready("a")
    fleet.heartbeat("a", True, 10 * SILENCE)
    assert fleet.members["a"].serves
    fleet.enter(1)
    fleet.route(1, {}, 0, 10 * SILENCE)
    fleet.heartbeat("a", True, 11 * SILENCE)
    assert fleet.members["a"].serves
    fleet.heartbeat("a", True, 11 * SILENCE + 1)
    assert fleet.members["a"].state is State.DOWN
    assert "no request answered for 100 s" in fleet.members["a"].reason


def test_starts_in_vain_come_ever_later_and_end_for_a_server_of_ours_alone() -> None:
    ours, theirs = ready("a", ours=True), ready("a", ours=False)
    for fleet, gives_up in ((ours, True), (theirs, False)):
        now, waits = 0.0, []
        for _ in range(TRIES):
            fleet.lost("a", "no such flag", now)
            waits.append(fleet.members["a"].retry_at - now)
            assert fleet.due(now) == []
            now = fleet.members["a"].retry_at
            assert fleet.due(now) == ["a"]
        assert waits == [1, 2, 4, 8, 16]
        assert fleet.why_hopeless() is None
        fleet.lost("a", "no such flag", now)
        assert (fleet.members["a"].state is State.GIVEN_UP) == gives_up
    assert ours.why_hopeless() == f"no server is left: a was given up after {TRIES} starts in vain: no such flag"
    assert theirs.members["a"].retry_at - now <= LONGEST_RETRY_SECONDS


def test_a_server_that_served_long_has_all_its_tries_again() -> None:
    fleet = ready("a")
    now = 0.0
    for _ in range(3 * TRIES):
        now += STEADY_SECONDS + 1
        fleet.lost("a", "it died", now)
        now += 1
        assert fleet.due(now) == ["a"]
        assert come_back(fleet, "a", now)


def test_a_server_that_comes_back_during_a_swap_needs_the_newest_weights() -> None:
    fleet = ready("a", "b")
    fleet.lost("a", "it died", 1.0)
    fleet.due(2.0)
    fleet.reached("a")
    assert fleet.begin(1) == ["b"]
    assert not fleet.accepted("a", 0, 3.0)
    assert fleet.accepted("a", 1, 4.0)
    fleet.updated("b", 5.0)
    fleet.published(6.0)
    assert fleet.serving() == ["a", "b"]


def test_a_server_that_did_not_take_a_version_is_lost_when_the_swap_ends() -> None:
    fleet = ready("a", "b")
    fleet.begin(1)
    fleet.updated("b", 1.0)
    assert place(fleet, 1, 2) == ["a", "b"]  # both serve meanwhile
    fleet.published(2.0)
    assert fleet.serving() == ["b"]
    assert fleet.placed == {1: None, 2: "b"}


def test_a_version_that_nobody_would_have_leaves_all_as_they_were() -> None:
    fleet = ready("a", "b")
    fleet.begin(1)
    fleet.refused(1.0)
    assert fleet.serving() == ["a", "b"]
    assert fleet.target == 0


def test_a_quarantined_server_never_serves_again() -> None:
    fleet = ready("a", "b")
    place(fleet, 1)
    fleet.quarantine("a", "it says something else", 1.0)
    assert fleet.placed == {1: None}
    assert fleet.due(1e9) == []
    assert fleet.messages() == ["a was quarantined: it says something else"]


def test_how_long_nobody_serves_is_counted_from_the_last_one_on() -> None:
    fleet = ready("a", "b")
    fleet.lost("a", "", 1.0)
    assert fleet.none_since is None
    fleet.lost("b", "", 5.0)
    assert fleet.none_since == 5.0
    fleet.due(10.0)
    come_back(fleet, "a", 11.0)
    assert fleet.none_since is None


def test_a_server_that_leaves_gets_nothing_new_and_its_requests_count_until_it_is_lost_or_gone() -> None:
    fleet = ready("a", "b")
    assert place(fleet, 1, 2, 3) == ["a", "b", "a"]
    fleet.retire("a", 1.0)
    assert place(fleet, 4) == ["b"]
    assert fleet.placed[1] == fleet.placed[3] == "a"
    assert fleet.answered(1, "a", 2.0)
    fleet.lost("a", "its node is gone", 3.0)
    assert fleet.placed[3] is None
    assert fleet.due(1e9) == []
    assert fleet.messages() == []
    fleet.leave("a", 4.0)
    assert fleet.route(3, {}, 0, 4.0) == "b"


NAMES = ("a", "b", "c")


class AnyOrder(RuleBasedStateMachine):
    """Every event, whenever it may come: late, twice, about servers that are gone."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet, self.now = Fleet(0, SILENCE), 0.0
        self.wanted: set[int] = set()
        self.next = 0

    @rule(name=st.sampled_from(NAMES), ours=st.booleans(), limit=st.none() | st.integers(1, 3))
    def join(self, name: str, ours: bool, limit: int | None) -> None:
        if name not in self.fleet.members:
            self.fleet.join(name, ours, self.now, limit)

    @rule(name=st.sampled_from(NAMES))
    def leave(self, name: str) -> None:
        if name in self.fleet.members:
            self.fleet.leave(name, self.now)

    @rule(name=st.sampled_from(NAMES))
    def retire(self, name: str) -> None:
        self.fleet.retire(name, self.now)
        assert name not in self.fleet.serving()

    @rule(seconds=st.sampled_from([0.5, 5.0, 70.0, 400.0]))
    def time(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def due(self) -> None:
        self.fleet.due(self.now)

    @rule(name=st.sampled_from(NAMES))
    def reached(self, name: str) -> None:
        self.fleet.reached(name)

    @rule(name=st.sampled_from(NAMES), behind=st.integers(0, 1))
    def accepted(self, name: str, behind: int) -> None:
        if self.fleet.accepted(name, self.fleet.target - behind, self.now):
            assert behind == 0
            assert self.fleet.members[name].state is State.READY

    @rule(name=st.sampled_from(NAMES), how=st.sampled_from(["lost", "quarantine"]))
    def ends(self, name: str, how: str) -> None:
        getattr(self.fleet, how)(name, how, self.now)

    @rule(name=st.sampled_from(NAMES), answered=st.booleans())
    def heartbeat(self, name: str, answered: bool) -> None:
        self.fleet.heartbeat(name, answered, self.now)

    @rule()
    def enter(self) -> None:
        self.fleet.enter(self.next)
        self.wanted.add(self.next)
        self.next += 1

    @precondition(lambda self: self.wanted)
    @rule(data=st.data(), slack=st.integers(0, 2))
    def route(self, data: st.DataObject, slack: int) -> None:
        request = data.draw(st.sampled_from(sorted(self.wanted)))
        if self.fleet.placed[request] is None:
            name = self.fleet.route(request, {}, slack, self.now)
            takers = [m for m in self.fleet.members.values() if m.state is State.READY]
            if name is None:
                assert all(m.limit is not None and len(m.requests) >= m.limit for m in takers)
            else:
                assert self.fleet.members[name].state is State.READY

    @precondition(lambda self: self.wanted)
    @rule(data=st.data(), name=st.sampled_from(NAMES), outcome=st.sampled_from(["answered", "failed", "withdraw"]))
    def ended(self, data: st.DataObject, name: str, outcome: str) -> None:
        request = data.draw(st.sampled_from(sorted(self.wanted)))
        at = self.fleet.placed[request]
        if outcome == "failed":
            self.fleet.failed(request, name, "500", self.now)
        elif outcome == "withdraw":
            self.fleet.withdraw(request)
            self.wanted.discard(request)
        else:
            assert self.fleet.answered(request, name, self.now) == (at == name)
            if at == name:
                self.wanted.discard(request)

    @rule()
    def begin(self) -> None:
        self.fleet.begin(self.fleet.target + 1)

    @rule(name=st.sampled_from(NAMES))
    def updated(self, name: str) -> None:
        self.fleet.updated(name, self.now)

    @rule(how=st.sampled_from(["published", "refused"]))
    def swap_ends(self, how: str) -> None:
        getattr(self.fleet, how)(self.now)
        assert all(self.fleet.members[name].version == self.fleet.target for name in self.fleet.serving())

    @invariant()
    def no_request_is_lost(self) -> None:
        assert set(self.fleet.placed) == self.wanted

    @invariant()
    def a_request_is_where_it_is_said_to_be_and_only_with_servers_that_serve(self) -> None:
        at = {request: name for name, m in self.fleet.members.items() for request in m.requests}
        assert at == {request: name for request, name in self.fleet.placed.items() if name is not None}
        assert sum(len(m.requests) for m in self.fleet.members.values()) == len(at)
        assert all(self.fleet.members[name].serves or self.fleet.is_leaving(name) for name in at.values())

    @invariant()
    def nobody_serves_older_weights_than_those_of_the_last_swap(self) -> None:
        versions = [self.fleet.members[name].version for name in self.fleet.serving()]
        assert all(version is not None and self.fleet.floor <= version <= self.fleet.target for version in versions)

    @invariant()
    def the_loads_are_those_of_the_servers_that_take_requests(self) -> None:
        takers = {name: len(m.requests) for name, m in self.fleet.members.items() if m.takes_requests}
        assert {name: self.fleet.loads.get(name) for name in NAMES if self.fleet.loads.get(name) is not None} == takers
        assert self.fleet.loads.least == min(takers.values(), default=None)

    @invariant()
    def it_is_known_who_serves(self) -> None:
        assert [name for name in NAMES if self.fleet.serves(name)] == sorted(self.fleet.serving())

    @rule(name=st.sampled_from(NAMES), limit=st.integers(1, 3))
    def set_limit(self, name: str, limit: int) -> None:
        if name in self.fleet.members and self.fleet.members[name].limit is not None:
            self.fleet.set_limit(name, limit)

    @invariant()
    def it_is_known_since_when_nobody_serves(self) -> None:
        if self.fleet.members:
            assert (self.fleet.none_since is None) == bool(self.fleet.serving())


AnyOrder.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAnyOrder = AnyOrder.TestCase


# ---- routing

NAMES_OF_SIX = "abcdef"


def loads_of(loads: dict[str, int]) -> Loads:
    made = Loads()
    for name, load in loads.items():
        made.set(name, load)
    return made


@given(st.lists(st.tuples(st.sampled_from(NAMES_OF_SIX), st.none() | st.integers(0, 20))))
def test_the_least_loaded_is_known_after_any_changes(changes: list[tuple[str, int | None]]) -> None:
    loads, expected = Loads(), dict[str, int]()
    for name, load in changes:
        if load is None:
            loads.remove(name)
            expected.pop(name, None)
        else:
            loads.set(name, load)
            expected[name] = load
        assert loads.least == min(expected.values(), default=None)
        first = loads.first()
        assert (first is None) == (not expected)
        assert first is None or expected[first] == loads.least
        assert {name: loads.get(name) for name in NAMES_OF_SIX if loads.get(name) is not None} == expected


def test_servers_that_are_equally_loaded_are_taken_in_turn() -> None:
    fleet = ready("a", "b", "c")
    assert place(fleet, 0, 1, 2, 3, 4, 5) == ["a", "b", "c"] * 2
    fleet.answered(1, "b", 1.0)
    fleet.answered(0, "a", 1.0)
    assert place(fleet, 6, 7) == ["b", "a"]


of_servers = st.dictionaries(st.sampled_from(NAMES_OF_SIX), st.integers(0, 20))


@given(of_servers, st.dictionaries(st.sampled_from(NAMES_OF_SIX), st.integers(0, 99)), st.integers(0, 8))
def test_the_chosen_server_is_near_the_least_loaded_and_none_near_it_has_more_in_cache(
    loads: dict[str, int], cached: dict[str, int], slack: int
) -> None:
    name = choose(loads_of(loads), cached, slack)
    if not loads:
        assert name is None
        return
    assert name is not None
    least = min(loads.values())
    assert loads[name] <= least + slack
    near = [other for other in loads if loads[other] <= least + slack]
    assert cached.get(name, 0) == max(cached.get(other, 0) for other in near)
    if not any(cached.get(other, 0) for other in loads):
        assert loads[name] == least


def cached(prefixes: Prefixes, tokens: list[int] | np.ndarray) -> dict[str, int]:
    return prefixes.cached(prefixes_of(np.int32(tokens)))


def remembering(sent: dict[str, list[int] | np.ndarray], **settings: int) -> Prefixes:
    prefixes = Prefixes(**settings)
    for server, tokens in sent.items():
        prefixes.remember(prefixes_of(np.int32(tokens)), server)
    return prefixes


@given(st.lists(st.integers(0, 3), max_size=70), st.lists(st.integers(0, 3), max_size=70))
def test_the_cached_beginning_is_the_common_one_in_whole_blocks(one: list[int], other: list[int]) -> None:
    common = next((i for i, (x, y) in enumerate(zip(one, other, strict=False)) if x != y), min(len(one), len(other)))
    whole = common // BLOCK * BLOCK
    assert cached(remembering({"a": one}), other) == ({"a": whole} if whole else {})


@given(st.integers(BLOCK, 200_000), st.integers(0, 200_000))
def test_of_a_long_common_beginning_eight_ninths_are_known(common: int, more: int) -> None:
    one, other = np.zeros((2, common + more), np.int32)
    other[common:] = 1
    found = cached(remembering({"a": one}), other)["a"]
    assert found % BLOCK == 0
    assert min(common * 8 / 9, common - BLOCK) < found <= common


@given(st.integers(0, 5000), st.integers(0, 5000))
def test_prefixes_go_on_from_those_that_are_known(first: int, more: int) -> None:
    tokens = np.arange(first + more, dtype=np.int32)
    known = prefixes_of(tokens[:first])
    assert known + prefixes_of(tokens, known) == prefixes_of(tokens)


def test_a_block_is_in_cache_behind_the_same_beginning_alone() -> None:
    first, other, second = (np.full(BLOCK, token, np.int32) for token in (1, 2, 3))
    prefixes = remembering({"a": np.concatenate([first, second])})
    prefixes.remember(prefixes_of(other), "a")
    assert cached(prefixes, np.concatenate([other, second])) == {"a": BLOCK}


def test_a_conversation_goes_on_where_its_beginning_was_and_new_weights_end_that() -> None:
    turn, longer = np.arange(40, dtype=np.int32), np.arange(60, dtype=np.int32)
    prefixes = remembering({"b": turn})
    assert choose(loads_of({"a": 0, "b": 2}), cached(prefixes, longer), 2) == "b"
    assert choose(loads_of({"a": 0, "b": 3}), cached(prefixes, longer), 2) == "a"
    prefixes.forget("b")
    assert cached(prefixes, longer) == {}


def test_what_every_server_was_sent_hides_nothing_of_the_one_that_has_more() -> None:
    system, turn = np.arange(4 * BLOCK, dtype=np.int32), np.arange(9 * BLOCK, dtype=np.int32)
    prefixes = remembering({"a": turn, **{f"server {i}": system for i in range(2 * HOLDERS)}})
    found = cached(prefixes, turn)
    assert found["a"] == 9 * BLOCK
    assert len(found) <= 2 * HOLDERS
    assert set(found.values()) == {9 * BLOCK, 4 * BLOCK}


@pytest.mark.parametrize("remembered", [0, 1, 2])
def test_no_more_prefixes_are_remembered_than_allowed(remembered: int) -> None:
    prefixes = Prefixes(remembered)
    for start in range(5):
        prefixes.remember(prefixes_of(np.arange(start, start + 2 * BLOCK, dtype=np.int32)), "a")
    assert len(prefixes._holders) == remembered
