"""Conversations of tiny models: the frame of their turns and tool calls, and demonstrations to
learn it from.

    <tools><user>417*86=<end><assistant><tool_call>{"name": "python", "arguments": {"code": "417*86"}}</tool_call><end>
    <tool_response>35862</tool_response><end><assistant>35862<end>

(without the line break). `demonstration` writes what the chat template does, with no need of
transformers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from areal_x.types import Trajectory
from examples.tiny.model import encode
from examples.tiny.supervised import taught

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

Turn = tuple[str, str]  # "user", "assistant" or "tool", and what it says


def opening(name: str, argument: str) -> str:
    """The piece with which a call of the tool `name` begins, up to its only argument, a text;
    `CLOSING` ends it."""
    return json.dumps({"name": name, "arguments": {argument: ""}}).removesuffix(CLOSING)


def calling(name: str, argument: str, text: str) -> str:
    """What an assistant says that calls this tool."""
    return f"<tool_call>{opening(name, argument)}{text}{CLOSING}</tool_call>"


def demonstration(pieces: Sequence[str], turns: Sequence[Turn], tools: bool) -> Trajectory:
    """A conversation of which the assistant's turns are learnt, from what they say to the end
    token."""
    return taught(*((encode(pieces, text), learnt) for text, learnt in _parts(turns, tools)))


def _parts(turns: Sequence[Turn], tools: bool) -> Iterator[tuple[str, bool]]:
    if tools:
        yield "<tools>", False
    for who, said in turns:
        match who:
            case "assistant":
                yield "<assistant>", False
                yield f"{said}<end>", True
            case "tool":
                yield f"<tool_response>{said}</tool_response><end>", False
            case _:
                yield f"<user>{said}<end>", False
