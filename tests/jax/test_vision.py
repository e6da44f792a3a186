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
from areal_x.hf.image_positions import image_tokens, mrope_positions
from areal_x.hf.model_dir import read_config, read_tensors
from areal_x_jax.architecture import Architecture, read_architecture
from areal_x_jax.images import image_places, patch_layout
from areal_x_jax.parameters import Params, parameter_shapes
from areal_x_jax.vision import PatchLayout, encode, multimodal_rotation
from areal_x_jax.vision_architecture import MODULES, VisionArchitecture
from areal_x_jax.vision_families import read_vision_architecture
from areal_x_jax.weights import from_tensors, places, to_tensors
from tests.models import IMAGE, image_prompt, reference_model
from tests.thorough import further

FAMILIES = ("qwen2_5_vl", "qwen3_vl")
# Windows are of 4×4 patches: whole ones, ragged ones in either or both directions, an image smaller than a window, a video.
GRIDS = [(1, 4, 8), (1, 6, 10), (2, 4, 6), (1, 2, 2), (1, 8, 2)]
PATCHES = sum(t * h * w for t, h, w in GRIDS)


@dataclass(frozen=True)
class Made:
    """A random model as transformers has it, and its vision tower as this backend read it from its directory."""

    reference: Any
    directory: Path
    arch: Architecture
    params: Params

    @property
    def tower(self) -> VisionArchitecture:
        assert self.arch.vision is not None
        return self.arch.vision


@pytest.fixture(scope="module")
def made_of(model_dir_of: Callable[[str], Path]) -> Callable[[str], Made]:
    @cache
    def make(family: str) -> Made:
        directory = model_dir_of(family)
        arch = read_architecture(read_config(directory))
        params = from_tensors(arch, read_tensors(directory), str(directory))["vision"]
        return Made(reference_model(directory), directory, arch, params)

    return make


def random_patches(arch: VisionArchitecture, capacity: int = PATCHES) -> np.ndarray:
    """The same numbers for the images whatever the capacity; beyond them others, none of them 0."""
    patches = np.random.default_rng(1).normal(size=(capacity, arch.in_features)).astype(np.float32)
    patches[PATCHES:] = 100.0 * np.random.default_rng(2).normal(size=patches[PATCHES:].shape)
    return patches


def in_a_row(layout: PatchLayout) -> PatchLayout:
    return PatchLayout(*(None if x is None else x[None] for x in layout))


