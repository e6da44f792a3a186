"""The part of an episode's reward that each call's tokens get, against formulas that do not know of merging."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_x.agents.chat.credit import Credit, episode_of_calls
from areal_x.algorithms import recipes
from areal_x.algorithms.advantages import returns_to_go
from areal_x.algorithms.algorithm import Algorithm
from areal_x.batching.batch import Models, make_batches
from areal_x.errors import ConfigError
from areal_x.run import group_bytes
from areal_x.run.group_bytes import decode, encode
from areal_x.types import Failed, Group, Scored, Task, TimedOut
from tests.agents.chat.calls import Agent, call, generated, trained

TREES = st.lists(st.sampled_from(["continue", "continue", "retry", "fork", "rewrite"]), min_size=1, max_size=8)
GIVEN = st.lists(st.none() | st.floats(-2, 2, width=32), min_size=8, max_size=8)
EXPORT = st.sampled_from(["merged", "individual"])
TASK = Task("t", "")


class Nothing:
    """A policy that is never called."""


def calls_of(seed, steps, given_rewards):
    """Calls that each generated some tokens and wrote their own number into the log-probabilities."""
    agent = Agent(seed)
    for kind in steps:
        agent.step(kind)
    made = []
    for index, (c, reward) in enumerate(zip(agent.calls, given_rewards, strict=False)):
        tokens = c.completion.tokens.tolist() or [1]
        made.append(call(c.prompt, tokens, id=str(index), logprobs=[-index - 1.0] * len(tokens), reward=reward))
    return made


def batch_of(episode, advantages, **parts):
    """Returns the batch of a group of this episode and one with reward 0."""
    other = episode_of_calls([call([1], [2], logprobs=[-99.0])], Scored(0.0), Credit())
    algorithm = Algorithm(**{**vars(recipes.grpo()), "advantages": advantages, "filters": (), **parts})
    return make_batches([Group(TASK, 0, 0, (episode, other))], algorithm, 256, Models(Nothing()))[0]


def by_call(batch, values, calls):
    """Returns the values of each call's tokens, in order."""
    own = [batch.mask & (batch.behavior_logp == -index - 1.0) for index in range(len(calls))]
    return [values[places] for places in own]


@given(st.integers(0, 2**32 - 1), TREES, EXPORT)
def test_every_call_gets_the_episodes_advantage(seed, steps, export):
    calls = calls_of(seed, steps, [None] * 8)
    episode = episode_of_calls(calls, Scored(1.5, {"exact": 1.0}), Credit(export=export))
    assert all(t.credit is None and t.token_rewards is None and t.reward == 1.5 for t in episode.trajectories)
    assert trained(episode.trajectories) == generated(calls)
    assert episode.outcome.reward == 1.5
    assert episode.outcome.details["exact"] == 1.0


@given(st.integers(0, 2**32 - 1), TREES, EXPORT)
def test_only_the_last_call_is_trained_on(seed, steps, export):
    calls = calls_of(seed, steps, [None] * 8)
    episode = episode_of_calls(calls, Scored(1.0), Credit("last", export=export))
    (trajectory,) = episode.trajectories
    assert trajectory.tokens.tolist() == [*calls[-1].prompt, *calls[-1].completion.tokens]
    assert trained([trajectory]) == generated(calls[-1:])


@given(st.integers(0, 2**32 - 1), TREES, EXPORT, st.floats(0, 1))
def test_an_earlier_calls_advantage_counts_less_by_the_discount_for_each_call_after_it(seed, steps, export, discount):
    calls = calls_of(seed, steps, [None] * 8)
    episode = episode_of_calls(calls, Scored(3.0), Credit("discounted", discount, export))
    batch = batch_of(episode, lambda rewards: rewards * 2.0 + 1.0)
    for index, found in enumerate(by_call(batch, batch.advantages, calls)):
        expected = 7.0 * discount ** (len(calls) - 1 - index)
        np.testing.assert_allclose(found, np.full(len(calls[index].completion.tokens), expected), rtol=1e-6, atol=1e-30)
    assert (batch.advantages[batch.mask & (batch.behavior_logp == -99.0)] == 1.0).all()


@given(st.integers(0, 2**32 - 1), TREES, EXPORT)
def test_the_credit_multiplies_advantages_of_tokens_too_and_leaves_the_critics_targets(seed, steps, export):
    calls = calls_of(seed, steps, [None] * 8)
    both = {how: episode_of_calls(calls, Scored(1.0), Credit(how, 0.5, export)) for how in ("every", "discounted")}
    batches = {how: batch_of(episode, lambda rewards, mask: (mask + 1.0, mask + 7.0)) for how, episode in both.items()}
    for index, found in enumerate(by_call(batches["discounted"], batches["discounted"].advantages, calls)):
        np.testing.assert_allclose(found, np.full(len(found), 2.0 * 0.5 ** (len(calls) - 1 - index)))
    np.testing.assert_array_equal(batches["discounted"].returns, batches["every"].returns)


