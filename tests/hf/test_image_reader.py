"""Images in messages: read as by Hugging Face's processor, expanded to tokens, rejected if they cannot be read."""

from __future__ import annotations

import asyncio
import base64
import io
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
Image = pytest.importorskip("PIL.Image")

from PIL.PngImagePlugin import PngInfo

from areal_x.errors import UserError
from areal_x.hf import image_reader
from areal_x.hf.image_reader import UnreadableImage, image_urls, load_image_reader, read_prompt_images
from areal_x.hf.tokenizer import load_tokenizer
from areal_x.types import Episode, Task
from areal_x.workflows.single_turn import SingleTurn, encode
from examples.vision.task import as_url
from examples.vision.warm_start import IMAGE, PIECES, write_model
from tests.examples.running import Script

TOKEN = PIECES.index(IMAGE) + 2


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("seeing")
    write_model(directory, 0)
    return directory


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3)).astype(np.uint8)


def shows(*urls: str) -> list[dict[str, object]]:
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}} for url in urls]}]


def test_tokens_and_patches_are_those_of_hugging_faces_own_processor(seeing: Path) -> None:
    from transformers import AutoImageProcessor
    from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor

    tokenizer = load_tokenizer(seeing)
    tokenizer.image_token, tokenizer.image_token_id = IMAGE, TOKEN
    whole = Qwen2_5_VLProcessor.__new__(Qwen2_5_VLProcessor)  # without a reader of videos, which needs torchvision
    whole.image_processor = AutoImageProcessor.from_pretrained(seeing, backend="pil")
    whole.image_token = IMAGE
    made = [noise(32, 32), noise(40, 24, 1), noise(200, 100, 2)]
    prompt = shows(*map(as_url, made))
    images = read_prompt_images(tokenizer, prompt)
    theirs = whole.image_processor(images=[Image.fromarray(x) for x in made], return_tensors="np")
    np.testing.assert_array_equal(images.patches, theirs["pixel_values"])
    np.testing.assert_array_equal(images.grids, theirs["image_grid_thw"])
    text = "<user>" + "".join(f"<vision_start>{whole.replace_image_token(theirs, i)}<vision_end>" for i in range(len(made)))
    expected = tokenizer.encode(text + "<end><assistant>", add_special_tokens=False)
    assert encode(tokenizer, prompt, images).tolist() == expected


def test_an_episode_carries_its_images_and_the_tokens_that_stand_for_them(seeing: Path) -> None:
    async def run() -> Episode:
        ready = SingleTurn(reward=says_nothing, reward_workers=1).setup(load_tokenizer(seeing))
        try:
            episode = await ready.run(
                Task("t", shows(as_url(noise(32, 32)), as_url(noise(16, 64)))), Script([np.ones(1, np.int32)])
            )
        finally:
            await ready.close()
        assert isinstance(episode, Episode), episode
        return episode

    (trajectory,) = asyncio.run(run()).trajectories
    assert trajectory.images is not None
    assert trajectory.images.grids.tolist() == [[1, 8, 8], [1, 4, 16]]
    assert (trajectory.tokens == TOKEN).sum() == 16 + 16
    assert not trajectory.mask[trajectory.tokens == TOKEN].any()


def says_nothing(task: Task, text: str) -> float:
    return float(text == "")


