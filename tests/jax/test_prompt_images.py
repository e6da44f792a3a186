"""Sampling from models that see: every log-probability that is recorded is transformers' over the same tokens and images."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from areal_x.batching.packing import pack
from areal_x.errors import UserError
from areal_x.protocols.backends import create_trainer
from areal_x.protocols.engine import Request
from areal_x.protocols.speculation import Speculation
from areal_x.protocols.trainer_config import ModelConfig, TrainerConfig
from areal_x.testing.conformance.helpers import sample_to_end
from areal_x.types import Images, Trajectory
from areal_x_jax.prefill_chunks import packed
from areal_x_jax.prompt_images import Features, PromptImages, Tower
from areal_x_jax.sampler import Sampler
from areal_x_jax.trainer import Trainer
from tests.launching import finished
from tests.models import (
    IMAGE,
    SEEING_PLACED,
    SEEING_ROWS,
    SEEING_SQUARES,
    SEEING_TILES,
    log_softmax,
    reference_model,
    seen_logits,
)
from tests.sampled_images import CONTEXT, in_slot, requests_of, sampled, trajectories_of
from tests.thorough import further, thorough

from .sampling import sample_shown

OTHERS = ("qwen2_5_vl", "qwen2_5_vl-yarn", "qwen3_vl-tied", *SEEING_SQUARES, *SEEING_ROWS, *SEEING_PLACED, *SEEING_TILES)


def trainer_of(directory: Path, backend: str = "jax") -> Any:
    return create_trainer(backend, TrainerConfig(model=ModelConfig(str(directory))))


def assert_recorded(trajectories: list[Trajectory], trainer: Any) -> None:
    """The recorded log-probabilities are those of a trainer."""
    packed_rows = pack(trajectories, 2 * CONTEXT)
    for t, logprobs in zip(trajectories, packed_rows.gather(trainer.logprobs(packed_rows.batch)), strict=True):
        np.testing.assert_allclose(t.logprobs[t.mask], logprobs[t.mask], atol=1e-4)


@pytest.mark.parametrize(
    "name, chunk",
    [("qwen3_vl", 7), *further(("qwen3_vl", 64), *((name, chunk) for name in OTHERS for chunk in (7, 64)))],
)
def test_recorded_log_probabilities_are_those_of_transformers(model_dir_of, monkeypatch, name: str, chunk: int) -> None:
    """More requests than slots, of all lengths, some without images, some with two; and where a chunk ends within an image."""
    import torch

    monkeypatch.setattr("areal_x_jax.lane.CPU_CHUNK", chunk)
    directory = model_dir_of(name)
    requests = requests_of(directory) + requests_of(directory, seed=100)
    made = trajectories_of(requests, sampled(trainer_of(directory), requests, slots=5))
    # What the policy says is text, also where it has an image's id: torch's trainer takes it for that, transformers would not.
    assert_recorded(made, trainer_of(directory, "torch"))
    plain = [t for t in made if IMAGE not in t.tokens[t.mask]]
    assert len(plain) > 3
    model = reference_model(directory)
    for t in plain:
        with torch.no_grad():
            logp = log_softmax(seen_logits(model, t).numpy())
        own = logp[np.arange(len(t) - 1), t.tokens[1:]][t.mask[1:]]
        np.testing.assert_allclose(t.logprobs[t.mask], own, atol=1e-4)


@pytest.fixture(scope="module")
def seeing(model_dir_of) -> tuple[Trainer, list[Request]]:
    directory = model_dir_of("qwen3_vl")
    return trainer_of(directory), requests_of(directory)


def test_going_on_after_a_swap_samples_what_would_have_come_and_new_weights_of_the_tower_are_used(seeing) -> None:
    """Also where an image's id is among what was generated so far."""
    trainer, (request, *_) = seeing
    sampler, snapshot = trainer.sampler(2, CONTEXT), trainer.snapshot()
    sampler.load(snapshot)
    for begun in ((), (9, IMAGE, IMAGE)):
        tokens, logprobs = sample_to_end(sampler, [in_slot(request, 0, begun)])[0]
        sampler.load(snapshot)
        rest, its_logprobs = sample_to_end(sampler, [in_slot(request, 1, (*begun, *tokens[:11]))])[1]
        assert rest == tokens[11:]
        np.testing.assert_allclose(its_logprobs, logprobs[11:], atol=1e-5)
    swapped = snapshot | {"vision": jax.tree.map(lambda x: x * 1.5, snapshot["vision"])}
    sampler.load(swapped)
    tokens, logprobs = sample_to_end(sampler, [in_slot(request, 0)])[0]
    trained, trainer.params = trainer.params, swapped
    try:
        assert_recorded(
            [
                Trajectory.from_completion(
                    request.tokens, np.int32(tokens), np.float32(logprobs), np.zeros(len(tokens)), images=request.images
                )
            ],
            trainer,
        )
    finally:
        trainer.params = trained


