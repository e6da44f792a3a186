"""Models that see, through the trainer: against transformers, in packed rows, saved and read again."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from transformers import AutoModelForImageTextToText

import areal_x_torch
from areal_x.algorithms import losses
from areal_x.algorithms.weighting import token_mean
from areal_x.batching.packing import pack
from areal_x.errors import UserError
from areal_x.hf import model_dir
from areal_x.protocols.backends import create_trainer
from areal_x.protocols.trainer_config import ModelConfig, OptimizerConfig, TrainerConfig
from areal_x.types import Trajectory
from areal_x_torch import model
from tests.models import (
    FIRST_SEEING,
    IMAGE,
    MORE_SEEING,
    PROMPTS,
    SEEING,
    SEEING_HYBRIDS,
    SEEING_PLACED,
    SEEING_SQUARES,
    reference_model,
    seen_logits,
    shown_to,
    stand_in_reference,
    with_images,
    write_config,
)
from tests.thorough import further

ROW = 64
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, eps=1e-2, weight_decay=0.1, clip_norm=0)


def trainer_of(directory, **changes):
    defaults = {"optimizer": OPTIMIZER, "micro_batch_rows": 2}
    return areal_x_torch.create_trainer(TrainerConfig(model=ModelConfig(str(directory)), **defaults | changes))


def learnable(batch):
    weights = np.asarray(token_mean(batch.mask, batch.segment_ids), np.float32)
    return batch.replace(proximal_logp=batch.behavior_logp, advantages=np.ones(batch.shape, np.float32), weights=weights)


def logps_of(of, made):
    """transformers' own of each sequence alone."""
    found = []
    for trajectory in made:
        after = torch.from_numpy(trajectory.tokens[1:].astype(np.int64))[:, None]
        found.append(seen_logits(of, trajectory)[:-1].log_softmax(-1).gather(1, after)[:, 0])
    return found


@pytest.mark.parametrize(
    ("name", "image_like"),
    [*((name, False) for name in [*SEEING, *SEEING_HYBRIDS, *SEEING_SQUARES, *FIRST_SEEING])]
    + [(name, True) for name in ("qwen2_5_vl", "qwen3_vl", "gemma3_vl-untied", "gemma4_vl-whole")]
    + further(("mistral3_vl", True), *((name, False) for name in MORE_SEEING)),
)
def test_a_packed_row_gives_what_transformers_gives_for_each_sequence_alone(model_dir_of, name, image_like):
    made = shown_to(model_dir_of(name), image_like=image_like)
    packed = pack(made, ROW)
    said = packed.gather(trainer_of(model_dir_of(name)).logprobs(packed.batch))
    with torch.no_grad():
        theirs = logps_of((stand_in_reference if image_like else reference_model)(model_dir_of(name)), made)
    for ours, expected in zip(said, theirs, strict=True):
        np.testing.assert_allclose(ours[1:], expected.numpy(), atol=1e-4 if name in SEEING_HYBRIDS else 2e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "name", ["qwen2_5_vl", "qwen3_vl", *SEEING_HYBRIDS, *SEEING_SQUARES, *FIRST_SEEING, *further(*MORE_SEEING)]
)
def test_gradients_are_those_of_each_sequence_alone(model_dir_of, name):
    made = shown_to(model_dir_of(name), image_like=False)
    batch = pack(made, ROW).batch
    trainer = trainer_of(model_dir_of(name))
    row = next(iter(rows_of(trainer, batch)))
    said = model.head(trainer.model).logits(model.hidden_states(trainer.model, row)).log_softmax(-1)
    first = row.segments.bounds[:-1].long()
    told = torch.ones(len(row.tokens), dtype=torch.bool).index_fill(0, first, False).nonzero()[:, 0]
    said[told - 1].gather(1, row.tokens[told, None]).sum().backward()
    theirs = reference_model(model_dir_of(name))
    theirs.get_input_embeddings().padding_idx = None
    torch.cat(logps_of(theirs, made)).sum().backward()
    expected = {n: p.grad for n, p in theirs.named_parameters()}
    close = 2e-4 if name in SEEING_HYBRIDS else 1e-4
    for n, p in trainer.model.named_parameters():
        if not p.requires_grad:  # SigLIP's pooling, which transformers' gradient does not reach either
            assert p.grad is expected[n] is None
            continue
        torch.testing.assert_close(p.grad, expected[n], atol=close * float(expected[n].abs().max()) + 5e-6, rtol=0, msg=n)


def rows_of(trainer, batch):
    from areal_x_torch.flat_rows import flatten_rows

    return (
        trainer.forward.row(batch, flat, slice(0, len(flat.places)), None)
        for flat in flatten_rows(batch.segment_ids, batch.tokens.size)
    )


