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
from areal_x.data.packing import Packed, pack
from areal_x.errors import ConfigError, UserError
from areal_x.model_dir import read_config, read_tensors, write_model
from areal_x.trainer import ModelConfig, OptimizerConfig, TrainerConfig
from areal_x.types import Batch, Images, Trajectory
from areal_x_jax import head
from areal_x_jax.images import image_arrays
from areal_x_jax.layout import ALONE
from areal_x_jax.model import head_kernel, hidden_states
from areal_x_jax.parameters import Params
from areal_x_jax.shape import Shape, shape_of
from areal_x_jax.trainer import Trainer
from areal_x_jax.vision import look
from areal_x_jax.weights import from_tensors, places, saved_name, to_tensors

from .conftest import IMAGE, SEEING, log_softmax, reference_model, with_images
from .meshes import learn, learn_on

MadeModel = Callable[[str], Path]
FAMILIES = ("qwen2_5_vl", "qwen3_vl")
# Several images in a sequence, ragged windows, two frames, none at all.
PROMPTS = [(3, (1, 4, 6), 2, (2, 4, 4), 1), (5,), (1, (1, 6, 10)), (2, (1, 2, 2), 1, (1, 8, 2), 2), (4,), ((1, 4, 4),)]
IMAGES_OF = [[part for part in parts if not isinstance(part, int)] for parts in PROMPTS]
ROW, STAND_IN = 64, 49
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, weight_decay=0.1, warmup_steps=4, clip_norm=0.5, eps=1e-4)


def make_trainer(directory: Path, **changes: Any) -> Trainer:
    defaults: dict[str, Any] = {"optimizer": OPTIMIZER, "micro_batch_rows": 2, "head_chunk": 64}
    return Trainer(TrainerConfig(**{**defaults, "model": ModelConfig(path=str(directory)), **changes}))


def learnable(packed: Packed) -> Batch:
    return packed.batch.replace(weights=np.asarray(sequence_mean(packed.batch.mask, packed.batch.segment_ids), np.float32))


def packed_of(**how: Any) -> Packed:
    return pack(with_images(*PROMPTS, **how), ROW)


def torch_logits(model: Any, trajectory: Trajectory) -> Any:
    """transformers' own of one sequence alone."""
    import torch

    tokens = torch.tensor(trajectory.tokens).long()
    if trajectory.images is None:
        return model(tokens[None]).logits[0]
    # It would take a token of the answer with an image's id for an image's: one that nothing else uses stands in for it.
    tokens[(tokens == IMAGE) & torch.tensor(trajectory.mask)] = STAND_IN
    pixels, grids = torch.tensor(trajectory.images.patches), torch.tensor(trajectory.images.grids).long()
    kinds = (tokens == IMAGE).int()[None]
    return model(tokens[None], pixel_values=pixels, image_grid_thw=grids, mm_token_type_ids=kinds).logits[0]


def reference(directory: Path) -> Any:
    import torch

    model = reference_model(directory)
    embeddings = model.get_input_embeddings().weight
    with torch.no_grad():
        embeddings[STAND_IN] = embeddings[IMAGE]
    return model


def hidden_of(shape: Shape, params: Params, batch: Batch) -> Any:
    arrays = image_arrays(batch, shape.vision)
    assert arrays is not None
    features = look(shape, params, arrays, False, ALONE, "auto")
    packed = (batch.tokens, batch.positions, batch.segment_ids)
    return hidden_states(shape, params, *map(jnp.asarray, packed), False, images=features)[0]


def load(directory: Path) -> tuple[Shape, Params]:
    shape = shape_of(read_config(directory))
    return shape, from_tensors(shape, read_tensors(directory), str(directory))


def image_logit_deviation(directory: Path, image_like: bool = False) -> float:
    """The largest difference of any logit of packed sequences, with images and without, from transformers'."""
    import torch

    shape, params = load(directory)
    packed = packed_of(image_like=image_like)
    logits = jax.jit(lambda params: hidden_of(shape, params, packed.batch) @ head_kernel(params))(params)
    model = reference(directory) if image_like else reference_model(directory)
    with torch.no_grad():
        theirs = [torch_logits(model, trajectory).numpy() for trajectory in with_images(*PROMPTS, image_like=image_like)]
    return max(float(np.abs(a - b).max()) for a, b in zip(in_sequences(packed, logits), theirs, strict=True))


def in_sequences(packed: Packed, x: Any) -> list[np.ndarray]:
    """Of each trajectory, what stands at its tokens."""
    places = zip(packed.rows, packed.starts, packed.lengths, strict=True)
    return [np.asarray(x)[row, start : start + length] for row, start, length in places]


def image_gradient_deviation(directory: Path) -> float:
    """The largest difference of any gradient of a loss of packed sequences from transformers', relative to the largest of its
    tensor."""
    import torch

    shape, params = load(directory)
    batch, tokens = packed_of(image_like=False).batch, 0

    @jax.jit
    def loss(params: Params) -> Any:
        hidden, ids = hidden_of(shape, params, batch), jnp.asarray(batch.segment_ids)
        return -jnp.sum(head.logprobs(hidden, head_kernel(params), jnp.asarray(batch.tokens), ids, 1.0, 64)[0])

    ours, model = dict(to_tensors(shape, jax.grad(loss)(params))), reference_model(directory)
    for trajectory in with_images(*PROMPTS, image_like=False):
        logp = torch.log_softmax(torch_logits(model, trajectory)[:-1], -1)
        (-logp[torch.arange(len(logp)), torch.tensor(trajectory.tokens[1:]).long()].sum()).backward()
        tokens += len(logp)
    theirs = {saved_name(shape, name): x.grad.numpy() for name, x in model.named_parameters()}
    assert ours.keys() == theirs.keys()
    return max(float(np.abs(ours[name] - x).max() / np.abs(x).max()) for name, x in theirs.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_packed_rows_are_those_of_transformers(family: str, model_dir_of: MadeModel) -> None:
    packed = packed_of()
    rows = {row: {i for i in np.flatnonzero(packed.rows == row)} for row in packed.rows}
    assert any(len(own) > 1 and any(not IMAGES_OF[i] for i in own) and any(IMAGES_OF[i] for i in own) for own in rows.values())
    assert image_logit_deviation(model_dir_of(family), image_like=True) < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_transformers_the_towers_too(family: str, model_dir_of: MadeModel) -> None:
    assert image_gradient_deviation(model_dir_of(family)) < 1e-3
