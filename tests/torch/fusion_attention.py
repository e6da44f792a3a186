"""torch_npu's fused attention on a CPU: the operator under its real schema, and its documented meaning as plain sums.

The schema is that of torch_npu 2.10 to 2.13 (torch_npu/csrc/aten/npu_native_functions_by_codegen.yaml), so that torch itself
refuses arguments that the real operator would refuse. The meaning and the limits are those of torch_npu/_op_plugin_docs.py.
"""

from __future__ import annotations

import torch
from torch.library import Library

SCHEMA = (
    "npu_fusion_attention(Tensor query, Tensor key, Tensor value, int head_num, str input_layout, Tensor? pse=None,"
    " Tensor? padding_mask=None, Tensor? atten_mask=None, float scale=1., float keep_prob=1., int pre_tockens=2147483647,"
    " int next_tockens=2147483647, int inner_precise=0, int[]? prefix=None, int[]? actual_seq_qlen=None,"
    " int[]? actual_seq_kvlen=None, int sparse_mode=0, bool gen_mask_parallel=True, bool sync=False,"
    ' str softmax_layout="", Tensor? sink=None, Tensor? dropout_mask=None, int seed=0, int offset=0)'
    " -> (Tensor, Tensor, Tensor, Tensor, int, int, int)"
)
MASKED = 2048
CALLS = []  # the arguments of each, by name


def attention_score(q, k, v, hidden, scale):
    """softmax(scale · q · kᵀ) · v of one sequence. Shapes: [length, heads, head_dim], hidden [queries, keys]."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def hidden_keys(queries, keys, mode, before, after):
    """What each query does not see, counted from the lower right corner of the scores (modes 3 and 4)."""
    ahead = torch.arange(keys) - torch.arange(queries)[:, None] - (keys - queries)  # of the query's own key
    return ahead > 0 if mode == 3 else (ahead > after) | (ahead < -before)


def npu_fusion_attention(query, key, value, head_num, input_layout, **how):
    CALLS.append({"query": query, "key": key, "value": value, "head_num": head_num, **how})
    assert input_layout == "TND", "other layouts are not computed here"
    assert query.dtype == key.dtype == value.dtype
    assert key.shape == value.shape
    assert query.shape[2] == key.shape[2] <= 768
    assert head_num == query.shape[1] <= 256
    assert head_num % key.shape[1] == 0
    assert how["keep_prob"] == 1.0
    mask, mode = how["atten_mask"], how["sparse_mode"]
    assert mode in (3, 4)
    assert mask.dtype in (torch.bool, torch.uint8)
    assert torch.equal(mask.bool(), torch.ones(MASKED, MASKED).triu(1).bool())
    ends, key_ends = how["actual_seq_qlen"], how["actual_seq_kvlen"]
    assert (ends[-1], key_ends[-1]) == (len(query), len(key))
    assert len(ends) == len(key_ends) <= 1024
    found, at, key_at = [], 0, 0
    for end, key_end in zip(ends, key_ends, strict=True):
        hidden = hidden_keys(end - at, key_end - key_at, mode, how["pre_tockens"], how["next_tockens"])
        assert not hidden.all(dim=1).any(), "a query that sees nothing"
        own = key[key_at:key_end], value[key_at:key_end]
        found.append(attention_score(query[at:end], *own, hidden, how["scale"]))
        at, key_at = end, key_end
    nothing = query.new_empty(0)
    return torch.cat(found), nothing, nothing, nothing, 0, 0, 0


def define():
    """Returns the operator; calls of it are kept in CALLS. The library ends with the returned handle."""
    library = Library("areal_x_npu", "DEF")  # not "npu", which the real package defines
    library.define(SCHEMA)
    names = [argument.name for argument in torch._C.parse_schema(SCHEMA).arguments]
    defaults = {argument.name: argument.default_value for argument in torch._C.parse_schema(SCHEMA).arguments}

    def composite(*given, **by_name):
        arguments = defaults | dict(zip(names, given, strict=False)) | by_name
        return npu_fusion_attention(**arguments)

    library.impl("npu_fusion_attention", composite, "CompositeImplicitAutograd")
    return library, torch.ops.areal_x_npu.npu_fusion_attention