def gif() -> str:
    file = io.BytesIO()
    Image.fromarray(noise(8, 8)).save(file, "GIF")
    return "data:image/gif;base64," + base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://127.0.0.1:1/a.png", "nothing is downloaded.*http://127"),
        ("file:///etc/passwd", "nothing is downloaded"),
        ("/etc/passwd", "nothing is downloaded"),
        ("data:text/plain;base64,aGk=", "nothing is downloaded"),
        ("data:image/png;base64,aGk=", "cannot be read as PNG, JPEG, WEBP"),
        ("data:image/png;base64,a*k=", "cannot be read"),
        (gif(), "cannot be read"),
        (as_url(noise(100, 101)), "100.*101.*pixels|101×100 has over"),
        ("data:image/png;base64," + "A" * 40_000, "larger than 20000: make it smaller"),
    ],
    ids=["http", "file", "path", "text", "no_picture", "no_base64", "gif", "pixels", "bytes"],
)
def test_a_picture_that_is_fetched_or_large_or_none_is_refused(seeing: Path, monkeypatch, url: str, reason: str) -> None:
    monkeypatch.setattr(image_reader, "MAX_PIXELS", 10_000)
    monkeypatch.setattr(image_reader, "MAX_BYTES", 20_000)
    if "×" in reason:
        monkeypatch.setattr(image_reader, "MAX_BYTES", 2**20)
    with pytest.raises(UserError, match=reason):
        load_image_reader(str(seeing)).read(image_urls(shows(url)))


@pytest.mark.parametrize("size", [(1, 300), (300, 1), (2, 4000)])
def test_a_picture_of_a_shape_that_the_processor_refuses_is_refused(seeing: Path, size: tuple[int, int]) -> None:
    with pytest.raises(UnreadableImage, match=rf"rejects an image \(of {size[1]}×{size[0]} pixels\)"):
        read_prompt_images(load_tokenizer(seeing), shows(as_url(noise(*size))))


def test_whatever_is_in_a_picture_it_is_read_or_refused(seeing: Path) -> None:
    rng, reader = np.random.default_rng(0), load_image_reader(str(seeing))
    for kind in ("PNG", "JPEG", "WEBP"):
        file = io.BytesIO()
        Image.fromarray(noise(24, 24)).save(file, kind)
        for _ in range(100):
            data = bytearray(file.getvalue())
            for place in rng.integers(0, len(data), 3):
                data[place] = rng.integers(256)
            with suppress(UnreadableImage):
                reader.read((f"data:image/x;base64,{base64.b64encode(data[: rng.integers(1, len(data) + 1)]).decode()}",))
    bomb = io.BytesIO()
    texts = PngInfo()
    texts.add_text("x", "x" * (2 << 20), zip=True)
    Image.fromarray(noise(24, 24)).save(bomb, "PNG", pnginfo=texts)
    with pytest.raises(UnreadableImage, match="Decompressed data too large"):
        reader.read((f"data:image/png;base64,{base64.b64encode(bomb.getvalue()).decode()}",))


def test_a_part_without_a_url_and_a_text_with_an_image_token_are_refused(seeing: Path) -> None:
    with pytest.raises(UserError, match=r"must be.*data:image"):
        image_urls([{"role": "user", "content": [{"type": "image_url", "image_url": {"uri": "x"}}]}])
    tokenizer, prompt = load_tokenizer(seeing), shows(as_url(noise(32, 32)))
    prompt[0]["content"] += [{"type": "text", "text": IMAGE}]
    with pytest.raises(UserError, match="writes 2 image tokens for 1 images"):
        encode(tokenizer, prompt, read_prompt_images(tokenizer, prompt))


def test_a_model_of_text_alone_and_one_without_its_processor_refuse_images(
    seeing: Path, tiny_model_dir: Path, tmp_path
) -> None:
    with pytest.raises(UserError, match="reads text only: train a vision-language model"):
        read_prompt_images(load_tokenizer(tiny_model_dir), shows(as_url(noise(32, 32))))
    (tmp_path / "config.json").write_bytes((seeing / "config.json").read_bytes())
    with pytest.raises(UserError, match=r"no image processor that loads.*preprocessor_config\.json"):
        load_image_reader(str(tmp_path))


def test_prompts_of_text_have_no_images(seeing: Path) -> None:
    tokenizer = load_tokenizer(seeing)
    for prompt in ("12", [{"role": "user", "content": "12"}], [{"role": "user", "content": None}]):
        assert read_prompt_images(tokenizer, prompt) is None