def encoded(made: Made, capacity: int | None = None) -> list[np.ndarray]:
    """Returns the output of encode for GRIDS' images, then that of each deepstack layer, without padding."""
    layout = patch_layout(GRIDS, made.tower, capacity)
    patches = random_patches(made.tower, len(layout.frames))
    embeddings, deepstack = jax.jit(encode, static_argnums=0)(made.arch, made.params, patches[None], in_a_row(layout))
    return [np.asarray(x)[0, : PATCHES // 4] for x in (embeddings, *deepstack)]


def torch_encoded(made: Made, patches: np.ndarray, grids: list[tuple[int, int, int]]) -> list[Any]:
    import torch

    said = made.reference.model.visual(torch.tensor(patches), grid_thw=torch.tensor(grids))
    return [said.pooler_output, *getattr(said, "deepstack_features", [])]


@pytest.mark.parametrize("family", FAMILIES)
def test_embeddings_are_those_of_transformers(family: str, made_of: Callable[[str], Made]) -> None:
    made = made_of(family)
    ours, theirs = encoded(made), torch_encoded(made, random_patches(made.tower), GRIDS)
    assert len(ours) == len(theirs) == (3 if family == "qwen3_vl" else 1)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b.detach().numpy(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_image_says_the_same_alone_and_in_any_padding(family: str, made_of: Callable[[str], Made]) -> None:
    made = made_of(family)
    together = encoded(made)
    for a, b in zip(together, encoded(made, 2 * len(patch_layout(GRIDS, made.tower).frames)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    start = 4 * 8
    patches = random_patches(made.tower)[start : start + 60]
    layout = patch_layout(GRIDS[1:2], made.tower, 60)
    embeddings, deepstack = encode(made.arch, made.params, jnp.asarray(patches)[None], in_a_row(layout))
    for a, b in zip(together, (embeddings, *deepstack), strict=True):
        np.testing.assert_allclose(a[start // 4 : start // 4 + 15], b[0], atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_in_bf16_embeddings_are_as_exact_as_those_of_transformers(family: str, made_of: Callable[[str], Made]) -> None:
    import torch

    made = made_of(family)
    exact = encoded(made)
    ours = encoded(replace(made, params=jax.tree.map(lambda x: x.astype(jnp.bfloat16), made.params)))
    half = copy.deepcopy(made.reference.model.visual).to(torch.bfloat16)
    said = half(torch.tensor(random_patches(made.tower)).bfloat16(), grid_thw=torch.tensor(GRIDS))
    theirs = [x.detach().float().numpy() for x in (said.pooler_output, *getattr(said, "deepstack_features", []))]
    for a, b, x in zip(ours, theirs, exact, strict=True):
        assert a.dtype == jnp.bfloat16
        assert np.abs(a - x).mean() < 1.5 * np.abs(b - x).mean()


@pytest.mark.parametrize(
    "family, remat, how",
    [
        ("qwen2_5_vl", False, "blocked"),
        ("qwen3_vl", True, "dense"),
        *further(
            ("qwen2_5_vl", False, "dense"),
            ("qwen2_5_vl", True, "dense"),
            ("qwen3_vl", False, "dense"),
            ("qwen3_vl", False, "blocked"),
        ),
    ],
)
def test_gradients_are_those_of_torch_and_ignore_padding(
    family: str, remat: bool, how: str, made_of: Callable[[str], Made]
) -> None:
    import torch

    made = made_of(family)
    layout = patch_layout(GRIDS, made.tower)
    assert len(layout.frames) > PATCHES
    patches = random_patches(made.tower, len(layout.frames))
    tokens = PATCHES // 4
    count = 1 + len(made.tower.deepstack)
    probes = np.random.default_rng(3).normal(size=(count, tokens, made.tower.out)).astype(np.float32) / tokens

    def loss(params: Params) -> jax.Array:
        embeddings, deepstack = encode(
            made.arch, params, jnp.asarray(patches)[None], in_a_row(layout), remat, implementation=how
        )
        said = zip((embeddings, *deepstack), probes, strict=True)
        return sum(jnp.sum(x[0, :tokens] * probe) for x, probe in said)

    ours = jax.jit(jax.grad(loss))(made.params)
    tower = made.reference.model.visual
    tower.zero_grad()
    said = torch_encoded(made, patches[:PATCHES], GRIDS)
    sum((x * torch.tensor(probe)).sum() for x, probe in zip(said, probes, strict=True)).backward()
    prefix = f"{MODULES[family][1]}."
    theirs = {prefix + name: parameter.grad.numpy() for name, parameter in tower.named_parameters()}
    assert theirs.keys() == {name for name in places(made.arch) if name.startswith(prefix)}
    params = jax.tree.map(jnp.zeros_like, parameter_shapes(made.arch)) | {"vision": ours}
    for name, gradient in to_tensors(made.arch, params):
        if name in theirs:
            scale = np.abs(theirs[name]).max()
            np.testing.assert_allclose(gradient / scale, theirs[name] / scale, atol=1e-4, err_msg=name)


def test_the_program_does_not_grow_with_depth_or_with_images(made_of: Callable[[str], Made]) -> None:
    def program(depth: int, grids: list[tuple[int, int, int]]) -> int:
        config = read_config(made_of("qwen3_vl").directory)
        arch = read_architecture({**config, "vision_config": {**config["vision_config"], "depth": depth}})
        assert arch.vision is not None
        layout = patch_layout(grids, arch.vision)
        patches = jax.ShapeDtypeStruct((1, len(layout.frames), arch.vision.in_features), jnp.float32)
        lowered = jax.jit(encode, static_argnums=0).lower(arch, parameter_shapes(arch)["vision"], patches, in_a_row(layout))
        return len(lowered.as_text().splitlines())

    assert program(3, [(1, 8, 8)]) == program(12, [(1, 2, 4), (1, 6, 6), (1, 2, 2)])


def test_the_capacity_is_a_power_of_two_of_squares(made_of: Callable[[str], Made]) -> None:
    arch = made_of("qwen3_vl").tower

    def capacity(*grids: tuple[int, int, int]) -> int:
        return len(patch_layout(grids, arch).frames)

    assert capacity() == 4
    assert capacity((1, 2, 2)) == 4
    assert capacity((1, 4, 4)) == 16
    assert capacity((1, 4, 4), (1, 2, 2)) == 32


def test_each_frame_and_each_window_is_a_segment_of_its_own(made_of: Callable[[str], Made]) -> None:
    layout = patch_layout([(2, 4, 6), (1, 2, 2)], made_of("qwen2_5_vl").tower)
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
        patch_layout([grid], made_of("qwen3_vl").tower, capacity)


def test_what_the_tower_does_not_do_is_refused_by_name(made_of: Callable[[str], Made]) -> None:
    config = read_config(made_of("qwen3_vl").directory)

    def changed(**fields: Any) -> dict[str, Any]:
        return {**config, "vision_config": {**config["vision_config"], **fields}}

    with pytest.raises(UserError, match="the activation 'relu'"):
        read_vision_architecture(changed(hidden_act="relu"))
    with pytest.raises(UserError, match=r"deepstack_visual_indexes = \[2, 0\]"):
        read_vision_architecture(changed(deepstack_visual_indexes=[2, 0]))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("parts", [(3, (1, 4, 6), 5, (1, 8, 2), (2, 4, 4), 2), ((1, 2, 2),), (7,)])
def test_positions_are_those_of_transformers(family: str, parts: tuple[Any, ...], made_of: Callable[[str], Made]) -> None:
    import torch

    tokens, grids = image_prompt(*parts)
    theirs, _ = made_of(family).reference.model.get_rope_index(
        torch.tensor(tokens)[None].long(),
        mm_token_type_ids=torch.tensor(tokens == IMAGE)[None].int(),
        image_grid_thw=torch.tensor(grids) if grids else None,
    )
    np.testing.assert_array_equal(mrope_positions(tokens, grids, IMAGE, 2), theirs[:, 0].numpy())


def test_an_image_token_that_the_policy_wrote_is_text() -> None:
    tokens, grids = image_prompt(2, (1, 4, 4), 1)
    sampled = np.repeat([False, True], [len(tokens), 3])
    tokens = np.append(tokens, np.int32([20, IMAGE, 20]))
    positions = mrope_positions(tokens, grids, IMAGE, 2, sampled)
    np.testing.assert_array_equal(positions[:, -4:], np.tile(np.arange(6, 10), (3, 1)))
    places = image_places(image_tokens(tokens, IMAGE, sampled)[None])
    np.testing.assert_array_equal(places[0], [-1, -1, -1, 0, 1, 2, 3, -1, -1, -1, -1, -1])
    with pytest.raises(UserError, match="has 5 image tokens, but its 1 images need 4"):
        mrope_positions(tokens, grids, IMAGE, 2)


def test_an_image_that_text_interrupts_is_refused() -> None:
    with pytest.raises(UserError, match="the image at token 0 is interrupted: it needs 4 image tokens in a row"):
        mrope_positions(np.array([IMAGE, IMAGE, 20, IMAGE, IMAGE]), [(1, 4, 4)], IMAGE, 2)


def test_embeddings_are_counted_in_each_row() -> None:
    tokens = np.array([[1, IMAGE, IMAGE, 1], [IMAGE, 1, 1, IMAGE]])
    np.testing.assert_array_equal(image_places(tokens == IMAGE), [[-1, 0, 1, -1], [0, -1, -1, 1]])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_rotation_is_that_of_transformers(family: str, made_of: Callable[[str], Made]) -> None:
    import torch

    made = made_of(family)
    positions = np.random.default_rng(0).integers(0, 200, (3, 2, 9)).astype(np.int32)
    ours = multimodal_rotation(jnp.asarray(positions), made.arch.ropes[0], made.tower, 16)
    theirs = made.reference.model.language_model.rotary_emb(torch.zeros(1), torch.tensor(positions))
    for a, b in zip(ours[:2], theirs, strict=True):
        np.testing.assert_allclose(np.tile(a[:, :, 0], 2), b.numpy(), atol=1e-4, rtol=0)  # they repeat it for both halves


def test_sections_that_do_not_fill_a_head_are_refused(made_of: Callable[[str], Made]) -> None:
    config = read_config(made_of("qwen2_5_vl").directory)
    with pytest.raises(UserError, match=r"mrope_section = \[2, 3, 3\] .* must add up to head_dim / 2 = 16"):
        read_architecture({**config, "text_config": {**config["text_config"], "head_dim": 32}})
