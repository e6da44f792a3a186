"""Completions generated in slices, and whether servers agree on the probe prompt."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from areal_x.engines.vllm.probe import outliers, probe_prompt
from areal_x.engines.vllm.slices import context_of, ended, joined, next_length
from areal_x.protocols.engine import Completion


@given(st.integers(1, 60), st.integers(0, 20), st.none() | st.integers(0, 59), st.booleans())
def test_slices_give_what_one_request_gives(most: int, slice_tokens: int, stop: int | None, experts: bool) -> None:
    """stop: the position of a stop token among the tokens that the model would sample."""
    count = most if stop is None or stop >= most else stop + 1
    prompt, drawn = np.arange(5, dtype=np.int32), np.arange(100, 160, dtype=np.int32)
    chosen = np.random.default_rng(0).integers(0, 8, (5 + 60, 2, 3)).astype(np.int16)  # of the tokens as they are drawn

    def draw(context: np.ndarray, length: int) -> Completion:
        begin = len(context) - len(prompt)
        end = min(begin + length, count)
        known = None
        if experts:
            known = chosen[: 5 + end].copy()
            known[: len(context) - 1 if parts else 0] += 8  # computed again, maybe by other weights
            known[-1] = -1
        versions = np.arange(begin, end, dtype=np.int32)
        reason = "stop" if stop is not None and end == stop + 1 else "length"
        return Completion(drawn[begin:end], np.float32(-drawn[begin:end]), versions, reason, known)

    parts: list[Completion] = []
    while not parts or not ended(parts, most):
        done = sum(len(part.tokens) for part in parts)
        assert done + next_length(done, most, slice_tokens) <= most
        parts.append(draw(context_of(prompt, parts), next_length(done, most, slice_tokens)))
        assert len(parts[-1].tokens) > 0
    whole = joined(parts)
    np.testing.assert_array_equal(whole.tokens, drawn[:count])
    np.testing.assert_array_equal(whole.logprobs, np.float32(-drawn[:count]))
    np.testing.assert_array_equal(whole.versions, np.arange(count))
    assert whole.finish_reason == ("stop" if stop is not None and stop < most else "length")
    if slice_tokens:
        assert max(len(part.tokens) for part in parts) <= slice_tokens
    if experts:
        assert whole.experts is not None
        np.testing.assert_array_equal(whole.experts[:-1], chosen[: 5 + count - 1])
        assert (whole.experts[-1] == -1).all()
    else:
        assert whole.experts is None


right = np.linspace(-3, -1, 32).astype(np.float32)


@given(st.integers(3, 7), st.integers(0, 6), st.floats(0.2, 5))
def test_one_of_several_that_is_far_from_the_others_is_named(count: int, bad: int, offset: float) -> None:
    rng = np.random.default_rng(count)
    scores = {str(i): (right + rng.normal(0, 0.01, 32)).astype(np.float32) for i in range(count)}
    assert outliers(scores, 0.1) == {}
    wrong = str(bad % count)
    scores[wrong] = right + np.float32(offset)
    far = outliers(scores, 0.1)
    assert list(far) == [wrong]
    assert abs(far[wrong] - offset) < 0.05


def test_where_no_majority_agrees_nobody_is_named() -> None:
    other = right + 1
    assert outliers({"a": right, "b": other}, 0.1) == {}
    assert outliers({"a": right, "b": right, "c": other, "d": other}, 0.1) == {}


@given(st.integers(2, 200_000), st.integers(3, 100))
def test_the_known_prompt_is_of_the_vocabulary_and_leaves_room_for_a_token(vocabulary: int, context: int) -> None:
    prompt = probe_prompt(vocabulary, context)
    assert 2 <= len(prompt) < context
    assert prompt.min() >= 0
    assert prompt.max() < vocabulary