@given(st.integers(0, 2**32 - 1), TREES, EXPORT, GIVEN, st.none() | st.floats(-2, 2, width=32))
def test_each_call_earns_what_it_was_given_and_the_last_what_nobody_was(seed, steps, export, rewards, own):
    calls = calls_of(seed, steps, rewards)
    total = sum(c.reward or 0.0 for c in calls)
    episode = episode_of_calls(calls, None if own is None else Scored(own), Credit("given", export=export))
    if own is None and all(c.reward is None for c in calls):
        assert isinstance(episode.outcome, Failed)
        return
    whole = total if own is None else own
    assert episode.outcome.reward == pytest.approx(whole, abs=1e-6)
    episodes = batch_of(episode, lambda rewards: rewards)
    for found in by_call(episodes, episodes.advantages, calls):
        np.testing.assert_allclose(found, np.full(len(found), whole), atol=1e-4)
    if all(c.reward is None for c in calls):
        assert all(t.token_rewards is None for t in episode.trajectories)
        return
    tokens = batch_of(episode, lambda rewards, mask: np.where(mask, rewards, 0.0))
    for index, found in enumerate(by_call(tokens, tokens.advantages, calls)):
        expected = (calls[index].reward or 0.0) + (whole - total if index == len(calls) - 1 else 0.0)
        np.testing.assert_allclose(found, [0.0] * (len(found) - 1) + [expected], atol=1e-5)
    np.testing.assert_allclose(tokens.advantages.sum(), whole, atol=1e-4)


def test_what_a_call_led_to_in_its_conversation_is_its_return():
    calls = [call([1], [2, 3], logprobs=[-1.0] * 2, reward=1.0), call([1, 2, 3, 4], [5], logprobs=[-2.0], reward=10.0)]
    batch = batch_of(episode_of_calls(calls, None, Credit("given")), returns_to_go)
    first, second = by_call(batch, batch.advantages, calls)
    assert first.tolist() == [11.0, 11.0]
    assert second.tolist() == [10.0]


def test_without_a_reward_of_its_own_an_episode_has_the_sum_of_its_calls():
    calls = [call([1], [2], reward=0.25), call([1], [3]), call([1], [4], reward=0.5)]
    assert episode_of_calls(calls, None, Credit()).outcome.reward == 0.75
    assert episode_of_calls(calls, Scored(3.0), Credit()).outcome.reward == 3.0


def test_the_details_say_how_the_calls_went_on():
    calls = [call([1], [2, 9]), call([1, 2, 9, 4], [5]), call([1, 2, 9, 4, 6], [3]), call([7], [8])]
    details = episode_of_calls(calls, Scored(1.0, {"exact": 0.5}), Credit("last")).outcome.details
    assert details == {"exact": 0.5, "first": 1, "continued": 1, "rewritten": 1, "forked": 1}
    assert episode_of_calls(calls, Scored(1.0), Credit(export="individual")).outcome.details == {}


def test_an_episode_that_nobody_rewarded_or_that_generated_nothing_failed_and_one_that_failed_is_no_other():
    assert "given a reward" in episode_of_calls([call([1], [2])], None, Credit()).outcome.error
    assert (
        "none of the 1 calls" in episode_of_calls([call([1], [2], finish_reason="abort")], Scored(1.0), Credit()).outcome.error
    )
    for outcome in (Failed("no"), TimedOut(3.0)):
        episode = episode_of_calls([call([1], [2], reward=1.0)], outcome, Credit())
        assert (episode.outcome, episode.trajectories) == (outcome, ())


def test_a_call_that_generated_nothing_is_no_call_that_came_after():
    calls = [call([1], [2]), call([1, 2], [], reward=0.5), call([1, 2], [3], finish_reason="abort")]
    (trajectory,) = episode_of_calls(calls, Scored(1.0), Credit("discounted", 0.5)).trajectories
    assert trajectory.credit.tolist() == [1.0, 1.0]
    (trajectory,) = episode_of_calls(calls, None, Credit("given")).trajectories
    assert trajectory.token_rewards.tolist() == [0.0, 0.0]  # the reward that no token earned is the last one's


def test_credit_comes_back_from_a_journal():
    episode = episode_of_calls([call([1], [2]), call([1], [3])], Scored(1.0), Credit("discounted", 0.3))
    group = Group(TASK, 3, 1, (episode, episode_of_calls([call([1], [2])], Scored(0.0), Credit())))
    read = decode(encode(group), TASK, 3, 1)
    found = [t.credit for e in read.episodes for t in e.trajectories]
    assert [None if c is None else c.tolist() for c in found] == [[1.0, np.float32(0.3)], [1.0, 1.0], None]


def test_a_journal_written_before_there_was_credit_is_read_as_having_none(monkeypatch):
    group = Group(TASK, 3, 1, (episode_of_calls([call([1], [2])], Scored(1.0), Credit()),))
    with monkeypatch.context() as earlier:
        earlier.setattr(group_bytes, "ARRAYS", tuple(name for name in group_bytes.ARRAYS if name != "credit"))
        content = encode(group)
    (trajectory,) = decode(content, TASK, 3, 1).episodes[0].trajectories
    assert trajectory.credit is None
    assert trajectory.tokens.tolist() == [1, 2]


@pytest.mark.parametrize(
    "make, says",
    [
        (lambda: Credit("some"), r"credit\.how = 'some'"),
        (lambda: Credit(discount=1.5), r"credit\.discount = 1\.5"),
        (lambda: Credit(export="merge"), r"credit\.export = 'merge' .* did you mean 'merged'"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(make, says):
    with pytest.raises(ConfigError, match=says):
        make()
