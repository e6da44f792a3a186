"""POST /v1/messages, as Anthropic's own client uses it."""

import json

import anthropic
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from areal_x.agents.chat.dialogue import ChatAnswer
from areal_x.agents.chat.parsing import Reply, ToolCall
from areal_x.agents.gateway.exchange import CallAnswer
from areal_x.agents.gateway.messages import Messages, Sent, messages_of
from areal_x.protocols.engine import Completion
from tests.agents.gateway.scripted import END, letters, read, tool

ADD = {
    "name": "add",
    "description": "Adds.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
SHOWN = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": ADD["input_schema"]}}
HI = [{"role": "user", "content": "hi"}]
TEXT = "A longer answer, of which every word arrives: " + "word " * 40
THINKS = f"<think>{'hm ' * 30}</think>{TEXT}" + tool("add", a=1, note="x" * 100) + tool("add", b=2)


def ask(one, **asked):
    return one.anthropic.messages.create(**{"model": "policy", "messages": HI, "max_tokens": 1000, **asked})


def test_an_answer_is_what_the_model_said_and_its_tokens_are_the_call(talk):
    one = talk("four")
    message = ask(one, system="be brief", messages=[{"role": "user", "content": "2+2?"}])
    assert [(block.type, block.text) for block in message.content] == [("text", "four")]
    assert (message.role, message.type, message.model) == ("assistant", "message", "policy")
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    (call,) = one.calls()
    assert call.id == message.id == message._request_id
    assert read(call.prompt) == f"system:be brief{END}user:2+2?{END}assistant:"
    assert read(call.completion.tokens) == f"four{END}"
    assert (message.usage.input_tokens, message.usage.output_tokens) == (len(call.prompt), 5)


def test_blocks_become_messages(talk):
    one = talk()
    ask(
        one,
        system=[{"type": "text", "text": "one", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "two"}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "1+1?"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "so", "signature": "s"},
                    {"type": "text", "text": "wait"},
                    {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}},
                    {"type": "tool_use", "id": "c2", "name": "add", "input": {"ä": "ü"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": "2"},
                    {"type": "tool_result", "tool_use_id": "c2", "content": [{"type": "text", "text": "3"}], "is_error": True},
                    {"type": "tool_result", "tool_use_id": "c3"},
                    {"type": "text", "text": "and?"},
                ],
            },
        ],
    )
    assert one.engine.prompts == [
        f"system:one\ntwo{END}user:1+1?{END}"
        f'assistant:<think>so</think>wait<tool>add {{"a": 1}}</tool><tool>add {{"ä": "ü"}}</tool>{END}'
        f"tool:2{END}tool:3{END}tool:{END}user:and?{END}assistant:"
    ]


def test_a_conversation_with_tools_goes_on_from_the_very_tokens_that_were_generated(talk):
    one = talk(lambda prompt: "<think>hm</think>let me" + tool("add", a=1) if "tool:" not in prompt else "two")
    messages = [{"role": "user", "content": "1+1?"}]
    first = ask(one, messages=messages, tools=[ADD])
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
    assert first.stop_reason == "tool_use"
    wanted = first.content[2]
    assert (wanted.name, wanted.input) == ("add", {"a": 1})
    result = {"type": "tool_result", "tool_use_id": wanted.id, "content": "2"}
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    assert ask(one, messages=messages, tools=[ADD]).content[0].text == "two"
    before, after = one.calls()
    held = read(before.prompt) + read(before.completion.tokens)
    assert read(after.prompt) == f"{held}tool:2{END}assistant:"


def test_tools_tool_choice_and_thinking_reach_the_template(talk):
    one = talk(tool("add", a=1) + tool("add", b=2))
    for kind in ("auto", "none", "any"):
        message = ask(one, tools=[{**ADD, "type": "custom"}], tool_choice={"type": kind})
        uses = [block.input for block in message.content if block.type == "tool_use"]
        assert uses == ([] if kind == "none" else [{"a": 1}, {"b": 2}])
    ask(one, tools=[ADD], tool_choice={"type": "tool", "name": "add", "disable_parallel_tool_use": True})
    ask(one, thinking={"type": "disabled"})
    ask(one, thinking={"type": "enabled", "budget_tokens": 1024}, output_config={"effort": "low"})
    ask(one, thinking={"type": "adaptive"})
    shown = [prompt.split("user:")[0] for prompt in one.engine.prompts]
    tools = f"tools:{json.dumps([SHOWN])}{END}"
    named = {"parallel_tool_calls": False, "tool_choice": {"type": "function", "function": {"name": "add"}}}
    assert shown == [
        tools,
        "",
        f'{tools}template:{{"tool_choice": "required"}}{END}',
        f"{tools}template:{json.dumps(named, sort_keys=True)}{END}",
        f'template:{{"enable_thinking": false}}{END}',
        f'template:{{"enable_thinking": true, "reasoning_effort": "low"}}{END}',
        "",
    ]


def test_an_assistants_message_at_the_end_is_continued(talk):
    one = talk(" world")
    message = ask(one, messages=[*HI, {"role": "assistant", "content": "hello"}])
    assert message.content[0].text == " world"
    assert one.engine.prompts == [f"user:hi{END}assistant:hello"]


def test_why_a_completion_ended_is_said(talk):
    one = talk("yes. no!")
    cut = ask(one, max_tokens=3)
    assert (cut.content[0].text, cut.stop_reason, cut.stop_sequence) == ("yes", "max_tokens", None)
    stopped = ask(one, stop_sequences=["!", "."])
    assert (stopped.content[0].text, stopped.stop_reason, stopped.stop_sequence) == ("yes", "stop_sequence", ".")
    assert read(one.calls()[1].completion.tokens) == f"yes. no!{END}"
    assert ask(one, max_tokens=6, stop_sequences=["."]).stop_reason == "stop_sequence"


