"""The backend's sampler by itself: what it samples, with which log-probabilities, in which slots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_x.batching.packing import pack
from areal_x.protocols.sampler import Sampler, SlotRequest
from areal_x.protocols.trainer import Trainer
from areal_x.protocols.trainer_config import LoRAConfig, OptimizerConfig
from areal_x.testing.conformance.helpers import (
    TOLERANCE,
    make_trainer,
    packed_batch,
    policy_gradient,
    sample_to_end,
    sample_with_kept,
    slot_request,
)
from areal_x.testing.reference import Reference
from areal_x.types import Kept, Trajectory

SLOTS, CONTEXT = 16, 384


@pytest.fixture(scope="module")
def compiled(still: Trainer) -> Sampler:
    return still.sampler(SLOTS, CONTEXT)


@pytest.fixture
def sampler(compiled: Sampler, still: Trainer) -> Sampler:
    """One sampler for all tests, because it may compile; loading forgets the last test's slots."""
    compiled.load(still.snapshot())
    return compiled


def trajectory(
    request: SlotRequest, tokens: list[int], logprobs: list[float], kept: Kept | None = None
) -> Trajectory:
    answer = np.array(tokens, np.int32), np.array(logprobs, np.float32)
    versions = np.zeros(len(tokens), np.int32)
    return Trajectory.from_completion(request.tokens, *answer, versions, kept=kept)


def test_what_the_sampler_has(sampler: Sampler) -> None:
    assert (sampler.slots, sampler.context) == (SLOTS, CONTEXT)
    assert sampler.supports_images in (True, False)


def test_logprobs_are_the_trainers(sampler: Sampler, still: Trainer) -> None:
    requests = [slot_request(slot, 5 + slot, 20, seed=slot) for slot in range(SLOTS)]
    found = sample_to_end(sampler, requests)
    made = [trajectory(r, *found[r.slot]) for r in requests]
    packed = pack(made, 64)
    for one, logp in zip(made, packed.gather(still.logprobs(packed.batch)), strict=True):
        np.testing.assert_allclose(one.logprobs[one.mask], logp[one.mask], atol=TOLERANCE)


def test_adapters_are_merged_into_what_is_sampled(backend: str, model_dir: Path) -> None:
    optimizer = OptimizerConfig(learning_rate=1e-2)
    trainer = make_trainer(backend, model_dir, optimizer=optimizer, lora=LoRAConfig(rank=3))
    for _ in range(2):
        trainer.update(packed_batch()[0], policy_gradient)
    sampler = trainer.sampler(2, 64)
    sampler.load(trainer.snapshot())
    request = slot_request(0, 9, 20)
    packed = pack([made := trajectory(request, *sample_to_end(sampler, [request])[0])], 32)
    (logp,) = packed.gather(trainer.logprobs(packed.batch))
    np.testing.assert_allclose(made.logprobs[made.mask], logp[made.mask], atol=TOLERANCE)


def test_greedy_takes_the_most_likely_token(sampler: Sampler, model_dir: Path) -> None:
    request = slot_request(3, 8, 24, temperature=0.0)
    tokens, logprobs = sample_to_end(sampler, [request])[3]
    table = Reference(model_dir).distributions(np.concatenate([request.tokens, tokens]))
    after = table[len(request.tokens) - 1 : -1]
    assert tokens == after.argmax(-1).tolist()
    np.testing.assert_allclose(logprobs, after.max(-1), atol=TOLERANCE)


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        (0, 1.0, 0.0),
        (5, 1.0, 0.0),
        (0, 0.6, 0.0),
        (7, 0.8, 0.0),
        (1, 1.0, 0.0),
        (0, 1.0, 0.9),
        (9, 0.9, 0.85),
    ],
)
def test_truncated_distributions_are_renormalised_over_the_tokens_that_are_reported(
    top_k: int, top_p: float, min_p: float, sampler: Sampler, model_dir: Path
) -> None:
    truncation: dict[str, Any] = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    requests = [
        slot_request(slot, 8, 1, seed=slot, temperature=0.9, **truncation) for slot in range(SLOTS)
    ]
    logp = Reference(model_dir).distributions(requests[0].tokens, 0.9)[-1]
    order = np.argsort(-logp)
    order = order[np.exp(logp[order] - logp.max()) >= min_p][: top_k or len(logp)]
    mass = np.exp(logp[order])
    kept = order[: int((np.cumsum(mass) < top_p * mass.sum()).sum()) + 1]
    expected = np.full(len(logp), -np.inf)
    expected[kept] = logp[kept] - np.log(np.exp(logp[kept]).sum())
    for (token,), (found,), reported in sample_with_kept(sampler, requests).values():
        assert found == pytest.approx(expected[token], abs=TOLERANCE)
        if requests[0].sampling.truncates:
            assert reported is not None
            assert sorted(reported.ids.tolist()) == sorted(kept.tolist())
        else:
            assert reported is None