@pytest.mark.parametrize(
    "name",
    ["qwen2_5_vl-tied", "qwen3_vl", "gemma3_vl-headed", "mistral3_vl-tied", "gemma4_vl", "gemma4_unified_vl", "llama4_vl"],
)
def test_what_is_saved_after_a_step_says_the_same_in_transformers_and_goes_on(model_dir_of, tmp_path, name):
    made = shown_to(model_dir_of(name), image_like=False)
    packed = pack(made, ROW)
    batch, trainer = learnable(packed.batch), trainer_of(model_dir_of(name))
    before = {n: x.copy() for n, x in trainer.weights()}
    trainer.update(batch, losses.ppo_clip)
    trainer.save(tmp_path)
    assert any(np.abs(x - before[n]).max() > 1e-4 for n, x in trainer.weights() if "vis" in n)  # the tower learns too
    names = [{n for n, _ in model_dir.read_tensors(directory)} for directory in (tmp_path, model_dir_of(name))]
    assert names[0] == names[1]
    after = dict(trainer.weights())
    assert all(np.array_equal(after[n], x) for n, x in before.items() if "tower.head." in n)  # which no image goes through
    _, info = AutoModelForImageTextToText.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    with torch.no_grad():
        theirs = logps_of(reference_model(tmp_path), made)
    for ours, expected in zip(packed.gather(trainer.logprobs(batch)), theirs, strict=True):
        np.testing.assert_allclose(ours[1:], expected.numpy(), atol=2e-5, rtol=1e-5)
    other = trainer_of(model_dir_of(name))
    other.restore(tmp_path)
    assert other.update(batch, losses.ppo_clip) == trainer.update(batch, losses.ppo_clip)


def test_a_batch_without_images_is_a_step_for_the_tower_too(model_dir_of):
    """Its moments fade and its weights decay as those of all others do, whatever the order of batches."""
    trainer = trainer_of(model_dir_of("qwen3_vl"))
    before = {n: x.copy() for n, x in trainer.weights()}
    trainer.update(learnable(pack(with_images((5,), (4,)), ROW).batch), losses.ppo_clip)
    for n, x in trainer.weights():
        if "visual" in n:
            np.testing.assert_allclose(x, before[n] * (1 - 1e-3 * (x.ndim >= 2)), rtol=1e-6, err_msg=n)
    assert {float(state["step"]) for state in trainer.optimizer.state.values()} == {1}


def test_images_that_do_not_fit_are_refused(model_dir_of):
    trainer, batch = trainer_of(model_dir_of("qwen3_vl")), pack(with_images(*PROMPTS), ROW).batch
    with pytest.raises(UserError, match="patches of 95 numbers, but the model's tower takes 96"):
        trainer.logprobs(batch.replace(patches=batch.patches[:, :, :95]))
    grids = batch.grids.copy()
    grids[0, 0] = grids[0, 0][[0, 2, 1]] + [0, 1, 0]
    with pytest.raises(UserError, match="must be multiples of 2"):
        trainer.logprobs(batch.replace(grids=grids))
    with pytest.raises(UserError, match="image tokens, but its 0 images"):
        trainer.logprobs(batch.replace(patches=None, grids=None, image_segments=None))


def test_images_of_another_size_or_beside_each_other_are_refused(model_dir_of):
    directory = model_dir_of("gemma3_vl")
    trainer, batch = trainer_of(directory), pack(shown_to(directory), ROW).batch
    grids = batch.grids.copy()
    grids[0, 0] = [1, 2, 8]
    with pytest.raises(UserError, match="an image of 2×8 patches: the model's tower takes 4×4"):
        trainer.logprobs(batch.replace(grids=grids))
    tokens = batch.tokens.copy()
    row = np.flatnonzero(batch.tokens[0] == IMAGE)
    between = slice(row[3] + 1, row[4])  # the text between the first two images goes before them
    tokens[0, row[0] : row[4] + 4] = [*tokens[0, between], *[IMAGE] * 8]
    with pytest.raises(UserError, match="follows another at once: text must stand between them"):
        trainer.logprobs(batch.replace(tokens=tokens))


@pytest.mark.parametrize("inner", ["", "vision_model."])
def test_a_gemma_3_is_saved_and_sent_under_the_names_of_its_files(backend, model_dir_of, tmp_path, inner):
    """Those of the hub, which servers read, have one more module in the tower than those that transformers 5 writes."""
    source, read = tmp_path / "source", dict(model_dir.read_tensors(model_dir_of("gemma3_vl-headed")))
    named = {n.replace("vision_tower.", f"vision_tower.{inner}"): x for n, x in read.items()}
    model_dir.write_model(source, model_dir_of("gemma3_vl-headed"), named.items())
    trainer = create_trainer(backend, TrainerConfig(model=ModelConfig(str(source))))
    sent = dict(trainer.weights())
    assert named.keys() - sent.keys() <= {n for n in named if ".head." in n}
    assert all(np.array_equal(named[n], x) for n, x in sent.items())
    trainer.save(tmp_path / "saved")
    saved = dict(model_dir.read_tensors(tmp_path / "saved"))
    assert saved.keys() == named.keys()
    assert all(np.array_equal(named[n], x) for n, x in saved.items())