def test_arguments_that_are_no_object_are_handed_on_as_text_and_come_back_as_they_were(talk):
    broken = '<tool>add {"a": </tool><tool>add [1]</tool>'
    one = talk(lambda prompt: broken if "tool:" not in prompt else "sorry")
    first = ask(one, tools=[ADD])
    assert [block.input for block in first.content] == [{"unparsed_arguments": '{"a": '}, {"unparsed_arguments": "[1]"}]
    results = [{"type": "tool_result", "tool_use_id": block.id, "content": "what?"} for block in first.content]
    ask(one, tools=[ADD], messages=[*HI, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}])
    before, after = one.calls()
    held = read(before.prompt) + read(before.completion.tokens)
    assert read(after.prompt) == f"{held}tool:what?{END}tool:what?{END}assistant:"


def test_tokens_are_counted_without_a_call(talk):
    one = talk()
    asked = {"messages": HI, "system": "be brief", "tools": [ADD]}
    count = one.anthropic.messages.count_tokens(model="m", **asked).input_tokens
    assert one.calls() == ()
    ask(one, **asked)
    assert count == len(one.calls()[0].prompt)


def test_a_stream_says_in_pieces_what_an_answer_says_at_once(talk):
    one = talk(THINKS)
    whole = ask(one, tools=[ADD])
    with one.anthropic.messages.stream(model="policy", messages=HI, max_tokens=1000, tools=[ADD]) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == TEXT
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert [block.input for block in final.content[2:]] == [block.input for block in whole.content[2:]]
    assert [final.content[0].thinking, final.content[1].text] == [whole.content[0].thinking, whole.content[1].text]
    assert (final.stop_reason, final.usage) == (whole.stop_reason, whole.usage)
    assert final.id == one.calls()[1].id


def test_the_events_of_a_stream_come_in_order(talk):
    events = list(ask(talk(THINKS), tools=[ADD], stream=True))
    kinds = []
    for event in events:
        kind = event.delta.type if event.type == "content_block_delta" else event.type
        kinds += [kind] if kinds[-1:] != [kind] else []
    deltas = [["thinking_delta", "signature_delta"], ["text_delta"], ["input_json_delta"], ["input_json_delta"]]
    blocks = [kind for one in deltas for kind in ("content_block_start", *one, "content_block_stop")]
    assert kinds == ["message_start", *blocks, "message_delta", "message_stop"]
    assert events[0].message.content == []
    begun = [event.content_block for event in events if event.type == "content_block_start"]
    assert [begun[0].thinking, begun[1].text, begun[2].input, begun[3].input] == ["", "", {}, {}]
    assert events[0].message.usage.output_tokens == 0
    assert events[-2].delta.stop_reason == "tool_use"
    assert events[-2].usage.output_tokens == len(THINKS) + 1


def test_nothing_said_is_no_block(talk):
    one = talk("")
    assert ask(one).content == []
    assert [event.type for event in ask(one, stream=True)] == ["message_start", "message_delta", "message_stop"]


texts = st.text(min_size=1)
objects = st.dictionaries(texts, st.integers() | texts | st.lists(st.booleans()))
arguments = objects.map(lambda given: json.dumps(given, ensure_ascii=False)) | texts
calls = st.lists(st.builds(ToolCall, texts, texts, arguments), max_size=3).map(tuple)


@given(st.builds(Reply, st.none() | texts, st.none() | texts, calls))
def test_what_comes_back_is_the_message_that_the_model_gave(reply):
    """Otherwise its tokens would not be found again. Spaces within JSON arguments may differ."""
    answer = ChatAnswer(letters("p"), Completion(letters("c"), [0.0], [0], "stop"), reply)
    body = json.dumps({"messages": HI, "max_tokens": 5}).encode()
    said = Messages(body, "msg_1").whole([CallAnswer("msg_1", answer)])
    sent = {"role": "assistant", "content": said["content"]}
    (back,) = messages_of(TypeAdapter(Sent).validate_json(json.dumps(sent)))
    wanted = reply.message()
    for message in (back, wanted):
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = parsed(call["function"]["arguments"])
    assert back == wanted


def parsed(text):
    """JSON objects as they are; everything else, other JSON included, stays text."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, dict) else text


REFUSED = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "smell"}]}]}, "messages.0.user.content"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0"),
    (
        {"messages": [*HI, {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]}]},
        "tools",
    ),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "'m' does not support tool types: bash_20250124"),
    ({"tools": [{"name": "f", "input_schema": {"type": "string"}}]}, "JSON schema"),
    ({"tools": [ADD], "tool_choice": {"type": "tool", "name": "sub"}}, "tool_choice"),
    ({"tools": [ADD], "tool_choice": {"type": "tool"}}, "tool_choice"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
    ({"container": "c"}, "container"),
]


@pytest.mark.parametrize(("wrong", "named"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_done_is_refused_by_name(talk, wrong, named):
    one = talk()
    body = {"model": "m", "messages": HI, "max_tokens": 5, **wrong}
    with pytest.raises(anthropic.BadRequestError) as error:
        one.anthropic.post("/v1/messages", body=body, cast_to=object)
    assert error.value.body["type"] == "error"
    assert error.value.body["error"]["type"] == "invalid_request_error"
    assert named in error.value.body["error"]["message"]
    assert one.calls() == ()


def test_max_tokens_is_required(talk):
    with pytest.raises(anthropic.BadRequestError, match="max_tokens is missing"):
        talk().anthropic.post("/v1/messages", body={"messages": HI}, cast_to=object)


def test_a_prompt_beyond_the_context_is_the_clients_mistake(talk):
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        ask(talk(context=10), messages=[{"role": "user", "content": "x" * 20}])
