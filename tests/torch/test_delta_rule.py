"""Gated delta rule layers over flat rows: against the recurrence itself, token by token, and against transformers."""

from __future__ import annotations

import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings
from hypothesis import strategies as st

from areal_x.errors import ConfigError
from areal_x.protocols.trainer_config import MeshConfig, ModelConfig, TrainerConfig
from areal_x_torch import compatibility, delta_chunks, delta_rule, loading, preflight
from areal_x_torch.attention import sdpa
from areal_x_torch.delta_chunks import Inputs
from areal_x_torch.model import PackedRow, hidden_states
from areal_x_torch.segments import Segments
from tests.model_families import CASES
from tests.models import sequences, write_config

from .test_families import loaded, plain

CPU = torch.device("cpu")
HEADS, GROUP, KEYS, VALUES = 2, 3, 4, 5


def inputs_of(tokens, seed):
    """Random, with states that last: a decay of 0.9 or more."""
    random = torch.Generator().manual_seed(seed)
    query, key = (torch.randn(tokens, HEADS, KEYS, generator=random, dtype=torch.float64) for _ in range(2))
    value = torch.randn(tokens, HEADS, GROUP, VALUES, generator=random, dtype=torch.float64)
    g, beta = (torch.rand(tokens, HEADS, GROUP, generator=random, dtype=torch.float64) for _ in range(2))
    return Inputs(delta_rule.normalised(query), delta_rule.normalised(key), value, -0.1 * g, beta)


def token_by_token(inputs, segments):
    """The recurrence as the papers write it, of each sequence with those that it continues."""
    found, parts = [], list(zip(*(x.split(segments.lengths) for x in inputs), strict=True))
    chains = chains_of(segments.prefixes)
    for i, chain in enumerate(chains):
        own = Inputs(*(torch.cat(both) for both in zip(*(parts[j] for j in chain), strict=True)))
        state, outputs = torch.zeros(HEADS, GROUP, KEYS, VALUES, dtype=torch.float64), []
        for query, key, value, g, beta in zip(*own, strict=True):
            state = state * g.exp()[..., None, None]
            read = torch.einsum("hk,hgkv->hgv", key, state)
            state = state + torch.einsum("hk,hgv->hgkv", key, beta[..., None] * (value - read))
            outputs.append(torch.einsum("hk,hgkv->hgv", query, state))
        found.append(torch.stack(outputs[-segments.lengths[i] :]))
    return torch.cat(found).flatten(1, 2)


def chains_of(prefixes):
    """Of each sequence those that it continues, the first one first, and itself."""
    chains = []
    for i, prefix in enumerate(prefixes):
        chains.append([*(chains[prefix] if prefix >= 0 else []), i])
    return chains


def segments_of(lengths, prefixes=None):
    return Segments.of(tuple(lengths), sdpa, CPU, None if prefixes is None else tuple(prefixes))


ROWS = st.lists(st.integers(1, 140), min_size=1, max_size=3)


@settings(deadline=None, max_examples=5)
@given(ROWS, st.lists(st.integers(1, 70), max_size=3), st.data())
def test_chunks_compute_the_recurrence_and_its_gradients(lengths, continuing, data):
    prefixes = [-1] * len(lengths)
    for _ in continuing:
        prefixes.append(data.draw(st.integers(0, len(prefixes) - 1)))
    segments = segments_of([*lengths, *continuing], prefixes)
    found = []
    for rule in (delta_chunks.gated_delta_rule, token_by_token):
        inputs = Inputs(*(x.requires_grad_() for x in inputs_of(sum(segments.lengths), seed=len(lengths))))
        outputs = rule(inputs, segments)
        slopes = torch.linspace(-1, 1, outputs.numel(), dtype=torch.float64).view_as(outputs)
        found.append([outputs, *torch.autograd.grad((outputs * slopes).sum(), inputs)])
    for mine, expected in zip(*found, strict=True):
        torch.testing.assert_close(mine, expected, atol=1e-9, rtol=1e-9)


def test_decays_that_leave_nothing_and_long_rows_stay_finite():
    inputs = inputs_of(300, 0)
    inputs = inputs._replace(g=100 * inputs.g)
    outputs = delta_chunks.gated_delta_rule(Inputs(*(x.float().requires_grad_() for x in inputs)), segments_of([300]))
    outputs.sum().backward()
    torch.testing.assert_close(outputs.double(), token_by_token(inputs, segments_of([300])), atol=1e-4, rtol=1e-3)


