"""POST /v1/chat/completions, as OpenAI's own client uses it."""

import json

import httpx
import numpy as np
import openai
import pytest

from areal_x.agents.gateway import Gateway
from areal_x.protocols.engine import SamplingParams
from tests.agents.gateway.scripted import END, RUN, Letters, read, tool

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


def test_an_answer_is_what_the_model_said_and_its_tokens_are_the_call(talk):
    one = talk("four")
    completion = one.chat("2+2?")
    (choice,) = completion.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "four", "stop")
    assert (choice.index, choice.logprobs, completion.object, completion.model) == (0, None, "chat.completion", "policy")
    (call,) = one.calls()
    assert call.id == completion.id
    assert read(call.prompt) == f"user:2+2?{END}assistant:"
    assert read(call.completion.tokens) == f"four{END}"
    assert call.completion.logprobs.tolist() == [-1 / 8, -2 / 8, -3 / 8, -4 / 8, -5 / 8]
    assert call.completion.versions.tolist() == [7] * 5
    usage = completion.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (len(call.prompt), 5, len(call.prompt) + 5)


def test_the_header_of_an_answer_names_its_call(talk):
    one = talk()
    raw = one.openai.chat.completions.with_raw_response.create(model="m", messages=[{"role": "user", "content": "hi"}])
    assert raw.headers["x-areal-call"] == raw.parse().id == one.calls()[0].id
    assert raw.parse()._request_id == raw.parse().id


def test_every_role_reaches_the_template_and_nothing_that_clients_add_to_it(talk):
    one = talk()
    called = {"id": "c1", "type": "function", "index": 0, "function": {"name": "add", "arguments": '{"a": 1}', "parsed": None}}
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}], "name": "Ann"},
        {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "audio": None,
            "annotations": [],
            "function_call": None,
            "reasoning_content": "so",
            "tool_calls": [called],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        {"role": "user", "content": "and?"},
    ]
    one.openai.chat.completions.create(model="m", messages=messages)
    assert one.engine.prompts == [
        f"system:be brief{END}user:one\ntwo{END}"
        f'assistant:<think>so</think><tool>add {{"a": 1}}</tool>{END}tool:2{END}user:and?{END}assistant:'
    ]


def test_a_conversation_goes_on_from_the_very_tokens_that_were_generated(talk):
    one = talk(lambda prompt: "<think>hm</think>" + tool("add", a=1, b=2) if "tool:" not in prompt else "3")
    messages = [{"role": "user", "content": "1+2?"}]
    first = one.openai.chat.completions.create(model="m", messages=messages, tools=[ADD]).choices[0]
    assert first.finish_reason == "tool_calls"
    assert first.message.reasoning_content == "hm"
    (wanted,) = first.message.tool_calls
    assert (wanted.function.name, json.loads(wanted.function.arguments)) == ("add", {"a": 1, "b": 2})
    messages += [first.message, {"role": "tool", "tool_call_id": wanted.id, "content": "3"}]
    assert one.openai.chat.completions.create(model="m", messages=messages, tools=[ADD]).choices[0].message.content == "3"
    before, after = one.calls()
    held = np.concatenate([before.prompt, before.completion.tokens])
    assert after.prompt[: len(held)].tolist() == held.tolist()
    assert read(after.prompt[len(held) :]) == f"tool:3{END}assistant:"


