"""docs/gateway.md lists every parameter of the three APIs and its effect, and the code agrees."""

import re
from dataclasses import fields
from pathlib import Path

import openai
import pytest
from anthropic.types import message_create_params
from openai.types.chat import completion_create_params
from openai.types.responses import response_create_params

from areal_x.agents.gateway.chat_completions import ChatCompletionRequest
from areal_x.agents.gateway.messages import MessageRequest
from areal_x.agents.gateway.responses import ResponseRequest
from areal_x.agents.gateway.session_state import SessionLimits

PAGE = (Path(__file__).parents[3] / "docs" / "gateway.md").read_text()
HI = [{"role": "user", "content": "hi"}]
APIS = {
    "Chat completions": (
        ChatCompletionRequest,
        completion_create_params.CompletionCreateParamsBase,
        "/chat/completions",
        {"messages": HI},
    ),
    "Responses": (ResponseRequest, response_create_params.ResponseCreateParamsBase, "/responses", {"input": "hi"}),
    "Messages": (MessageRequest, message_create_params.MessageCreateParamsBase, "/messages", {"messages": HI, "max_tokens": 5}),
}


def section(title):
    return re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)[1]


def names(text):
    return set(re.findall(r"`(\w+)`", text))


def said_of(title):
    """Returns the parameters that are accepted, that have no effect, that are ignored and counted, and that are refused."""
    text = section(title)
    taken = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    lists = (r"Change nothing: (.*)", r"any other: (.*)", r"Refused: (.*)")
    return taken, *(names(re.search(one, text)[1]) for one in lists)


@pytest.mark.parametrize("title", APIS)
def test_what_is_taken_and_what_changes_nothing_are_the_parameters_that_the_code_reads(title):
    taken, without_effect, _, _ = said_of(title)
    assert not taken & without_effect
    assert taken | without_effect == set(APIS[title][0].model_fields)


@pytest.mark.parametrize("title", APIS)
def test_every_parameter_of_the_official_client_is_spoken_of(title):
    request, official, _, _ = APIS[title]
    taken, without_effect, counted, refused = said_of(title)
    known = set(official.__annotations__) | {"stream"}
    assert known - taken - without_effect - counted == refused & known
    assert not (refused | counted) & set(request.model_fields)


@pytest.mark.parametrize("title", APIS)
def test_what_is_said_to_change_nothing_is_taken_whatever_it_is(talk, title):
    _, _, path, body = APIS[title]
    one = talk()
    for number, value in enumerate((1, "x", {"a": "b"}, [True])):
        one.openai.post(path, body=body | dict.fromkeys(said_of(title)[1], value), cast_to=object)
        assert len(one.calls()) == number + 1
    assert len(set(one.engine.prompts)) == 1
    assert len({request.sampling for request in one.engine.requests}) == 1


@pytest.mark.parametrize("title", APIS)
def test_what_is_said_to_be_ignored_is_counted(talk, title):
    _, _, path, body = APIS[title]
    one = talk()
    counted = said_of(title)[2]
    one.openai.post(path, body=body | dict.fromkeys(counted, "x"), cast_to=object)
    assert one.session.ignored == dict.fromkeys(counted, 1)


@pytest.mark.parametrize("title", APIS)
def test_what_is_said_to_be_refused_is_refused_by_its_name(talk, title):
    _, _, path, body = APIS[title]
    one = talk()
    for name in said_of(title)[3]:
        with pytest.raises(openai.BadRequestError, match=name):
            one.openai.post(path, body=body | {name: "x"}, cast_to=object)
    assert one.calls() == ()


def test_the_limits_of_the_page_are_those_of_the_code():
    rows = dict(re.findall(r"^\| `(\w+)` \| (\d+) \|", section("Limits"), re.MULTILINE))
    assert {name: float(value) for name, value in rows.items()} == {f.name: float(f.default) for f in fields(SessionLimits)}


def test_every_code_of_an_error_is_on_the_page():
    source = "".join(path.read_text() for path in (Path(__file__).parents[3] / "areal_x/agents/gateway").glob("*.py"))
    calls = re.findall(r"ApiError\((?:[^()]|\([^()]*\))*\)", source)
    codes = {code for call in calls for code in re.findall(r'"([a-z]+(?:_[a-z]+)+)"', call)}
    codes |= {"session_calls", "session_tokens"}
    missing = codes - names(section("Errors")) - {"continue_final_message", "tool_choice", "previous_response_id"}
    assert not missing
