"""POST /v1/responses, as OpenAI's own client uses it."""

import json

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from areal_x.agents.chat.dialogue import ChatAnswer
from areal_x.agents.chat.parsing import Reply, ToolCall
from areal_x.agents.gateway.exchange import CallAnswer
from areal_x.agents.gateway.items import Item, messages_of
from areal_x.agents.gateway.responses import ResponseRequest, Responses
from areal_x.protocols.engine import Completion
from tests.agents.gateway.scripted import END, letters, read, tool

ADD = {
    "type": "function",
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
SHOWN = {"type": "function", "function": {key: ADD[key] for key in ("name", "description", "parameters")}}
TEXT = "A longer answer, of which every word arrives: " + "word " * 40
THINKS = f"<think>{'hm ' * 30}</think>{TEXT}" + tool("add", a=1, note="x" * 100) + tool("add", b=2)


def ask(one, **asked):
    return one.openai.responses.create(**{"model": "policy", "input": "hi", **asked})


def test_an_answer_is_what_the_model_said_and_its_tokens_are_the_call(talk):
    one = talk("four")
    response = ask(one, input="2+2?", instructions="be brief", metadata={"run": "7"})
    assert (response.output_text, response.status, response.error, response.model) == ("four", "completed", None, "policy")
    assert (response.instructions, response.metadata) == ("be brief", {"run": "7"})
    (call,) = one.calls()
    assert call.id == response.id
    assert read(call.prompt) == f"system:be brief{END}user:2+2?{END}assistant:"
    assert read(call.completion.tokens) == f"four{END}"
    usage = response.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (len(call.prompt), 5, len(call.prompt) + 5)


def test_items_become_messages_and_what_the_assistant_said_at_once_stays_one(talk):
    one = talk()
    items = [
        {"role": "developer", "content": "be brief"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "1+1?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "so"}]},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "wait", "annotations": [], "logprobs": []}],
        },
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "add", "arguments": "{}", "status": "completed"},
        {"type": "function_call", "call_id": "c2", "name": "add", "arguments": "[]"},
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "3"}]},
        {"role": "assistant", "content": "two"},
        {"role": "assistant", "content": "again two"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "sure"}]},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "and?"},
    ]
    ask(one, input=items)
    assert one.engine.prompts == [
        f"system:be brief{END}user:1+1?{END}"
        f"assistant:<think>so</think>wait<tool>add {{}}</tool><tool>add []</tool>{END}tool:2{END}tool:3{END}"
        f"assistant:two{END}assistant:again two{END}assistant:<think>sure</think>yes{END}user:and?{END}assistant:"
    ]


def test_a_conversation_goes_on_by_sending_the_output_back_or_by_the_id_of_the_response(talk):
    for by_id in (False, True):
        one = talk(lambda prompt: "<think>hm</think>" + tool("add", a=1) if "tool:" not in prompt else "two")
        first = ask(one, input="1+1?", tools=[ADD], instructions="be brief")
        thought, wanted = first.output
        assert (thought.type, thought.content[0].text, wanted.type) == ("reasoning", "hm", "function_call")
        assert (wanted.name, json.loads(wanted.arguments)) == ("add", {"a": 1})
        result = {"type": "function_call_output", "call_id": wanted.call_id, "output": "2"}
        if by_id:
            more = {"input": [result], "previous_response_id": first.id}
        else:
            more = {"input": [{"role": "user", "content": "1+1?"}, *first.output, result]}
        second = ask(one, tools=[ADD], instructions="be brief", **more)
        assert second.output_text == "two"
        before, after = one.calls()
        held = read(before.prompt) + read(before.completion.tokens)
        assert read(after.prompt) == f"{held}tool:2{END}assistant:"


def test_instructions_are_those_of_each_request(talk):
    one = talk("yes")
    first = ask(one, instructions="be brief")
    second = ask(one, instructions="be long", previous_response_id=first.id)
    ask(one, previous_response_id=second.id)
    said = f"user:hi{END}assistant:yes{END}"
    assert one.engine.prompts[1:] == [
        f"system:be long{END}{said}user:hi{END}assistant:",
        f"{said}{said}user:hi{END}assistant:",
    ]


def test_only_a_response_that_the_session_keeps_can_be_continued(talk):
    one, other = talk(), talk()
    ids = [ask(one, store=False).id, ask(other).id, "resp_none"]
    for id in ids:
        with pytest.raises(openai.BadRequestError) as error:
            ask(one, previous_response_id=id)
        assert (error.value.code, error.value.param) == ("previous_response_not_found", "previous_response_id")


def test_tools_tool_choice_and_reasoning_reach_the_template(talk):
    one = talk(tool("add", a=1))
    named = {"type": "function", "name": "add"}
    for choice in ("auto", "none", "required", named):
        response = ask(one, tools=[{**ADD, "strict": True}], tool_choice=choice)
        assert any(item.type == "function_call" for item in response.output) == (choice != "none")
    ask(one, parallel_tool_calls=False, reasoning={"effort": "high", "summary": "auto"})
    shown = [prompt.split("user:")[0] for prompt in one.engine.prompts]
    tools = f"tools:{json.dumps([SHOWN])}{END}"
    told = {"tool_choice": {"type": "function", "function": {"name": "add"}}}
    assert shown == [
        tools,
        "",
        f'{tools}template:{{"tool_choice": "required"}}{END}',
        f"{tools}template:{json.dumps(told, sort_keys=True)}{END}",
        f'template:{{"parallel_tool_calls": false, "reasoning_effort": "high"}}{END}',
    ]


