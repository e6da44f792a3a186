"""JSON that an agent wants an answer to be: asked for in words, and looked at afterwards.

Nothing holds the policy to it. A grammar would take words away that the policy gives a probability,
and what is left would be trained on as if it had been chosen among all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from areal_x.agents.chat.rendering import text_content
from areal_x.agents.gateway.errors import ApiError
from areal_x.types import Message

Schema = Mapping[str, Any]
OBJECT: Schema = {"type": "object"}


def format_schema(kind: str, schema: Schema | None, param: str) -> Schema | None:
    """Of a format of this type, None for text. schema: as the client gave it, of which somebody
    else sees whether it is one. Raises: ApiError for a type that is not known, or where there is
    none."""
    if kind == "text":
        return None
    if kind == "json_object":
        return OBJECT
    if kind != "json_schema":
        raise ApiError(
            400,
            f"{param} is {kind!r}: text, json_object and json_schema are known",
            "invalid_value",
            param,
        )
    if schema is None:
        raise invalid_schema(param, "it is missing")
    return schema


def invalid_schema(param: str, why: str) -> ApiError:
    return ApiError(400, f"{param} has no JSON schema: {why}", "invalid_schema", param)


def with_format_instructions(
    messages: Sequence[Message], schema: Schema | None
) -> tuple[Message, ...]:
    """The messages, with the format at the end of the system's, or as one of the system's where
    there is none."""
    if schema is None:
        return tuple(messages)
    words = "Answer with JSON alone, a single object."
    if schema is not OBJECT:
        words = (
            "Answer with JSON alone, as this JSON schema describes it:"
            f" {json.dumps(schema, ensure_ascii=False)}"
        )
    if messages and messages[0].get("role") == "system":
        first = {**messages[0], "content": f"{text_content(messages[0].get('content'))}\n\n{words}"}
        return (first, *messages[1:])
    return ({"role": "system", "content": words}, *messages)
