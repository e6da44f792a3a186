"""Drawing from models that see: every log-probability that is recorded is the trainer's own over the same tokens and images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from areal_x.batching.packing import pack
from areal_x.errors import UserError
from areal_x.protocols.backends import create_trainer
from areal_x.protocols.engine import Request
from areal_x.protocols.trainer import Trainer
from areal_x.protocols.trainer_config import ModelConfig, TrainerConfig
from areal_x.testing.conformance.helpers import sample_to_end
from areal_x.types import Images
from areal_x_torch import prefill, prompt_images
from areal_x_torch.images import features_of
from tests.models import FIRST_SEEING, IMAGE, MORE_SEEING, SEEING_SQUARES
from tests.sampled_images import CONTEXT, in_slot, requests_of, sampled, trajectories_of
from tests.thorough import further


def trainer_of(directory: Path) -> Trainer:
    return create_trainer("torch", TrainerConfig(model=ModelConfig(str(directory))))


@pytest.mark.parametrize(
    "name",
    [
        *("qwen2_5_vl", "qwen2_5_vl-yarn", "qwen3_vl", "qwen3_vl-tied"),
        *SEEING_SQUARES,
        "gemma4_vl-whole",
        *FIRST_SEEING,
        *further(*(name for name in MORE_SEEING if name != "gemma4_vl-whole")),
    ],
)
@pytest.mark.parametrize("chunk", [512, 7])
def test_recorded_log_probabilities_are_the_trainers(model_dir_of, monkeypatch, name: str, chunk: int) -> None:
    """More requests than slots, of all lengths, some without images, some with two; and where a chunk ends within an image."""
    monkeypatch.setattr(prefill, "CHUNK", chunk)
    trainer = trainer_of(model_dir_of(name))
    requests = requests_of(model_dir_of(name)) + requests_of(model_dir_of(name), seed=100)
    said = sampled(trainer, requests, slots=5)
    made = trajectories_of(requests, said)
    if name != "gemma3_vl":  # which happens not to say it
        assert any(IMAGE in c.tokens for c in said)  # what the policy says is text, also where it has an image's id
    packed = pack(made, 2 * CONTEXT)
    for trajectory, logprobs in zip(made, packed.gather(trainer.logprobs(packed.batch)), strict=True):
        np.testing.assert_allclose(trajectory.logprobs[trajectory.mask], logprobs[trajectory.mask], atol=1e-4)


def test_going_on_after_a_swap_draws_what_would_have_come(model_dir_of) -> None:
    """Also where an image's id is among what was generated so far."""
    trainer = trainer_of(model_dir_of("qwen2_5_vl"))
    drawing, request = trainer.sampler(2, CONTEXT), requests_of(model_dir_of("qwen2_5_vl"))[0]
    drawing.load(trainer.snapshot())
    for begun in ((), (IMAGE,), (9, IMAGE, IMAGE)):
        tokens, logprobs = sample_to_end(drawing, [in_slot(request, 0, begun)])[0]
        drawing.load(trainer.snapshot())
        rest, its_logprobs = sample_to_end(drawing, [in_slot(request, 1, (*begun, *tokens[:11]))])[1]
        assert rest == tokens[11:]
        np.testing.assert_allclose(its_logprobs, logprobs[11:], atol=1e-5)


def test_what_is_said_depends_on_the_image(model_dir_of) -> None:
    trainer, request = trainer_of(model_dir_of("qwen2_5_vl")), requests_of(model_dir_of("qwen2_5_vl"))[0]
    drawing = trainer.sampler(2, CONTEXT)
    drawing.load(trainer.snapshot())
    dark = Request(request.tokens, request.sampling, request.seed, Images(0 * request.images.patches, request.images.grids))
    said = sample_to_end(drawing, [in_slot(request, 0), in_slot(dark, 1)])
    assert said[0][1][0] != pytest.approx(said[1][1][0], abs=1e-3)


def test_episodes_of_a_group_have_their_images_looked_at_once(model_dir_of, monkeypatch) -> None:
    looked = []

    def counting(of, patches, grids):
        looked.append(len(grids))
        return features_of(of, patches, grids)

    monkeypatch.setattr(prompt_images, "features_of", counting)
    trainer = trainer_of(model_dir_of("qwen2_5_vl"))
    drawing, request = trainer.sampler(4, CONTEXT), requests_of(model_dir_of("qwen2_5_vl"))[0]
    drawing.load(trainer.snapshot())
    drawing.fill([in_slot(request, slot) for slot in range(4)])
    assert looked == [len(request.images.grids)]


def test_tokens_that_are_not_of_the_images_are_refused(model_dir_of) -> None:
    trainer, request = trainer_of(model_dir_of("qwen2_5_vl")), requests_of(model_dir_of("qwen2_5_vl"))[0]
    drawing = trainer.sampler(2, CONTEXT)
    drawing.load(trainer.snapshot())
    for tokens, reason in (
        (request.tokens[request.tokens != IMAGE], "has 0 image tokens"),
        (request.tokens[: np.flatnonzero(request.tokens == IMAGE)[-1] + 1], "ends in an image"),
    ):
        with pytest.raises(UserError, match=reason):
            drawing.fill([in_slot(Request(tokens, request.sampling, images=request.images), 0)])


def test_a_chunk_of_a_prefill_ends_within_no_image_of_any_row(monkeypatch) -> None:
    monkeypatch.setattr(prefill, "CHUNK", 10)
    assert list(prefill.chunks(35, [])) == [(0, 10), (10, 20), (20, 30), (30, 35)]
    assert list(prefill.chunks(35, [(8, 12), (2, 9), (11, 15), (20, 24), (33, 40)])) == [(0, 15), (15, 25), (25, 35)]
