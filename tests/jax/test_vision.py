from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_x.errors import UserError
from areal_x.model_dir import read_config, read_tensors
from areal_x_jax.images import image_places, mrope_positions, patch_layout
from areal_x_jax.parameters import Params
from areal_x_jax.vision import (
    VisionShape,
    encode,
    multimodal_rotation,
    put,
    take,
    vision_parameter_shapes,
    vision_places,
    vision_shape_of,
)

from .conftest import SIZES

IMAGE, START, END = 5, 7, 8
VISION = {"depth": 4, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "patch_size": 4, "out_hidden_size": 32}
TOWERS = {
    "qwen2_5_vl": {**VISION, "window_size": 16, "fullatt_block_indexes": [1]},
    "qwen3_vl": {**VISION, "num_position_embeddings": 49, "deepstack_visual_indexes": [0, 2]},
}
SECTIONS = {"qwen2_5_vl": [2, 3, 3], "qwen3_vl": [4, 2, 2]}
# Windows are of 4×4 patches: whole ones, ragged ones in either or both directions, an image smaller than a window, a video.
GRIDS = [(1, 4, 8), (1, 6, 10), (2, 4, 6), (1, 2, 2), (1, 8, 2)]
PATCHES = sum(t * h * w for t, h, w in GRIDS)


@dataclass(frozen=True)
class Made:
    """A random model as transformers has it, and its vision tower as this backend read it from its directory."""

    reference: Any
    directory: Path
    shape: VisionShape
    params: Params


@pytest.fixture(scope="module")
def made_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    torch.set_num_threads(1)

    @cache
    def make(family: str) -> Made:
        torch.manual_seed(len(family))
        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": SECTIONS[family]}
        text = {**SIZES, "hidden_size": 32, "head_dim": 16, "rope_parameters": rope, "bos_token_id": 1, "eos_token_id": 2}
        if family == "qwen2_5_vl":  # which has no head_dim of its own
            text = {**text, "num_attention_heads": 2}
        config = AutoConfig.for_model(
            family,
            text_config=text,
            vision_config=TOWERS[family],
            image_token_id=IMAGE,
            video_token_id=6,
            vision_start_token_id=START,
            vision_end_token_id=END,
        )
        model = AutoModelForImageTextToText.from_config(config)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.2)
        directory = tmp_path_factory.mktemp(family)
        model.save_pretrained(directory)
        shape = vision_shape_of(read_config(directory))
        return Made(model.float(), directory, shape, load(shape, dict(read_tensors(directory))))

    return make


def load(shape: VisionShape, tensors: dict[str, np.ndarray]) -> Params:
    params = jax.tree.map(lambda leaf: np.full(leaf.shape, np.nan, np.float32), vision_parameter_shapes(shape))
    for name, place in vision_places(shape).items():
        put(params, place, tensors[name])
    return params


def random_patches(shape: VisionShape, capacity: int = PATCHES) -> np.ndarray:
    """The same numbers for the images whatever the capacity; beyond them others, none of them 0."""
    patches = np.random.default_rng(1).normal(size=(capacity, shape.in_features)).astype(np.float32)
    patches[PATCHES:] = 100.0 * np.random.default_rng(2).normal(size=patches[PATCHES:].shape)
    return patches