def test_a_completion_that_was_cut_is_incomplete(talk):
    one = talk("a long story")
    response = ask(one, max_output_tokens=4)
    assert (response.status, response.output_text) == ("incomplete", "a lo")
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete"
    *_, last = ask(one, max_output_tokens=4, stream=True)
    assert (last.type, last.response.output_text) == ("response.incomplete", "a lo")


def test_logprobs_come_on_request(talk):
    response = ask(talk("no"), include=["message.output_text.logprobs"])
    shown = [(token.token, token.logprob) for token in response.output[0].content[0].logprobs]
    assert shown == [("n", -1 / 8), ("o", -2 / 8), ("", -3 / 8)]


def test_a_stream_says_in_typed_events_what_an_answer_says_at_once(talk):
    one = talk(THINKS)
    whole = ask(one, tools=[ADD])
    with one.openai.responses.stream(model="policy", input="hi", tools=[ADD]) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "function_call"]
    assert final.output_text == whole.output_text == TEXT
    assert [(i.name, i.arguments) for i in final.output[2:]] == [(i.name, i.arguments) for i in whole.output[2:]]
    assert final.usage == whole.usage
    assert final.id == one.calls()[1].id
    assert sum(event.type == "response.output_text.delta" for event in events) > 3


def test_the_events_of_a_stream_are_numbered_and_every_item_is_begun_filled_and_done(talk):
    events = list(ask(talk(THINKS), tools=[ADD], stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = []
    for event in events:
        kinds += [event.type] if kinds[-1:] != [event.type] else []
    filled = {
        "reasoning_text": ["content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done"],
        "output_text": ["content_part.added", "output_text.delta", "output_text.done", "content_part.done"],
        "call": ["function_call_arguments.delta", "function_call_arguments.done"],
    }
    wanted = ["created", "in_progress"]
    for kind in ("reasoning_text", "output_text", "call", "call"):
        wanted += ["output_item.added", *filled[kind], "output_item.done"]
    assert kinds == [f"response.{kind}" for kind in [*wanted, "completed"]]
    final = events[-1].response.output
    for index, item in enumerate(final):
        deltas = "".join(e.delta for e in events if e.type.endswith(".delta") and e.output_index == index)
        assert deltas == (item.arguments if item.type == "function_call" else item.content[0].text)
        (done,) = [e.item for e in events if e.type == "response.output_item.done" and e.output_index == index]
        assert done == item


def test_nothing_said_is_an_empty_text(talk):
    response = ask(talk(""))
    assert (response.output_text, [item.type for item in response.output]) == ("", ["message"])


texts = st.text(min_size=1)
replies = st.builds(
    Reply,
    texts,
    st.none() | texts,
    st.lists(st.builds(ToolCall, texts, texts, texts), max_size=3).map(tuple),
) | st.builds(Reply, st.none(), st.none() | texts, st.lists(st.builds(ToolCall, texts, texts, texts), min_size=1).map(tuple))


@given(st.lists(replies, min_size=1, max_size=3))
def test_what_comes_back_is_the_message_that_the_model_gave(replies):
    """Over any number of turns: otherwise its tokens would not be found again."""
    exchange = Responses(ResponseRequest.read(b'{"input": "hi"}'), "resp_1", 0, str, None)
    items, messages = [], []
    for index, reply in enumerate(replies):
        answer = ChatAnswer(letters("p"), Completion(letters("c"), [0.0], [0], "stop"), reply)
        items += [*exchange.whole([CallAnswer("resp_1", answer)])["output"], {"role": "user", "content": str(index)}]
        messages += [reply.message(), {"role": "user", "content": str(index)}]
    assert messages_of(TypeAdapter(list[Item]).validate_json(json.dumps(items))) == messages


REFUSED = [
    ({"input": []}, "input"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
    ({"input": [{"role": "user", "content": [{"type": "smell"}]}]}, "input"),
    ({"tools": [{"type": "web_search"}]}, "tools.0"),
    ({"tools": [{**ADD, "parameters": {"type": "array"}}]}, "tools.0.parameters"),
    ({"tools": [ADD], "tool_choice": {"type": "function", "name": "sub"}}, "tool_choice"),
    ({"text": {"format": {"type": "grammar"}}}, "text.format"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
    ({"background": True}, "background"),
    ({"truncation": "auto"}, "truncation"),
    ({"conversation": "c"}, "conversation"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"top_logprobs": 3}, "top_logprobs"),
]


@pytest.mark.parametrize(("wrong", "param"), REFUSED, ids=[param for _, param in REFUSED])
def test_what_cannot_be_done_is_refused_by_name(talk, wrong, param):
    one = talk()
    with pytest.raises(openai.BadRequestError) as error:
        one.openai.post("/responses", body={"model": "m", "input": "hi", **wrong}, cast_to=object)
    assert error.value.param.startswith(param)
    assert one.calls() == ()


def test_a_prompt_beyond_the_context_is_the_clients_mistake(talk):
    with pytest.raises(openai.BadRequestError, match="too long") as error:
        ask(talk(context=10), input="x" * 20)
    assert error.value.code == "context_length_exceeded"
