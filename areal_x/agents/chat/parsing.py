"""What a completion's text says: content, reasoning and tool calls.

Two ways of writing tool calls are read. Hermes', which Qwen took over, any number of them:

    <tool_call>
    {"name": "add", "arguments": {"a": 1}}
    </tool_call>

and Llama 3's, one that is the whole text: {"name": "add", "parameters": {"a": 1}}. What is neither
stays content.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

THINK, THOUGHT = "<think>", "</think>"
CALL, CALLED = "<tool_call>", "</tool_call>"
PYTHON = "<|python_tag|>"  # Llama writes it before a call
# read also where they are special tokens, which are left out of texts else
MARKERS = (THINK, THOUGHT, CALL, CALLED, PYTHON)
BLANK, CLOSE = re.compile(r"\s*"), re.compile(rf"\s*{CALLED}")


@dataclass(frozen=True)
class ToolCall:
    """A tool that the model wants called. id: unique in its conversation. arguments: JSON text;
    where it does not parse, as the model wrote it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Reply:
    """What the model said. content: None where it said nothing but tool calls or reasoning."""

    content: str | None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()

    def message(self) -> dict[str, Any]:
        """The assistant's message in OpenAI's form, for the conversation that goes on."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.tool_calls
            ]
        return message


def read(
    text: str, *, reasons: bool = False, opened: bool = False, tools: bool = False, key: bytes = b""
) -> Reply:
    """The reply that a text is.

    reasons: <think>…</think> at its beginning is reasoning; opened: the prompt has opened it
    already. tools: calls of tools are read. key: of which, and of each call's place, the calls' ids
    are made.
    """
    reasoning, said = _reasoned(text, opened) if reasons else (None, text)
    calls, content = _called(said) if tools else ([], said)
    made = tuple(
        ToolCall(call_id(key, place), name, arguments)
        for place, (name, arguments) in enumerate(calls)
    )
    if made:
        content = content.strip()
    return Reply(content if content or not (made or reasoning) else None, reasoning, made)


def call_id(key: bytes, place: int) -> str:
    """Of nine letters and digits: Mistral's template refuses others."""
    return blake2b(key + place.to_bytes(4, "little")).hexdigest()[:9]


def arguments_of(value: Any) -> str:
    """A tool's arguments as JSON text, the one that they are of which they are, or a text that is
    no JSON as it is.

    Raises ValueError for what cannot be sent on as text.
    """
    if isinstance(value, str):
        try:
            parsed, end = _json(value, 0)
        except ValueError:
            parsed, end = None, -1
        if end < len(value.rstrip()):
            return _sendable(value)
        value = parsed
    return _sendable(json.dumps(value, ensure_ascii=False, allow_nan=False))


def _reasoned(text: str, opened: bool) -> tuple[str | None, str]:
    """The reasoning at the beginning of a text, and the rest."""
    begun = text.lstrip()
    if begun.startswith(THINK):
        begun = begun.removeprefix(THINK)
    elif not opened:
        return None, text
    reasoning, _, said = begun.partition(THOUGHT)
    return reasoning.strip("\n"), said.lstrip("\n")


def _called(text: str) -> tuple[list[tuple[str, str]], str]:
    """Names and arguments of the tools called, and what else the text says: also what was begun
    like a call and is none."""
    if (alone := _whole(text)) is not None:
        return [alone], ""
    calls: list[tuple[str, str]] = []
    said: list[str] = []
    at = 0
    while (start := text.find(CALL, at)) >= 0:
        said.append(text[at:start])
        at = start + len(CALL)
        call, end = _call(text, at, ("arguments", "parameters"))
        closed = CLOSE.match(text, end) if call is not None else None
        if call is None or closed is None:
            said.append(CALL)
        else:
            calls.append(call)
            at = closed.end()
    return calls, "".join([*said, text[at:]])


def _whole(text: str) -> tuple[str, str] | None:
    """The call that is all of a text. Its arguments must be there: a name alone is as well an
    answer in JSON."""
    written = text.strip().removeprefix(PYTHON).strip()
    call, end = _call(written, 0, ("parameters", "arguments"), needed=True)
    return call if end == len(written) else None


def _call(
    text: str, at: int, keys: tuple[str, str], needed: bool = False
) -> tuple[tuple[str, str] | None, int]:
    """The name and arguments of the call that is written at or behind blanks from `at`, and where
    it ends."""
    try:
        value, end = _json(text, at)
        name = value.get("name") if isinstance(value, dict) else None
        arguments = [value[key] for key in keys if name and key in value]
        if not isinstance(name, str) or not name or (needed and not arguments):
            return None, at
        return (_sendable(name), arguments_of(arguments[0] if arguments else {})), end
    except (ValueError, RecursionError):
        return None, at


def _json(text: str, at: int) -> tuple[Any, int]:
    """The JSON value at or behind blanks from `at`, and where it ends. Raises ValueError where
    there is none."""
    try:
        return DECODER.raw_decode(text, BLANK.match(text, at).end())  # type: ignore[union-attr]  # it always matches
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _sendable(text: str) -> str:
    """Raises ValueError for halves of characters, which JSON may spell and UTF-8 does not."""
    text.encode()
    return text


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


# models write line breaks inside of texts
DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse)