def encoded(made: Made, capacity: int | None = None) -> list[np.ndarray]:
    """What encode says of GRIDS' images, then of each deepstack layer, without padding."""
    layout = patch_layout(GRIDS, made.shape, capacity)
    patches = random_patches(made.shape, len(layout.frames))
    embeddings, deepstack = jax.jit(encode, static_argnums=0)(made.shape, made.params, patches, layout)
    return [np.asarray(x)[: PATCHES // 4] for x in (embeddings, *deepstack)]


def torch_encoded(made: Made, patches: np.ndarray, grids: list[tuple[int, int, int]]) -> list[Any]:
    import torch

    said = made.reference.model.visual(torch.tensor(patches), grid_thw=torch.tensor(grids))
    return [said.pooler_output, *getattr(said, "deepstack_features", [])]


@pytest.mark.parametrize("family", TOWERS)
def test_embeddings_are_those_of_transformers(family: str, made_of: Callable[[str], Made]) -> None:
    made = made_of(family)
    ours, theirs = encoded(made), torch_encoded(made, random_patches(made.shape), GRIDS)
    assert len(ours) == len(theirs) == (3 if family == "qwen3_vl" else 1)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b.detach().numpy(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", TOWERS)
def test_an_image_says_the_same_alone_and_in_any_padding(family: str, made_of: Callable[[str], Made]) -> None:
    made = made_of(family)
    together = encoded(made)
    for a, b in zip(together, encoded(made, 2 * len(patch_layout(GRIDS, made.shape).frames)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    start = 4 * 8
    patches = random_patches(made.shape)[start : start + 60]
    layout = patch_layout(GRIDS[1:2], made.shape, 60)
    embeddings, deepstack = encode(made.shape, made.params, jnp.asarray(patches), layout)
    for a, b in zip(together, (embeddings, *deepstack), strict=True):
        np.testing.assert_allclose(a[start // 4 : start // 4 + 15], b, atol=1e-5)


@pytest.mark.parametrize("family", TOWERS)
def test_in_bf16_embeddings_are_as_exact_as_those_of_transformers(family: str, made_of: Callable[[str], Made]) -> None:
    import torch

    made = made_of(family)
    exact = encoded(made)
    ours = encoded(replace(made, params=jax.tree.map(lambda x: x.astype(jnp.bfloat16), made.params)))
    half = copy.deepcopy(made.reference.model.visual).to(torch.bfloat16)
    said = half(torch.tensor(random_patches(made.shape)).bfloat16(), grid_thw=torch.tensor(GRIDS))
    theirs = [x.detach().float().numpy() for x in (said.pooler_output, *getattr(said, "deepstack_features", []))]
    for a, b, x in zip(ours, theirs, exact, strict=True):
        assert a.dtype == jnp.bfloat16
        assert np.abs(a - x).mean() < 1.5 * np.abs(b - x).mean()


@pytest.mark.parametrize("family", TOWERS)
@pytest.mark.parametrize("remat", [False, True])
def test_gradients_are_those_of_torch_and_ignore_padding(family: str, remat: bool, made_of: Callable[[str], Made]) -> None:
    import torch

    made = made_of(family)
    layout = patch_layout(GRIDS, made.shape)
    assert len(layout.frames) > PATCHES
    patches = random_patches(made.shape, len(layout.frames))
    tokens = PATCHES // 4
    count = 1 + len(made.shape.deepstack)
    probes = np.random.default_rng(3).normal(size=(count, tokens, made.shape.out)).astype(np.float32) / tokens

    def loss(params: Params) -> jax.Array:
        embeddings, deepstack = encode(made.shape, params, jnp.asarray(patches), layout, remat)
        said = zip((embeddings, *deepstack), probes, strict=True)
        return sum(jnp.sum(x[:tokens] * probe) for x, probe in said)

    ours = jax.jit(jax.grad(loss))(made.params)
    tower = made.reference.model.visual
    tower.zero_grad()
    said = torch_encoded(made, patches[:PATCHES], GRIDS)
    sum((x * torch.tensor(probe)).sum() for x, probe in zip(said, probes, strict=True)).backward()
    prefix = "visual." if family == "qwen2_5_vl" else "model.visual."
    theirs = {prefix + name: parameter.grad.numpy() for name, parameter in tower.named_parameters()}
    assert theirs.keys() == vision_places(made.shape).keys()
    for name, place in vision_places(made.shape).items():
        scale = np.abs(theirs[name]).max()
        np.testing.assert_allclose(take(ours, place) / scale, theirs[name] / scale, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("family", TOWERS)
def test_tensors_go_in_and_come_out_under_the_same_names_with_the_same_bits(
    family: str, made_of: Callable[[str], Made]
) -> None:
    made = made_of(family)
    read = {name: tensor for name, tensor in read_tensors(made.directory) if "visual." in name}
    assert vision_places(made.shape).keys() == read.keys()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(made.params))
    for name, place in vision_places(made.shape).items():
        assert read[name].shape == place.tensor
        np.testing.assert_array_equal(take(jax.device_put(made.params), place), read[name])


def test_the_program_does_not_grow_with_depth_or_with_images(made_of: Callable[[str], Made]) -> None:
    def program(depth: int, grids: list[tuple[int, int, int]]) -> int:
        config = read_config(made_of("qwen3_vl").directory)
        shape = vision_shape_of({**config, "vision_config": {**config["vision_config"], "depth": depth}})
        layout = patch_layout(grids, shape)
        patches = jax.ShapeDtypeStruct((len(layout.frames), shape.in_features), jnp.float32)
        lowered = jax.jit(encode, static_argnums=0).lower(shape, vision_parameter_shapes(shape), patches, layout)
        return len(lowered.as_text().splitlines())

    assert program(3, [(1, 8, 8)]) == program(12, [(1, 2, 4), (1, 6, 6), (1, 2, 2)])


def test_the_capacity_is_a_power_of_two_of_squares(made_of: Callable[[str], Made]) -> None:
    shape = made_of("qwen3_vl").shape

    def capacity(*grids: tuple[int, int, int]) -> int:
        return len(patch_layout(grids, shape).frames)

    assert capacity() == 4
    assert capacity((1, 2, 2)) == 4
    assert capacity((1, 4, 4)) == 16
    assert capacity((1, 4, 4), (1, 2, 2)) == 32


def test_each_frame_and_each_window_is_a_segment_of_its_own(made_of: Callable[[str], Made]) -> None:
    layout = patch_layout([(2, 4, 6), (1, 2, 2)], made_of("qwen2_5_vl").shape)
    np.testing.assert_array_equal(layout.frames, np.repeat([1, 2, 3, 0], [24, 24, 4, 12]))
    # Squares of 2×2, three beside each other: two in the window of four columns, one in the ragged window.
    np.testing.assert_array_equal(layout.windows, np.repeat([1, 2, 1, 2, 3, 4, 3, 4, 5, 0], [8, 4, 8, 4, 8, 4, 8, 4, 4, 12]))
    np.testing.assert_array_equal(layout.rows[:8], [0, 0, 1, 1, 0, 0, 1, 1])
    np.testing.assert_array_equal(layout.columns[:8], [0, 1, 0, 1, 2, 3, 2, 3])
    assert layout.corners is None


@pytest.mark.parametrize("grid, capacity, complaint", [((1, 3, 4), None, "multiples of 2"), ((1, 4, 4), 12, "16 patches need")])
def test_images_that_do_not_fit_are_refused(
    grid: tuple[int, int, int], capacity: int | None, complaint: str, made_of: Callable[[str], Made]
) -> None:
    with pytest.raises(UserError, match=complaint):
        patch_layout([grid], made_of("qwen3_vl").shape, capacity)


def test_what_the_tower_does_not_do_is_refused_by_name(made_of: Callable[[str], Made]) -> None:
    config = read_config(made_of("qwen3_vl").directory)

    def changed(**fields: Any) -> dict[str, Any]:
        return {**config, "vision_config": {**config["vision_config"], **fields}}

    with pytest.raises(UserError, match="no images with LlavaForConditionalGeneration; it does with Qwen2_5_VL"):
        vision_shape_of({**config, "architectures": ["LlavaForConditionalGeneration"]})
    with pytest.raises(UserError, match="the activation 'relu'"):
        vision_shape_of(changed(hidden_act="relu"))
    with pytest.raises(UserError, match=r"deepstack_visual_indexes = \[2, 0\]"):
        vision_shape_of(changed(deepstack_visual_indexes=[2, 0]))


def prompt(*parts: int | tuple[int, int, int]) -> tuple[np.ndarray, list[tuple[int, int, int]]]:
    """Tokens of text (so many) and of images (of these grids), each image between its marks."""
    tokens: list[int] = []
    for part in parts:
        tokens += [20] * part if isinstance(part, int) else [START, *[IMAGE] * (part[0] * part[1] * part[2] // 4), END]
    return np.array(tokens, np.int32), [part for part in parts if not isinstance(part, int)]


@pytest.mark.parametrize("family", TOWERS)
@pytest.mark.parametrize("parts", [(3, (1, 4, 6), 5, (1, 8, 2), (2, 4, 4), 2), ((1, 2, 2),), (7,)])
def test_positions_are_those_of_transformers(family: str, parts: tuple[Any, ...], made_of: Callable[[str], Made]) -> None:
    import torch

    tokens, grids = prompt(*parts)
    theirs, _ = made_of(family).reference.model.get_rope_index(
        torch.tensor(tokens)[None].long(),
        mm_token_type_ids=torch.tensor(tokens == IMAGE)[None].int(),
        image_grid_thw=torch.tensor(grids) if grids else None,
    )
    np.testing.assert_array_equal(mrope_positions(tokens, grids, IMAGE, 2), theirs[:, 0].numpy())


def test_an_image_token_that_the_policy_wrote_is_text() -> None:
    tokens, grids = prompt(2, (1, 4, 4), 1)
    sampled = np.repeat([False, True], [len(tokens), 3])
    tokens = np.append(tokens, np.int32([20, IMAGE, 20]))
    positions = mrope_positions(tokens, grids, IMAGE, 2, sampled)
    np.testing.assert_array_equal(positions[:, -4:], np.tile(np.arange(6, 10), (3, 1)))
    places = image_places(tokens[None], IMAGE, sampled[None])
    np.testing.assert_array_equal(places[0], [-1, -1, -1, 0, 1, 2, 3, -1, -1, -1, -1, -1])
    with pytest.raises(UserError, match="has 5 image tokens, but its 1 images are 4 of them"):
        mrope_positions(tokens, grids, IMAGE, 2)


def test_an_image_that_text_interrupts_is_refused() -> None:
    with pytest.raises(UserError, match="the image at token 0 is interrupted: it needs 4 image tokens in a row"):
        mrope_positions(np.array([IMAGE, IMAGE, 20, IMAGE, IMAGE]), [(1, 4, 4)], IMAGE, 2)


def test_embeddings_are_counted_through_rows() -> None:
    tokens = np.array([[1, IMAGE, IMAGE, 1], [IMAGE, 1, 1, IMAGE]])
    np.testing.assert_array_equal(image_places(tokens, IMAGE), [[-1, 0, 1, -1], [2, -1, -1, 3]])


@pytest.mark.parametrize("family", TOWERS)
def test_the_rotation_is_that_of_transformers(family: str, made_of: Callable[[str], Made]) -> None:
    import torch

    positions = np.random.default_rng(0).integers(0, 200, (3, 2, 9)).astype(np.int32)
    ours = multimodal_rotation(jnp.asarray(positions), SECTIONS[family], family == "qwen3_vl", 1e4, 16)
    theirs = made_of(family).reference.model.language_model.rotary_emb(torch.zeros(1), torch.tensor(positions))
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(np.tile(a[:, :, 0], 2), b.numpy(), atol=1e-4, rtol=0)  # they repeat it for both halves


def test_sections_that_do_not_fill_a_head_are_refused() -> None:
    with pytest.raises(UserError, match=r"mrope_section = \[2, 3, 3\] must add up to head_dim / 2 = 16"):
        multimodal_rotation(jnp.zeros((3, 1, 4), jnp.int32), [2, 3, 3], False, 1e4, 32)
