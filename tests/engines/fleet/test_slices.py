"""Completions generated in slices, and whether servers agree on the probe prompt."""

from __future__ import annotations

import asyncio

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from areal_x.engines.fleet.probe import outliers, probe_prompt
from areal_x.engines.fleet.slices import sliced
from areal_x.protocols.engine import Completion, SamplingParams
from areal_x.types import Kept


@given(st.integers(1, 60), st.integers(0, 20), st.none() | st.integers(0, 59), st.booleans(), st.sampled_from([0, 1, 2]))
def test_slices_give_what_one_request_gives(
    most: int, slice_tokens: int, stop: int | None, experts: bool, reports: int
) -> None:
    """stop: the position of a stop token among the tokens that the model would sample. reports: which slices say what
    was kept (none, all, or those that begin at an even place)."""
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
        kept = None
        if reports and (reports == 1 or begin % 2 == 0):
            kept = Kept.joined([kept_at(place) for place in range(begin, end)])
        return Completion(drawn[begin:end], np.float32(-drawn[begin:end]), versions, reason, known, kept)

    def kept_at(place: int) -> Kept:
        ids = np.append(drawn[place], np.arange(place % 4)).astype(np.int32)
        return Kept(np.array([len(ids)], np.int32), ids)

    async def generate(context: np.ndarray, sampling: SamplingParams) -> Completion:
        assert len(context) - len(prompt) + sampling.max_tokens <= most
        parts.append(draw(context, sampling.max_tokens))
        assert len(parts[-1].tokens) > 0
        return parts[-1]

    parts: list[Completion] = []
    whole = asyncio.run(sliced(generate, prompt, SamplingParams(max_tokens=most), most, slice_tokens))
    np.testing.assert_array_equal(whole.tokens, drawn[:count])
    np.testing.assert_array_equal(whole.logprobs, np.float32(-drawn[:count]))
    np.testing.assert_array_equal(whole.versions, np.arange(count))
    assert whole.finish_reason == ("stop" if stop is not None and stop < most else "length")
    if slice_tokens:
        assert max(len(part.tokens) for part in parts) <= slice_tokens
    told = [part.kept is not None for part in parts for _ in part.tokens]
    of_each = [kept_at(i) if said else Kept.everything(1) for i, said in enumerate(told)]
    if any(told):
        assert whole.kept is not None
        np.testing.assert_array_equal(whole.kept.counts, Kept.joined(of_each).counts)
        np.testing.assert_array_equal(whole.kept.ids, Kept.joined(of_each).ids)
    else:
        assert whole.kept is None
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
