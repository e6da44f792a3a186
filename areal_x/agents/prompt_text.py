"""Messages as text, for whoever shows them to a program, a person or another model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from areal_x.types import Message


def prompt_text(prompt: str | Sequence[Message], roles: bool = False) -> str:
    """Returns a prompt as text: of messages, a paragraph each. roles: each begins with its role."""
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(
        f"{message['role']}: {content_text(message)}" if roles else content_text(message)
        for message in prompt
    )


def content_text(message: Mapping[str, Any]) -> str:
    """Returns the text of a message, with the type of a part that is none, such as [image_url]."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    parts = [part.get("text") or f"[{part.get('type', 'part')}]" for part in content]
    return "\n".join(parts)
