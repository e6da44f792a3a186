"""A model that sees, through the trainer: against transformers, in packed rows, on a mesh, saved and read again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_x.algorithms import losses
from areal_x.algorithms.weighting import sequence_mean
from areal_x.batching.packing import Packed, pack
from areal_x.errors import ConfigError, UserError
from areal_x.hf.model_dir import read_config, read_tensors
from areal_x.protocols.trainer_config import ModelConfig, OptimizerConfig, TrainerConfig
from areal_x.types import Batch, Images, Trajectory
from areal_x_jax import head
from areal_x_jax.architecture import Architecture, read_architecture
from areal_x_jax.dense_attention import softcapped
from areal_x_jax.images import image_arrays
from areal_x_jax.model import head_kernel, hidden_states
from areal_x_jax.parameters import FIXED, Params
from areal_x_jax.sharding import ONE_DEVICE
from areal_x_jax.trainer import Trainer
from areal_x_jax.vision import image_features
from areal_x_jax.vision_architecture import MODULES, VisionArchitecture
from areal_x_jax.weights import from_tensors, places, saved_name, to_tensors
from tests.models import (
    SEEING_PLACED,
    SEEING_ROWS,
    SEEING_SQUARES,
    SEEING_TILES,
    log_softmax,
    reference_model,
    seen_logits,
    shown_to,
    stand_in_reference,
    with_images,
)
from tests.thorough import further, thorough

from .meshes import learn, learn_on

MadeModel = Callable[[str], Path]
QWENS = ["qwen3_vl", *further("qwen2_5_vl")]
FAMILIES = [*QWENS, *further("gemma3_vl", "mistral3_vl", "gemma4_vl", "gemma4_unified_vl", "llama4_vl")]
SHAPES = [*QWENS, *further(*SEEING_SQUARES, *SEEING_ROWS, *SEEING_PLACED, *SEEING_TILES)]
ROW = 64
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, weight_decay=0.1, warmup_steps=4, clip_norm=0.5, eps=1e-4)


def make_trainer(directory: Path, **changes: Any) -> Trainer:
    defaults: dict[str, Any] = {"optimizer": OPTIMIZER, "micro_batch_rows": 2, "head_chunk": 64}
    return Trainer(TrainerConfig(**{**defaults, "model": ModelConfig(path=str(directory)), **changes}))


def learnable(packed: Packed) -> Batch:
    return packed.batch.replace(weights=np.asarray(sequence_mean(packed.batch.mask, packed.batch.segment_ids), np.float32))


def packed_of(directory: Path, **how: Any) -> Packed:
    return pack(shown_to(directory, **how), ROW)


def hidden_of(arch: Architecture, params: Params, batch: Batch) -> Any:
    arrays = image_arrays(batch, arch.vision)
    assert arrays is not None
    features = image_features(arch, params, arrays, False, ONE_DEVICE, "auto")
    packed = (batch.tokens, batch.positions, batch.segment_ids)
    return hidden_states(arch, params, *map(jnp.asarray, packed), images=features)[0]


def load(directory: Path) -> tuple[Architecture, Params]:
    arch = read_architecture(read_config(directory))
    return arch, from_tensors(arch, read_tensors(directory), str(directory))


def image_logit_deviation(directory: Path, image_like: bool = False) -> float:
    """The largest difference of any logit of packed sequences, with images and without, from transformers'."""
    import torch

    arch, params = load(directory)
    packed = packed_of(directory, image_like=image_like)
    logits = jax.jit(lambda params: hidden_of(arch, params, packed.batch) @ head_kernel(params))(params)
    logits = softcapped(logits, arch.logit_softcap)
    model = stand_in_reference(directory) if image_like else reference_model(directory)
    with torch.no_grad():
        theirs = [seen_logits(model, trajectory).numpy() for trajectory in shown_to(directory, image_like=image_like)]
    # np.max, as the largest of Python's may pass over a NaN.
    return float(np.max([np.abs(a - b).max() for a, b in zip(in_sequences(packed, logits), theirs, strict=True)]))


def in_sequences(packed: Packed, x: Any) -> list[np.ndarray]:
    """Returns the values at each trajectory's tokens."""
    places = zip(packed.places.rows, packed.places.starts, packed.lengths, strict=True)
    return [np.asarray(x)[row, start : start + length] for row, start, length in places]


