"""Images with a token of text after each row of their tokens, Mistral 3's: patches and tokens are those of Hugging Face's own
processor."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("msgpack")
Image = pytest.importorskip("PIL.Image")

from areal_x.engines.vllm.config import VLLMConfig
from areal_x.engines.vllm.features import check_sent_images, features_of, served_format
from areal_x.engines.vllm.image_rows import with_marks
from areal_x.errors import UserError
from areal_x.hf.image_format import described_config, format_of, patches_of, pixels_of
from areal_x.hf.image_reader import load_image_reader, read_prompt_images
from areal_x.hf.tokenizer import load_tokenizer
from areal_x.workflows.single_turn import encode
from tests.models import IMAGE, SEEING_ROWS
from tests.row_images import SPECIAL, write_prompt_files
from tests.sent_images import arrays_of

from .test_square_images import message, noise

CONFIG = SEEING_ROWS["mistral3_vl-threes"]  # a token is 12×12 pixels
PICTURES = [noise(24, 24), noise(40, 17, 1), noise(9, 100, 2)]


@dataclass(frozen=True)
class Range:
    """As vLLM's PlaceholderRange."""

    offset: int
    length: int
    is_embed: Any = None


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of a Mistral Small 3.1 that a prompt is read with."""
    made = tmp_path_factory.mktemp("mistral3")
    (made / "config.json").write_text(json.dumps(CONFIG))
    write_prompt_files(made, CONFIG)
    return made


@pytest.mark.parametrize("parts", [(PICTURES[0], "What is it?"), ("one", *PICTURES[1:], "two", PICTURES[0]), (PICTURES[2],)])
def test_tokens_and_pixels_are_those_of_hugging_faces_own_processor(
    directory: Path, parts: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoImageProcessor
    from transformers.models.pixtral import image_processing_pil_pixtral

    # The one without torchvision, of the same functions.
    monkeypatch.setitem(sys.modules, "transformers.models.pixtral.image_processing_pixtral", image_processing_pil_pixtral)
    from transformers.models.pixtral.processing_pixtral import PixtralProcessor

    tokenizer, prompt = load_tokenizer(directory), message(*parts)
    images = read_prompt_images(tokenizer, prompt)
    shown = [Image.fromarray(x) for x in parts if not isinstance(x, str)]
    process = AutoImageProcessor.from_pretrained(directory, backend="pil")
    theirs = process(images=shown, return_tensors="np", patch_size=12)
    whole = PixtralProcessor.__new__(PixtralProcessor)
    whole.patch_size, whole.spatial_merge_size = 4, 3
    whole.image_token, whole.image_break_token, whole.image_end_token = SPECIAL[5:8]
    each = iter(range(len(shown)))
    text = "".join(x if isinstance(x, str) else whole.replace_image_token(theirs, next(each)) for x in parts)
    tokens = encode(tokenizer, prompt, images)
    assert tokens.tolist() == tokenizer.encode(f"<s>[INST]{text}[/INST]", add_special_tokens=False)
    form, start = load_image_reader(str(directory)).form, 0
    for pixels, (height, width), grid in zip(theirs["pixel_values"], theirs["image_sizes"], images.grids.tolist(), strict=True):
        assert grid == [1, height // 4, width // 4]
        count = grid[1] * grid[2]
        found = pixels_of(images.patches[start : start + count], form, grid)
        np.testing.assert_array_equal(found[0], pixels[:, :height, :width])
        start += count
    assert start == len(images.patches)


def test_an_image_wider_than_high_becomes_its_pixels_again() -> None:
    from transformers import AutoConfig

    form = format_of(AutoConfig.for_model(**CONFIG))
    assert (form.side, form.merge, form.rows) == (0, 3, True)
    pixels = np.arange(3 * 12 * 36, dtype=np.float32).reshape(1, 3, 12, 36)
    patches, grids = patches_of(pixels, form)
    assert grids.tolist() == [[1, 3, 9]]
    np.testing.assert_array_equal(pixels_of(patches, form, (1, 3, 9)), pixels)
    np.testing.assert_array_equal(patches[9 + 4].reshape(3, 4, 4), pixels[0, :, 4:8, 16:20])  # of the second token's middle


def test_rows_that_are_not_those_of_the_images_are_refused() -> None:
    from transformers import AutoConfig

    form, row = format_of(AutoConfig.for_model(**CONFIG)), [5, 5, 6]
    grids = [(1, 6, 6), (1, 3, 6)]
    assert form.spans(np.array([9, *row * 2, *row, 9]), grids) == [(1, 3), (4, 6), (7, 9)]
    with pytest.raises(UserError, match="has 4 image tokens, but its 2 images need 6"):
        form.spans(np.array(row * 2), grids)
    with pytest.raises(UserError, match="at token 3 is interrupted: it needs 2 image tokens in a row"):
        form.spans(np.array([5, 5, 6, 5, 6, 5, 5, 5]), grids)
    with pytest.raises(UserError, match="text must stand between"):
        form.spans(np.array([5, 5, 5, 5, 6, 5, 5]), grids)


def test_a_tokenizer_without_the_tokens_between_rows_is_refused(directory: Path, tmp_path: Path) -> None:
    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    write_prompt_files(tmp_path, CONFIG, [*SPECIAL[:6], "<6>", SPECIAL[7]])
    tokenizer, prompt = load_tokenizer(tmp_path), message(PICTURES[0])
    with pytest.raises(UserError, match=r"has no token \[IMG_BREAK\], which stands between the tokens of an image"):
        encode(tokenizer, prompt, read_prompt_images(tokenizer, prompt))


def test_servers_get_an_image_and_all_of_its_tokens_and_mark_those_of_it(directory: Path) -> None:
    tokenizer, prompt = load_tokenizer(directory), message(PICTURES[0], "and", PICTURES[1])
    images = read_prompt_images(tokenizer, prompt)
    tokens, form = encode(tokenizer, prompt, images), served_format(directory)
    sent, start = features_of(tokens, images, form), 0
    ranges = [Range(**place) for place in sent["mm_placeholders"]["image"]]
    for packed, place, grid in zip(sent["kwargs_data"]["image"], ranges, images.grids.tolist(), strict=True):
        pixels, batching = arrays_of(packed)["pixel_values"]
        own = images.patches[start : start + grid[1] * grid[2]]
        np.testing.assert_array_equal(pixels, pixels_of(own, form, grid)[0])
        assert batching == "batched"
        rows, columns = grid[1] // 3, grid[2] // 3
        assert place.length == rows * (columns + 1) - 1  # without what ends the image
        assert tokens[place.offset + place.length] == SPECIAL.index("[IMG_END]")
        start += len(own)
    assert ranges[1].length > 3
    given = {"type": "multimodal", "prompt_token_ids": tokens.tolist(), "mm_placeholders": {"image": ranges}}
    config = described_config(CONFIG)
    marked = with_marks(given, config)
    places = marked["mm_placeholders"]["image"]
    for place in places:
        own = tokens[place.offset : place.offset + place.length]
        assert place.is_embed.tolist() == (own == IMAGE).tolist()
    assert 0 < sum(int(x.is_embed.sum()) for x in places) == (tokens == IMAGE).sum() < sum(x.length for x in places)
    assert marked == {**given, "mm_placeholders": {"image": places}}
    # Those that vLLM's own processor has marked, prompts of text, and other models.
    assert with_marks(marked, config)["mm_placeholders"]["image"][0] is places[0]
    for prompt, model in (("text", config), ({"type": "token", "prompt_token_ids": [1]}, config), (given, config.text_config)):
        assert with_marks(prompt, model) is prompt


def test_servers_that_may_lack_what_marks_tokens_get_no_images(directory: Path) -> None:
    urls = ("http://127.0.0.1:1",)
    check_sent_images(directory, VLLMConfig(urls=urls))
    check_sent_images(directory, VLLMConfig(transport="nccl"))  # started by the run
    with pytest.raises(UserError, match=r"with areal-x installed beside them alone: set vllm\.transport = 'files'"):
        check_sent_images(directory, VLLMConfig(urls=urls, transport="nccl"))
