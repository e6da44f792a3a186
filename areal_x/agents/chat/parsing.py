"""Parses the text of a completion into content, reasoning and tool calls.

Two notations of tool calls are recognised. That of Hermes, also used by Qwen, any number of times:

    <tool_call>
    {"name": "add", "arguments": {"a": 1}}
    </tool_call>

and that of Llama 3, one call that is the whole text: {"name": "add", "parameters": {"a": 1}}.
Anything else stays content.
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
# kept in the text even if they are special tokens, which are otherwise removed
MARKERS = (THINK, THOUGHT, CALL, CALLED, PYTHON)
BLANK, CLOSE = re.compile(r"\s*"), re.compile(rf"\s*{CALLED}")


@dataclass(frozen=True)
class ToolCall:
    """A tool that the model calls. id: unique in its conversation. arguments: JSON text, or, if
    that does not parse, the model's own text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Reply:
    """The model's reply. content: None for a reply with only tool calls or reasoning."""

    content: str | None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()

    def message(self) -> dict[str, Any]:
        """Returns the assistant's message in OpenAI's form, to continue the conversation with."""
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
    """Parses a text into a reply.

    reasons: <think>…</think> at its start is reasoning. opened: the prompt already opened it.
    tools: parse tool calls. key: seeds the calls' ids, together with their positions.
    """
    reasoning, rest = _reasoned(text, opened) if reasons else (None, text)
    calls, content = _called(rest) if tools else ([], rest)
    made = tuple(
        ToolCall(call_id(key, place), name, arguments)
        for place, (name, arguments) in enumerate(calls)
    )
    if made:
        content = content.strip()
    return Reply(content if content or not (made or reasoning) else None, reasoning, made)


def call_id(key: bytes, place: int) -> str:
    """Returns nine letters and digits: Mistral's template refuses other ids."""
    return blake2b(key + place.to_bytes(4, "little")).hexdigest()[:9]


def arguments_of(value: Any) -> str:
    """Returns a tool's arguments as JSON text: encoded, if they are a value; normalised, if they
    are JSON text; unchanged, if they are other text.

    Raises: ValueError for text that cannot be encoded.
    """
    if isinstance(value, str):
        try:
            parsed, end = _json(value, 0)
        except ValueError:
            parsed = None
            end = -1
        if end < len(value.rstrip()):
            return _sendable(value)
        value = parsed
    return _sendable(json.dumps(value, ensure_ascii=False, allow_nan=False))


def _reasoned(text: str, opened: bool) -> tuple[str | None, str]:
    """Splits off the reasoning at the start of a text."""
    begun = text.lstrip()
    if begun.startswith(THINK):
        begun = begun.removeprefix(THINK)
    elif not opened:
        return None, text
    reasoning, _, rest = begun.partition(THOUGHT)
    return reasoning.strip("\n"), rest.lstrip("\n")


def _called(text: str) -> tuple[list[tuple[str, str]], str]:
    """Returns the names and arguments of the tools called, and the remaining text, which includes
    malformed calls."""
    if (alone := _whole(text)) is not None:
        return [alone], ""
    calls: list[tuple[str, str]] = []
    rest: list[str] = []
    at = 0
    while (start := text.find(CALL, at)) >= 0:
        rest.append(text[at:start])
        at = start + len(CALL)
        call, end = _call(text, at, ("arguments", "parameters"))
        closed = CLOSE.match(text, end) if call is not None else None
        if call is None or closed is None:
            rest.append(CALL)
        else:
            calls.append(call)
            at = closed.end()
    return calls, "".join([*rest, text[at:]])


def _whole(text: str) -> tuple[str, str] | None:
    """Returns the call that a whole text is. It must have arguments: a lone name may just as well
    be an answer in JSON."""
    written = text.strip().removeprefix(PYTHON).strip()
    call, end = _call(written, 0, ("parameters", "arguments"), needed=True)
    return call if end == len(written) else None


def _call(
    text: str, at: int, keys: tuple[str, str], needed: bool = False
) -> tuple[tuple[str, str] | None, int]:
    """Parses the call at `at`, after optional spaces; returns its name and arguments, and its end."""
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
    """Parses the JSON value at `at`, after optional spaces; returns it and its end. Raises:
    ValueError if there is none."""
    try:
        return DECODER.raw_decode(text, BLANK.match(text, at).end())  # type: ignore[union-attr]  # it always matches
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _sendable(text: str) -> str:
    """Raises: ValueError for unpaired surrogates, which JSON can express and UTF-8 cannot."""
    text.encode()
    return text


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


# models write line breaks inside strings
DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse)
