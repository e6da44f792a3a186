"""Conversations of tiny models: the format of turns and tool calls, and demonstrations of it.

    <tools><user>417*86=<end><assistant><tool_call>{"name": "python", "arguments": {"code": "417*86"}}</tool_call><end>
    <tool_response>35862</tool_response><end><assistant>35862<end>

(without the line break). `demonstration` writes the same text as the chat template, without
transformers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from areal_x import Trajectory
from examples.tiny.model import encode
from examples.tiny.supervised import supervised_trajectory

CHAT_TEMPLATE = """\
{%- if tools %}<tools>{% endif %}
{%- for message in messages %}
  {%- if message.role == "assistant" %}<assistant>{{ message.content }}
    {%- for call in message.tool_calls -%}
      <tool_call>{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson }}</tool_call>
    {%- endfor %}
  {%- elif message.role == "tool" %}<tool_response>{{ message.content | trim }}</tool_response>
  {%- else %}<user>{{ message.content }}
  {%- endif %}<end>
{%- endfor %}
{%- if add_generation_prompt %}<assistant>{% endif -%}
"""
CLOSING = '"}}'
FRAME = (
    "<tools>",
    "<user>",
    "<assistant>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    CLOSING,
)

Turn = tuple[str, str]  # "user", "assistant" or "tool", and the text


def opening(name: str, argument: str) -> str:
    """The token that opens a call of the tool `name`, up to its only argument, a string; `CLOSING`
    ends it."""
    return json.dumps({"name": name, "arguments": {argument: ""}}).removesuffix(CLOSING)


def calling(name: str, argument: str, text: str) -> str:
    """An assistant message that calls this tool."""
    return f"<tool_call>{opening(name, argument)}{text}{CLOSING}</tool_call>"


def demonstration(pieces: Sequence[str], turns: Sequence[Turn], tools: bool) -> Trajectory:
    """A conversation as a trajectory, trained on the text and end token of the assistant's
    messages."""
    return supervised_trajectory(
        *((encode(pieces, text), trained) for text, trained in _parts(turns, tools))
    )


def _parts(turns: Sequence[Turn], tools: bool) -> Iterator[tuple[str, bool]]:
    if tools:
        yield "<tools>", False
    for role, text in turns:
        match role:
            case "assistant":
                yield "<assistant>", False
                yield f"{text}<end>", True
            case "tool":
                yield f"<tool_response>{text}</tool_response><end>", False
            case _:
                yield f"<user>{text}<end>", False
