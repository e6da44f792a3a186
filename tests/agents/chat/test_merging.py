"""Whatever tree of calls an agent makes, every generated token is trained on exactly once."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from areal_x.agents.chat.merging import merge_calls, separate_calls
from areal_x.types import NOT_THE_POLICY, Kept
from tests.agents.chat.calls import Agent, call, generated, trained

STEPS = st.lists(st.sampled_from(["continue", "retry", "fork", "rewrite", "sub-agent"]), min_size=1, max_size=12)


@given(st.integers(0, 2**32 - 1), STEPS)
def test_every_generated_token_is_trained_once_with_its_own_logprob_and_version(seed, steps):
    agent = Agent(seed)
    for kind in steps:
        agent.step(kind)
    merged = merge_calls(agent.calls)
    assert trained([item.trajectory for item in merged.trajectories]) == generated(agent.calls)
    assert trained([item.trajectory for item in separate_calls(agent.calls).trajectories]) == generated(agent.calls)


@given(st.integers(0, 2**32 - 1), STEPS)
def test_each_call_stands_in_one_line_behind_the_whole_of_its_prompt(seed, steps):
    agent = Agent(seed)
    for kind in steps:
        agent.step(kind)
    kept = [i for i, c in enumerate(agent.calls) if len(c.completion.tokens) and c.completion.finish_reason != "abort"]
    for merged in (merge_calls(agent.calls), separate_calls(agent.calls)):
        assert sorted(span.call for item in merged.trajectories for span in item.spans) == kept
        for item in merged.trajectories:
            t, within = item.trajectory, np.zeros(len(item.trajectory), bool)
            for span in item.spans:
                asked = agent.calls[span.call]
                assert np.array_equal(t.tokens[: span.start], asked.prompt)
                assert np.array_equal(t.tokens[span.start : span.stop], asked.completion.tokens)
                within[span.start : span.stop] = True
            assert np.array_equal(t.mask, within)
            assert (t.logprobs[~t.mask] == 0).all()
            assert (t.versions[~t.mask] == NOT_THE_POLICY).all()
            assert t.finish_reason == agent.calls[item.spans[-1].call].completion.finish_reason
    assert sum(merge_calls(agent.calls).counts.values()) == len(kept)


@given(st.integers(0, 2**32 - 1), STEPS)
def test_no_line_could_have_gone_on_with_a_call_that_began_another(seed, steps):
    agent = Agent(seed)
    for kind in steps:
        agent.step(kind)
    merged = merge_calls(agent.calls).trajectories
    for item in merged:
        asked = agent.calls[item.spans[0].call]
        for other in merged:
            before = [span for span in other.spans if span.call < item.spans[0].call]
            if before:
                held = other.trajectory.tokens[: before[-1].stop]
                assert not np.array_equal(held, asked.prompt[: len(held)])


def test_a_conversation_is_one_trajectory_and_what_others_said_is_context():
    merged = merge_calls([call([1, 2], [3, 4], version=5), call([1, 2, 3, 4, 9], [6], version=7, finish_reason="length")])
    (item,) = merged.trajectories
    assert item.trajectory.tokens.tolist() == [1, 2, 3, 4, 9, 6]
    assert item.trajectory.mask.tolist() == [False, False, True, True, False, True]
    assert item.trajectory.versions.tolist() == [-1, -1, 5, 5, -1, 7]
    assert item.trajectory.finish_reason == "length"
    assert merged.counts == {"first": 1, "continued": 1, "rewritten": 0, "forked": 0}


def test_a_retry_begins_a_trajectory_of_its_own():
    merged = merge_calls([call([1], [2]), call([1], [3])])
    assert [item.trajectory.tokens.tolist() for item in merged.trajectories] == [[1, 2], [1, 3]]
    assert merged.counts == {"first": 1, "continued": 0, "rewritten": 0, "forked": 1}


def test_a_reply_whose_end_was_rewritten_is_context_of_another_trajectory_and_trained_where_it_was_said():
    merged = merge_calls([call([1], [7, 8, 2]), call([1, 7, 5, 5], [6])])
    assert [item.trajectory.tokens.tolist() for item in merged.trajectories] == [[1, 7, 8, 2], [1, 7, 5, 5, 6]]
    assert [item.trajectory.mask.sum() for item in merged.trajectories] == [3, 1]
    assert merged.counts == {"first": 1, "continued": 0, "rewritten": 1, "forked": 0}


def test_a_reply_rewritten_from_its_first_token_on_is_rewritten_and_a_prompt_changed_before_it_is_forked():
    assert merge_calls([call([1, 4], [7]), call([1, 4, 5], [6])]).counts["rewritten"] == 1
    assert merge_calls([call([1, 4], [7]), call([1, 5, 7], [6])]).counts["forked"] == 1


def test_what_a_call_left_is_the_line_with_which_it_shares_most():
    calls = [call([8], [9]), call([1], [2, 3]), call([7], [9]), call([1, 2, 4], [5])]
    assert merge_calls(calls).counts == {"first": 1, "continued": 0, "rewritten": 1, "forked": 2}


def test_a_change_in_an_earlier_turn_than_the_last_is_a_fork():
    calls = [call([1], [2, 3]), call([1, 2, 3, 4], [5]), call([1, 2, 9], [6])]
    assert merge_calls(calls).counts == {"first": 1, "continued": 1, "rewritten": 0, "forked": 1}


def test_a_call_goes_on_with_the_longest_line_that_it_could():
    calls = [call([1], [2]), call([1], [2, 3]), call([1, 2, 3, 4], [5])]
    assert [item.trajectory.tokens.tolist() for item in merge_calls(calls).trajectories] == [[1, 2], [1, 2, 3, 4, 5]]


def test_agents_that_take_turns_keep_a_line_each():
    calls = [call([1], [2]), call([8], [9]), call([1, 2, 3], [4]), call([8, 9, 3], [5])]
    assert [item.trajectory.tokens.tolist() for item in merge_calls(calls).trajectories] == [[1, 2, 3, 4], [8, 9, 3, 5]]
    assert merge_calls(calls).counts == {"first": 1, "continued": 2, "rewritten": 0, "forked": 1}


def test_a_token_keeps_the_experts_of_when_it_was_first_read():
    def experts(*numbers):
        return np.asarray(numbers, np.int16).reshape(-1, 1, 1)

    first = call([1, 2], [3, 4], experts=experts(10, 11, 12, -1))
    second = call([1, 2, 3, 4, 5], [6], experts=experts(20, 21, 22, 23, 24, -1))
    (item,) = merge_calls([first, second]).trajectories
    assert item.trajectory.experts.ravel().tolist() == [10, 11, 12, 23, 24, -1]
    (item,) = merge_calls([first, call([1, 2, 3, 4, 5], [6])]).trajectories
    assert item.trajectory.experts is None


def test_a_token_keeps_what_could_be_sampled_in_its_place():
    def kept(*ids):
        return Kept(np.array([len(x) for x in ids], np.int32), np.concatenate(ids).astype(np.int32))

    first = call([1, 2], [3, 4], kept=kept([3, 9], [4]))
    (item,) = merge_calls([first, call([1, 2, 3, 4, 5], [6], kept=kept([8, 6]))]).trajectories
    assert item.trajectory.kept.counts.tolist() == [0, 0, 2, 1, 0, 2]
    assert item.trajectory.kept.ids.tolist() == [3, 9, 4, 8, 6]
    (item,) = merge_calls([first, call([1, 2, 3, 4, 5], [6])]).trajectories
    assert item.trajectory.kept.counts.tolist() == [0, 0, 2, 1, 0, 0]
    (item,) = merge_calls([call([1, 2], [3]), call([1, 2, 3, 5], [6], kept=kept([8, 6]))]).trajectories
    assert item.trajectory.kept.counts.tolist() == [0, 0, 0, 0, 2]
    (item,) = merge_calls([call([1, 2], [3]), call([1, 2, 3, 5], [6])]).trajectories
    assert item.trajectory.kept is None


def test_nothing_that_was_generated_gives_no_line():
    calls = [call([1], []), call([1], [2], finish_reason="abort")]
    assert merge_calls(calls).trajectories == ()
    assert separate_calls(calls).trajectories == ()
    assert set(merge_calls(calls).counts.values()) == {0}
