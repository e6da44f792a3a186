"""Parses the text of a completion into content, reasoning and tool calls.

Several notations of tool calls are recognised. That of Hermes, also used by Qwen, any number of times:

    <tool_call>
    {"name": "add", "arguments": {"a": 1}}
    </tool_call>

that of Llama, calls that are the whole text: {"name": "add", "parameters": {"a": 1}}, and those of
areal_x.agents.chat.notations. Anything else stays content.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from areal_x.agents.chat.notations import Tools, xml_call
from areal_x.hf.chat_form import THINK, THOUGHT

CALL, CALLED = "<tool_call>", "</tool_call>"
PYTHON = "<|python_tag|>"  # Llama 3 writes it before a call
# Llama 4's template writes a call's content between these, before the call
PYTHON_START, PYTHON_END = "<|python_start|>", "<|python_end|>"
MISTRAL = "[TOOL_CALLS]"
# kept in the text even if they are special tokens, which are otherwise removed
MARKERS = (THINK, THOUGHT, CALL, CALLED, PYTHON, PYTHON_START, PYTHON_END, MISTRAL)
MISTRALS_ID = re.compile(r"[a-zA-Z0-9]{9}")
LONGEST = 100_000  # characters of a call in XML
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
    text: str,
    *,
    reasons: bool = False,
    opened: bool = False,
    tools: bool = False,
    schemas: Tools = (),
    key: bytes = b"",
) -> Reply:
    """Parses a text into a reply.

    reasons: <think>…</think> at its start is reasoning. opened: the prompt already opened it.
    tools: parse tool calls. schemas: the tools that the model was given, whose parameters tell texts
    from values in notations that do not. key: seeds the calls' ids, together with their positions.
    """
    reasoning, rest = _reasoned(text, opened) if reasons else (None, text)
    calls, content = _called(rest, schemas) if tools else ([], rest)
    made = tuple(
        ToolCall(written or call_id(key, place), name, arguments)
        for place, (name, arguments, written) in enumerate(calls)
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


Called = tuple[str, str, str | None]  # name, arguments, and the id if the model wrote one


def _called(text: str, schemas: Tools) -> tuple[list[Called], str]:
    """Returns the tools called, and the remaining text, which includes malformed calls."""
    if whole := _whole(text):
        return whole, ""
    content, marked, listed = text.partition(MISTRAL)
    if marked and (found := _list(listed)):
        return found, content
    calls: list[Called] = []
    rest: list[str] = []
    at = 0
    while (start := text.find(CALL, at)) >= 0:
        rest.append(text[at:start])
        at = start + len(CALL)
        call, end = _tagged(text, at, schemas)
        if call is None:
            rest.append(CALL)
        else:
            calls.append(call)
            at = end
    return calls, "".join([*rest, text[at:]])


def _tagged(text: str, at: int, schemas: Tools) -> tuple[Called | None, int]:
    """Parses the call behind a <tool_call> at `at`; returns it and the end of its closing tag."""
    call, end = _call(text, at, ("arguments", "parameters"))
    closed = CLOSE.match(text, end) if call is not None else None
    if call is not None and closed is not None:
        return call, closed.end()
    # a call in XML is short: looking further would cost a pass over the text for each tag
    end = text.find(CALLED, at, at + LONGEST)
    try:
        found = xml_call(text[at:end], schemas) if end >= 0 else None
        if found is not None:
            return (_sendable(found[0]), arguments_of(found[1]), None), end + len(CALLED)
    except (ValueError, RecursionError):
        pass
    return None, at


def _whole(text: str) -> list[Called]:
    """Returns the calls that a whole text is. They must have arguments: a lone name may just as well
    be an answer in JSON."""
    written = text.strip().removeprefix(PYTHON).strip()
    if written.startswith(PYTHON_START):
        written = written.removeprefix(PYTHON_START + PYTHON_END).strip()
    calls: list[Called] = []
    at = 0
    while at < len(written):
        call, at = _call(written, at, ("parameters", "arguments"), needed=True)
        if call is None:
            return []
        calls.append(call)
    return calls


def _list(text: str) -> list[Called]:
    """Returns the calls of a JSON list that is the whole text; Mistral's model writes their ids."""
    try:
        values, end = _json(text, 0)
        if text[end:].strip() or not isinstance(values, list):
            return []
        return [
            (_sendable(value["name"]), arguments_of(value["arguments"]), _id(value.get("id")))
            for value in values
        ]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []


def _id(written: Any) -> str | None:
    return written if isinstance(written, str) and MISTRALS_ID.fullmatch(written) else None


def _call(
    text: str, at: int, keys: tuple[str, str], needed: bool = False
) -> tuple[Called | None, int]:
    """Parses the call at `at`, after optional spaces; returns its name and arguments, and its end."""
    try:
        value, end = _json(text, at)
        name = value.get("name") if isinstance(value, dict) else None
        arguments = [value[key] for key in keys if name and key in value]
        if not isinstance(name, str) or not name or (needed and not arguments):
            return None, at
        return (_sendable(name), arguments_of(arguments[0] if arguments else {}), None), end
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
