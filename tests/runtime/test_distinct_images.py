"""Equal images of several sequences: one copy, whatever objects they are in."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_x.runtime.distinct_images import DistinctImages, images_of
from areal_x.types import Images

FEATURES = 4


def images(*shown: tuple[int, int]) -> Images:
    """Images by what they show and how many patches they have: each a copy of its own."""
    each = [np.random.default_rng(what).normal(size=(patches, FEATURES)).astype(np.float32) for what, patches in shown]
    return Images(np.concatenate(each), np.array([[1, 1, patches] for _, patches in shown], np.int32))


@given(
    st.lists(
        st.none() | st.lists(st.tuples(st.integers(0, 2), st.sampled_from([1, 2, 40])), min_size=1, max_size=4), max_size=6
    )
)
def test_sequences_come_back_as_they_were_with_one_copy_of_each_image(sequences):
    distinct = DistinctImages()
    given = [None if shown is None else images(*shown) for shown in sequences]
    numbers = [None if own is None else distinct.add(own) for own in given]
    assert len(distinct.images) == len({image for shown in sequences for image in shown or ()})
    for own, found in zip(given, images_of(distinct.images, numbers), strict=True):
        assert (own is None) == (found is None)
        if own is not None:
            np.testing.assert_array_equal(own.patches, found.patches)
            np.testing.assert_array_equal(own.grids, found.grids)
            assert (found.patches.dtype, found.grids.dtype) == (np.float32, np.int32)


def test_sequences_with_the_same_images_share_one_object():
    distinct = DistinctImages()
    numbers = [distinct.add(images((0, 4), (1, 4))) for _ in range(3)]
    first, second, third = images_of(distinct.images, numbers)
    assert first is second is third


@pytest.mark.parametrize("place", [0, 7, 39])
def test_one_pixel_makes_another_image(place):
    """Also where it is in none of the patches that are compared first."""
    one, other = images((0, 40)), images((0, 40))
    other.patches[place, 1] = np.nextafter(other.patches[place, 1], np.float32(9))
    assert DistinctImages().add(one) == (0,)
    distinct = DistinctImages()
    assert [distinct.add(x) for x in (one, other, images((0, 40)))] == [(0,), (1,), (0,)]


def test_grids_of_the_same_patches_make_other_images():
    wide, tall = images((0, 40)), images((0, 40))
    tall.grids[:] = [1, 40, 1]
    distinct = DistinctImages()
    assert [distinct.add(x) for x in (wide, tall)] == [(0,), (1,)]


def test_bits_are_compared():
    zero, negative, nothing = (
        Images(np.full((2, FEATURES), x, np.float32), np.array([[1, 1, 2]], np.int32)) for x in (0, -0.0, np.nan)
    )
    distinct = DistinctImages()
    copies = [Images(x.patches.copy(), x.grids) for x in (zero, negative, nothing)]
    assert [distinct.add(x) for x in (zero, negative, nothing, *copies)] == [(0,), (1,), (2,), (0,), (1,), (2,)]
