"""JSON response formats: requested in words, and checked afterwards.

They are not enforced. A grammar would remove tokens to which the policy gives a probability, and
the completion would be trained on as if it had been sampled among all tokens.
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
    """Returns the schema of a format of this type, None for text. schema: as the client sent it; it
    is validated elsewhere. Raises: ApiError for an unknown type, or a missing schema."""
    if kind == "text":
        return None
    if kind == "json_object":
        return OBJECT
    if kind != "json_schema":
        raise ApiError(
            400,
            f"{param} is {kind!r}: text, json_object and json_schema are supported",
            "invalid_value",
            param,
        )
    if schema is None:
        raise invalid_schema(param, "it is missing")
    return schema


def invalid_schema(param: str, why: str) -> ApiError:
    return ApiError(400, f"{param} has no valid JSON schema: {why}", "invalid_schema", param)


def with_format_instructions(
    messages: Sequence[Message], schema: Schema | None
) -> tuple[Message, ...]:
    """Returns the messages with the format appended to the system message, or with a system message
    for it if there is none."""
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
