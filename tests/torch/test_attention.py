"""Attention within the sequences of a flat row against the plain formula, and which way is chosen where."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from areal_x.errors import ConfigError
from areal_x_torch import attention
from areal_x_torch.attention import attend, choose, flash, npu, sdpa, varlen
from areal_x_torch.segments import Segments

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
NPU = SimpleNamespace(type="npu")  # as torch_npu would name it
RAGGED, ONE = (9, 5, 5, 5, 12, 1, 3, 3), (11,)


def arrays(lengths, kv_heads=2, head_dim=8):
    """Queries of 4 heads, keys and values, laid out as models have them."""
    random = torch.Generator().manual_seed(0)
    shapes = [(1, sum(lengths), heads, head_dim) for heads in (4, kv_heads, kv_heads)]
    return [torch.randn(shape, generator=random).transpose(1, 2).requires_grad_() for shape in shapes]


def formula(query, key, value, sinks, lengths, scale, window, softcap, prefixes=None, images=()):
    """softmax(scale · query · key) · value with all scores of the row, those between sequences hidden; prefixes, images:
    Segments'. sinks: None, or a score of each head."""
    prefixes = prefixes or (-1,) * len(lengths)
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    chains = [[i] for i in range(len(lengths))]  # each sequence and those that it continues
    for i, prefix in enumerate(prefixes):
        chains[i] += chains[prefix] if prefix >= 0 else []
    before = [sum(lengths[j] for j in chain[1:]) for chain in chains]
    at = torch.cat([torch.arange(first, first + length) for first, length in zip(before, lengths, strict=True)])
    behind, whole = at[:, None] - at, torch.tensor([[j in chain for j in range(len(lengths))] for chain in chains])
    image = torch.zeros(len(ids))
    for number, (first, end) in enumerate(images, 1):
        image[first:end] = number
    within = (image[:, None] == image) & (image > 0)
    seen = whole[ids][:, ids] & ((behind >= 0) | within) & (behind < (window or len(ids)))
    powers = scores.masked_fill(~seen, -torch.inf).exp()
    extra = 0 if sinks is None else sinks.exp()[:, None, None]
    return (powers / (powers.sum(-1, keepdim=True) + extra) @ value).transpose(1, 2)


def with_gradients(compute, inputs):
    attended = compute(*inputs)
    weights = torch.randn(attended.shape, generator=torch.Generator().manual_seed(1))
    return attended, *torch.autograd.grad((attended * weights).sum(), [x for x in inputs if x is not None])


def agrees(way, lengths, window=None, softcap=None, kv_heads=2, prefixes=None, sinks=None, images=()):
    inputs, scale = [*arrays(lengths, kv_heads), sinks], 0.7
    segments = Segments.of(lengths, way, CPU, prefixes, images=images)
    extra = {"scaling": scale, "sliding_window": window, "softcap": softcap}
    found = with_gradients(lambda *x: attend(None, *x[:3], None, segments=segments, s_aux=x[3], **extra)[0], inputs)
    expected = with_gradients(lambda *x: formula(*x, lengths, scale, window, softcap, prefixes, images), inputs)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("lengths", [RAGGED, ONE])
@pytest.mark.parametrize("window", [None, 3, 5, 100])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_each_sequence_attends_to_itself_alone(lengths, window, softcap):
    agrees(sdpa, lengths, window, softcap)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_heads_share_keys_in_equal_groups(kv_heads):
    agrees(sdpa, RAGGED, kv_heads=kv_heads)
    agrees(sdpa, RAGGED, 4, 2.0, kv_heads)


# The first and the sixth are prompts that others go on from, one of these from one that goes on itself; neighbours of one
# length that continue the same one, and that do not.
SHARING, PREFIXES = (5, 4, 4, 2, 2, 6, 6, 3, 3), (-1, 0, 0, 0, -1, -1, 5, 6, 5)
SEEN = [5, 9, 9, 7, 2, 6, 12, 15, 9]


@pytest.mark.parametrize("window", [None, 3, 6, 100])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("block", [3, 512])
def test_answers_see_the_prompt_that_they_share_and_not_each_other(monkeypatch, window, softcap, kv_heads, block):
    monkeypatch.setattr(attention, "BLOCK", block)
    agrees(sdpa, SHARING, window, softcap, kv_heads, PREFIXES)


@pytest.mark.parametrize("window", [None, 2, 7])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_blocks_of_queries_give_what_all_at_once_give(monkeypatch, window, softcap):
    monkeypatch.setattr(attention, "BLOCK", 4)
    agrees(sdpa, RAGGED, window, softcap)


