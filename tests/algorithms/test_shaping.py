"""The penalty on overlong answers."""

from __future__ import annotations

from functools import partial
from math import copysign

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_x.algorithms.shaping import overlong_penalty
from areal_x.errors import ConfigError
from tests.algorithms.agreement import agree


def by_hand(length, max_length, buffer, scale):
    if length <= max_length - buffer:
        return 0.0
    if length <= max_length:
        return scale * (max_length - buffer - length) / buffer
    return -scale


@given(st.integers(0, 40), st.integers(0, 20), st.integers(0, 20), st.sampled_from([0.0, 0.5, 1.0]))
def test_the_penalty_grows_over_the_buffer_from_nothing_to_all_of_it(length, max_length, buffer, scale):
    buffer = min(buffer, max_length)
    expected = by_hand(length, max_length, buffer, scale)
    found = overlong_penalty(length, max_length, buffer, scale)
    assert type(found) is float
    assert found == pytest.approx(expected)
    np.testing.assert_allclose(overlong_penalty(np.array([[length]]), max_length, buffer, scale), [[expected]])


def test_the_corners_are_those_of_the_paper():
    lengths = [16384, 16385, 18432, 20480, 20481]
    assert [overlong_penalty(n, 20480, 4096) for n in lengths] == [0, -1 / 4096, -0.5, -1, -1]
    assert [overlong_penalty(n, 10, 0) for n in (9, 10, 11)] == [0, 0, -1]
    assert copysign(1, overlong_penalty(3, 10, 5)) == 1  # and not -0.0


@pytest.mark.parametrize("buffer", [0, 4])
def test_numpy_jax_and_torch_agree(buffer):
    lengths = np.arange(14, dtype=np.int32).reshape(2, 7)
    agree(partial(overlong_penalty, max_length=10, buffer=buffer, scale=0.5), lengths)
    agree(partial(overlong_penalty, max_length=10, buffer=buffer), lengths.astype(float))


@pytest.mark.parametrize("buffer", [-1, 11])
def test_a_buffer_that_is_negative_or_beyond_the_length_is_refused_by_name(buffer):
    with pytest.raises(ConfigError, match=r"overlong_penalty\.buffer"):
        overlong_penalty(3, 10, buffer)
    with pytest.raises(ConfigError, match=r"overlong_penalty\.scale"):
        overlong_penalty(3, 10, 5, scale=-1.0)
