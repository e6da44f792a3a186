"""Attention by processes that each have some of a row's tokens, as threads, and which models they can share."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from areal_x.errors import ConfigError
from areal_x.protocols.trainer_config import MeshConfig
from areal_x_torch import context_parallel
from areal_x_torch.attention import attend, sdpa
from areal_x_torch.flat_rows import FlatRow, padded_to_multiple
from areal_x_torch.segments import Segments
from areal_x_torch.sharding import check_model

from .test_attention import CPU, RAGGED, arrays, formula
from .test_trainer import save_model


@dataclass
class Threads:
    """As many processes as threads, and what each has for the others. One thread sees it as its own group."""

    barrier: threading.Barrier
    sent: dict[int, tuple[torch.Tensor, ...]] = field(default_factory=dict)
    at: threading.local = field(default_factory=threading.local)

    def size(self):
        return self.barrier.parties

    def rank(self):
        return self.at.rank

    def all_to_all_single(self, received, x, received_sizes, sent_sizes, group):
        self.sent[self.rank()] = x.split(sent_sizes)
        self.barrier.wait()
        received.copy_(torch.cat([self.sent[other][self.rank()] for other in range(self.size())]))
        self.barrier.wait()

    def all_reduce(self, x, group):
        self.sent[self.rank()] = (x.clone(),)
        self.barrier.wait()
        x.copy_(sum(self.sent[other][0] for other in range(self.size())))
        self.barrier.wait()


def together(monkeypatch, processes, compute):
    """Returns the result of `compute(group, rank)` on each rank."""
    group = Threads(threading.Barrier(processes, timeout=60))
    monkeypatch.setattr(torch.distributed, "all_to_all_single", group.all_to_all_single)
    monkeypatch.setattr(torch.distributed, "all_reduce", group.all_reduce)

    def one(rank):
        group.at.rank = rank
        try:
            return compute(group, rank)
        except Exception:
            group.barrier.abort()  # the others wait for this one
            raise

    with ThreadPoolExecutor(processes) as pool:
        return list(pool.map(one, range(processes)))


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(("window", "softcap", "sunk"), [(None, None, False), (3, 1.5, False), (3, None, True)])
def test_parts_of_a_row_attend_as_the_row_does(monkeypatch, processes, kv_heads, window, softcap, sunk):
    lengths = (*RAGGED, 1)  # 44 tokens: parts end within sequences
    inputs, scale = arrays(lengths, kv_heads), 0.7
    sinks = torch.linspace(-1, 2, 4).requires_grad_() if sunk else None
    attended = formula(*inputs, sinks, lengths, scale, window, softcap)
    weights = torch.randn(attended.shape, generator=torch.Generator().manual_seed(1))
    of_sinks = [sinks] if sunk else []
    *slopes, of_whole = torch.autograd.grad((attended * weights).sum(), [*inputs, *(of_sinks or inputs[:1])])
    expected = attended, *(x.transpose(1, 2) for x in slopes)
    heads_of_keys = []

    def seen(query, key, *others):
        heads_of_keys.append(key.shape[1])
        return sdpa(query, key, *others)

    def compute(group, rank):
        own = context_parallel.token_range(sum(lengths), group)
        parts = [x.detach()[:, :, own].requires_grad_() for x in inputs]
        segments = Segments.of(lengths, context_parallel.ulysses(seen, group), CPU)
        extra = {"scaling": scale, "sliding_window": window, "softcap": softcap}
        copies = [x.detach().requires_grad_() for x in of_sinks]
        found = attend(None, *parts, None, segments=segments, s_aux=copies[0] if copies else None, **extra)[0]
        *grads, of_copy = torch.autograd.grad((found * weights[:, own]).sum(), [*parts, *(copies or parts[:1])])
        return found, *(x.transpose(1, 2) for x in grads), of_copy

    *found_parts, of_copies = zip(*together(monkeypatch, processes, compute), strict=True)
    for found, whole in zip(found_parts, expected, strict=True):
        torch.testing.assert_close(torch.cat(found, dim=1), whole, atol=1e-5, rtol=1e-5)
    if sunk:  # each process has a part of the gradient, which the trainer sums
        torch.testing.assert_close(sum(of_copies), of_whole, atol=1e-5, rtol=1e-5)
    assert set(heads_of_keys) == {max(kv_heads // processes, 1)}


def test_a_state_tells_of_the_next_token_though_a_neighbour_has_that():
    flat = padded_to_multiple(FlatRow(np.array([4, 5, 6, 8, 9]), np.array([3, 2]), np.array([-1, -1])), 4)
    assert flat.places.tolist()[:5] == [4, 5, 6, 8, 9]
    assert (len(flat.places), flat.lengths.tolist(), flat.padding) == (8, [3, 2, 3], 3)
    wanted = np.ones((3, 4), bool)
    read = [flat.read(wanted, before=True, own=slice(start, start + 2)) for start in range(0, 8, 2)]
    assert [telling.tolist() for telling, _ in read] == [[0, 1], [1], [], []]
    assert [told.tolist() for _, told in read] == [[5, 6], [9], [], []]
    of_themselves = [flat.read(wanted, before=False, own=slice(start, start + 2))[1].tolist() for start in range(0, 8, 2)]
    assert of_themselves == [[4, 5], [6, 8], [9], []]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("models") / "qwen3", "qwen3", head_dim=16)


@pytest.mark.parametrize(
    ("context", "tensor", "wanted"),
    [(3, 1, "a divisor of the model's num_attention_heads = 4"), (4, 2, r"num_attention_heads = 4 / mesh\.tensor = 2")],
)
def test_heads_that_the_processes_of_a_row_do_not_share_evenly_are_refused(model, context, tensor, wanted):
    with pytest.raises(ConfigError, match=rf"mesh\.context = {context} cannot work: it must be .*{wanted}"):
        check_model(model, MeshConfig(context=context, tensor=tensor, processes=context * tensor), None, learns=True)


@pytest.mark.parametrize(
    ("change", "wanted"),
    [({"model_type": "qwen2_5_vl"}, "rows with images")],
)
def test_what_sees_more_of_a_row_than_attention_does_is_refused(model, tmp_path, change, wanted):
    config = json.loads((model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ConfigError, match=rf"mesh\.context = 2 cannot work: it must be 1, as .*{wanted}.*use mesh\.fsdp"):
        check_model(tmp_path, MeshConfig(context=2, processes=2), None, learns=True)
