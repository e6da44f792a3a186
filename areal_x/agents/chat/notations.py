"""Tool calls in the notations of families that do not write Hermes' JSON: Qwen3.5's and GLM's XML,
and Mistral's list.

    <function=add>\\n<parameter=first>\\n1\\n</parameter>\\n</function>          Qwen3-Coder, Qwen3.5
    add\\n<arg_key>first</arg_key>\\n<arg_value>1</arg_value>\\n                 GLM-4.5
    [TOOL_CALLS] [{"name": "add", "arguments": {"first": 1}, "id": "…"}]      Mistral v3

The first two stand between <tool_call> and </tool_call>. Their values are texts: one whose parameter
is not a string by the tool's schema is parsed as JSON, if it is any.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

FUNCTION = re.compile(r"\s*<function=([^<>\n]+)>\s*")
PARAMETER = re.compile(r"\s*<parameter=([^<>\n]+)>\n?")
NAME = re.compile(r"\s*([^\s<>{}\"]+)\s*(?=<arg_key>|\Z)")
KEY = re.compile(r"\s*<arg_key>([^<]*)</arg_key>\s*<arg_value>")
Tools = Sequence[Mapping[str, Any]]


def xml_call(inside: str, tools: Tools) -> tuple[str, dict[str, Any]] | None:
    """Returns the name and arguments of the call between <tool_call> tags, or None if it is in
    neither notation."""
    if (found := FUNCTION.match(inside)) is not None:
        pairs, at = _pairs(inside, found.end(), PARAMETER, "</parameter>")
        if inside[at:].strip() != "</function>":
            return None
    elif (found := NAME.match(inside)) is not None:
        pairs, at = _pairs(inside, found.end(), KEY, "</arg_value>")
        if inside[at:].strip():
            return None
    else:
        return None
    return found[1], _values(found[1], pairs, tools)


def _pairs(
    text: str, at: int, begins: re.Pattern[str], end: str
) -> tuple[list[tuple[str, str]], int]:
    """Returns the keys and values from `at` on, and the position behind them."""
    pairs: list[tuple[str, str]] = []
    while (key := begins.match(text, at)) is not None:
        stop = text.find(end, key.end())
        if stop < 0:
            break
        value = text[key.end() : stop]
        pairs.append((key[1], value.removesuffix("\n") if begins is PARAMETER else value))
        at = stop + len(end)
    return pairs, at


def _values(name: str, pairs: Sequence[tuple[str, str]], tools: Tools) -> dict[str, Any]:
    properties = next((_properties(tool) for tool in tools if _name(tool) == name), {})
    return {key: _value(text, properties.get(key)) for key, text in pairs}


def _value(text: str, schema: Any) -> Any:
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind is None or kind == "string" or (isinstance(kind, list) and "string" in kind):
        return text
    if text in PYTHON_WORDS:  # templates write values as Python does
        return PYTHON_WORDS[text]
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


PYTHON_WORDS = {"True": True, "False": False, "None": None}


def _name(tool: Mapping[str, Any]) -> Any:
    function = tool.get("function")
    return function.get("name") if isinstance(function, Mapping) else None


def _properties(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = tool["function"].get("parameters")
    found = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return found if isinstance(found, Mapping) else {}