def test_images_of_a_group_are_encoded_once_in_all_lanes_and_whenever_its_attempts_begin(seeing, monkeypatch) -> None:
    seen: list[int] = []
    computed = Tower._computed

    def counted(tower: Tower, images: Images) -> Features:
        seen.append(len(images.grids))
        return computed(tower, images)

    monkeypatch.setattr(Tower, "_computed", counted)
    trainer, (request, *_) = seeing
    sampler = Sampler(trainer.arch, 8, CONTEXT, lanes=2)
    sampler.load(trainer.snapshot())
    said = sample_to_end(sampler, [in_slot(request, slot) for slot in range(5)])
    said |= sample_to_end(sampler, [in_slot(request, slot) for slot in range(5, 8)])
    assert seen == [len(request.images.grids)]
    assert all(said[slot] == said[0] for slot in range(5))  # with one seed, from one cache or a copy of it
    sampler.load(trainer.snapshot())
    sampler.fill([in_slot(request, 0)])
    assert len(seen) == 2
    dark = replace(request, images=Images(0 * request.images.patches, request.images.grids))
    other = sample_to_end(sampler, [in_slot(request, 0), in_slot(dark, 2)])  # of one lane
    assert other[0][1][0] != pytest.approx(other[2][1][0], abs=1e-3)


def test_tokens_that_are_not_of_the_images_or_the_model_are_refused(seeing) -> None:
    trainer, (request, *_) = seeing
    sampler, shown = trainer.sampler(2, CONTEXT), request.images
    sampler.load(trainer.snapshot())
    for tokens, images, reason in (
        (request.tokens[request.tokens != IMAGE], shown, "has 0 image tokens"),
        (request.tokens, None, "its 0 images need 0"),
        (request.tokens[: np.flatnonzero(request.tokens == IMAGE)[-1] + 1], shown, "ends in an image"),
        (request.tokens, Images(shown.patches[:, 1:], shown.grids), "patches of 95 numbers"),
    ):
        with pytest.raises(UserError, match=reason):
            sampler.fill([in_slot(Request(tokens, request.sampling, images=images), 0)])


@thorough
@pytest.mark.parametrize("method", ["ngram", "draft"])
def test_guesses_change_nothing_of_what_is_sampled_after_images(model_dir_of, seeing, method: str) -> None:
    trainer, requests = seeing
    draft = str(model_dir_of("qwen3")) if method == "draft" else ""
    asked = [in_slot(request, slot) for slot, request in enumerate(requests)]
    found = []
    for speculation in (Speculation(), Speculation(method=method, tokens=2, draft=draft)):
        sampler = trainer.sampler(len(asked), CONTEXT, speculation)
        sampler.load(trainer.snapshot())
        found.append(sample_to_end(sampler, asked))
    for slot in range(len(asked)):
        assert found[0][slot][0] == found[1][slot][0]
        np.testing.assert_allclose(found[0][slot][1], found[1][slot][1], atol=1e-4)