def image_gradient_deviation(directory: Path) -> float:
    """The largest difference of any gradient of a loss of packed sequences from transformers', relative to the largest of its
    tensor."""
    import torch

    arch, params = load(directory)
    batch = packed_of(directory, image_like=False).batch

    @jax.jit
    def loss(params: Params) -> Any:
        hidden, ids = hidden_of(arch, params, batch), jnp.asarray(batch.segment_ids)
        how = {"temperature": 1.0, "chunk": 64, "softcap": arch.logit_softcap}
        return -jnp.sum(head.logprobs(hidden, head_kernel(params), jnp.asarray(batch.tokens), ids, **how)[0])

    found, model = to_tensors(arch, jax.grad(loss)(params)), reference_model(directory)
    fixed = {name for name, place in places(arch).items() if place.path[-1] in FIXED}
    ours = {name: x for name, x in found if name not in fixed}
    for trajectory in shown_to(directory, image_like=False):
        logp = torch.log_softmax(seen_logits(model, trajectory)[:-1], -1)
        (-logp[torch.arange(len(logp)), torch.tensor(trajectory.tokens[1:]).long()].sum()).backward()
    of_names = {saved_name(arch, name): x.grad for name, x in model.named_parameters()}
    theirs = {name: x.numpy() for name, x in of_names.items() if x is not None}
    assert ours.keys() == theirs.keys()
    # That of a key's bias in SigLIP is 0, but for rounding.
    scales = {name: max(np.abs(x).max(), 1e-2) for name, x in theirs.items()}
    return float(np.max([np.abs(ours[name] - x).max() / scales[name] for name, x in theirs.items()]))


@pytest.mark.parametrize("family", SHAPES)
def test_logits_of_packed_rows_are_those_of_transformers(family: str, model_dir_of: MadeModel) -> None:
    packed, made = packed_of(model_dir_of(family)), shown_to(model_dir_of(family))
    rows = [{made[i].images is None for i in np.flatnonzero(packed.places.rows == row)} for row in packed.places.rows]
    assert family not in FAMILIES or {True, False} in rows  # sequences with images and without share one
    # The model that an image's id stands in for is another one if its head is the embedding.
    tied = "tie_word_embeddings" not in (config := read_config(model_dir_of(family))) or config["tie_word_embeddings"]
    assert image_logit_deviation(model_dir_of(family), image_like=not tied) < 1e-4


@pytest.mark.parametrize("family", SHAPES)
def test_gradients_are_those_of_transformers_the_towers_too(family: str, model_dir_of: MadeModel) -> None:
    assert image_gradient_deviation(model_dir_of(family)) < 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_an_update_is_that_of_torch_and_what_is_saved_loads_in_transformers(
    family: str, model_dir_of: MadeModel, tmp_path: Path
) -> None:
    import torch

    trainer, model = make_trainer(model_dir_of(family)), reference_model(model_dir_of(family))
    made = shown_to(model_dir_of(family), image_like=False)
    packed = pack(made, ROW)
    learned, total = trainer.update(learnable(packed), losses.sft), torch.zeros(())
    for trajectory in made:
        logp = torch.log_softmax(seen_logits(model, trajectory)[:-1], -1)
        own = logp[torch.arange(len(logp)), torch.tensor(trajectory.tokens[1:]).long()][torch.tensor(trajectory.mask[1:])]
        total = total - own.mean() / len(made)
    total.backward()
    assert learned["loss"] == pytest.approx(total.item(), rel=1e-5)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip_norm)
    assert learned["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    decayed = [[p for p in model.parameters() if (p.ndim >= 2) == matrix] for matrix in (True, False)]
    groups = [{"params": own, "weight_decay": decay} for own, decay in zip(decayed, (0.1, 0.0), strict=True)]
    torch.optim.AdamW(groups, lr=1e-2 / 4, betas=(OPTIMIZER.beta1, OPTIMIZER.beta2), eps=OPTIMIZER.eps).step()
    ours = dict(trainer.weights())
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(ours[saved_name(trainer.arch, name)], parameter.detach().numpy(), atol=2e-5, err_msg=name)

    trainer.save(tmp_path)
    saved = dict(read_tensors(tmp_path))
    assert saved.keys() == {name for name, _ in read_tensors(model_dir_of(family))}
    again = reference_model(tmp_path)
    for name, parameter in again.named_parameters():
        np.testing.assert_array_equal(saved[saved_name(trainer.arch, name)], parameter.detach().numpy())
    for trajectory, logp in zip(made, packed.gather(trainer.logprobs(packed.batch)), strict=True):
        with torch.no_grad():
            logits = seen_logits(again, trajectory).numpy()
        expected = log_softmax(logits[:-1])[np.arange(len(logits) - 1), trajectory.tokens[1:]]
        np.testing.assert_allclose(logp[1:], expected, atol=1e-4)


@pytest.mark.parametrize("name", ["adamw", *further("muon")])
def test_training_goes_on_from_a_saved_state_with_the_same_bits(name: str, model_dir_of: MadeModel, tmp_path: Path) -> None:
    batch, optimizer = learnable(packed_of(model_dir_of("qwen3_vl"))), replace(OPTIMIZER, name=name)
    trainer = make_trainer(model_dir_of("qwen3_vl"), optimizer=optimizer)
    trainer.update(batch, losses.sft)
    trainer.save(tmp_path)
    restored = make_trainer(model_dir_of("qwen3_vl"), optimizer=optimizer)
    restored.restore(tmp_path)
    assert restored.version == 1
    jax.tree.map(np.testing.assert_array_equal, (trainer.params, trainer.moments), (restored.params, restored.moments))


@thorough
def test_rows_at_once_and_one_by_one_give_the_same_update(model_dir_of: MadeModel) -> None:
    batch = learnable(packed_of(model_dir_of("qwen3_vl")))
    batch = batch.map(lambda x: x[[0, 1, 2, 1]])
    one, four = (make_trainer(model_dir_of("qwen2_5_vl"), micro_batch_rows=rows) for rows in (1, 4))
    learned, expected = one.update(batch, losses.sft), four.update(batch, losses.sft)
    assert learned["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert learned["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), one.params, four.params)
    # Other rows with other images, and as many patches to the next power of two.
    others = learnable(pack(with_images((2, (1, 8, 10), 1), (3,), ((1, 2, 2), 4, (1, 2, 2)), seed=1), ROW))
    assert others.patches.shape[1] < batch.patches.shape[1]
    for another in (batch.map(lambda x: x[[3, 1, 0]]), others.map(lambda x: x[[0, 0, 1, 0]])):
        one.update(another, losses.sft)
    assert one.programs == 1