# Two images in the first sequence, all of a later one, and one at the end of the longest.
IMAGES = ((1, 4), (5, 8), (9, 14), (28, 36))


@pytest.mark.parametrize("way", [sdpa, flash, varlen, npu])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (None, 1.5), (2, None), (7, 1.5), (100, None)])
@pytest.mark.parametrize("block", [3, 512])
def test_tokens_of_an_image_see_all_of_it_that_their_window_does_not_hide(monkeypatch, way, window, softcap, block):
    monkeypatch.setattr(attention, "BLOCK", block)
    agrees(way, RAGGED, window, softcap, images=IMAGES)


def test_no_mask_is_larger_than_a_block_and_a_window(monkeypatch):
    monkeypatch.setattr(attention, "BLOCK", 4)
    segments = Segments.of((64, 3), sdpa, CPU)
    attend(None, *arrays((64, 3)), None, segments=segments, sliding_window=5)
    assert {tuple(mask.shape) for mask in segments.masks.values()} == {(5, 5), (5, 9), (4, 8)}


def test_without_segments_each_row_is_one_sequence():
    inputs = arrays((6,))
    both = [x.expand(2, -1, -1, -1) for x in inputs]
    found = attend(None, *both, None)[0]
    torch.testing.assert_close(found[1:], formula(*inputs, None, (6,), 8**-0.5, None, None))


def test_after_a_rotation_in_float32_the_precision_is_that_of_the_values():
    query, key, value = arrays(ONE)
    assert attend(None, query, key, value.bfloat16(), None)[0].dtype == torch.bfloat16


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize(("lengths", "prefixes"), [(RAGGED, None), (SHARING, PREFIXES)])
def test_a_sink_takes_part_in_the_softmax_of_its_head(monkeypatch, window, softcap, lengths, prefixes):
    monkeypatch.setattr(attention, "BLOCK", 4)
    sinks = torch.linspace(-2, 3, 4).requires_grad_()
    for way in (sdpa, attention.flash, attention.npu):  # the last two have kernels without sinks
        agrees(way, lengths, window, softcap, 2, prefixes, sinks)


def test_biases_are_refused():
    with pytest.raises(NotImplementedError, match="adds a bias"):
        attend(None, *arrays(ONE), None, position_bias=torch.zeros(1, 4, 11, 11))


def last_of(query, key, value, scale, window, softcap):
    """Returns the attention of a sequence's last queries, aligned to the last key as in flash-attn."""
    before = key.shape[2] - query.shape[2]
    whole = torch.cat([torch.zeros_like(query[:, :, :1]).expand(-1, -1, before, -1), query], dim=2)
    return formula(whole, key, value, None, (key.shape[2],), scale, window, softcap)[0, before:]


@pytest.fixture
def flash_attn(monkeypatch):
    """A module that computes by the formula what flash-attn would be asked for, and keeps what that was."""
    asked = SimpleNamespace()

    def flash_attn_varlen_func(q, k, v, **how):
        vars(asked).update(how, q=q)
        window = None if how["window_size"] == (-1, -1) else how["window_size"][0] + 1
        queries, keys = (how[f"cu_seqlens_{of}"].diff().tolist() for of in "qk")
        rows = [x.transpose(0, 1)[None].split(of, dim=2) for x, of in ((q, queries), (k, keys), (v, keys))]
        found = [last_of(*one, how["softmax_scale"], window, how["softcap"] or None) for one in zip(*rows, strict=True)]
        return torch.cat(found)

    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func, __spec__=1))
    return asked


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_flash_attn_is_asked_for_the_same(flash_attn, window, softcap):
    agrees(flash, RAGGED, window, softcap)
    assert flash_attn.q.shape == (sum(RAGGED), 4, 8)
    assert flash_attn.cu_seqlens_q.tolist() == flash_attn.cu_seqlens_k.tolist() == [0, 9, 14, 19, 24, 36, 37, 40, 43]
    assert flash_attn.cu_seqlens_q.dtype == torch.int32
    assert flash_attn.max_seqlen_q == flash_attn.max_seqlen_k == 12
    assert flash_attn.causal
    assert flash_attn.window_size == ((-1, -1) if window is None else (2, 0))


@pytest.mark.parametrize("window", [None, 3])
def test_flash_attn_is_given_a_copy_of_a_shared_prompt_with_each_answer(flash_attn, window):
    agrees(flash, SHARING, window, prefixes=PREFIXES)
    assert flash_attn.cu_seqlens_q.diff().tolist() == list(SHARING)
    assert flash_attn.cu_seqlens_k.diff().tolist() == SEEN
    assert (flash_attn.max_seqlen_q, flash_attn.max_seqlen_k) == (6, 15)
    assert flash_attn.causal


