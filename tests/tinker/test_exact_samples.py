"""What a bank's sampler gives a sequence does not depend, bit for bit, on what else it samples."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_x.hf.adapters import MATRICES
from areal_x.protocols.adapter_bank import AdapterBank, AdapterState
from areal_x.protocols.backends import load_backend
from areal_x.protocols.engine import SamplingParams
from areal_x.protocols.sampler import AdaptedSampler, SlotRequest
from areal_x.protocols.trainer_config import LoRAConfig, ModelConfig, TrainerConfig
from areal_x.testing.models import write_model

BACKENDS = ("torch", pytest.param("jax", marks=pytest.mark.thorough))  # which compiles for half a minute
SLOTS, CONTEXT = 20, 150  # more than the rows and the columns that torch computes at once
RANKS = {"a": 3, "b": 20, "c": 8, "broken": 5}
OTHERS = (None, "b", "c", "broken")


@dataclass(frozen=True)
class Numbers:
    """What was sampled for a sequence."""

    tokens: list[int]
    logprobs: list[float]
    kept: Any


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # So large that another number of rows or columns has other bits on a usual CPU.
    return write_model(tmp_path_factory.mktemp("model"), head_dim=64, num_attention_heads=6, intermediate_size=160)


@cache
def bank_of(backend: str, base: Path) -> AdapterBank:
    pytest.importorskip(f"areal_x_{backend}")
    config = TrainerConfig(model=ModelConfig(path=str(base)), row_length=256)
    bank: AdapterBank = load_backend(backend).create_bank(config)
    random = np.random.default_rng(1)
    for name, rank in RANKS.items():
        lora = LoRAConfig(rank=rank)
        tensors = {x: 0.3 * random.normal(size=shape).astype(np.float32) for x, shape in bank.shapes(lora).items()}
        if name == "broken":
            tensors = {x: np.full_like(y, 3e38) if MATRICES[1] in x else y for x, y in tensors.items()}  # NaN in a product
        bank.put(name, lora, AdapterState(tensors))
    return bank


@pytest.fixture(params=BACKENDS)
def bank(request: pytest.FixtureRequest, base: Path) -> AdapterBank:
    return bank_of(request.param, base)


def sampler_of(bank: AdapterBank, adapters: list[str]) -> AdaptedSampler:
    sampler = bank.sampler(SLOTS, CONTEXT, exact=True)
    sampler.load(bank.snapshot())
    for name in adapters:
        sampler.put_adapter(name, bank.adapter(name))
    return sampler


def request(slot: int, length: int, adapter: str | None, seed: int, most: int, **settings: Any) -> SlotRequest:
    tokens = np.random.default_rng(length).integers(2, 40, length).astype(np.int32)
    return SlotRequest(slot, tokens, 0, SamplingParams(max_tokens=most, **settings), seed, adapter=adapter)


def asked(slots: list[int]) -> list[SlotRequest]:
    """The sequences whose numbers are compared: two of one prompt, one that leaves tokens out, one without adapter."""
    first, second, third, fourth = slots
    return [
        request(first, 9, "a", 1, 12),
        request(second, 9, "a", 2, 9, temperature=0.7),
        request(third, 30, "a", 3, 12, top_k=5),
        request(fourth, 1, None, 4, 10),
    ]


def run(sampler: AdaptedSampler, waves: list[list[SlotRequest]], watched: list[int], steps: int) -> list[Numbers]:
    """Returns what the watched slots sampled, of requests that come one wave after another, some steps apart."""
    found: dict[int, Numbers] = {slot: Numbers([], [], []) for slot in watched}
    left = set(watched)
    while waves or left:
        if waves:
            sampler.fill(waves.pop(0))
        decoded = sampler.decode(steps, SLOTS)
        for slot in left & set(watched):
            count = int(decoded.counts[slot])
            found[slot].tokens.extend(decoded.tokens[slot, :count].tolist())
            found[slot].logprobs.extend(decoded.logprobs[slot, :count].tolist())
            if slot in decoded.kept:
                found[slot].kept.extend(decoded.kept[slot].ids.tolist())
        left -= {slot for slot in left if decoded.finished[slot]}
    return [found[slot] for slot in watched]


def test_samples_have_the_same_bits_alone_and_among_others_in_other_slots(bank: AdapterBank) -> None:
    slots = [0, 1, 2, 3]
    alone = sampler_of(bank, ["a"])
    expected = [run(alone, [[one]], [one.slot], 64)[0] for one in asked(slots)]
    assert [len(x.tokens) for x in expected] == [12, 9, 12, 10]
    together = run(sampler_of(bank, ["b", "a"]), [asked(slots)], slots, 64)
    assert together == expected

    sampler = sampler_of(bank, ["b", "c", "a", "broken"])
    places = [17, 4, 11, 13]
    lengths = (3, 9, 30, 100, 60, 127)  # past the first columns, and with prompts that others have too
    free = [slot for slot in range(SLOTS) if slot not in places]
    company = [
        request(slot, lengths[i % len(lengths)], OTHERS[i % len(OTHERS)], 10 + i, 3 + 4 * (i % 5), top_p=1 - i % 2 / 2)
        for i, slot in enumerate(free)
    ]
    early, late = company[:8], company[8:]
    one, *more = asked(places)
    for among in ([early, [one, *late], more], [[*late, *more], early, [one]]):
        assert run(sampler, among, places, 3) == expected
        # Another comes that is wider than what one leaves.
        sampler.remove_adapter("c")
        for name in ("b", "c"):
            sampler.put_adapter(f"{name} again", bank.adapter(name))
        sampler.put_adapter("c", bank.adapter("c"))
