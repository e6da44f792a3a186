"""Where cuDNN is told that sequences begin and end. The kernel itself needs a GPU: a stand-in computes what it is asked for."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn

from areal_x_jax import packed_cudnn as module
from areal_x_jax.dense_attention import AttentionMask, Tries, dense
from areal_x_jax.packed_cudnn import packed_cudnn, packed_cudnn_takes, run_ends

from .test_attention import IDS, computed, draw, packed

FULL = packed((17, 1, 22, 13), (37, 16), (53,), length=53)
ONE = packed((53,), (40,), (), length=53)


def each_alone(query: Any, key: Any, value: Any, *, q_offsets: Any, q_seqlen: Any, scale: float, **how: Any) -> Any:
    """Attention of each sequence of given offsets and lengths, NaN where there is none."""
    assert how.keys() == {"kv_offsets", "kv_seqlen", "mask_type"}
    assert how["mask_type"] == cudnn.MaskType.PADDING_CAUSAL
    assert q_offsets.shape == (len(query), q_seqlen.shape[1] + 1)
    at = jnp.arange(query.shape[1])[None, :, None]
    first, length = q_offsets[:, None, :-1], q_seqlen[:, None, :]
    inside = (first >= 0) & (length > 0) & (first <= at) & (at < first + length)
    ids = jnp.where(inside, jnp.arange(1, q_seqlen.shape[1] + 1), 0).sum(-1)
    attended = dense(query, key, value, AttentionMask(ids, ids), scale)
    return jnp.where((ids > 0)[..., None, None], attended, jnp.nan)


@pytest.mark.parametrize("ids", [IDS, FULL, ONE])
def test_each_sequence_attends_to_itself(monkeypatch: pytest.MonkeyPatch, ids: np.ndarray) -> None:
    def causal(query: Any, key: Any, value: Any, *, scale: float, is_causal: bool, implementation: str) -> Any:
        assert is_causal
        assert implementation == "cudnn"
        whole = jnp.ones(query.shape[:2], jnp.int32)
        return dense(query, key, value, AttentionMask(whole, whole), scale)

    monkeypatch.setattr(cudnn, "dot_product_attention", each_alone)
    monkeypatch.setattr(jax.nn, "dot_product_attention", causal)
    inputs, ends = draw(ids), run_ends(ids)
    assert ends is not None
    seen = AttentionMask(ids, ids)
    wanted = computed(dense, inputs, seen)
    found = computed(packed_cudnn, inputs, seen._replace(ends=ends))
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


def test_runs_are_counted_in_few_sizes() -> None:
    ends = run_ends(packed((3, 2, 1), (4,), length=8))
    assert ends is not None
    assert ends.tolist() == [[3, 5, 6, 8], [4, 8, 8, 8]]  # padding is a run
    whole = run_ends(packed((8,), (5,), (), length=8))
    assert whole is not None
    assert whole.tolist() == [[8]] * 3
    assert [run_ends(packed((1,) * n, length=n)).shape[1] for n in (2, 4, 5, 16, 17)] == [4, 4, 16, 16, 64]  # type: ignore[union-attr]


def test_rows_that_cannot_be_told_by_ends_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_ends(np.array([[1, 1, 2, 1]])) is None
    late = run_ends(np.array([[0, 0, 1, 1]]))  # padding before a sequence
    assert late is not None
    assert late.tolist() == [[2, 4, 4, 4]]
    monkeypatch.setattr(module, "MOST", 3)
    assert run_ends(packed((1, 1, 1, 1), length=4)) is None


def test_only_plain_causal_attention_in_bf16_is_taken() -> None:
    query, key, *_ = (jnp.asarray(x, jnp.bfloat16) for x in draw(IDS))
    seen = AttentionMask(IDS, IDS, ends=run_ends(IDS))
    assert packed_cudnn_takes(query, key, seen, 0.0)
    assert not packed_cudnn_takes(query.astype(jnp.float32), key, seen, 0.0)
    assert not packed_cudnn_takes(query, key, seen, 2.0)
    for change in ({"ends": None}, {"window": 5}, {"start": jnp.int32(0)}, {"tries": Tries(IDS, IDS, IDS)}):
        assert not packed_cudnn_takes(query, key, seen._replace(**change), 0.0)
