"""How long a text is, for a tokenizer, before it is given all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from areal_x.protocols.engine import PromptTooLong
from areal_x.types import Message

OF_A_TOKEN = 8  # characters, as work: of most tokens fewer, but each is looked up
PIECE = 1 << 16  # characters that are tokenised at once of a text that may be too long
SEAM = 64  # tokens, more than a cut between two pieces can add


def refuse_long(count: Callable[[str], int], texts: Iterable[str], most: int) -> None:
    """Raises: PromptTooLong for texts that surely have more tokens, looking at no more of them than
    it takes to know. Texts of one piece are left to whoever tokenises them."""
    least = 0
    for text in texts:
        for start in range(0, len(text), PIECE) if len(text) > PIECE else ():
            least += count(text[start : start + PIECE]) - SEAM
            if least > most:
                raise PromptTooLong(
                    f"a prompt of more than {most} tokens leaves no room in a context of {most}:"
                    " raise train.row_length"
                )


def size_of(value: Any) -> int:
    """About how many characters messages or tools have, at the depth that JSON may have here."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(16 + size_of(x) for x in value.values())
    return sum(map(size_of, value)) if isinstance(value, Sequence) else 8


def about(count: Callable[[str], int], text: str) -> int:
    """How many tokens a text has: of a long one, piece by piece, with a few more at the cuts."""
    return sum(count(text[start : start + PIECE]) for start in range(0, len(text), PIECE))


def texts_of(messages: Sequence[Message]) -> Iterator[str]:
    """The contents of messages, in no chat template."""
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            yield content
        else:
            yield from (part["text"] for part in content or () if isinstance(part.get("text"), str))