def test_a_batch_without_images_is_that_of_a_text_model(model_dir_of: MadeModel) -> None:
    import torch

    made = with_images((5,), (9,), (3,), image_like=False)
    packed, trainer = pack(made, ROW), make_trainer(model_dir_of("qwen3_vl"))
    assert not packed.batch.has_images
    model = reference_model(model_dir_of("qwen3_vl"))
    for trajectory, logp in zip(made, packed.gather(trainer.logprobs(packed.batch)), strict=True):
        with torch.no_grad():
            logits = seen_logits(model, trajectory).numpy()
        expected = log_softmax(logits[:-1])[np.arange(len(logits) - 1), trajectory.tokens[1:]]
        np.testing.assert_allclose(logp[1:], expected, atol=1e-4)


@thorough
@pytest.mark.parametrize(
    "name, mesh",
    [
        ("qwen3_vl", {"data": 2, "fsdp": 2, "tensor": 2}),
        ("gemma3_vl", {"fsdp": 2, "context": 2, "tensor": 2}),
        ("mistral3_vl", {"data": 2, "fsdp": 2, "tensor": 2}),
        ("gemma4_vl", {"data": 2, "fsdp": 2, "tensor": 2}),
        ("llama4_vl", {"data": 2, "fsdp": 2, "expert": 2}),
    ],
)
def test_updates_are_the_same_on_a_mesh(name: str, mesh: dict[str, int], model_dir_of: MadeModel) -> None:
    directory = model_dir_of(name)
    alone = learn(directory, {})
    (found,) = learn_on(directory, [mesh], JAX_DISABLE_MOST_OPTIMIZATIONS="1")
    np.testing.assert_allclose(found["loss"], alone["loss"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["grad_norm"], alone["grad_norm"], rtol=1e-4)
    np.testing.assert_allclose(found["logp"], alone["logp"], atol=1e-4)
    # Of images of one size a row has one or two, and more patches then; Pixtral's differ by their rows' breaks.
    assert found["programs"] == alone["programs"] <= (1 if name in ("qwen3_vl", "gemma4_vl") else 2)
    assert found["share"] < 0.6


@thorough
def test_a_critic_of_a_model_that_sees_is_trained_and_read_again(model_dir_of: MadeModel, tmp_path: Path) -> None:
    batch = learnable(packed_of(model_dir_of("qwen3_vl")))
    batch = batch.replace(returns=np.ones(batch.shape, np.float32), old_values=np.zeros(batch.shape, np.float32))
    trainer = make_trainer(model_dir_of("qwen2_5_vl"), head="reward", optimizer=replace(OPTIMIZER, warmup_steps=0))
    assert not trainer.values(batch).any()  # its matrix begins as zeros
    trainer.update(batch, lambda policy, batch: ((policy.values - batch.returns) ** 2 * batch.mask, {}))
    trainer.save(tmp_path)
    values = make_trainer(tmp_path, head="reward").values(batch)
    np.testing.assert_array_equal(values, trainer.values(batch))
    score = dict(trainer.weights())["score.weight"]
    hidden = hidden_of(trainer.arch, trainer.params, batch)
    np.testing.assert_allclose(values, (hidden @ score.T)[..., 0] * (batch.segment_ids > 0), atol=1e-5)


def as_on_the_hub(family: str, config: dict[str, Any], name: str) -> str:
    """The name under which the other half of the hub's models has a tensor."""
    theirs, ours = MODULES[family], MODULES["qwen3_vl" if family == "qwen2_5_vl" else "qwen2_5_vl"]
    for module, other in sorted(zip(theirs, ours, strict=True), reverse=True):
        if name.startswith(f"{module}."):
            return other + name.removeprefix(module)
    return name


@pytest.mark.parametrize("family", QWENS)
def test_models_are_read_as_they_are_on_the_hub(family: str, model_dir_of: MadeModel) -> None:
    """Under either names, and with the text's sizes beside the tower's, as older configs of Qwen2.5-VL have them."""
    directory = model_dir_of(family)
    config, tensors = read_config(directory), dict(read_tensors(directory))
    arch = read_architecture(config)
    renamed = {as_on_the_hub(family, config, name): x for name, x in tensors.items()}
    assert len(renamed.keys() & tensors.keys()) == 1  # the head
    expected, found = (from_tensors(arch, x.items(), "made") for x in (tensors, renamed))
    jax.tree.map(np.testing.assert_array_equal, expected, found)
    text = dict(config["text_config"])
    sections = text.pop("rope_parameters")["mrope_section"]
    flat = {**text, **config, "rope_scaling": {"type": "mrope", "mrope_section": sections}, "rope_theta": 1e4}
    del flat["text_config"]
    assert read_architecture(flat) == arch


def test_tensors_of_the_tower_that_are_missing_or_of_another_shape_are_named(model_dir_of: MadeModel) -> None:
    directory = model_dir_of("qwen3_vl")
    arch, tensors = read_architecture(read_config(directory)), dict(read_tensors(directory))
    name = "model.visual.deepstack_merger_list.1.norm.bias"
    without = {key: x for key, x in tensors.items() if key != name}
    with pytest.raises(UserError, match=f"missing {name}"):
        from_tensors(arch, without.items(), "made")
    kernel = "model.visual.patch_embed.proj.weight"
    with pytest.raises(
        UserError, match=r"proj.weight has the shape \(32, 96\), but its config.json requires \(32, 3, 2, 4, 4\)"
    ):
        from_tensors(arch, {**tensors, kernel: tensors[kernel].reshape(32, -1)}.items(), "made")


def test_images_that_are_not_those_of_the_tokens_or_the_model_are_refused(model_dir_of: MadeModel) -> None:
    arch = read_architecture(read_config(model_dir_of("qwen3_vl"))).vision
    (seeing,) = with_images((2, (1, 4, 4), 1))
    assert seeing.images is not None

    def arrays(trajectory: Trajectory, arch: VisionArchitecture | None = arch) -> Any:
        return image_arrays(pack([trajectory], ROW).batch, arch)

    assert arrays(seeing).patches.shape == (1, 16, 96)
    with pytest.raises(UserError, match="the model reads text only"):
        arrays(seeing, None)
    with pytest.raises(UserError, match="4 image tokens and no image"):
        arrays(replace(seeing, images=None))
    with pytest.raises(UserError, match="has 4 image tokens, but its 1 images need 2"):
        arrays(replace(seeing, images=Images(seeing.images.patches[:8], np.array([[1, 2, 4]]))))
    with pytest.raises(UserError, match="patches of 90 numbers, but the model's tower takes 96"):
        arrays(replace(seeing, images=replace(seeing.images, patches=seeing.images.patches[:, :90])))
    with pytest.raises(ValueError, match="1 images whose grids have 16 patches came with 12"):
        replace(seeing.images, patches=seeing.images.patches[:12])


def test_a_text_model_is_given_no_images_and_a_student_that_sees_no_blind_teacher(model_dir_of: MadeModel) -> None:
    batch = learnable(packed_of(model_dir_of("qwen3_vl")))
    trainer = make_trainer(model_dir_of("qwen3"))
    for ask in (trainer.logprobs, lambda batch: trainer.update(batch, losses.sft)):
        with pytest.raises(UserError, match="the model reads text only: train a vision-language model"):
            ask(batch)
    teacher = {"teacher": str(model_dir_of("qwen3")), "divergence": lambda student, teacher: student[..., 0]}
    with pytest.raises(ConfigError, match=r"train.teacher .* a model that sees images as"):
        make_trainer(model_dir_of("qwen3_vl"), **teacher)
