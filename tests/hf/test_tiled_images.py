"""Images in tiles, Llama 4's: tiles and tokens are those of Hugging Face's own processor, but for the interpolation, which is
Pillow's."""

from __future__ import annotations

import json
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import numpy as np
import pytest

torch = pytest.importorskip("torch")
Image = pytest.importorskip("PIL.Image")
pytest.importorskip("msgpack")
pytest.importorskip("transformers.image_processing_backends")  # before torchvision is replaced, for which it looks

from areal_x.engines.vllm.features import features_of, served_format
from areal_x.errors import UserError
from areal_x.hf.image_format import described_config, pixels_of, takes_images
from areal_x.hf.image_reader import load_image_reader, read_prompt_images
from areal_x.hf.image_tiles import TileProcessor
from areal_x.hf.tokenizer import load_tokenizer
from areal_x.workflows.single_turn import encode
from tests.models import IMAGE, SEEING_TILES
from tests.sent_images import arrays_of
from tests.tiled_images import write_prompt_files

from .test_square_images import message, noise

CONFIG = SEEING_TILES["llama4_vl"]  # tiles of 16×16 pixels, 4 tokens
PICTURES = [noise(16, 16), noise(40, 17, 1), noise(9, 100, 2), noise(200, 160, 3), noise(5, 7, 4)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of a Llama 4 that a prompt is read with."""
    made = tmp_path_factory.mktemp("llama4")
    (made / "config.json").write_text(json.dumps(CONFIG))
    write_prompt_files(made, CONFIG)
    return made


@cache
def of_transformers() -> Any:
    """The module of transformers' processor, which imports torchvision; what pads is torch's."""
    needed = "torchvision", "torchvision.transforms", "torchvision.transforms.v2", "torchvision.transforms.v2.functional"
    with patch.dict(sys.modules, {name: MagicMock() for name in needed}):
        module = import_module("transformers.models.llama4.image_processing_llama4")

    def pad(images: Any, padding: list[int], fill: list[int]) -> Any:
        left, top, right, bottom = padding
        return torch.nn.functional.pad(images, (left, right, top, bottom))

    module.tvF = MagicMock(pad=pad)
    return module


def tiles_of_transformers(picture: np.ndarray, **changes: Any) -> tuple[Any, list[int]]:
    """Its own arithmetic, with Pillow's interpolation."""
    module = of_transformers()

    def resize(images: Any, size: Any, resample: int) -> Any:
        resized = Image.fromarray(images[0].permute(1, 2, 0).numpy()).resize((size.width, size.height), resample)
        return torch.tensor(np.array(resized)).permute(2, 0, 1)[None]

    def normalize(images: Any, mean: list[float], std: list[float]) -> Any:
        of_dtype = [torch.tensor(x, dtype=images.dtype)[:, None, None] for x in (mean, std)]
        return images.sub(of_dtype[0]).div_(of_dtype[1])

    itself = MagicMock(resize=resize, normalize=normalize)
    itself.rescale_and_normalize = lambda *given: module.Llama4ImageProcessor.rescale_and_normalize(itself, *given)
    size = module.SizeDict(height=16, width=16)
    how: dict[str, Any] = {"do_resize": True, "size": size, "resample": 2, "do_rescale": True, "rescale_factor": 1 / 255}
    how |= {"do_normalize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "max_patches": 16}
    how |= {"resize_to_max_canvas": False, "disable_grouping": True, "return_tensors": "pt"}
    of_picture = [torch.tensor(picture).permute(2, 0, 1)]
    found = module.Llama4ImageProcessor._preprocess(itself, of_picture, **(how | changes))
    return found["pixel_values"], torch.as_tensor(found["aspect_ratios"][0]).tolist()


@pytest.mark.parametrize("changes", [{}, {"max_patches": 5}, {"resize_to_max_canvas": True, "image_mean": [0.4, 0.5, 0.45]}])
def test_tiles_are_those_of_hugging_faces_own_processor(changes: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    pictures = PICTURES + [noise(*rng.integers(1, 120, 2), seed) for seed in range(12)]
    process = TileProcessor(size={"height": 16, "width": 16}, **changes)
    for picture in pictures:
        ours, layout = process.tiles_of(Image.fromarray(picture))
        theirs, their_layout = tiles_of_transformers(picture, **changes)
        assert list(layout) == their_layout
        np.testing.assert_array_equal(ours, theirs.float().flatten(0, -4).numpy())


def test_tokens_and_patches_are_those_of_the_tiles(directory: Path) -> None:
    from transformers.models.llama4.processing_llama4 import Llama4Processor

    parts = ["one", *PICTURES, "two"]
    tokenizer, prompt = load_tokenizer(directory), message(*parts)
    images = read_prompt_images(tokenizer, prompt)
    whole = Llama4Processor.__new__(Llama4Processor)
    each = iter([tiles_of_transformers(picture) for picture in PICTURES])
    tiles, text = [], ""
    for part in parts:
        if isinstance(part, str):
            text += part
            continue
        own, layout = next(each)
        tiles.append(own.float().flatten(0, -4).numpy())
        text += whole._prompt_split_image(layout, 4)
    tokens = encode(tokenizer, prompt, images)
    assert tokens.tolist() == tokenizer.encode(f"<|begin_of_text|>{text}<|eot|>", add_special_tokens=False)
    form = load_image_reader(str(directory)).form
    np.testing.assert_array_equal(pixels_of(images.patches, form), np.concatenate(tiles))
    assert len(form.spans(tokens, [tuple(x) for x in images.grids.tolist()])) == sum(map(len, tiles))
    with pytest.raises(UserError, match="writes 6 image tokens for 5 images"):
        encode(tokenizer, message("<|image|>", *PICTURES), images)


@pytest.mark.parametrize("change", [{"image_size": 18}, {"intermediate_size": 65}, {"vision_output_dim": 8}])
def test_a_tower_whose_parts_do_not_fit_is_none(change: dict[str, int], tmp_path: Path) -> None:
    config = {**CONFIG, "vision_config": CONFIG["vision_config"] | change}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert takes_images(described_config(CONFIG))
    assert not takes_images(described_config(config))
    with pytest.raises(UserError, match="parts of vision_config do not fit together"):
        load_image_reader(str(tmp_path))


def test_servers_get_each_tile_as_an_image_of_one(directory: Path) -> None:
    tokenizer, prompt = load_tokenizer(directory), message("one", PICTURES[0], PICTURES[1])
    images = read_prompt_images(tokenizer, prompt)
    tokens, form = encode(tokenizer, prompt, images), served_format(directory)
    sent = features_of(tokens, images, form)
    tiles = pixels_of(images.patches, form)
    assert len(tiles) > 3
    places = sent["mm_placeholders"]["image"]
    for tile, packed, place in zip(tiles, sent["kwargs_data"]["image"], places, strict=True):
        found = arrays_of(packed)
        pixels, batching = found["pixel_values"]
        np.testing.assert_array_equal(pixels, tile[None])
        assert batching == "flat"
        assert (found["patches_per_image"][0].tolist(), found["aspect_ratios"][0].tolist()) == (1, [1, 1])
        assert place["length"] == 4
        assert (tokens[place["offset"] :][:4] == IMAGE).all()
    assert len({x["offset"] for x in places}) == len(tiles)