def test_logprobs_of_truncated_distributions_are_the_trainers(
    sampler: Sampler, still: Trainer
) -> None:
    """Beside others that leave nothing out or are greedy; with slots that end early, too."""
    truncated: dict[str, Any] = {"top_p": 0.9, "top_k": 12, "min_p": 0.05}
    others: tuple[dict[str, Any], ...] = ({}, {"temperature": 0.0, "top_p": 0.5})
    requests = [
        slot_request(
            slot,
            5 + slot,
            4 + 2 * slot,
            seed=slot,
            **(others[slot % 4] if slot % 4 < 2 else truncated),
        )
        for slot in range(SLOTS)
    ]
    found = sample_with_kept(sampler, requests)
    for r in requests:
        kept = found[r.slot][2]
        assert (kept is not None) == r.sampling.truncates
        assert kept is None or 1 <= kept.counts.min() <= kept.counts.max() <= 12
    made = [trajectory(r, *found[r.slot]) for r in requests if r.slot % 4 != 1]
    packed = pack(made, 64)
    assert packed.batch.kept is not None
    for one, logp in zip(made, packed.gather(still.logprobs(packed.batch)), strict=True):
        np.testing.assert_allclose(one.logprobs[one.mask], logp[one.mask], atol=TOLERANCE)
    unaware = still.logprobs(packed.batch.replace(kept=None))
    assert np.abs(unaware - still.logprobs(packed.batch)).max() > 0.05


def test_a_stop_token_ends_the_sequence_and_belongs_to_it(sampler: Sampler) -> None:
    tokens, _ = sample_to_end(sampler, [slot_request(0, 8, 30, seed=3)])[0]
    stop = next(t for t in reversed(tokens) if tokens.index(t) > 3)
    request = slot_request(0, 8, 30, seed=3, stop_token_ids=(43, stop))
    assert sample_to_end(sampler, [request])[0][0] == tokens[: tokens.index(stop) + 1]


def test_attempts_at_one_prompt_are_sampled_together_as_each_alone(sampler: Sampler) -> None:
    """In any order, of two prompts, one of a single token, beside others."""
    prompts = (33, 20, 33, 1, 33, 20, 50, 1, 33, 33)
    requests = [slot_request(slot, n, 9 + slot % 3, seed=slot) for slot, n in enumerate(prompts)]
    alone = {r.slot: sample_to_end(sampler, [r])[r.slot] for r in requests}
    for slot, (tokens, logprobs) in sample_to_end(sampler, requests).items():
        assert tokens == alone[slot][0]
        np.testing.assert_allclose(logprobs, alone[slot][1], atol=TOLERANCE)


def test_tokens_of_one_sequence_are_sampled_independently(sampler: Sampler) -> None:
    """The model finds all tokens about equally likely: the same random number at every position
    would give the same token at every position."""
    requests = [slot_request(slot, 3, 200, seed=slot) for slot in range(4)]
    for tokens, _ in sample_to_end(sampler, requests).values():
        counts = np.bincount(tokens)
        assert np.count_nonzero(counts) > 25
        assert counts.max() < 0.2 * len(tokens)


def test_a_sequence_depends_neither_on_its_slot_nor_on_its_neighbours(sampler: Sampler) -> None:
    """Alone, among fifteen others, in another slot, and after a cache has gone round."""
    own = {"prompt": 30, "most": 40, "seed": 2**40 + 5}
    tokens, logprobs = sample_to_end(sampler, [slot_request(3, **own)])[3]
    others = [
        slot_request(slot, 5 + 20 * slot, 10 + slot, seed=slot)
        for slot in range(SLOTS)
        if slot != 9
    ]
    mine = slot_request(9, **own)
    for requests in ([mine, *others], [*others, mine], [mine]):
        for _ in range(4):
            again, its_logprobs = sample_to_end(sampler, requests)[9]
            assert again == tokens
            np.testing.assert_allclose(its_logprobs, logprobs, atol=1e-5)


