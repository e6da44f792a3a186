"""JSON response formats, as official clients request them: the model is instructed, and the reply is checked."""

import asyncio
import json

import openai
import pydantic
import pytest

from areal_x.agents.json_checks.schemas import matches
from tests.agents.gateway.scripted import END

HI = [{"role": "user", "content": "2+2?"}]


class Sum(pydantic.BaseModel):
    total: int


SAYS = '{"total": 4}'


def shown(one) -> dict:
    """Returns the schema in the prompt, which begins with the system message."""
    system = one.engine.prompts[-1].split(END)[0]
    assert system.startswith("system:")
    return json.loads(system.partition("describes it: ")[2])


def test_openais_client_parses_what_the_model_said(talk):
    one = talk(SAYS)
    message = one.openai.chat.completions.parse(model="m", messages=HI, response_format=Sum).choices[0].message
    assert message.parsed == Sum(total=4)
    assert shown(one)["properties"]["total"]["type"] == "integer"
    response = one.openai.responses.parse(model="m", input="2+2?", text_format=Sum)
    assert response.output_parsed == Sum(total=4)
    assert (response.text.format.type, response.text.format.name) == ("json_schema", "Sum")
    assert shown(one)["required"] == ["total"]
    assert one.session.overruled == {}


def test_anthropics_client_parses_what_the_model_said(talk):
    one = talk(SAYS)
    message = one.anthropic.messages.parse(model="m", messages=HI, max_tokens=50, output_format=Sum)
    assert message.parsed_output == Sum(total=4)
    assert shown(one)["properties"]["total"]["type"] == "integer"


def test_the_words_stand_behind_those_of_the_system(talk):
    one = talk(SAYS)
    messages = [{"role": "developer", "content": [{"type": "text", "text": "Be brief."}]}, *HI]
    one.openai.chat.completions.create(model="m", messages=messages, response_format={"type": "json_object"})
    wanted = f"system:Be brief.\n\nAnswer with JSON alone, a single object.{END}user:2+2?{END}assistant:"
    assert one.engine.prompts == [wanted]


def test_a_conversation_goes_on_from_the_tokens_that_it_held(talk):
    one = talk(SAYS)
    first = one.openai.responses.parse(model="m", input="2+2?", text_format=Sum)
    one.openai.responses.parse(model="m", input="again", previous_response_id=first.id, text_format=Sum)
    before, after = one.calls()
    held = [*before.prompt, *before.completion.tokens]
    assert after.prompt[: len(held)].tolist() == held
    assert one.engine.prompts[-1].count("describes it") == 1


@pytest.mark.parametrize("says", ["four", '{"total": "four"}', "[4]"])
def test_a_reply_of_another_form_is_the_agents_to_judge_and_is_counted(talk, says):
    one = talk(says)
    with pytest.raises(pydantic.ValidationError):
        one.openai.chat.completions.parse(model="m", messages=HI, response_format=Sum)
    assert one.session.overruled == {"format": 1}
    assert len(one.calls()) == 1  # what was generated is trained on


def test_a_tool_call_is_no_answer_yet(talk):
    one = talk('<tool>add {"a": 1}</tool>')
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    one.openai.chat.completions.create(model="m", messages=HI, tools=[tool], response_format={"type": "json_object"})
    assert one.session.overruled == {}


def fitting(schema, text):
    return asyncio.run(matches(schema, text))


def test_nothing_that_a_schema_refers_to_is_fetched(monkeypatch):
    fetched = []
    monkeypatch.setattr("urllib.request.urlopen", lambda *asked, **_: fetched.append(asked))
    assert not fitting({"$ref": "http://127.0.0.1:1/schema.json"}, "{}")
    assert not fetched
    assert fitting({"$ref": "#/$defs/a", "$defs": {"a": {"type": "object"}}}, "{}")
    assert fitting({"properties": {"a": {}}}, '{"a": 1, "b": 2}')
    assert not fitting({"type": "object"}, "[" * 100_000)


def test_a_schema_that_is_none_is_refused(talk):
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "row"}}}
    with pytest.raises(openai.BadRequestError, match="no valid JSON schema"):
        talk().openai.chat.completions.create(model="m", messages=HI, response_format=wanted)
