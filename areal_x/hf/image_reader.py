"""Pictures in the messages of a prompt: to the `Images` that a model sees, and the tokens that
stand for them.

A picture is a part of a message's content in OpenAI's form, with its bytes in the URL; nothing is
ever fetched:

    {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo…"}}

The chat template writes one image token for each; here it is repeated as often as the picture's
grid has merged patches, which is what Hugging Face's processors do.
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

MOST_BYTES = 20 * 2**20  # of one picture as a file
# of one picture, before the model's processor makes it smaller: 100 MB as numbers of a byte
MOST_PIXELS = 2**25
FORMATS = ("PNG", "JPEG", "WEBP")
KEPT = 16  # prompts whose pictures are kept, as the episodes of a group have the same ones

Urls = tuple[str, ...]


class UnreadableImage(TaskError, ValueError):
    """A picture that is none, is too large, or would have to be fetched."""


def image_urls(prompt: str | Sequence[Message]) -> Urls:
    """The URLs of a prompt's pictures, in the order in which its messages have them. Raises
    UnreadableImage for a part without."""
    messages = [] if isinstance(prompt, str) else prompt
    contents = [
        content for message in messages if not isinstance(content := message.get("content"), str)
    ]
    parts = [part for content in contents for part in content or () if is_image(part)]
    return tuple(_url(part) for part in parts)


def is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "image_url"


def with_image_placeholders(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The same messages, each picture as {"type": "image"}: of templates that know pictures all
    know this form."""

    def plain(content: Any) -> Any:
        if content is None or isinstance(content, str):
            return content
        return [{"type": "image"} if is_image(part) else part for part in content]

    return [{**message, "content": plain(message.get("content"))} for message in messages]


@dataclass(frozen=True)
class Reader:
    """How a model's pictures become patches and tokens.

    process: its Hugging Face image processor. token: the id that stands for a square of merge²
    patches. directory: for errors.
    """

    process: Any
    token: int
    merge: int
    directory: str

    def read(self, urls: Urls) -> Images:
        """Raises UnreadableImage."""
        opened = [_opened(url) for url in urls]
        try:
            read = self.process(images=opened, return_tensors="np")
        except (
            ValueError,
            ZeroDivisionError,
        ) as error:  # of a shape that the model does not see, as one of 1×300 pixels
            sizes = ", ".join(f"{picture.width}×{picture.height}" for picture in opened)
            raise UnreadableImage(
                f"the model's processor refuses an image (of {sizes} pixels): {error}"
            ) from error
        grids = np.asarray(read["image_grid_thw"], np.int32)
        check_grids(grids.tolist(), self.merge)
        return Images(np.asarray(read["pixel_values"], np.float32), grids)

    def expanded(
        self, tokens: Int32[np.ndarray, " T"], images: Images
    ) -> Int32[np.ndarray, " prompt"]:
        """The tokens of a chat template with each image's token as often as the image has squares.

        Raises UserError where the template did not write one token for each image.
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


@lru_cache(maxsize=KEPT)
def read_images(directory: str, urls: Urls) -> Images:
    """The pictures as the model of this directory sees them. Raises: UnreadableImage, and what
    `reader_of` does."""
    return load_image_reader(directory).read(urls)


def read_prompt_images(tokenizer: Any, prompt: str | Sequence[Message]) -> Images | None:
    """Those of a prompt, None where it has none. Raises what `urls_of` and `read_pictures` do."""
    urls = image_urls(prompt)
    return read_images(tokenizer.name_or_path, urls) if urls else None


@lru_cache(maxsize=KEPT)
def load_image_reader(directory: str) -> Reader:
    """Raises: UserError for a model that does not see, or whose processor does not load."""
    try:
        config = read_config(Path(directory))
        token, merge = config["image_token_id"], config["vision_config"]["spatial_merge_size"]
    except (OSError, KeyError) as error:
        raise UserError(
            f"the prompt has images and {directory} reads text alone: train a model that sees,"
            " Qwen2.5-VL or Qwen3-VL"
        ) from error
    try:
        from transformers import AutoImageProcessor

        # Pillow everywhere: torchvision resizes otherwise, and what a model sees should not depend
        # on what is installed.
        process = AutoImageProcessor.from_pretrained(
            directory, backend="pil", trust_remote_code=False
        )
    except (OSError, ValueError, ImportError) as error:
        reason = str(error).strip().split("\n")[0][:200]
        wanted = "copy preprocessor_config.json there, and pip install pillow"
        raise UserError(
            f"{directory} has no image processor that loads ({reason}): {wanted}"
        ) from error
    return Reader(process, int(token), int(merge), directory)


def _url(part: Mapping[str, Any]) -> str:
    about = part.get("image_url")
    url = about.get("url") if isinstance(about, Mapping) else about
    if not isinstance(url, str):
        raise UnreadableImage(
            "an image must be {'image_url': {'url': 'data:image/png;base64,…'}}, this is"
            f" {str(part)[:100]!r}"
        )
    return url


def _opened(url: str) -> Any:
    """The picture of a data: URL, in colours."""
    from PIL import Image

    kind, _, data = url.partition(";base64,")
    if not kind.startswith("data:image/"):
        shown = url if len(url) < 80 else f"{url[:80]}…"
        raise UnreadableImage(
            f"an image must come as data:image/…;base64,…, as nothing is fetched; this is {shown!r}"
        )
    if len(data) > MOST_BYTES * 4 // 3 + 4:
        raise UnreadableImage(
            f"an image of {len(data) * 3 // 4} bytes is larger than {MOST_BYTES}: make it smaller"
        )
    try:
        picture = Image.open(io.BytesIO(base64.b64decode(data, validate=True)), formats=FORMATS)
        if picture.width * picture.height > MOST_PIXELS:
            raise UnreadableImage(
                f"an image of {picture.width}×{picture.height} has over {MOST_PIXELS} pixels: make"
                " it smaller"
            )
        return picture.convert("RGB")
    except UnreadableImage:
        raise
    except Exception as error:  # what a decoder raises of damaged bytes is of any kind: struct.error, ValueError, zlib.error
        raise UnreadableImage(
            f"an image cannot be read as {', '.join(FORMATS)}: {error}"
        ) from error
