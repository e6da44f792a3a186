"""Images and documents in the messages of the three APIs: what a model that reads text is shown.

Documents of text are shown as their text. In place of an image, a PDF or a recording the model is
shown a notice, and the session counts it: an agent that looked at a picture once sends it with every
later request, which a refusal would end.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Annotated, Literal, Protocol

from pydantic import Field

from areal_x.agents.gateway.exchange import Lenient, Many, Omitted

TEXTS = ("text/", "application/json", "application/xml", "application/x-yaml", "application/yaml")


class Part(Protocol):
    def shown(self) -> str:
        """Returns the text that stands for this part in the prompt."""
        ...


def joined(content: str | Sequence[Part]) -> str:
    return content if isinstance(content, str) else "\n".join(part.shown() for part in content)


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


class MediaPart(Omitted):
    type: Literal["image_url", "input_image", "input_audio", "video_url"]

    def omitted(self) -> str:
        return self.type

    def shown(self) -> str:
        kinds = {"input_audio": "A recording", "video_url": "A video"}
        return notice(kinds.get(self.type, "An image"))


class File(Lenient):
    file_data: str | None = None
    filename: str | None = None

    def text(self) -> str | None:
        return None if self.file_data is None else text_at(self.file_data)


class FilePart(Omitted):
    """Of chat completions."""

    type: Literal["file"]
    file: File

    def omitted(self) -> str | None:
        return self.type if self.file.text() is None else None

    def shown(self) -> str:
        text = self.file.text()
        return notice("A file", self.file.filename) if text is None else text


class InputFilePart(File, Omitted):
    """Of responses."""

    type: Literal["input_file"]

    def omitted(self) -> str | None:
        return self.type if self.text() is None else None

    def shown(self) -> str:
        text = self.text()
        return notice("A file", self.filename) if text is None else text


# of Anthropic's API


class TextBlock(Lenient):
    type: Literal["text"]
    text: str

    def shown(self) -> str:
        return self.text


class ImageBlock(Omitted):
    type: Literal["image"]

    def omitted(self) -> str:
        return self.type

    def shown(self) -> str:
        return notice("An image")


class DocumentSource(Lenient):
    type: str
    media_type: str = ""
    data: str | None = None
    content: str | Many[Annotated[TextBlock | ImageBlock, Field(discriminator="type")]] | None = (
        None
    )

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
        return self.type if self.source.text() is None else None

    def shown(self) -> str:
        text = self.source.text()
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
