"""JSON schemas from elsewhere: mismatches are reported, and checks that would not end are refused."""

import asyncio
import json

import pytest

from areal_x.agents.json_checks import schemas
from areal_x.agents.json_checks.json_bounds import VALUES

LONG = f"it takes more than {schemas.CPU_SECONDS:g} s to check"


def wrong(schema):
    return asyncio.run(schemas.schema_error(schema))


def misfit(schema, value):
    return asyncio.run(schemas.mismatch(schema, json.dumps(value)))


def arguments_misfit(parameters, value):
    return asyncio.run(schemas.arguments_mismatch(parameters, json.dumps(value)))


def of(**properties):
    return {"type": "object", "properties": properties}


def deep(depth):
    schema = {}
    for _ in range(depth):
        schema = {"not": schema}
    return schema


def test_what_does_not_fit_is_said_with_its_place():
    numbers = of(a={"type": "array", "items": {"type": "integer"}})
    assert misfit(numbers, {"a": [1, "x"]}) == "a.1: 'x' is not of type 'integer'"
    assert misfit(numbers, {"a": [1]}) is None
    assert misfit({"type": "object"}, {"anything": 1}) is None
    assert misfit(of(), {"b": 1}) is None
    assert arguments_misfit({**of(), "additionalProperties": True}, {"b": 1}) is None
    assert arguments_misfit(of(city={}), {"citty": 1}) == "'citty' is unknown; known are: city; did you mean 'city'?"
    assert misfit(of(a={"pattern": "^a+$"}), {"a": "b"}) == "a: 'b' does not match '^a+$'"
    assert misfit({"type": "array"}, []) is None


def test_nothing_that_a_schema_refers_to_is_fetched():
    elsewhere = of(a={"$ref": "http://127.0.0.1:1/a.json"})
    assert misfit(elsewhere, {"a": 1}) == "the schema refers to http://127.0.0.1:1/a.json, which is not in it"


def test_a_schema_of_a_draft_that_it_names_is_read_as_that():
    draft4 = {"$schema": "http://json-schema.org/draft-04/schema#", "exclusiveMinimum": True, "minimum": 1}
    assert wrong(draft4) is None
    assert wrong({"exclusiveMinimum": True}) == "True is not of type 'number'"


@pytest.mark.parametrize(
    ("schema", "value", "words"),
    [
        (of(a={"pattern": "^(a+)+$"}), {"a": "a" * 40 + "!"}, LONG),
        (
            {"$defs": {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)} | {"d40": {}}}
            | {"$ref": "#/$defs/d0"},
            {},
            LONG,
        ),
        ({"$ref": "#"}, {}, "the schema refers to itself without an end"),
        ({"enum": [[]] * VALUES}, None, f"the schema has more than {VALUES} values"),
        (of(a={"description": "x" * schemas.CHARACTERS}), None, "more than 262144"),
        (deep(90), None, "the schema is nested more than 64 deep"),
        (deep(60), {}, None),
        (of(), {"a": [[]] * VALUES}, f"the value has more than {VALUES} values"),
    ],
)
def test_a_check_that_could_cost_anything_ends(schema, value, words):
    said = wrong(schema) if value is None else misfit(schema, value)
    assert said is None if words is None else words in said
    assert misfit(of(a={"type": "string"}), {"a": "b"}) is None  # and the next one is answered


def test_what_is_said_stays_short():
    assert len(misfit(of(a={"type": "integer"}), {"a": "x" * 10_000})) < 400
    assert len(wrong({"type": "x" * 10_000})) < 400