def test_several_tools_are_called_at_once_and_tools_are_shown_in_one_form(talk):
    one = talk(tool("add", a=1) + tool("add", b=2))
    strict = {"type": "function", "function": {**ADD["function"], "strict": True}}
    message = one.chat(tools=[strict], parallel_tool_calls=True).choices[0].message
    assert message.content is None
    assert [(call.type, call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls] == [
        ("function", "add", {"a": 1}),
        ("function", "add", {"b": 2}),
    ]
    assert len({call.id for call in message.tool_calls}) == 2
    assert one.engine.prompts[0].startswith(f"tools:{json.dumps([ADD])}{END}")


def test_tool_choice_none_takes_the_tools_away_and_others_are_told_to_the_template(talk):
    one = talk(tool("add", a=1))
    by_name = {"type": "function", "function": {"name": "add"}}
    for choice in ("auto", "none", "required", by_name):
        answer = one.chat(tools=[ADD], tool_choice=choice).choices[0]
        assert (answer.message.tool_calls is None) == (choice == "none")
    one.chat(tools=[ADD], parallel_tool_calls=False)
    shown = [prompt.split("user:")[0] for prompt in one.engine.prompts]
    tools = f"tools:{json.dumps([ADD])}{END}"
    assert shown == [
        tools,
        "",
        f'{tools}template:{{"tool_choice": "required"}}{END}',
        f"{tools}template:{json.dumps({'tool_choice': by_name}, sort_keys=True)}{END}",
        f'{tools}template:{{"parallel_tool_calls": false}}{END}',
    ]


def test_calls_that_were_asked_for_and_not_made_are_counted_and_said_once(talk, caplog, run):
    fresh = Gateway()
    run(fresh.start())
    one = talk(lambda prompt: prompt.split("user:")[1].split(END)[0], on=fresh)
    add, other = tool("add", a=1), tool("other", b=2)
    by_name = {"type": "function", "function": {"name": "add"}}

    def asked(says, **choice):
        before = dict(one.session.overruled)
        one.chat(says, tools=[ADD], **choice)
        return [name for name, count in one.session.overruled.items() if count != before.get(name, 0)]

    for says in ("hello", add, other, add + add):
        assert asked(says) == asked(says, tool_choice="auto") == []
    assert asked("hello", tool_choice="required") == ["tool_choice"]
    assert asked(other, tool_choice="required") == []
    for says in ("hello", other, add + other):
        assert asked(says, tool_choice=by_name) == ["tool_choice"]
    assert asked(add, tool_choice=by_name) == []
    assert asked(add + add, parallel_tool_calls=False) == ["parallel_tool_calls"]
    assert asked(add, parallel_tool_calls=False) == []
    assert one.session.overruled == {"tool_choice": 4, "parallel_tool_calls": 1}
    said = [record.getMessage().split(" requested ")[1].split()[0] for record in caplog.records]
    assert sorted(said) == ["parallel_tool_calls", "tool_choice"]
    run(fresh.close())


def test_reasoning_effort_and_template_variables_reach_the_template(talk):
    one = talk()
    one.chat(reasoning_effort="none", extra_body={"chat_template_kwargs": {"documentation": "x"}})
    one.chat(reasoning_effort="high")
    variables = [json.loads(prompt.split(END)[0].removeprefix("template:")) for prompt in one.engine.prompts]
    assert variables == [
        {"reasoning_effort": "none", "enable_thinking": False, "documentation": "x"},
        {"reasoning_effort": "high"},
    ]


def test_an_assistants_beginning_is_continued_on_request(talk):
    one = talk(" world")
    messages = [{"role": "user", "content": "greet"}, {"role": "assistant", "content": "hello"}]
    more = {"continue_final_message": True, "add_generation_prompt": False}
    answer = one.openai.chat.completions.create(model="m", messages=messages, extra_body=more)
    assert answer.choices[0].message.content == " world"
    assert one.engine.prompts == [f"user:greet{END}assistant:hello"]


def test_n_completions_are_n_calls(talk):
    said = iter("abc")
    one = talk(lambda prompt: next(said))
    raw = one.openai.chat.completions.with_raw_response.create(model="m", messages=[{"role": "user", "content": "x"}], n=3)
    answer = raw.parse()
    assert sorted(choice.message.content for choice in answer.choices) == ["a", "b", "c"]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    ids = [answer.id, f"{answer.id}-1", f"{answer.id}-2"]
    assert raw.headers["x-areal-call"].split(",") == ids
    texts = {call.id: Letters().text(call.completion.tokens) for call in one.calls()}
    assert texts == dict(zip(ids, [choice.message.content for choice in answer.choices], strict=True))
    assert answer.usage.completion_tokens == 6
    assert answer.usage.prompt_tokens == len(one.calls()[0].prompt)


def test_a_stop_text_ends_the_answer_but_not_what_is_trained_on(talk):
    one = talk("yes. no.")
    for stop in (".", [".", "!"]):
        choice = one.chat(stop=stop).choices[0]
        assert (choice.message.content, choice.finish_reason) == ("yes", "stop")
    assert [read(call.completion.tokens) for call in one.calls()] == [f"yes. no.{END}"] * 2
    assert one.chat(stop=".", max_tokens=6).choices[0].finish_reason == "stop"
    assert [request.stop for request in one.engine.requests] == [(".",), (".", "!"), (".",)]


def test_a_completion_that_was_cut_says_so(talk):
    one = talk("a long story")
    for limit in ({"max_tokens": 4}, {"max_completion_tokens": 4}, {"max_completion_tokens": 4, "max_tokens": 9}):
        choice = one.chat(**limit).choices[0]
        assert (choice.message.content, choice.finish_reason) == ("a lo", "length")


def test_logprobs_are_those_of_the_sampled_tokens(talk):
    one = talk("né")
    choice = one.chat(logprobs=True, top_logprobs=0).choices[0]
    shown = [(token.token, token.bytes, token.logprob, token.top_logprobs) for token in choice.logprobs.content]
    assert shown == [("n", [110], -1 / 8, []), ("é", [195, 169], -2 / 8, []), ("", [], -3 / 8, [])]


def test_the_runs_sampling_wins_and_what_was_overruled_is_counted_and_said_once(talk, caplog, run):
    async def fresh():
        served = Gateway()
        await served.start()
        return served

    served = run(fresh())
    own = SamplingParams(max_tokens=50, temperature=0.8, top_p=0.9, top_k=5, stop_token_ids=(0,))
    one = talk(sampling=own, on=served)
    for _ in range(2):
        one.chat(temperature=0.1, top_p=0.9, max_tokens=999, extra_body={"top_k": 0})
    one.chat(temperature=0.8, max_tokens=20)
    sampled = [request.sampling for request in one.engine.requests]
    assert sampled[:2] == [own, own]
    assert sampled[2] == SamplingParams(20, 0.8, 0.9, 5, (0,))
    assert one.session.overruled == {"temperature": 2, "max_tokens": 2, "top_k": 2}
    assert sorted(record.args[0] for record in caplog.records) == ["max_tokens", "temperature", "top_k"]
    run(served.close())


def test_a_run_can_leave_the_sampling_to_the_client_but_for_the_length(talk, run):
    async def fresh():
        served = Gateway(sampling="client")
        await served.start()
        return served

    served = run(fresh())
    one = talk(sampling=RUN, on=served)
    one.chat(temperature=0.0, top_p=0.5, max_tokens=99999, extra_body={"top_k": 3})
    assert one.engine.requests[0].sampling == SamplingParams(RUN.max_tokens, 0.0, 0.5, 3, (0,))
    assert one.session.overruled == {"max_tokens": 1}
    run(served.close())


TEXT = "A longer answer, of which every word arrives: " + "word " * 40
THINKS = f"<think>{'hm ' * 30}</think>{TEXT}" + tool("add", a=1, note="x" * 100) + tool("add", b=2)


def test_a_stream_says_in_pieces_what_an_answer_says_at_once(talk):
    one = talk(THINKS)
    whole = one.chat(tools=[ADD], logprobs=True)
    with one.openai.chat.completions.stream(
        model="policy",
        messages=[{"role": "user", "content": "hi"}],
        tools=[ADD],
        logprobs=True,
        stream_options={"include_usage": True},
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    told, said = final.choices[0], whole.choices[0]
    assert told.message.content == said.message.content == TEXT
    assert kinds.count("content.delta") > 3
    assert [(c.id, c.function.name, c.function.arguments) for c in told.message.tool_calls] == [
        (c.id, c.function.name, c.function.arguments) for c in said.message.tool_calls
    ]
    assert told.finish_reason == said.finish_reason == "tool_calls"
    assert told.logprobs.content == said.logprobs.content
    assert final.usage == whole.usage
    assert final.id == one.calls()[1].id


def test_the_chunks_of_a_stream_come_in_order(talk):
    one = talk(THINKS)
    chunks = list(one.chat(tools=[ADD], stream=True, stream_options={"include_usage": True}))
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == ([], len(THINKS) + 1)
    deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
    assert (deltas[0].role, deltas[0].content) == ("assistant", "")
    kinds = []
    for delta in deltas[1:-1]:
        (kind,) = delta.model_dump(exclude_unset=True, exclude_none=True)
        kinds += [kind] if kinds[-1:] != [kind] else []
    assert kinds == ["reasoning_content", "content", "tool_calls"]
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["tool_calls"]


def test_a_stream_without_usage_ends_with_the_finish_and_done(talk):
    one = talk("hello")
    headers = {"authorization": f"Bearer {one.session.key}"}
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
    answer = httpx.post(f"{one.session.base_url}/chat/completions", json=body, headers=headers)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["x-areal-call"] == one.calls()[0].id
    *events, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert "usage" not in chunks[-1]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_several_choices_stream_one_after_the_other(talk):
    said = iter(["first", "second"])
    one = talk(lambda prompt: next(said))
    chunks = list(one.chat(stream=True, n=2))
    texts = ["".join(c.choices[0].delta.content or "" for c in chunks if c.choices[0].index == i) for i in range(2)]
    assert sorted(texts) == ["first", "second"]
    assert [c.choices[0].index for c in chunks] == sorted(c.choices[0].index for c in chunks)


REFUSED = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0"),
    ({"messages": [{"role": "user", "content": [{"type": "smell"}]}]}, "messages.0.user.content"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool.tool_call_id"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"n": 0}, "n"),
    ({"n": True}, "n"),
    ({"top_logprobs": 5}, "top_logprobs"),
    ({"stop": ""}, "stop"),
    ({"frequency_penalty": 0.5}, "frequency_penalty"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"min_tokens": 5}, "min_tokens"),
    ({"repetition_penalty": 1.1}, "repetition_penalty"),
    ({"min_p": 2}, "min_p"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"response_format": {"type": "grammar"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "row"}}}}, "response_format"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"tools": [{"type": "web_search"}]}, "tools.0"),
    ({"tools": [{"type": "function", "function": {"name": "no spaces"}}]}, "tools.0.function.name"),
    ({"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name"),
]


