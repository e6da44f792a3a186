"""Images of one size, Gemma 3's: patches and tokens are those of Hugging Face's own processor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
Image = pytest.importorskip("PIL.Image")
pytest.importorskip("msgpack")

from areal_x.engines.vllm import features
from areal_x.engines.vllm.config import VLLMConfig
from areal_x.engines.vllm.engine import VLLMEngine
from areal_x.engines.vllm.features import features_of, served_format
from areal_x.errors import UserError
from areal_x.hf.image_format import format_of, patches_of, pixels_of
from areal_x.hf.image_reader import load_image_reader, read_prompt_images
from areal_x.hf.tokenizer import load_tokenizer
from areal_x.protocols.engine import Request, SamplingParams
from areal_x.workflows.single_turn import encode
from examples.vision.task import as_url
from tests.models import SEEING_SQUARES
from tests.sent_images import arrays_of
from tests.square_images import TEMPLATE, write_processor, write_prompt_files

CONFIG = SEEING_SQUARES["gemma3_vl-narrow"]  # 24×24 pixels, 9 tokens


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of a Gemma 3 that a prompt is read with."""
    made = tmp_path_factory.mktemp("gemma3")
    (made / "config.json").write_text(json.dumps(CONFIG))
    write_prompt_files(made, CONFIG)
    return made


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3)).astype(np.uint8)


PICTURES = [noise(24, 24), noise(40, 17, 1), noise(9, 100, 2)]


def part(of: np.ndarray | str) -> dict[str, Any]:
    return {"type": "text", "text": of} if isinstance(of, str) else {"type": "image_url", "image_url": {"url": as_url(of)}}


def message(*parts: np.ndarray | str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [part(x) for x in parts]}]


@pytest.mark.parametrize(
    "parts",
    [
        (PICTURES[0], "What is it?"),
        ("one\n", PICTURES[1], PICTURES[2], "\n\ntwo", PICTURES[0]),
        (PICTURES[2],),
    ],
)
def test_tokens_and_pixels_are_those_of_hugging_faces_own_processor(directory: Path, parts: tuple[Any, ...]) -> None:
    from transformers import AutoImageProcessor
    from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

    tokenizer, prompt = load_tokenizer(directory), message(*parts)
    images = read_prompt_images(tokenizer, prompt)
    own = AutoImageProcessor.from_pretrained(directory, backend="pil")
    whole = Gemma3Processor(own, tokenizer, TEMPLATE, image_seq_length=CONFIG["mm_tokens_per_image"])
    placed = [{**prompt[0], "content": [x if x["type"] == "text" else {"type": "image"} for x in prompt[0]["content"]]}]
    text = tokenizer.apply_chat_template(placed, add_generation_prompt=True, tokenize=False)
    shown = [Image.fromarray(x) for x in parts if not isinstance(x, str)]
    theirs = whole(text=[text], images=[shown], return_tensors="np", add_special_tokens=False)
    tokens = encode(tokenizer, prompt, images)
    assert tokens.tolist() == theirs["input_ids"][0].tolist()
    np.testing.assert_array_equal(pixels_of(images.patches, load_image_reader(str(directory)).form), theirs["pixel_values"])
    assert images.grids.tolist() == [[1, 6, 6]] * len(shown)
    # Each image is a block of tokens of its own: text stands between them.
    kinds = theirs["token_type_ids"][0]
    np.testing.assert_array_equal(tokens == 5, kinds == 1)
    assert (np.diff(kinds, prepend=0) == 1).sum() == len(shown)