def test_what_the_backward_pass_keeps_grows_with_tokens_and_is_what_recomputation_reckons_with():
    for tokens in (256, 512):
        kept, inputs = {}, Inputs(*(x.float().requires_grad_() for x in inputs_of(tokens, 0)))

        def keep(x, kept=kept):
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage()
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            delta_chunks.gated_delta_rule(inputs, segments_of([tokens]))
        numbers = sum(x.nbytes() for x in kept.values()) / 4
        expected = tokens * HEADS * GROUP * delta_chunks.saved_of_head(KEYS, VALUES)
        assert numbers == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("name", ["qwen3_next-0", "qwen3_5_text-1"])
def test_branches_that_share_tokens_are_those_of_whole_sequences(name, tmp_path):
    """A prompt shorter than the convolution, one longer than a chunk; gradients of either's parameters too."""
    lengths, prefixes = (70, 2, 5, 66, 1, 3, 4), (-1, -1, 0, 0, 1, 1, 4)
    parts = [torch.from_numpy(x.astype(np.int64)) for x in sequences(*lengths)]
    ours, theirs = (loaded(write_config(CASES[name], tmp_path)), plain(tmp_path))
    chains = chains_of(prefixes)
    starts = [sum(lengths[j] for j in chain[:-1]) for chain in chains]
    positions = torch.cat([torch.arange(n) + start for n, start in zip(lengths, starts, strict=True)])
    row = PackedRow(torch.cat(parts), positions, segments_of(lengths, prefixes))
    shared = hidden_states(ours, row).split(lengths)[2:]
    whole = [
        theirs.model(torch.cat([parts[j] for j in chain])[None], use_cache=False).last_hidden_state[0, -lengths[chain[-1]] :]
        for chain in chains[2:]
    ]
    for found in (shared, whole):
        sum((x * torch.linspace(-1, 1, x.numel()).view_as(x)).sum() for x in found).backward()
    for mine, expected in zip(shared, whole, strict=True):
        torch.testing.assert_close(mine, expected, atol=1e-4, rtol=1e-4)
    expected = dict(theirs.named_parameters())
    for parameter, p in ours.named_parameters():
        if not parameter.startswith("lm_head"):
            assert (p.grad - expected[parameter].grad).norm() < 5e-4 * expected[parameter].grad.norm(), parameter


def test_a_layer_without_segments_is_transformers_own(tmp_path):
    """To the last bit, so that it can judge this backend's own."""
    ours, theirs = (loaded(write_config(CASES["qwen3_5_text-0"], tmp_path)), plain(tmp_path))
    x = torch.randn(1, 9, 32)
    with torch.no_grad():
        mine, other = (of.model.layers[0].linear_attn(x) for of in (ours, theirs))
    torch.testing.assert_close(mine, other, rtol=0, atol=0)


def test_kernels_for_gpus_alone_do_not_keep_a_model_from_being_compared_on_the_host(tmp_path, monkeypatch):
    """As flash-linear-attention's are, which transformers calls wherever it is installed."""
    directory = write_config(CASES["qwen3_next-0"], tmp_path)
    module = sys.modules["transformers.models.qwen3_next.modeling_qwen3_next"]
    for name in delta_rule.KERNELS:

        def kernel(*_, name=name, **__):
            raise RuntimeError(f"{name} needs a GPU")

        kernel.__wrapped__ = getattr(module, name).__wrapped__
        monkeypatch.setattr(module, name, kernel)
    compatibility._passed.clear()
    loading.build(directory, "policy")


@pytest.mark.parametrize(
    ("mesh", "reason"),
    [
        ({"context": 4}, r"mesh\.context = 4.*a divisor of the model's linear_num_key_heads = 2"),
        ({"expert": 3}, r"mesh\.expert = 3.*a divisor of the model's 4 experts"),
    ],
)
def test_meshes_that_do_not_divide_its_heads_are_named(mesh, reason, tmp_path):
    directory = write_config(CASES["qwen3_next-0"], tmp_path)
    processes = next(iter(mesh.values()))
    config = TrainerConfig(ModelConfig(str(directory)), mesh=MeshConfig(processes=processes, **mesh))
    with pytest.raises(ConfigError, match=reason):
        preflight.check(config)
