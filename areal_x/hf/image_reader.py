"""Reads the images in the messages of a prompt: the `Images` for the model, and the tokens that
stand for them.

An image is a part of a message's content in OpenAI's form, with its bytes in the URL; nothing is
ever downloaded:

    {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo…"}}

The chat template writes one image token for each; it is repeated here once for each merged patch of
the image's grid, as Hugging Face's processors do, with a token after each row of them for Mistral's
models, and between two tokens for Gemma 4 (`image_tokens`). Gemma 3's writes one token at which an image begins: the
image's tokens follow it, then one at which it ends.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from jaxtyping import Int32

from areal_x.errors import TaskError, UserError
from areal_x.hf.chat_form import encode_plain
from areal_x.hf.image_cache import ReadOnce
from areal_x.hf.image_format import (
    VISION_MODELS,
    ImageFormat,
    described_config,
    format_of,
    patches_of,
    placed_patches,
)
from areal_x.hf.image_positions import check_grids, count_patches
from areal_x.hf.image_tiles import TiledImages, joined, load_tile_processor
from areal_x.hf.image_tokens import expanded, placeholder, tokens_of_each
from areal_x.hf.model_dir import read_config
from areal_x.types import Images, Message

MAX_BYTES = 20 * 2**20  # of one image as a file
# of one image, before the model's processor scales it down: 100 MB as bytes of RGB
MAX_PIXELS = 2**25
FORMATS = ("PNG", "JPEG", "WEBP")
WANTED = (
    "train a vision-language model, Qwen2.5-VL, Qwen3-VL, Gemma 3 or 4, Mistral Small 3.1, Llama 4"
)
CACHED = (
    16  # prompts whose images are kept though no episode has them, and models whose readers are
)

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

    form: ImageFormat

    directory: str
    """The model's, for error messages."""

    ends: tuple[int, int] | None = None
    """Ids of the tokens between which an image's stand; None if there are none."""

    begun: bool = False
    """True if the template writes the first of these, False if it writes the image token itself."""

    joined: int = 1
    """Side of the squares of the processor's patches that are one of the model's."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """Of each call of the image processor."""

    def read(self, urls: Urls) -> Images:
        """The patches of the images. Raises: UnreadableImage."""
        images = [_decode(url) for url in urls]
        try:
            read = self.process(images=images, return_tensors="np", **self.options)
        # a shape that the model does not support, such as 1×300 pixels
        except (ValueError, ZeroDivisionError) as error:
            sizes = ", ".join(f"{image.width}×{image.height}" for image in images)
            raise UnreadableImage(
                f"the model's processor rejects an image (of {sizes} pixels): {error}"
            ) from error
        pixels = np.asarray(read["pixel_values"], np.float32)
        if "aspect_ratios" in read:
            return TiledImages(*patches_of(pixels, self.form), tuple(read["aspect_ratios"]))
        if self.form.side:
            if np.any(read.get("num_crops", 0)):
                raise UserError(
                    f"the image processor of {self.directory} cuts images into crops beside the whole,"
                    " which is not supported: set do_pan_and_scan to false in preprocessor_config.json"
                )
            return Images(*patches_of(pixels, self.form))
        if self.form.colours_last:
            shown = zip(pixels, np.asarray(read["image_position_ids"]), strict=True)
            each = [placed_patches(x, places, self.form, self.joined) for x, places in shown]
            return Images(*map(np.concatenate, zip(*each, strict=True)))
        if not self.form.directed:
            sizes = np.asarray(read["image_sizes"]).tolist()
            each = [
                patches_of(x[None, :, :height, :width], self.form)
                for x, (height, width) in zip(pixels, sizes, strict=True)
            ]
            return Images(*map(np.concatenate, zip(*each, strict=True)))
        grids = np.asarray(read["image_grid_thw"], np.int32)
        check_grids(grids.tolist(), self.form.merge)
        return Images(pixels, grids)

    def tokens_of(
        self,
        tokenizer: Any,
        text: str,
        images: Images,
        encode: Callable[[str], Int32[np.ndarray, " T"]] | None = None,
    ) -> Int32[np.ndarray, " prompt"]:
        """Returns the tokens of a rendered chat template, or of a part of it, with as many image tokens
        as the images have squares of patches.

        encode: tokenises a text without the special tokens around it; by default the tokenizer does.

        Raises: UserError if the template did not write one token for each image.
        """
        encode = encode or partial(encode_plain, tokenizer)
        if not self.begun:
            return self.expand_tokens(encode(text), images, tokenizer.get_vocab())
        assert self.ends is not None
        counts = self._counts(images)
        # In the text, as the line breaks around an image join others to tokens of their own.
        begin, end, image = tokenizer.convert_ids_to_tokens([*self.ends, self.form.token])
        before, *after = text.split(begin)
        self._check_count(len(after), len(counts))
        shown = (f"\n\n{begin}{image * n}{end}\n\n{x}" for n, x in zip(counts, after, strict=True))
        whole = "".join([before, *shown])
        tokens = encode(whole)
        self._check_count((tokens == self.form.token).sum() / counts[0], len(counts))
        return tokens

    def stand_for(self, images: Images | None, tokens: Int32[np.ndarray, " T"]) -> bool:
        """True if a prompt has exactly the tokens of these images, and none that a model wrote."""
        count = 0 if images is None else sum(self._counts(images))
        return int((tokens == self.form.token).sum()) == count

    def expand_tokens(
        self,
        tokens: Int32[np.ndarray, " T"],
        images: Images,
        vocabulary: Mapping[str, int] = MappingProxyType({}),
    ) -> Int32[np.ndarray, " prompt"]:
        """Replaces the token that a chat template writes for each image by the image's own. vocabulary:
        the tokenizer's, for models with tokens of text between an image's.

        Raises: UserError if the template did not write one token for each image.
        """
        shown = tokens_of_each(self.form, images, vocabulary, self.ends)
        places = np.flatnonzero(tokens == placeholder(self.form, images, vocabulary))
        self._check_count(len(places), len(shown))
        return expanded(tokens, places, shown)

    def _counts(self, images: Images) -> list[int]:
        """Returns the number of tokens of each image."""
        return [count_patches([grid]) // self.form.merge**2 for grid in images.grids.tolist()]

    def _check_count(self, found: float, wanted: int) -> None:
        if found != wanted:
            raise UserError(
                f"the chat template of {self.directory} writes {found:g} image tokens for"
                f" {wanted} images: use the template that came with the model, and no"
                " image tokens in texts"
            )


def read_images(directory: str, urls: Urls) -> Images:
    """The images as patches of the model of this directory, one copy for all who ask. Raises:
    UnreadableImage; UserError as `load_image_reader`."""
    return _read_together(directory, urls)


def read_each(directory: str, urls: Urls) -> Images:
    """The images of a conversation, each read once however often it grows. Raises: as `read_images`."""
    return _read_apart(directory, urls)


def _read(directory: str, urls: tuple[str, ...]) -> Images:
    return load_image_reader(directory).read(urls)


def _read_one_by_one(directory: str, urls: tuple[str, ...]) -> Images:
    return joined([read_images(directory, (url,)) for url in urls])


_read_together, _read_apart = ReadOnce(_read, CACHED), ReadOnce(_read_one_by_one, CACHED)


def read_prompt_images(tokenizer: Any, prompt: str | Sequence[Message]) -> Images | None:
    """The images of a prompt, None if it has none. Raises as `image_urls` and `read_images`."""
    urls = image_urls(prompt)
    return read_images(tokenizer.name_or_path, urls) if urls else None


def reads_images(directory: str) -> bool:
    """True if the model reads images; False also for a tokenizer without a model."""
    try:
        config = read_config(Path(directory))
    except UserError:
        return False
    return config.get("model_type") in VISION_MODELS and bool(config.get("vision_config"))


@lru_cache(maxsize=CACHED)
def load_image_reader(directory: str) -> ImageReader:
    """Loads the image processor of a model. Raises: UserError for a text-only model, or a processor
    that does not load."""
    config = read_config(Path(directory))
    model_type, tower = config.get("model_type"), config.get("vision_config")
    if model_type not in VISION_MODELS or not tower:
        reads = f"is a {model_type}, which is trained on text alone" if tower else "reads text only"
        raise UserError(f"the prompt has images and {directory} {reads}: {WANTED}")
    described = described_config(config)
    form, ends, options = format_of(described), None, {}
    joined = 1
    if model_type.startswith("gemma"):
        ends = described.boi_token_id, described.eoi_token_id
    if form.colours_last:
        tower = described.vision_config
        options = {x: getattr(tower, x) for x in ("patch_size", "pooling_kernel_size")}
        joined = form.patch[0] // tower.patch_size
    if form.rows:  # the tower's patches in squares, as PixtralProcessor asks for
        options["patch_size"] = form.merge * form.patch[-1]
    try:
        process = load_processor(directory, str(model_type))
    except (OSError, ValueError, ImportError) as error:
        reason = str(error).strip().split("\n")[0][:200]
        wanted = "copy preprocessor_config.json there, and pip install pillow"
        raise UserError(
            f"{directory} has no image processor that loads ({reason}): {wanted}"
        ) from error
    begun = model_type == "gemma3"
    return ImageReader(process, form, directory, ends, begun, joined, options)


def load_processor(directory: str, model_type: str) -> Any:
    """Loads the image processor of a model, with Pillow always: torchvision resizes differently,
    and a model's input should not depend on the packages that are installed.

    Raises: OSError, ValueError, ImportError.
    """
    if model_type == "llama4":
        return load_tile_processor(directory)
    if model_type == "gemma4_unified":
        # Its own needs torchvision, and joins the patches of this one, as `placed_patches` does.
        from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

        return Gemma4ImageProcessorPil.from_pretrained(directory, trust_remote_code=False)
    from transformers import AutoImageProcessor

    return AutoImageProcessor.from_pretrained(directory, backend="pil", trust_remote_code=False)


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
