"""The copy of a trainer's weights, and how several writers divide it."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from areal_x.hf.weight_copy import Turns, WeightCopy, write_shards


def test_a_copy_does_not_change_with_the_trainers_memory() -> None:
    weights = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(3, ml_dtypes.bfloat16), "c": np.float32([[7]]).T}
    copy = WeightCopy()
    assert copy.take(weights.items()) == 24 + 6 + 4
    expected = {name: x.copy() for name, x in weights.items()}
    for x in weights.values():
        x += 1
    for name, x in copy:
        assert x.dtype == expected[name].dtype
        np.testing.assert_array_equal(x, expected[name])


def test_the_next_copy_takes_the_memory_of_the_one_before_and_frees_what_does_not_fit() -> None:
    copy = WeightCopy()
    copy.take([("a", np.zeros((4, 2))), ("b", np.zeros(3)), ("gone", np.zeros(9))])
    before = dict(copy)
    copy.take([("a", np.ones((4, 2))), ("b", np.ones(5)), ("new", np.ones(1))])
    assert list(copy.tensors) == ["a", "b", "new"]
    assert copy.tensors["a"] is before["a"]
    assert copy.tensors["b"] is not before["b"]
    assert all((x == 1).all() for _, x in copy)


def test_a_view_is_written_as_the_tensor_that_it_shows(tmp_path: Path) -> None:
    tensor = np.arange(12, dtype=np.float32).reshape(3, 4)
    copy = WeightCopy()
    copy.take([("transposed", tensor.T), ("every other", tensor[:, ::2])])
    (name,) = write_shards(tmp_path, copy)
    found = load_file(tmp_path / name)
    np.testing.assert_array_equal(found["transposed"], tensor.T)
    np.testing.assert_array_equal(found["every other"], tensor[:, ::2])


@given(sizes=st.lists(st.integers(0, 1000), max_size=60), writers=st.integers(1, 9))
def test_every_tensor_has_one_writer_and_none_has_more_than_a_tensor_above_its_share(sizes: list[int], writers: int) -> None:
    turns = [Turns(own, writers) for own in range(writers)]
    helper = Turns(None, writers)
    assert [size for size in sizes if helper(size)] == []
    owned = [[turn(size) for turn in turns] for size in sizes]
    assert all(sum(row) == 1 for row in owned)
    for own, turn in enumerate(turns):
        mine = sum(size for size, row in zip(sizes, owned, strict=True) if row[own])
        assert turn.bytes[own] == mine <= sum(sizes) / writers + max(sizes, default=0)
        assert sum(turn.bytes) == sum(sizes)
