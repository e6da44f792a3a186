"""torch_npu's fused kernel is given arguments that its schema takes, and that mean the plain formula by its documentation."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from areal_x_torch import npu_attention
from areal_x_torch.attention import attend, npu
from areal_x_torch.segments import Segments
from tests.torch import fusion_attention
from tests.torch.test_attention import CPU, ONE, PREFIXES, RAGGED, SEEN, SHARING, agrees, arrays


@pytest.fixture(scope="module")
def operator():
    library, operator = fusion_attention.define()
    yield operator
    library._destroy()


@pytest.fixture
def calls(operator, monkeypatch):
    """The arguments of each call of the kernel."""
    monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace(npu_fusion_attention=operator, __spec__=1))
    fusion_attention.CALLS.clear()
    return fusion_attention.CALLS


@pytest.mark.parametrize("lengths", [RAGGED, ONE])
@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_the_kernel_computes_the_formula_forward_and_backward(calls, lengths, window, kv_heads):
    agrees(npu, lengths, window, kv_heads=kv_heads)
    (call,) = calls
    ends = torch.tensor(lengths).cumsum(0).tolist()
    assert list(call["actual_seq_qlen"]) == list(call["actual_seq_kvlen"]) == ends
    assert call["sparse_mode"] == (3 if window in (None, 100) else 4)
    assert call["key"].shape[1] == kv_heads  # none is repeated


@pytest.mark.parametrize("window", [None, 3, 6, 100])
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_each_answer_gets_a_copy_of_the_prompt_that_it_shares(calls, window, kv_heads):
    agrees(npu, SHARING, window, kv_heads=kv_heads, prefixes=PREFIXES)
    (call,) = calls
    assert torch.tensor([0, *call["actual_seq_qlen"]]).diff().tolist() == list(SHARING)
    assert torch.tensor([0, *call["actual_seq_kvlen"]]).diff().tolist() == SEEN


@pytest.mark.parametrize(("limit", "number", "calls_of"), [("SEQUENCES", 3, [3, 3, 3]), ("TOKENS", 15, [2, 1, 3, 1, 1, 1])])
@pytest.mark.parametrize("window", [None, 3])
def test_a_row_beyond_the_kernels_limits_takes_several_calls(calls, monkeypatch, limit, number, calls_of, window):
    monkeypatch.setattr(npu_attention, limit, number)
    agrees(npu, SHARING, window, prefixes=PREFIXES)
    assert [len(call["actual_seq_qlen"]) for call in calls] == calls_of


def test_a_sequence_beyond_the_limit_is_left_to_the_kernel(calls, monkeypatch):
    monkeypatch.setattr(npu_attention, "TOKENS", 4)
    agrees(npu, (9, 2, 2, 5))
    assert [list(call["actual_seq_qlen"]) for call in calls] == [[9], [2, 4], [5]]


@pytest.mark.parametrize("window", [None, 3])
def test_capped_scores_go_another_way(calls, window):
    agrees(npu, RAGGED, window, softcap=1.5)
    assert calls == []


@pytest.mark.parametrize("how", [{"head_dim": 776}, {"kv_heads": 3}])
def test_heads_that_the_kernel_does_not_take_go_another_way(how):
    query, _, value = arrays(ONE, **how)
    assert not npu_attention.supports(query, value)
    assert npu_attention.supports(*arrays(ONE, head_dim=768)[::2])


def test_values_of_another_width_go_another_way(calls):
    query, key, value = arrays(ONE)
    found, _ = attend(None, query, key, value[..., :4], None, segments=Segments.of(ONE, npu, CPU))
    whole, _ = attend(None, query, key, value, None, segments=Segments.of(ONE, npu, CPU))
    torch.testing.assert_close(found, whole[..., :4])
    assert len(calls) == 1


def test_in_half_precision_the_kernel_gets_one_type(calls):
    query, key, value = arrays(ONE)
    attended, _ = attend(None, query, key, value.bfloat16(), None, segments=Segments.of(ONE, npu, CPU))
    assert attended.dtype == calls[0]["query"].dtype == calls[0]["key"].dtype == torch.bfloat16


def test_the_operator_refuses_what_its_schema_has_not(operator):
    query, key, value = (x[0].transpose(0, 1) for x in arrays(ONE))
    with pytest.raises(RuntimeError, match="pre_tokens"):
        operator(query, key, value, 4, "TND", pre_tokens=3)
