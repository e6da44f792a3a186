"""Questions about pictures in the forms of public datasets, as tasks: Geometry3K, CLEVR-count and others
with their columns.

    train.dataset = @load_dataset()
    load_dataset.path = "hiyouga/geometry3k"
    load_dataset.to_task = @picture_task
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any

import gin

from areal_x.errors import UserError
from areal_x.tasks.answer_tags import tagged_answer
from areal_x.types import Message, Task

MARK = "<image>"  # where a picture stands in a question
MAGIC = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"RIFF": "webp"}
QUESTIONS = ("problem", "question", "prompt")
ANSWERS = ("answer", "solution")
PICTURES = ("images", "image")


@gin.configurable
def picture_task(record: Mapping[str, Any], id: str, instruction: str = "") -> Task:
    r"""Makes a task of a record with a question, its pictures and an answer.

    The question is in `problem`, `question` or `prompt`; "<image>" in it marks the place of a picture,
    and pictures without a mark come first. They are in `images` or `image`: data: URLs, bytes as
    `datasets` stores them ({"bytes": …}), or Pillow's. The answer, in `answer` or `solution`, is what
    stands in <answer> </answer>, if that is there. Everything else becomes metadata.

    Args:
        record: One of the dataset's.
        id: The task's.
        instruction: Text behind each question.

    Raises: UserError for a record without a question, an answer or a picture, with more marks than
    pictures, or with a picture in another form.
    """
    question, answer = field_of(record, QUESTIONS, id), field_of(record, ANSWERS, id)
    given = record[field_of(record, PICTURES, id)]
    many = isinstance(given, Sequence) and not isinstance(given, str | bytes)
    shown = [url_of(picture, id) for picture in (given if many else [given])]
    used = {question, answer, *PICTURES}
    rest = {name: x for name, x in record.items() if name not in used}
    text = record[question]
    if not isinstance(text, str):
        raise UserError(f"the question of task {id!r} is no text but {type(text).__name__}")
    content = content_of(text, shown, instruction, id)
    message: Message = {"role": "user", "content": content}
    return Task(id, [message], tagged_answer(str(record[answer])).strip(), rest)


def field_of(record: Mapping[str, Any], names: Sequence[str], id: str) -> str:
    """Returns the name of the first of these fields that a record has. Raises: UserError."""
    found = next((name for name in names if record.get(name) is not None), None)
    if found is None:
        raise UserError(
            f"task {id!r} has none of the fields {', '.join(names)}: it has {', '.join(record)}"
        )
    return found


def content_of(text: str, urls: Sequence[str], instruction: str, id: str) -> list[dict[str, Any]]:
    """Returns text and pictures as parts of a message, each picture at its mark."""
    pieces = text.split(MARK)
    marks = len(pieces) - 1
    if marks > len(urls):
        raise UserError(f"task {id!r} marks {marks} pictures and has {len(urls)}")
    pictures = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    first = len(urls) - marks
    parts: list[dict[str, Any]] = pictures[:first]
    for number, piece in enumerate(pieces):
        if number:
            parts.append(pictures[first + number - 1])
        if number == len(pieces) - 1 and instruction:
            piece = f"{piece.rstrip()} {instruction}".strip()
        if piece.strip():
            parts.append({"type": "text", "text": piece})
    return parts


def url_of(picture: Any, id: str) -> str:
    """Returns a picture as a data: URL. Raises: UserError for another form."""
    if isinstance(picture, str) and picture.startswith("data:image/"):
        return picture
    if isinstance(picture, Mapping):
        picture = picture.get("bytes")
    if hasattr(picture, "save") and hasattr(picture, "convert"):
        file = io.BytesIO()
        picture.convert("RGB").save(file, "PNG")
        picture = file.getvalue()
    if isinstance(picture, bytes):
        kind = next((kind for magic, kind in MAGIC.items() if picture.startswith(magic)), None)
        if kind is not None:
            return f"data:image/{kind};base64,{base64.b64encode(picture).decode()}"
    raise UserError(
        f"a picture of task {id!r} is no data: URL, no PNG, JPEG or WEBP as bytes, and none of Pillow:"
        f" {str(picture)[:80]!r} (files and addresses are not read)"
    )
