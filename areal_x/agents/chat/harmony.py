"""Parses completions in harmony, the format of gpt-oss: messages in channels.

    <|channel|>analysis<|message|>…<|end|>                                     reasoning
    <|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{…}<|call|>
    <|start|>assistant<|channel|>final<|message|>…<|return|>                   content

The recipient of a call stands in the message's role or in its channel. Commentary without a
recipient is said to the user, as content. Source: the openai-harmony package and OpenAI's
description of the format.
"""

from __future__ import annotations

import re

from areal_x.agents.chat.parsing import Reply, ToolCall, arguments_of, call_id

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>")
PART = re.compile(
    r"(?P<header>[^<]*(?:<\|(?:channel|constrain)\|>[^<]*)*)<\|message\|>(?P<text>.*?)"
    r"(?:<\|(?:end|return|call|start)\|>|\Z)",
    re.DOTALL,
)
RECIPIENT = re.compile(r"\bto=functions\.([^\s<]+)")
NAME = re.compile(r"<\|channel\|>\s*(\w+)")


def is_harmony(template: str) -> bool:
    """Returns True for a chat template that writes messages in channels."""
    return all(token in template for token in (START, CHANNEL, MESSAGE))


def read_harmony(text: str, tools: bool = False, key: bytes = b"") -> Reply:
    """Parses a completion, with its special tokens, that began behind `<|start|>assistant`.

    tools: parse tool calls; otherwise they stay content. key: seeds the calls' ids.
    """
    reasoning: list[str] = []
    content: list[str] = []
    calls: list[ToolCall] = []
    at = 0
    while at < len(text):
        found = PART.match(text, at)
        if found is None:
            content.append(_bare(text[at:]))
            break
        header, written = found["header"], _bare(found["text"])
        recipient = RECIPIENT.search(header)
        named = NAME.search(header)
        if recipient is not None and tools:
            made = _call(recipient[1], written, call_id(key, len(calls)))
            if made is None:
                content.append(written)
            else:
                calls.append(made)
        elif named is not None and named[1] == "analysis":
            reasoning.append(written)
        else:
            content.append(written)
        at = found.end()
        at += len("assistant") if text.startswith("assistant", at) else 0
        if text.startswith(START, at):
            at += len(START)
            at += len("assistant") if text.startswith("assistant", at) else 0
    said = "\n".join(part for part in content if part)
    thought = "\n".join(reasoning) if reasoning else None
    return Reply(said if said or not (calls or thought) else None, thought, tuple(calls))


def _call(name: str, arguments: str, id: str) -> ToolCall | None:
    try:
        return ToolCall(id, name, arguments_of(arguments))
    except ValueError:  # surrogates that UTF-8 cannot express
        return None


def _bare(text: str) -> str:
    """Returns a text without harmony's own tokens."""
    for token in (START, CHANNEL, MESSAGE, "<|constrain|>", *ENDS):
        text = text.replace(token, "")
    return text
