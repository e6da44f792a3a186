"""Which published tensors the parameters of a model hold is found from loaders that write into the parameters in use, as
SGLang's do, and nothing changes in the model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from areal_x.engines.fleet.proof.claims import Claiming
from areal_x.engines.fleet.proof.judge import Verdict, judge, parsed
from areal_x.engines.fleet.proof.prover import question
from areal_x.engines.fleet.proof.readers import Reader, memory_reader
from areal_x.engines.fleet.proof.worker import answer, report
from areal_x.engines.sglang.proof import unchanged

SHAPES = {
    "embed": (5, 16),
    "q": (8, 16),
    "k": (4, 16),
    "v": (4, 16),
    "expert.0": (3, 16),
    "expert.1": (3, 16),
    "norm": (16,),
    "correction": (2,),
    "bound": (),
}


class Fused(torch.nn.Module):  # type: ignore[misc]
    """A worker's half of a model: queries, keys and values in one parameter, the whole vocabulary, with rows to spare, and in
    buffers a router's correction and a bound, a single number."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {"embed": (8, 16), "qkv": (8, 16), "experts": (2, 3, 16), "norm": (16,)}
        for name, shape in shapes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape), requires_grad=False))
        self.register_buffer("correction", torch.zeros(2))
        self.register_buffer("bound", torch.zeros(()))
        self.loads = 0

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        self.loads += 1
        self.last = None
        for name, tensor in weights:
            if name == "embed":
                self.embed[: len(tensor)].data.copy_(tensor)
                self.embed[len(tensor) :].data.fill_(0)
            elif name.startswith("expert."):
                self.experts.data[int(name[-1])].copy_(tensor)
            elif name in ("correction", "bound"):
                getattr(self, name).copy_(tensor)
            elif name == "norm":
                self.norm.data.copy_(tensor)
                self.last = tensor  # a loader that keeps what it was given
            else:
                start = {"q": 0, "k": 4, "v": 6}[name]
                half = tensor[len(tensor) // 2 :]
                self.qkv.data[start : start + len(half)].copy_(half)


def readers_of(held: Any, modules: Any, aliases: Any) -> list[Reader]:
    return [Reader(held.name, memory_reader(modules[held.module], held))]


def proved(model: Fused, claiming: Claiming) -> Verdict:
    claims = claiming.done()
    found = answer(
        question(claims), lambda shapes, version, full, _: report(model, shapes, version, full, readers_of, unchanged)
    )
    return judge(claims, [parsed(found)])


def test_a_model_is_proved_by_its_own_loaders_and_is_as_it_was_before() -> None:
    rng = np.random.default_rng(0)
    tensors = {name: np.asarray(rng.normal(size=shape), np.float32) for name, shape in SHAPES.items()}
    model = Fused()
    model.load_weights((name, torch.tensor(x)) for name, x in tensors.items())
    model.embed[6] = 7.0  # beyond the vocabulary: a loader that ran would set it to 0
    before = {name: x.clone() for name, x in model.state_dict().items()}
    last = model.last
    claiming = Claiming(1, True)
    for name, x in tensors.items():
        claiming.add(name, x)
    verdict = proved(model, claiming)
    halves = {f"{name} has {tensors[name].size // 2} of the {tensors[name].size} published numbers (qkv)" for name in "qkv"}
    assert set(verdict.differences) == halves  # another worker has the others
    assert (verdict.unproved, verdict.dtypes) == ({}, {})
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert (model.loads, model.last) == (1, last)
    model.experts[1, 2, 3] += 1
    model.norm[[0, 1]] = model.norm[[1, 0]]
    model.correction[0] = 0
    model.bound += 1
    assert {words.split()[0] for words in proved(model, claiming).differences} == {
        "q",
        "k",
        "v",
        "expert.1",
        "norm",
        "correction",
        "bound",
    }