@pytest.mark.thorough
def test_what_hears_of_a_gemma_4_is_saved_as_it_is(backend, tmp_path):
    hears = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "subsampling_conv_channels": [4, 4]}
    hears |= {"output_proj_dims": 16, "attention_chunk_size": 4, "attention_context_left": 5}
    source = write_config(SEEING_PLACED["gemma4_vl-whole"] | {"audio_config": hears}, tmp_path / "source")
    config = TrainerConfig(ModelConfig(str(source)), optimizer=OPTIMIZER)
    trainer = create_trainer(backend, config)
    trainer.update(learnable(pack(shown_to(source, image_like=False), ROW).batch), losses.ppo_clip)
    trainer.save(tmp_path / "saved")
    before, after = (dict(model_dir.read_tensors(x)) for x in (source, tmp_path / "saved"))
    assert before.keys() == after.keys()
    kept = {n for n, x in before.items() if np.array_equal(x, after[n])}
    beside = {n for n in before if "audio" in n}
    assert beside
    assert kept == beside | {n for n in before if n.endswith((".layer_scalar", ".std_bias", ".std_scale"))}


def test_a_step_of_one_backend_is_that_of_the_other_with_images_that_see_themselves(model_dir_of, tmp_path):
    """From a state that the other saved."""
    pytest.importorskip("areal_x_jax")
    directory = model_dir_of("gemma3_vl-headed")
    packed = pack(shown_to(directory, image_like=False), ROW)
    batch, config = learnable(packed.batch), TrainerConfig(model=ModelConfig(str(directory)), optimizer=OPTIMIZER)
    first, second = (create_trainer(backend, config) for backend in ("torch", "jax"))
    first.update(batch, losses.ppo_clip)
    first.save(tmp_path)
    second.restore(tmp_path)
    ours, theirs = (trainer.update(batch, losses.ppo_clip) for trainer in (first, second))
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
    assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
    np.testing.assert_allclose(first.logprobs(batch), second.logprobs(batch), atol=1e-4)


def test_images_beside_prompts_that_are_shared_say_what_they_say_alone(backend, model_dir_of):
    """Their own prompts are shared by none: positions and what an image sees are those of each sequence."""
    directory = model_dir_of("gemma3_vl-narrow")
    prompt, none = np.arange(9, 39, dtype=np.int32), np.zeros(5)
    texts = [Trajectory.from_completion(prompt, prompt[i : i + 5], none, none, 1.0) for i in (3, 8, 11)]
    made = [*shown_to(directory, image_like=False), *texts]
    shared = pack(made, 2 * ROW, groups=[0, 1, 0, 2, 1, 2, *[3] * len(texts)])
    assert shared.batch.parents is not None
    trainer = create_trainer(backend, TrainerConfig(model=ModelConfig(str(directory)), share_prompts=True))
    apart = pack(made, 2 * ROW)
    found, expected = (x.gather(trainer.logprobs(x.batch)) for x in (shared, apart))
    for trajectory, ours, alone in zip(made, found, expected, strict=True):
        np.testing.assert_allclose(ours[trajectory.mask], alone[trajectory.mask], atol=1e-5)


def test_images_for_a_model_of_text_are_refused(model_dir_of):
    batch, trainer = pack(with_images(*PROMPTS), ROW).batch, trainer_of(model_dir_of("qwen3"))
    for ask in (trainer.logprobs, lambda batch: trainer.update(learnable(batch), losses.ppo_clip)):
        with pytest.raises(UserError, match="the model reads text only"):
            ask(batch)


def squared_error(policy, batch):
    return (policy.values - batch.advantages) ** 2 * batch.mask, {}


@pytest.mark.parametrize("name", ["qwen2_5_vl-tied", "qwen3_vl"])
def test_a_critic_of_a_model_that_sees_is_trained_and_read_again(model_dir_of, tmp_path, name):
    made = with_images(*PROMPTS, image_like=False)
    packed, trainer = pack(made, ROW), trainer_of(model_dir_of(name), head="reward")
    batch = learnable(packed.batch)
    assert not trainer.values(batch).any()  # its matrix begins as zeros
    for _ in range(2):  # the first reaches the score alone
        assert trainer.update(batch, squared_error)["grad_norm"] > 0
    trainer.save(tmp_path)
    assert model_dir.is_classifier(model_dir.read_config(tmp_path))
    names = [{n for n, _ in model_dir.read_tensors(directory)} for directory in (tmp_path, model_dir_of(name))]
    assert names[0] == names[1] - {"lm_head.weight"} | {"score.weight"}
    again = trainer_of(tmp_path, head="reward")
    np.testing.assert_array_equal(again.values(batch), trainer.values(batch))
    again.restore(tmp_path)
    assert again.update(batch, squared_error) == trainer.update(batch, squared_error)


def test_a_critic_of_a_model_that_sees_moves_to_jax_with_its_values(model_dir_of, tmp_path):
    pytest.importorskip("areal_x_jax")
    batch = learnable(pack(with_images(*PROMPTS, image_like=False), ROW).batch)
    trainer = trainer_of(model_dir_of("qwen3_vl"), head="value")
    for _ in range(2):
        trainer.update(batch, squared_error)
    trainer.save(tmp_path)
    theirs = create_trainer("jax", TrainerConfig(model=ModelConfig(str(tmp_path)), head="value", frozen=True))
    np.testing.assert_allclose(theirs.values(batch), trainer.values(batch), atol=1e-4)
