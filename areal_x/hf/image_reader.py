"""Reads the images in the messages of a prompt: the `Images` for the model, and the tokens that
stand for them.

An image is a part of a message's content in OpenAI's form, with its bytes in the URL; nothing is
ever downloaded:

    {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo…"}}

The chat template writes one image token for each; it is repeated here once for each merged patch of
the image's grid, as Hugging Face's processors do.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int32

from areal_x.errors import TaskError, UserError
from areal_x.hf.image_positions import check_grids, count_patches
from areal_x.hf.model_dir import read_config
from areal_x.types import Images, Message

MAX_BYTES = 20 * 2**20  # of one image as a file
# of one image, before the model's processor scales it down: 100 MB as bytes of RGB
MAX_PIXELS = 2**25
FORMATS = ("PNG", "JPEG", "WEBP")
BOTH_WAYS = (
    "gemma3",
    "gemma4",
    "gemma4_unified",
)  # model types in which the tokens of an image see those after them
CACHED = 16  # prompts whose images are cached, as the episodes of a group share them

Urls = tuple[str, ...]


class UnreadableImage(TaskError, ValueError):
    """An image that cannot be decoded, is too large, or would have to be downloaded."""


def image_urls(prompt: str | Sequence[Message]) -> Urls:
    """The URLs of a prompt's images, in the order of its messages. Raises: UnreadableImage for an
    image without a URL."""
    messages = [] if isinstance(prompt, str) else prompt
    contents = [
        content for message in messages if not isinstance(content := message.get("content"), str)
    ]
    parts = [part for content in contents for part in content or () if is_image(part)]
    return tuple(_url(part) for part in parts)


def is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "image_url"


def with_image_placeholders(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The same messages with each image as {"type": "image"}, a form that every chat template with
    images supports."""

    def plain(content: Any) -> Any:
        if content is None or isinstance(content, str):
            return content
        return [{"type": "image"} if is_image(part) else part for part in content]

    return [{**message, "content": plain(message.get("content"))} for message in messages]


@dataclass(frozen=True)
class ImageReader:
    """Converts images to a model's patches and tokens."""

    process: Any
    """The model's Hugging Face image processor."""

    token: int
    """Id of the token that stands for a square of merge × merge patches."""

    merge: int

    directory: str
    """The model's, for error messages."""

    def read(self, urls: Urls) -> Images:
        """The patches of the images. Raises: UnreadableImage."""
        images = [_decode(url) for url in urls]
        try:
            read = self.process(images=images, return_tensors="np")
        # a shape that the model does not support, such as 1×300 pixels
        except (ValueError, ZeroDivisionError) as error:
            sizes = ", ".join(f"{image.width}×{image.height}" for image in images)
            raise UnreadableImage(
                f"the model's processor rejects an image (of {sizes} pixels): {error}"
            ) from error
        grids = np.asarray(read["image_grid_thw"], np.int32)
        check_grids(grids.tolist(), self.merge)
        return Images(np.asarray(read["pixel_values"], np.float32), grids)

    def expand_tokens(
        self, tokens: Int32[np.ndarray, " T"], images: Images
    ) -> Int32[np.ndarray, " prompt"]:
        """Repeats each image token of a rendered chat template once for each square of its image.

        Raises: UserError if the template did not write one token for each image.
        """
        places = np.flatnonzero(tokens == self.token)
        if len(places) != len(images.grids):
            raise UserError(
                f"the chat template of {self.directory} writes {len(places)} image tokens for"
                f" {len(images.grids)} images: use the template that came with the model, and no"
                " image tokens in texts"
            )
        counts = np.ones(len(tokens), np.int64)
        counts[places] = [count_patches([grid]) // self.merge**2 for grid in images.grids.tolist()]
        return np.repeat(tokens, counts)


@lru_cache(maxsize=CACHED)
def read_images(directory: str, urls: Urls) -> Images:
    """The images as patches of the model of this directory. Raises: UnreadableImage; UserError as
    `load_image_reader`."""
    return load_image_reader(directory).read(urls)


def read_prompt_images(tokenizer: Any, prompt: str | Sequence[Message]) -> Images | None:
    """The images of a prompt, None if it has none. Raises as `image_urls` and `read_images`."""
    urls = image_urls(prompt)
    return read_images(tokenizer.name_or_path, urls) if urls else None


@lru_cache(maxsize=CACHED)
def load_image_reader(directory: str) -> ImageReader:
    """Loads the image processor of a model. Raises: UserError for a text-only model, or a processor
    that does not load."""
    config = read_config(Path(directory))
    tower = config.get("vision_config", {})
    if "image_token_id" not in config or "spatial_merge_size" not in tower:
        model_type, wanted = (
            config.get("model_type"),
            "a vision-language model, Qwen2.5-VL or Qwen3-VL",
        )
        reads = f"is a {model_type}, which is trained on text alone" if tower else "reads text only"
        if model_type in BOTH_WAYS:
            reads += ", as its attention among the tokens of an image is not causal"
        raise UserError(f"the prompt has images and {directory} {reads}: train {wanted}")
    token, merge = config["image_token_id"], tower["spatial_merge_size"]
    try:
        from transformers import AutoImageProcessor

        # Always Pillow: torchvision resizes differently, and a model's input should not depend on
        # the packages that are installed.
        process = AutoImageProcessor.from_pretrained(
            directory, backend="pil", trust_remote_code=False
        )
    except (OSError, ValueError, ImportError) as error:
        reason = str(error).strip().split("\n")[0][:200]
        wanted = "copy preprocessor_config.json there, and pip install pillow"
        raise UserError(
            f"{directory} has no image processor that loads ({reason}): {wanted}"
        ) from error
    return ImageReader(process, int(token), int(merge), directory)


def _url(part: Mapping[str, Any]) -> str:
    about = part.get("image_url")
    url = about.get("url") if isinstance(about, Mapping) else about
    if not isinstance(url, str):
        raise UnreadableImage(
            "an image must be {'image_url': {'url': 'data:image/png;base64,…'}}, this is"
            f" {str(part)[:100]!r}"
        )
    return url


def _decode(url: str) -> Any:
    """The image of a data: URL, in RGB."""
    from PIL import Image

    kind, _, data = url.partition(";base64,")
    if not kind.startswith("data:image/"):
        shown = url if len(url) < 80 else f"{url[:80]}…"
        raise UnreadableImage(
            "an image must be given as data:image/…;base64,…, as nothing is downloaded; this is"
            f" {shown!r}"
        )
    if len(data) > MAX_BYTES * 4 // 3 + 4:
        raise UnreadableImage(
            f"an image of {len(data) * 3 // 4} bytes is larger than {MAX_BYTES}: make it smaller"
        )
    try:
        image = Image.open(io.BytesIO(base64.b64decode(data, validate=True)), formats=FORMATS)
        if image.width * image.height > MAX_PIXELS:
            raise UnreadableImage(
                f"an image of {image.width}×{image.height} has over {MAX_PIXELS} pixels: make it"
                " smaller"
            )
        return image.convert("RGB")
    except UnreadableImage:
        raise
    # On damaged bytes, decoders raise errors of any kind: struct.error, ValueError, zlib.error.
    except Exception as error:
        raise UnreadableImage(
            f"an image cannot be read as {', '.join(FORMATS)}: {error}"
        ) from error
