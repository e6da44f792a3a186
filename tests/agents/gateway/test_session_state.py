"""The state machine of a session, without a server: its clock is a number."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from areal_x.agents.chat.calls import Call
from areal_x.agents.gateway import session_state
from areal_x.agents.gateway.errors import ApiError
from areal_x.agents.gateway.session_state import SessionKeys, SessionLimits, SessionState
from areal_x.errors import ConfigError
from areal_x.protocols.engine import Completion
from areal_x.types import Failed, Scored, TimedOut

LIMITS = SessionLimits(calls=4, tokens=100, seconds=1000, idle_seconds=60)


def call(name, tokens=5):
    numbers = np.arange(tokens)
    completion = Completion(numbers.astype(np.int32), -numbers.astype(np.float32), np.zeros(tokens, np.int32), "stop")
    return Call(name, np.arange(3, dtype=np.int32), completion)


def finished(*names, limits=LIMITS):
    state = SessionState(limits, 0.0)
    for name in names:
        state.begin([name], 0.0)
        state.finish(call(name), 0.0)
    return state


def refused(status, function, *arguments):
    with pytest.raises(ApiError) as error:
        function(*arguments)
    assert error.value.status == status
    return error.value


def test_calls_come_in_the_order_in_which_they_were_asked_for():
    state = SessionState(LIMITS, 0.0)
    for name in "abc":
        state.begin([name], 0.0)
    for name in "cab":
        state.finish(call(name), 1.0)
    assert [one.id for one in state.calls()] == ["a", "b", "c"]


def test_a_call_that_was_dropped_leaves_nothing():
    state = finished("a")
    state.begin(["b"], 0.0)
    assert state.running == 1
    state.drop(["b", "a"], 0.0)
    assert (state.running, [one.id for one in state.calls()]) == (0, ["a"])
    refused(404, state.reward, "b", 1.0, 0.0)


def test_rewards_stay_with_their_calls_and_come_once():
    state = finished("a", "b")
    assert state.reward("a", 0.25, 1.0) == "a"
    assert state.reward(None, 1.0, 1.0) == "b"
    assert [one.reward for one in state.calls()] == [0.25, 1.0]
    assert refused(409, state.reward, "a", 0.5, 1.0).code == "already_rewarded"
    refused(409, state.reward, None, 0.5, 1.0)
    assert [one.reward for one in state.calls()] == [0.25, 1.0]


def test_only_a_finished_call_of_the_session_can_be_rewarded():
    state = SessionState(LIMITS, 0.0)
    refused(404, state.reward, None, 1.0, 0.0)
    state.begin(["a"], 0.0)
    refused(404, state.reward, None, 1.0, 0.0)
    assert refused(409, state.reward, "a", 1.0, 0.0).code == "call_running"
    refused(404, state.reward, "other", 1.0, 0.0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_reward_is_a_finite_number(value):
    state = finished("a")
    refused(400, state.reward, "a", value, 0.0)
    refused(400, state.end, value, 0.0)
    assert state.outcome is None
    assert state.rewards == {}


def test_the_end_has_the_reward_that_it_was_given_or_the_sum_of_the_calls():
    state = finished("a", "b")
    state.reward("a", 0.25, 0.0)
    state.reward("b", 0.5, 0.0)
    given = replace(state)
    given.end(-2.0, 0.0)
    assert given.outcome == Scored(-2.0)
    state.end(None, 0.0)
    assert state.outcome == Scored(0.75)


def test_an_end_without_any_reward_is_a_failure():
    state = finished("a")
    state.end(None, 0.0)
    assert state.outcome == Failed("the session was ended without a reward")


def test_nothing_happens_after_the_end():
    state = finished("a")
    state.begin(["running"], 0.0)
    state.end(1.0, 0.0)
    for change in (
        lambda: state.begin(["b"], 1.0),
        lambda: state.finish(call("running"), 1.0),
        lambda: state.reward("a", 1.0, 1.0),
        lambda: state.end(0.0, 1.0),
    ):
        assert refused(409, change).code == "session_over"
    state.fail("too late")
    assert state.abandon(1e9) == Scored(1.0)
    assert [one.id for one in state.calls()] == ["a"]


def test_calls_are_limited_and_those_of_one_request_begin_together_or_not_at_all():
    state = finished("a", "b")
    state.begin(["c"], 0.0)
    assert refused(429, state.begin, ["d", "e"], 0.0).code == "session_calls"
    assert state.running == 1
    state.begin(["d"], 0.0)


def test_the_call_that_reaches_the_token_limit_is_the_last():
    state = finished("a", limits=replace(LIMITS, tokens=9))
    state.begin(["b"], 0.0)
    state.finish(call("b"), 0.0)
    assert state.generated == 10
    assert refused(429, state.begin, ["c"], 0.0).code == "session_tokens"


def test_a_session_is_abandoned_after_a_time_without_requests_but_not_while_one_runs():
    state = SessionState(LIMITS, 100.0)
    assert state.abandon(159.9) is None
    state.begin(["a"], 159.9)
    assert state.abandon(900.0) is None
    state.finish(call("a"), 900.0)
    assert state.deadline() == 960.0
    assert state.abandon(959.9) is None
    assert state.abandon(960.0) == TimedOut(860.0)
    refused(409, state.begin, ["b"], 961.0)


def test_a_sign_of_life_keeps_a_session_but_brings_none_back():
    state = SessionState(LIMITS, 0.0)
    state.touch(59.0)
    assert state.abandon(118.9) is None
    state.touch(119.0)
    assert state.outcome == TimedOut(119.0)


def test_a_session_ends_after_its_time_even_while_a_call_runs():
    state = SessionState(LIMITS, 100.0)
    state.begin(["a"], 159.0)
    assert state.deadline() == 1100.0
    assert state.abandon(1100.0) == TimedOut(1000.0)


def test_what_comes_too_late_finds_the_session_over_though_nobody_looked_before():
    state = finished("a")
    assert refused(409, state.reward, "a", 1.0, 61.0).code == "session_over"
    assert state.outcome == TimedOut(61.0)


@pytest.mark.parametrize("name", ["calls", "tokens", "seconds", "idle_seconds", "body_megabytes"])
def test_limits_are_positive(name):
    with pytest.raises(ConfigError, match=rf"session_limits\.{name} = 0"):
        SessionLimits(**{name: 0})


def test_a_key_opens_its_own_session_by_name_or_alone():
    doors = SessionKeys()
    for name in "ab":
        doors.open(name, f"key of {name}", name.upper())
    assert doors.find("a", ["key of a"]) == "A"
    assert doors.find(None, ["something else", "key of b"]) == "B"
    for name, keys in [("a", []), ("a", ["key of b"]), (None, []), (None, ["key"]), ("a", ["schlüssel"]), (None, ["\udcff"])]:
        assert refused(401, doors.find, name, keys).code == "invalid_api_key"
    assert refused(404, doors.find, "c", ["key of a"]).code == "no_such_session"


def test_a_closed_session_is_told_from_one_that_never_was_for_a_while(monkeypatch):
    monkeypatch.setattr(session_state, "REMEMBERED", 2)
    doors = SessionKeys()
    for name in "abc":
        doors.open(name, f"key of {name}", name)
    for name in "aab":
        doors.close(name)
    assert (len(doors), doors.things()) == (1, ["c"])
    for find in (("a", ["key of a"]), (None, ["key of a"])):
        assert refused(409, doors.find, *find).code == "session_over"
    refused(401, doors.find, "a", ["key of b"])
    doors.close("c")
    refused(404, doors.find, "a", ["key of a"])
    refused(401, doors.find, None, ["key of a"])
    refused(409, doors.find, "b", ["key of b"])


class AnySession(RuleBasedStateMachine):
    """Whatever an agent does, the session agrees with a model of a few lines."""

    @initialize()
    def opened(self):
        self.state, self.now, self.touched = SessionState(LIMITS, 0.0), 0.0, 0.0
        self.running, self.done, self.rewards, self.tokens, self.names = [], [], {}, 0, 0
        self.over = False

    def tried(self, allowed, change, *arguments):
        """Performs an action, and returns True if it succeeded; it must succeed exactly when the model allows it."""
        self.look()
        try:
            change(*arguments, self.now)
            done = True
        except ApiError:
            done = False
        assert done == (allowed and not self.over)
        return done

    def look(self):
        """The effect of any request."""
        self.over = self.over or self.now >= 1000 or (not self.running and self.now >= self.touched + 60)
        if not self.over:
            self.touched = self.now

    @rule(seconds=st.sampled_from([0.0, 1.0, 59.0, 61.0, 500.0]))
    def time_passes(self, seconds):
        self.now += seconds

    @rule(count=st.integers(1, 3))
    def begin(self, count):
        names = [f"call {self.names + i}" for i in range(count)]
        if self.tried(len(self.running + self.done) + count <= 4 and self.tokens < 100, self.state.begin, names):
            self.running += names
            self.names += count

    @precondition(lambda self: self.running)
    @rule(data=st.data(), tokens=st.integers(0, 60))
    def finish(self, data, tokens):
        name = data.draw(st.sampled_from(self.running))
        if self.tried(True, self.state.finish, call(name, tokens)):
            self.running.remove(name)
            self.done.append(name)
            self.tokens += tokens

    @precondition(lambda self: self.running and not self.over)
    @rule(data=st.data())
    def drop(self, data):
        name = data.draw(st.sampled_from(self.running))
        self.look()
        self.state.drop([name], self.now)
        self.running.remove(name)

    @rule(data=st.data(), value=st.floats(-1, 1))
    def reward(self, data, value):
        name = data.draw(st.sampled_from([*self.running, *self.done, "call of nobody", None]))
        last = max(self.done, key=lambda one: int(one.split()[1]), default=None)
        meant = last if name is None else name
        if self.tried(meant in self.done and meant not in self.rewards, self.state.reward, name, value):
            self.rewards[meant] = value

    @rule(value=st.none() | st.floats(-1, 1))
    def end(self, value):
        if self.tried(True, self.state.end, value):
            self.over = True
            assert isinstance(self.state.outcome, Scored if value is not None or self.rewards else Failed)

    @invariant()
    def what_was_finished_is_kept_with_its_rewards(self):
        if not hasattr(self, "state"):
            return
        calls = self.state.calls()
        assert sorted(one.id for one in calls) == sorted(self.done)
        assert {one.id: one.reward for one in calls if one.reward is not None} == self.rewards
        assert [int(one.id.split()[1]) for one in calls] == sorted(int(one.id.split()[1]) for one in calls)
        assert self.state.generated == self.tokens
        assert (self.state.running, self.state.outcome is not None) == (len(self.running), self.over)


TestAnySession = AnySession.TestCase