@pytest.mark.parametrize(("wrong", "param"), REFUSED, ids=[param for _, param in REFUSED])
def test_what_cannot_be_done_is_refused_by_name(talk, wrong, param):
    one = talk()
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **wrong}
    with pytest.raises(openai.BadRequestError) as error:
        one.openai.post("/chat/completions", body=body, cast_to=object)
    assert error.value.param.startswith(param)
    assert param.split(".")[0] in error.value.message
    if param in ("logit_bias", "min_tokens", "repetition_penalty", "frequency_penalty"):
        assert error.value.message.endswith(SamplingParams.REFUSED[param])
    assert not one.engine.requests
    assert one.calls() == ()


@pytest.mark.parametrize(
    "parameters",
    [{"type": "string"}, {"type": "object", "properties": {"a": {"type": "integr"}}}, {"properties": []}, {"required": "a"}],
)
def test_a_schema_that_is_none_is_refused_with_what_is_wrong(talk, parameters):
    with pytest.raises(openai.BadRequestError, match="not a JSON schema") as error:
        talk().chat(tools=[{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    assert (error.value.code, error.value.param) == ("invalid_tool_schema", "tools.0.function.parameters")


def test_a_body_that_is_not_json_is_refused(talk):
    one = talk()
    headers = {"authorization": f"Bearer {one.session.key}"}
    for body in (b"", b"{", b"[]", b'{"messages": [{"role": "user", "content": "\\ud800"}]}', b"\xff"):
        answer = httpx.post(f"{one.session.base_url}/chat/completions", content=body, headers=headers)
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"


def test_a_prompt_beyond_the_context_is_the_clients_mistake(talk):
    one = talk(context=40)
    one.chat("short")
    with pytest.raises(openai.BadRequestError, match="too long") as error:
        one.chat("x" * 60)
    assert error.value.code == "context_length_exceeded"
    assert len(one.calls()) == 1
