"""Cheap bounds on the length of a text, so that no tokenizer call runs on all of a very long one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from areal_x.errors import PromptTooLong
from areal_x.runtime.thread import INLINE
from areal_x.types import Message

# Characters that decoding one token counts for, in work: most tokens have fewer, but each is looked
# up.
CHARACTERS_PER_TOKEN = 8
PIECE_CHARACTERS = 1 << 16  # a longer text is tokenised in pieces of this size
SEAM_TOKENS = 64  # upper bound on the tokens that one cut between two pieces adds


def raise_if_too_long(
    count_tokens: Callable[[str], int], texts: Iterable[str], max_tokens: int
) -> None:
    """Rejects texts that certainly have more than `max_tokens` tokens, reading no more of them than
    that takes.

    A text of at most one piece is not counted: tokenising it whole is cheap for the caller.

    Raises: PromptTooLong.
    """
    least = 0
    for text in texts:
        for piece in _pieces(text) if len(text) > PIECE_CHARACTERS else ():
            least += count_tokens(piece) - SEAM_TOKENS
            if least > max_tokens:
                raise PromptTooLong(
                    f"a prompt of more than {max_tokens} tokens leaves no room in a context of"
                    f" {max_tokens}: raise train.row_length"
                )


def estimate_tokens(count_tokens: Callable[[str], int], text: str) -> int:
    """Token count of a text, computed piece by piece; each cut may add a few tokens."""
    return sum(map(count_tokens, _pieces(text)))


def estimate_characters(value: Any, enough: int = INLINE) -> int:
    """Approximate number of characters in messages or tools (nested JSON values), counted no further
    than `enough`: the cost of a decision does not grow with a conversation."""
    found = 0
    left = [value]
    while left and found <= enough:
        item = left.pop()
        if isinstance(item, str):
            found += len(item)
        elif isinstance(item, Mapping):
            found += 16 * len(item)
            left.extend(item.values())
        elif isinstance(item, Sequence):
            left.extend(reversed(item))
        else:
            found += 8
    return found


def texts_of(messages: Sequence[Message]) -> Iterator[str]:
    """Yields the text contents of messages, without a chat template."""
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            yield content
        else:
            yield from (part["text"] for part in content or () if isinstance(part.get("text"), str))


def _pieces(text: str) -> Iterator[str]:
    return (
        text[start : start + PIECE_CHARACTERS] for start in range(0, len(text), PIECE_CHARACTERS)
    )
