"""Completions as models write them, well-formed and malformed."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_x.agents.chat.parsing import Reply, ToolCall, read


def calls_of(text, **how):
    return [(c.name, json.loads(c.arguments)) for c in read(text, tools=True, **how).tool_calls]


def test_a_text_is_content_to_the_last_blank():
    assert read(" 42 \n") == Reply(" 42 \n")
    assert read("", tools=True, reasons=True) == Reply("")


def test_reasoning_stands_before_the_content():
    assert read("<think>\nhm, 6 · 7\n</think>\n\n42", reasons=True) == Reply("42", "hm, 6 · 7")
    assert read("\n<think>hm</think>42", reasons=True) == Reply("42", "hm")


def test_reasoning_that_the_prompt_opened_needs_no_tag_of_its_own():
    assert read("hm\n</think>\n\n42", reasons=True, opened=True) == Reply("42", "hm")
    assert read("<think>hm</think>42", reasons=True, opened=True) == Reply("42", "hm")


def test_reasoning_that_does_not_end_is_all_there_is():
    assert read("<think>hm, I", reasons=True) == Reply(None, "hm, I")
    assert read("hm, I", reasons=True, opened=True) == Reply(None, "hm, I")


def test_a_model_without_reasoning_says_its_tags():
    assert read("<think>hm</think>42") == Reply("<think>hm</think>42")
    assert read("so <think>hm</think>42", reasons=True) == Reply("so <think>hm</think>42")


def test_several_calls_of_hermes_form_are_several_calls():
    text = 'I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
    text += '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    reply = read(text, tools=True)
    assert reply.content == "I look."
    assert [(c.name, c.arguments) for c in reply.tool_calls] == [("weather", '{"city": "Paris"}'), ("add", "{}")]
    assert len({c.id for c in reply.tool_calls}) == 2
    assert all(c.id.isalnum() and len(c.id) == 9 for c in reply.tool_calls)


def test_calls_follow_reasoning_and_those_within_it_are_thoughts():
    call = '<tool_call>{"name": "add", "arguments": {"first": 1}}</tool_call>'
    reply = read(f"<think>{call}?</think>\n{call}", reasons=True, tools=True)
    assert reply.reasoning == f"{call}?"
    assert reply.content is None
    assert [c.name for c in reply.tool_calls] == ["add"]


def test_a_json_text_with_parameters_is_a_call_of_llama():
    assert calls_of('{"name": "weather", "parameters": {"city": "Paris"}}') == [("weather", {"city": "Paris"})]
    assert calls_of('<|python_tag|>{"name": "add", "parameters": {}}\n') == [("add", {})]
    assert read('{"name": "add", "parameters": {}}', tools=True).content is None


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Bob"}',
        '{"parameters": {}}',
        '{"name": 3, "parameters": {}}',
        'It is {"name": "add", "parameters": {}}',
        '{"name": "add", "parameters": {}} done',
        '["name"]',
        '<tool_call>{"name": "add", "arguments": {</tool_call>',
        '<tool_call>{"name": "add", "arguments": {}}',
        '<tool_call>{"name": "add", "arguments": {}} and</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"first": NaN}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"first": 1e999}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"first": "\\ud800"}}</tool_call>',
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
        "<tool_call>" + "[" * 100_000,
        "<tool_call>" * 1000,
        "</tool_call><tool_call>",
    ],
)
def test_what_is_no_whole_call_stays_content(text):
    assert read(text, tools=True) == Reply(text)


def test_a_call_beside_a_broken_one_is_a_call():
    reply = read('<tool_call>{"name": </tool_call>\n<tool_call>{"name": "add", "arguments": {}}</tool_call>', tools=True)
    assert [c.name for c in reply.tool_calls] == ["add"]
    assert reply.content == '<tool_call>{"name": </tool_call>'


def test_without_tools_nothing_is_a_call():
    for text in ('<tool_call>{"name": "add", "arguments": {}}</tool_call>', '{"name": "add", "parameters": {}}'):
        assert read(text) == Reply(text)


@pytest.mark.parametrize(
    "written, arguments",
    [
        ('"{\\"a\\":  1}"', '{"a": 1}'),
        ('"not JSON"', "not JSON"),
        ('{"a":\n"line\nbreak", "ü":1.50}', '{"a": "line\\nbreak", "ü": 1.5}'),
        ("[1,2]", "[1, 2]"),
        ("null", "null"),
    ],
)
def test_arguments_are_json_text_normalised_only_where_they_parse(written, arguments):
    (call,) = read(f'<tool_call>{{"name": "f", "arguments": {written}}}</tool_call>', tools=True).tool_calls
    assert call.arguments == arguments


def test_a_tool_without_arguments_is_called_with_none():
    assert calls_of('<tool_call>{"name": "now"}</tool_call>') == [("now", {})]


def test_ids_depend_on_what_was_generated_alone():
    text = '<tool_call>{"name": "now"}</tool_call>'
    same, other = (read(text, tools=True, key=key).tool_calls[0].id for key in (b"a", b"b"))
    assert read(text, tools=True, key=b"a").tool_calls[0].id == same
    assert same != other


def test_a_message_is_openais():
    reply = Reply(None, "hm", (ToolCall("1", "add", '{"a": 1}'),))
    assert reply.message() == {
        "role": "assistant",
        "content": None,
        "reasoning_content": "hm",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
    }
    assert Reply("hi").message() == {"role": "assistant", "content": "hi"}


PIECES = st.sampled_from(
    ["<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "f", "arguments": {}}', "{", "}", '"', "\n", "x"]
)


@given(st.lists(PIECES, max_size=12).map("".join), st.booleans(), st.booleans(), st.booleans())
def test_whatever_is_written_is_read_and_nothing_of_it_but_tags_and_blanks_is_lost(text, reasons, opened, tools):
    reply = read(text, reasons=reasons, opened=opened, tools=tools)
    kept = (reply.reasoning or "") + (reply.content or "") + '{"name": "f", "arguments": {}}' * len(reply.tool_calls)
    for letter in '{}"x':
        assert kept.count(letter) == text.count(letter)
