"""JSON that an agent wants an answer to be: asked for in words, and looked at afterwards.

Nothing holds the policy to it. A grammar would take words away that the policy gives a probability, and what is left would be
trained on as if it had been chosen among all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import jsonschema
from referencing import Registry
from referencing.exceptions import Unresolvable

from areal_x.rollout.chat.rendering import text_content
from areal_x.rollout.gateway.errors import ApiError
from areal_x.types import Message

Schema = Mapping[str, Any]
OBJECT: Schema = {"type": "object"}


def schema_of(kind: str, schema: Schema | None, param: str) -> Schema | None:
    """Of a format of this type, None for text. schema: as the client gave it. Raises: ApiError for what is none."""
    if kind == "text":
        return None
    if kind == "json_object":
        return OBJECT
    if kind != "json_schema":
        raise ApiError(400, f"{param} is {kind!r}: text, json_object and json_schema are known", "invalid_value", param)
    if (why := "it is missing" if schema is None else wrong(schema)) is not None:
        raise ApiError(400, f"{param} has no JSON schema: {why}", "invalid_schema", param)
    return schema


def wrong(schema: Schema) -> str | None:
    """Why this is no JSON schema, or None."""
    try:
        jsonschema.Draft202012Validator.check_schema(schema)
    except jsonschema.SchemaError as error:
        return str(error.message)
    return None


def asked_for(messages: Sequence[Message], schema: Schema | None) -> tuple[Message, ...]:
    """The messages, with the format at the end of the system's, or as one of the system's where there is none."""
    if schema is None:
        return tuple(messages)
    words = "Answer with JSON alone, a single object."
    if schema is not OBJECT:
        words = f"Answer with JSON alone, as this JSON schema describes it: {json.dumps(schema, ensure_ascii=False)}"
    if messages and messages[0].get("role") == "system":
        first = {**messages[0], "content": f"{text_content(messages[0].get('content'))}\n\n{words}"}
        return (first, *messages[1:])
    return ({"role": "system", "content": words}, *messages)


def fits(schema: Schema, text: str) -> bool:
    """Whether a text is JSON that the schema describes. Nothing that the schema refers to is fetched."""
    try:
        return bool(jsonschema.Draft202012Validator(schema, registry=Registry()).is_valid(json.loads(text)))
    except (ValueError, RecursionError, Unresolvable):
        return False