def test_patches_become_the_pixels_again_with_the_patches_of_a_token_together() -> None:
    from transformers import AutoConfig

    form = format_of(AutoConfig.for_model(**CONFIG))
    assert (form.side, form.merge, form.features) == (6, 2, 48)
    pixels = np.arange(2 * 3 * 24 * 24, dtype=np.float32).reshape(2, 3, 24, 24)
    patches, grids = patches_of(pixels, form)
    assert grids.tolist() == [[1, 6, 6]] * 2
    np.testing.assert_array_equal(pixels_of(patches, form), pixels)
    square = patches[36 + 4 : 36 + 8].reshape(4, 3, 4, 4)  # of the second image's second token
    np.testing.assert_array_equal(square[3], pixels[1, :, 4:8, 12:16])


def test_servers_get_whole_images(directory: Path) -> None:
    tokenizer, prompt = load_tokenizer(directory), message(PICTURES[0], "and", PICTURES[1])
    images = read_prompt_images(tokenizer, prompt)
    tokens = encode(tokenizer, prompt, images)
    found = features_of(tokens, images, served_format(directory))
    pixels = pixels_of(images.patches, load_image_reader(str(directory)).form)
    for i, packed in enumerate(found["kwargs_data"]["image"]):
        read = arrays_of(packed)
        np.testing.assert_array_equal(read["pixel_values"][0], pixels[i : i + 1])
        assert read["pixel_values"][1] == "flat"
        count = read["num_patches"][0]
        assert (count.dtype, count.shape, int(count)) == (np.int64, (), 1)
    places = found["mm_placeholders"]["image"]
    assert [place["length"] for place in places] == [9, 9]
    assert all((tokens[x["offset"] : x["offset"] + 9] == 5).all() for x in places)


def test_crops_and_images_of_another_size_are_refused(directory: Path, tmp_path: Path) -> None:
    tokenizer, crops = load_tokenizer(directory), {"pan_and_scan_min_crop_size": 4, "pan_and_scan_max_num_crops": 4}
    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    write_processor(tmp_path, CONFIG, do_pan_and_scan=True, pan_and_scan_min_ratio_to_activate=1.2, **crops)
    with pytest.raises(UserError, match=r"set do_pan_and_scan to false in preprocessor_config\.json"):
        read_prompt_images(load_tokenizer(tmp_path), message(PICTURES[2]))
    load_image_reader.cache_clear()
    write_processor(tmp_path, CONFIG, size={"height": 28, "width": 28})
    with pytest.raises(UserError, match=r"makes images of \(3, 28, 28\), but its tower takes \(3, 24, 24\): correct size"):
        read_prompt_images(load_tokenizer(tmp_path), message(PICTURES[0]))
    with pytest.raises(UserError, match="writes 2 image tokens for 1 images"):
        encode(tokenizer, message(PICTURES[0], "<start_of_image>"), read_prompt_images(tokenizer, message(PICTURES[0])))
    with pytest.raises(UserError, match="image tokens in texts"):
        encode(tokenizer, message(PICTURES[0], "<image_soft_token>"), read_prompt_images(tokenizer, message(PICTURES[0])))
    load_image_reader.cache_clear()
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"mm_tokens_per_image": 10}))
    with pytest.raises(UserError, match="do not become mm_tokens_per_image = 10 tokens"):
        load_image_reader(str(tmp_path))


def test_servers_on_a_cpu_are_sent_no_images_that_they_would_attend_to_otherwise(directory: Path, monkeypatch) -> None:
    tokenizer, prompt = load_tokenizer(directory), message(PICTURES[0], "?")
    images = read_prompt_images(tokenizer, prompt)
    request = Request(encode(tokenizer, prompt, images), SamplingParams(), images=images)
    ours, others = (VLLMEngine(VLLMConfig(**how), directory, directory) for how in ({}, {"urls": ("http://127.0.0.1:1",)}))
    monkeypatch.setattr(features, "is_cpu_build", lambda: True)
    with pytest.raises(UserError, match=r"which vLLM's attention on a CPU does not: use train\.engine = 'embedded'"):
        ours.features(request)
    assert others.features(request) is not None  # they may be on GPUs
    monkeypatch.setattr(features, "is_cpu_build", lambda: False)
    assert ours.features(request) is not None