def test_slots_filled_while_others_run_give_what_each_gives_alone(
    sampler: Sampler, still: Trainer
) -> None:
    """Continuous batching: sequences finish, and others take their slots."""
    sizes = np.random.default_rng(0).integers(1, 60, (40, 2)).tolist()
    requests = [slot_request(0, prompt, most, seed=i) for i, (prompt, most) in enumerate(sizes)]
    waiting, free = list(enumerate(requests)), list(range(5))
    running: dict[int, int] = {}
    found: dict[int, list[int]] = {i: [] for i in range(len(requests))}
    while waiting or running:
        admitted = []
        while waiting and free:
            i, request = waiting.pop(0)
            slot = free.pop(0)
            running[slot] = i
            admitted.append(SlotRequest(slot, request.tokens, 0, request.sampling, request.seed))
        sampler.fill(admitted)
        decoded = sampler.decode(16, 1)
        for slot, i in list(running.items()):
            found[i] += decoded.tokens[slot, : decoded.counts[slot]].tolist()
            if decoded.finished[slot]:
                free.append(slot)
                del running[slot]
    assert [len(tokens) for tokens in found.values()] == [most for _, most in sizes]
    alone = still.sampler(1, CONTEXT)
    alone.load(still.snapshot())
    for i, request in enumerate(requests):
        assert sample_to_end(alone, [request], steps=32)[0][0] == found[i]


def test_a_sequence_continued_after_a_load_gives_what_would_have_come(
    sampler: Sampler, still: Trainer
) -> None:
    """As after a swap of weights, here to the same ones."""
    whole = slot_request(0, 150, 30, seed=4)
    tokens, logprobs = sample_to_end(sampler, [whole])[0]
    so_far = np.concatenate([whole.tokens, np.array(tokens[:11], np.int32)])
    sampler.load(still.snapshot())
    request = SlotRequest(5, so_far, 11, whole.sampling, whole.seed)
    rest, its_logprobs = sample_to_end(sampler, [request])[5]
    assert rest == tokens[11:]
    np.testing.assert_allclose(its_logprobs, logprobs[11:], atol=1e-5)


def test_a_slot_filled_again_or_freed_forgets_its_sequence(sampler: Sampler) -> None:
    tokens, logprobs = sample_to_end(sampler, [slot_request(2, 9, seed=7)])[2]
    sampler.fill([slot_request(2, 33, seed=1), slot_request(4, 12, seed=2)])
    sampler.decode(3, SLOTS)
    sampler.free([4, 11])  # slot 11 holds nothing
    again, its_logprobs = sample_to_end(sampler, [slot_request(2, 9, seed=7)])[2]
    assert again == tokens
    np.testing.assert_allclose(its_logprobs, logprobs, atol=1e-5)
    assert sampler.decode(3, SLOTS).counts.tolist() == [0] * SLOTS


def test_decode_returns_when_enough_slots_are_free(sampler: Sampler) -> None:
    sampler.fill([slot_request(slot, 5, 2 + slot) for slot in range(SLOTS)])
    decoded = sampler.decode(100, 3)
    assert decoded.finished.sum() >= 3
    assert decoded.counts.max() < 2 + SLOTS // 2
    rest = [2 + slot - count for slot, count in enumerate(decoded.counts)]
    assert sampler.decode(100, SLOTS).counts.tolist() == rest


def test_a_sampler_without_weights_and_a_sequence_without_room_are_refused(
    sampler: Sampler, still: Trainer
) -> None:
    with pytest.raises(RuntimeError, match="load a snapshot"):
        still.sampler(2, 8).fill([slot_request(0, 3)])
    with pytest.raises(ValueError, match="no room"):
        sampler.fill([slot_request(0, CONTEXT)])


def test_a_snapshot_outlives_the_updates_after_it(backend: str, model_dir: Path) -> None:
    trainer = make_trainer(backend, model_dir, optimizer=OptimizerConfig(learning_rate=1e-2))
    sampler, request = trainer.sampler(2, 64), slot_request(0, 9, 20)
    snapshot = trainer.snapshot()
    sampler.load(snapshot)
    before = sample_to_end(sampler, [request])[0]
    trainer.update(packed_batch()[0], policy_gradient)
    sampler.load(snapshot)
    assert sample_to_end(sampler, [request])[0] == before
    sampler.load(trainer.snapshot())
    assert sample_to_end(sampler, [request])[0] != before
