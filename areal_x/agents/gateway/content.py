"""Images and documents in the messages of the three APIs, as the model is shown them.

Documents of text are shown as their text. An image in a user's message or a tool's result is shown
to a model that reads images. In place of a PDF, a recording, and an image that nothing here can
read, there is a notice, and the session counts it: an agent that looked at a picture once sends it
with every later request, which a refusal would end.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal, Protocol

from pydantic import Field

from areal_x.agents.gateway.exchange import Lenient, Many, Omitted
from areal_x.hf.image_reader import is_image
from areal_x.types import Message

TEXTS = ("text/", "application/json", "application/xml", "application/x-yaml", "application/yaml")
# what the three APIs' images are counted as by a session whose model reads none
IMAGES = frozenset({"messages: image_url", "messages: input_image", "messages: image"})


class Part(Protocol):
    def shown(self) -> str:
        """Returns the text that stands for this part in the prompt."""
        ...


def joined(content: str | Sequence[Part]) -> str:
    return content if isinstance(content, str) else "\n".join(part.shown() for part in content)


def seen(content: str | Sequence[Part]) -> str | list[dict[str, Any]]:
    """Returns content as a text, or as parts in the form of chat completions if it has images, in
    which the renderer finds them."""
    urls = [] if isinstance(content, str) else [url_of(part) for part in content]
    if isinstance(content, str) or not any(urls):
        return joined(content)
    return [
        {"type": "image_url", "image_url": {"url": url}}
        if url
        else {"type": "text", "text": part.shown()}
        for part, url in zip(content, urls, strict=True)
    ]


def url_of(part: Part) -> str | None:
    """Returns the URL of an image; None of anything else, and of one whose URL is not given."""
    return part.url() if isinstance(part, MediaPart | ImageBlock) else None


def without_images(messages: Sequence[Message]) -> list[Message]:
    """Returns the messages with a notice in place of each image."""
    found: list[Message] = []
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, list) and any(map(is_image, content)):
            texts = [notice("An image") if is_image(part) else part["text"] for part in content]
            message = {**message, "content": "\n".join(texts)}
        found.append(message)
    return found


def notice(kind: str, name: str | None = None) -> str:
    about = "" if name is None else f" ({name})"
    return f"[{kind}{about} that is not shown: the model is given text only.]"


def text_of(media_type: str, data: str) -> str | None:
    """Returns the text of a file in base64; None if it is none."""
    if not media_type.startswith(TEXTS):
        return None
    try:
        return base64.b64decode(data, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None


def text_at(url: str) -> str | None:
    """Returns the text of a file in a data URL; None if it is none, or elsewhere."""
    head, comma, data = url.partition(",")
    if not (comma and head.startswith("data:") and head.endswith(";base64")):
        return None
    return text_of(head.removeprefix("data:").removesuffix(";base64"), data)


# of OpenAI's two APIs


class RefusalPart(Lenient):
    """The refusal of an assistant, sent back."""

    type: Literal["refusal"]
    refusal: str

    def shown(self) -> str:
        return self.refusal


class ImageUrl(Lenient):
    url: str


class MediaPart(Omitted):
    """image_url: of an image, in the form of either API."""

    type: Literal["image_url", "input_image", "input_audio", "video_url"]
    image_url: ImageUrl | str | None = None

    def url(self) -> str | None:
        return self.image_url.url if isinstance(self.image_url, ImageUrl) else self.image_url

    def omitted(self) -> str:
        lacks = self.type in ("image_url", "input_image") and self.url() is None
        return f"{self.type} without image_url" if lacks else self.type

    def shown(self) -> str:
        kinds = {"input_audio": "A recording", "video_url": "A video"}
        return notice(kinds.get(self.type, "An image"))


class File(Lenient):
    file_data: str | None = None
    filename: str | None = None

    @cached_property  # to be counted and shown, and a file may be large
    def text(self) -> str | None:
        return None if self.file_data is None else text_at(self.file_data)


class FilePart(Omitted):
    """Of chat completions."""

    type: Literal["file"]
    file: File

    def omitted(self) -> str | None:
        return self.type if self.file.text is None else None

    def shown(self) -> str:
        text = self.file.text
        return notice("A file", self.file.filename) if text is None else text


class InputFilePart(File, Omitted):
    """Of responses."""

    type: Literal["input_file"]

    def omitted(self) -> str | None:
        return self.type if self.text is None else None

    def shown(self) -> str:
        text = self.text
        return notice("A file", self.filename) if text is None else text


# of Anthropic's API


class TextBlock(Lenient):
    type: Literal["text"]
    text: str

    def shown(self) -> str:
        return self.text


class ImageSource(Lenient):
    type: str
    media_type: str = ""
    data: str | None = None
    url: str | None = None


class ImageBlock(Omitted):
    type: Literal["image"]
    source: ImageSource

    def url(self) -> str | None:
        source = self.source
        return f"data:{source.media_type};base64,{source.data}" if source.data else source.url

    def omitted(self) -> str:
        return self.type if self.url() else f"{self.type} without data"

    def shown(self) -> str:
        return notice("An image")


class DocumentSource(Lenient):
    type: str
    media_type: str = ""
    data: str | None = None
    content: str | Many[Annotated[TextBlock | ImageBlock, Field(discriminator="type")]] | None = (
        None
    )

    @cached_property
    def text(self) -> str | None:
        if self.content is not None:
            return joined(self.content)
        if self.data is None:
            return None
        return self.data if self.type == "text" else text_of(self.media_type, self.data)


class DocumentBlock(Omitted):
    type: Literal["document"]
    source: DocumentSource
    title: str | None = None
    context: str | None = None

    def omitted(self) -> str | None:
        return self.type if self.source.text is None else None

    def shown(self) -> str:
        text = self.source.text
        if text is None:
            return notice("A document", self.title or self.source.media_type or None)
        return "\n".join(part for part in (self.title, self.context, text) if part)


class SearchResultBlock(Lenient):
    type: Literal["search_result"]
    source: str
    title: str
    content: Many[TextBlock]

    def shown(self) -> str:
        return "\n".join((self.title, self.source, joined(self.content)))


class ToolReferenceBlock(Lenient):
    """A tool that a client's own search for tools found."""

    type: Literal["tool_reference"]
    tool_name: str

    def shown(self) -> str:
        return self.tool_name


ReadBlock = Annotated[
    TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock,
    Field(discriminator="type"),
]