@pytest.fixture
def varlen_attn(monkeypatch):
    """Computes by the formula what torch's kernel would be asked for, and keeps what that was. (The kernel needs a GPU: on an
    H200 it deviated from the formula as sdpa in bf16 does, with groups of heads, windows and shared prompts.)"""
    asked = []

    def kernel(q, k, v, queries, keys, longest, longest_keys, *, scale, window_size):
        queries, keys = queries.diff().tolist(), keys.diff().tolist()
        assert (longest, longest_keys) == (max(queries), max(keys))
        assert window_size[1] == 0  # causal
        asked.append(queries)
        window = None if window_size[0] < 0 else window_size[0] + 1
        rows = [x.transpose(0, 1)[None].split(of, dim=2) for x, of in ((q, queries), (k, keys), (v, keys))]
        return torch.cat([last_of(*one, scale, window, None) for one in zip(*rows, strict=True)])

    monkeypatch.setattr(attention, "_varlen_kernel", lambda: kernel)
    return asked


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(("lengths", "prefixes"), [(RAGGED, None), (SHARING, PREFIXES)])
def test_torchs_kernel_of_different_lengths_is_asked_for_the_same(varlen_attn, window, lengths, prefixes):
    agrees(varlen, lengths, window, prefixes=prefixes)
    assert varlen_attn == [list(lengths)]
    agrees(varlen, lengths, window, 1.5, prefixes=prefixes)  # a cap, which it has not
    assert len(varlen_attn) == 1


def test_long_sequences_are_attended_one_by_one(monkeypatch, varlen_attn):
    monkeypatch.setattr("areal_x_torch.segments.LONG", 6)
    monkeypatch.setattr(attention, "GRAIN", 4)
    for kv_heads in (1, 4):
        agrees(varlen, (13, 8, 6, 5, 1, 7), kv_heads=kv_heads)
    assert varlen_attn == [[5, 1, 7]] * 2  # those before the first short one
    agrees(varlen, (9, 7))
    agrees(varlen, (9, 7), window=3)
    assert varlen_attn[2:] == [[9, 7]]  # windows are the kernel's


def test_heads_too_wide_for_flash_attn_go_another_way(flash_attn):
    inputs = arrays(ONE, head_dim=264)
    attend(None, *inputs, None, segments=Segments.of(ONE, flash, CPU))
    assert not vars(flash_attn)


@pytest.fixture
def torch_npu(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace(__spec__=1))


def test_auto_takes_the_kernel_of_the_device(flash_attn, torch_npu):
    assert choose("auto", CUDA, torch.bfloat16) is flash
    assert choose("auto", NPU, torch.bfloat16) is npu
    assert choose("auto", CUDA, torch.float32) is choose("auto", CPU, torch.bfloat16) is sdpa
    assert choose("sdpa", CUDA, torch.bfloat16) is sdpa


def test_auto_does_without_packages_that_are_missing(monkeypatch):
    monkeypatch.setattr(attention, "find_spec", lambda name: name == attention.VARLEN or None)
    assert choose("auto", CUDA, torch.bfloat16) is varlen
    monkeypatch.setattr(attention, "find_spec", lambda name: None)
    assert choose("auto", CUDA, torch.bfloat16) is choose("auto", NPU, torch.bfloat16) is sdpa
    for name, device, package in (("flash", CUDA, "flash-attn"), ("npu", NPU, "torch_npu")):
        with pytest.raises(ConfigError, match=f"'auto' or 'sdpa' here: {name} needs the package {package}"):
            choose(name, device, torch.bfloat16)


@pytest.mark.parametrize(
    ("how", "device", "dtype", "reason"),
    [
        ("flash", CPU, torch.bfloat16, "flash needs a CUDA device, and this is cpu"),
        ("flash", CUDA, torch.float32, r"flash needs trainer\.precision = 'bf16'"),
        ("npu", CUDA, torch.bfloat16, "npu needs an Ascend NPU, and this is cuda"),
        ("blocked", CPU, torch.float32, "'auto', 'sdpa', 'flash'"),
    ],
)
def test_a_way_that_cannot_work_here_is_refused_by_name(how, device, dtype, reason):
    with pytest.raises(ConfigError, match=rf"model\.attention = '{how}' .*{reason}"):
        choose(how, device, dtype)