@thorough
@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3_vl", "llama4_vl"])
def test_groups_of_a_mesh_sample_of_images_what_one_device_does(model_dir_of, tmp_path: Path, name: str) -> None:
    directory, file = model_dir_of(name), tmp_path / "sampled.json"
    mesh = json.dumps({"fsdp": 2, "tensor": 2})
    finished([sys.executable, "-m", "tests.jax.sampling", str(directory), str(file), mesh], 1, 4, tmp_path)
    for (tokens, logprobs), (expected, theirs) in zip(json.loads(file.read_text()), sample_shown(directory, {}), strict=True):
        assert tokens == expected
        np.testing.assert_allclose(logprobs, theirs, atol=1e-4)


def of_spans(length: int, *spans: tuple[int, int]) -> PromptImages:
    return PromptImages(Features(np.zeros((0, 4), np.float32), None), np.full(length, -1, np.int32), None, spans)


@pytest.mark.parametrize(
    "spans, cut, sizes",
    [
        ((), [10, 10, 10, 5], [10] * 4),
        (((8, 12), (20, 24)), [8, 10, 10, 7], [10] * 4),
        (((0, 10), (10, 20)), [10, 10, 10, 5], [10] * 4),
        (((3, 28),), [3, 25, 7], [10, 40, 10]),  # which no usual chunk holds
    ],
)
def test_no_chunk_of_a_prefill_cuts_an_image_whose_tokens_see_each_other(spans: Any, cut: list[int], sizes: list[int]) -> None:
    tokens = np.arange(35)
    chunks = list(packed([(0, 5, tokens)], 10, 64, [of_spans(35, *spans)]))
    assert [int(chunk.length[0]) for chunk in chunks] == cut
    assert [len(chunk.tokens) for chunk in chunks] == [len(chunk.images.shown) for chunk in chunks] == sizes
    assert [int(chunk.past) for chunk in chunks] == np.cumsum([0, *cut[:-1]]).tolist()
    np.testing.assert_array_equal(np.concatenate([chunk.tokens[:n] for chunk, n in zip(chunks, cut, strict=True)]), tokens)


def test_an_image_that_does_not_fit_behind_another_sequence_begins_a_chunk() -> None:
    shown = of_spans(9, (0, 8))
    first, second, third = packed([(0, 0, np.arange(4)), (1, 0, np.arange(9)), (2, 0, np.arange(2))], 10, 64, [None, shown])
    assert [x.slot[: x.count].tolist() for x in (first, second, third)] == [[0], [1, 2], [2]]
    assert (first.images, third.images) == (None, None)
    assert second.images.blocks.tolist() == [1] * 8 + [0, 0]


def test_positions_and_features_of_a_chunk_are_those_of_its_tokens() -> None:
    features = Features(np.arange(12, dtype=np.float32).reshape(3, 4), np.arange(24, dtype=np.float32).reshape(2, 3, 4))
    places = np.array([-1, 0, 1, -1, 2, -1, -1], np.int32)
    positions = np.arange(21, dtype=np.int32).reshape(3, 7)
    shown = PromptImages(features, places, positions)
    assert shown.shift == 6 - 6
    (first, second) = packed([(0, 0, np.arange(3)), (1, 0, np.arange(7))], 6, 64, [None, shown])
    for chunk, own in ((first.images, slice(0, 3)), (second.images, slice(3, 7))):
        here = slice(3, 6) if own.start == 0 else slice(0, 4)
        np.testing.assert_array_equal(chunk.shown[here], places[own] >= 0)
        np.testing.assert_array_equal(chunk.positions[:, here], positions[:, own])
        seen = np.flatnonzero(places[own] >= 0)
        np.testing.assert_array_equal(chunk.embeddings[here][seen], features.embeddings[places[own][seen]])
        np.testing.assert_array_equal(chunk.deepstack[:, here][:, seen], features.deepstack[:, places[own][seen]])
    np.testing.assert_array_equal(first.images.positions[:, :3], np.arange(3)[None].repeat(3, 0))
    assert not first.images.shown[:3].any()
