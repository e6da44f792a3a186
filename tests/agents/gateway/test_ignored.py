"""What real clients send beyond what the gateway does: nothing of it ends their conversation, and all of it is counted."""

import base64
import json

import anthropic
import openai
import pytest

from areal_x.agents.gateway import Gateway
from tests.agents.gateway.scripted import END, read, tool

HI = [{"role": "user", "content": "hi"}]
PIXEL = base64.b64encode(b"\x89PNG").decode()
TEXT = base64.b64encode("größe,3".encode()).decode()
PATHS = {
    "/chat/completions": {"messages": HI},
    "/responses": {"input": "hi"},
    "/messages": {"messages": HI, "max_tokens": 50},
}


def sent(one, path, **more):
    return one.openai.post(path, body=PATHS[path] | more, cast_to=object)


@pytest.mark.parametrize("path", PATHS)
def test_unknown_parameters_are_counted_and_do_nothing(talk, path):
    one = talk()
    sent(one, path)
    sent(one, path, wings=2, context_management={"edits": []}, nothing=None)
    sent(one, path, wings=3)
    assert one.engine.prompts[0] == one.engine.prompts[1] == one.engine.prompts[2]
    assert len({request.sampling for request in one.engine.requests}) == 1
    assert one.session.ignored == {"wings": 2, "context_management": 1}


def test_what_is_ignored_is_logged_once_a_run(talk, run, caplog):
    fresh = Gateway()
    run(fresh.start())
    for one in (talk(on=fresh), talk(on=fresh)):
        sent(one, "/responses", wings=1, tails=2)
        sent(one, "/responses", wings=1, beaks=2)
    run(fresh.close())
    said = [record.getMessage().split(": ")[1] for record in caplog.records if "no effect" in record.getMessage()]
    assert said == ["tails, wings (logged once)", "beaks (logged once)"]


@pytest.mark.parametrize("path", PATHS)
def test_a_parameter_that_would_change_the_distribution_is_refused_unless_its_value_does_not(talk, path):
    one = talk()
    neutral = {"presence_penalty": 0.0, "repetition_penalty": 1.0, "logit_bias": {}, "min_tokens": 0, "bad_words": []}
    sent(one, path, **neutral)
    sent(one, path, **dict.fromkeys(neutral))
    assert one.session.ignored == {}
    for name, value in {"presence_penalty": 0.1, "repetition_penalty": 1.1, "logit_bias": {"1": 2}, "bad_words": ["x"]}.items():
        with pytest.raises(openai.BadRequestError, match=name):
            sent(one, path, **{name: value})


def test_images_and_files_of_chat_completions_become_notices_and_texts(talk):
    one = talk()
    parts = [
        {"type": "text", "text": "look"},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}},
        {"type": "file", "file": {"filename": "a.csv", "file_data": f"data:text/csv;base64,{TEXT}"}},
        {"type": "file", "file": {"filename": "a.pdf", "file_data": f"data:application/pdf;base64,{PIXEL}"}},
    ]
    result = {"role": "tool", "tool_call_id": "c", "content": parts[1:2]}
    refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}
    one.openai.chat.completions.create(model="m", messages=[{"role": "user", "content": parts}, refused, result])
    image = "[An image that is not shown: the model is given text only.]"
    pdf = "[A file (a.pdf) that is not shown: the model is given text only.]"
    assert one.engine.prompts == [f"user:look\n{image}\ngröße,3\n{pdf}{END}assistant:no{END}tool:{image}{END}assistant:"]
    assert one.session.ignored == {"messages: image_url": 1, "messages: file": 1}


def test_images_and_files_of_responses_too(talk):
    one = talk()
    parts = [
        {"type": "input_image", "image_url": f"data:image/png;base64,{PIXEL}", "detail": "auto"},
        {"type": "input_file", "filename": "a.csv", "file_data": f"data:text/csv;base64,{TEXT}"},
    ]
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": parts}
    one.openai.responses.create(model="m", input=[{"role": "user", "content": parts}, call, output])
    shown = "[An image that is not shown: the model is given text only.]\ngröße,3"
    assert one.engine.prompts == [f"user:{shown}{END}assistant:<tool>look {{}}</tool>{END}tool:{shown}{END}assistant:"]
    assert one.session.ignored == {"messages: input_image": 1}


def test_a_file_is_decoded_once_a_request(talk, monkeypatch):
    decoded = []
    decode = base64.b64decode
    monkeypatch.setattr(base64, "b64decode", lambda data, **how: decoded.append(data) or decode(data, **how))
    one = talk()
    data = f"data:text/csv;base64,{TEXT}"
    for path, part in (
        ("/chat/completions", {"type": "file", "file": {"file_data": data}}),
        ("/responses", {"type": "input_file", "file_data": data}),
        ("/messages", {"type": "document", "source": {"type": "base64", "media_type": "text/csv", "data": TEXT}}),
    ):
        decoded.clear()
        sent(one, path, **{"input" if path == "/responses" else "messages": [{"role": "user", "content": [part]}]})
        assert decoded == [TEXT]


def test_blocks_of_anthropics_messages_too_and_reasoning_that_is_encrypted_is_left_out(talk):
    one = talk()
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}
    plain = {"type": "text", "media_type": "text/plain", "data": "all"}
    pdf = {"type": "base64", "media_type": "application/pdf", "data": PIXEL}
    blocks = [
        image,
        {"type": "document", "source": plain, "title": "Book", "context": "old", "citations": {"enabled": False}},
        {"type": "document", "source": {"type": "base64", "media_type": "text/csv", "data": TEXT}},
        {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "part"}, image]}},
        {"type": "document", "source": pdf},
        {"type": "search_result", "source": "u", "title": "T", "content": [{"type": "text", "text": "found"}]},
    ]
    before = [{"type": "redacted_thinking", "data": "x"}, {"type": "tool_use", "id": "c", "name": "look", "input": {}}]
    result = {"type": "tool_result", "tool_use_id": "c", "content": [*blocks[:1], {"type": "tool_reference", "tool_name": "f"}]}
    messages = [
        {"role": "user", "content": blocks},
        {"role": "assistant", "content": before},
        {"role": "user", "content": [result]},
    ]
    one.anthropic.messages.create(model="m", max_tokens=50, messages=messages)
    seen = "[An image that is not shown: the model is given text only.]"
    paper = "[A document (application/pdf) that is not shown: the model is given text only.]"
    shown = f"{seen}\nBook\nold\nall\ngröße,3\npart\n{seen}\n{paper}\nT\nu\nfound"
    looked = f"assistant:<tool>look {{}}</tool>{END}tool:{seen}\nf{END}"
    assert one.engine.prompts == [f"user:{shown}{END}{looked}assistant:"]
    assert one.session.ignored == {"messages: image": 1, "messages: document": 1}


def test_tools_of_the_apis_own_servers_are_refused_in_their_words(talk):
    one = talk()
    found = [{"type": "web_search_20250305", "name": "web_search"}]
    with pytest.raises(anthropic.BadRequestError, match="'m' does not support tool types: web_search_20250305"):
        one.anthropic.messages.create(model="m", max_tokens=5, messages=HI, tools=found)
    with pytest.raises(openai.BadRequestError, match="Hosted tool 'web_search' is not supported with m"):
        one.openai.responses.create(model="m", input="hi", tools=[{"type": "web_search"}])
    with pytest.raises(openai.BadRequestError, match="Supported values are: 'function' and 'custom'"):
        one.openai.chat.completions.create(model="m", messages=HI, tools=[{"type": "web_search"}])
    assert one.calls() == ()


GRAMMAR = {"syntax": "lark", "definition": "start: /a+/"}
SHOWN = {
    "type": "function",
    "function": {
        "name": "patch",
        "description": "Edits.\n\nThe text follows this lark grammar:\nstart: /a+/",
        "parameters": {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]},
    },
}


def patching(prompt):
    return tool("patch", input='a "b"\n') + "<tool>patch {broken</tool>" if "tool:" not in prompt else "done"


def test_a_custom_tool_of_responses_takes_text_and_its_call_is_continued(talk):
    one = talk(patching)
    tools = [{"type": "custom", "name": "patch", "description": "Edits.", "format": {"type": "grammar", **GRAMMAR}}]
    with one.openai.responses.stream(model="m", input="hi", tools=tools) as stream:
        first = stream.get_final_response()
    assert [(item.type, item.name, item.input) for item in first.output] == [
        ("custom_tool_call", "patch", 'a "b"\n'),
        ("custom_tool_call", "patch", "{broken"),
    ]
    results = [{"type": "custom_tool_call_output", "call_id": item.call_id, "output": "ok"} for item in first.output[:1]]
    history = [HI[0], first.output[0].model_dump(), *results]
    assert one.openai.responses.create(model="m", input=history, tools=tools).output_text == "done"
    assert one.engine.prompts[0].startswith(f"tools:{json.dumps([SHOWN])}{END}")
    one.openai.responses.create(model="m", input="hi", tools=tools, tool_choice={"type": "custom", "name": "patch"})
    assert '"tool_choice": {"function": {"name": "patch"}' in one.engine.prompts[-1]
    again = talk(lambda prompt: tool("patch", input="a") if "tool:" not in prompt else "done")
    first = again.openai.responses.create(model="m", input="hi", tools=tools)
    results = [{"type": "custom_tool_call_output", "call_id": first.output[0].call_id, "output": "ok"}]
    again.openai.responses.create(model="m", input=results, previous_response_id=first.id, tools=tools)
    before, after = again.calls()
    assert read(after.prompt) == f"{read(before.prompt)}{read(before.completion.tokens)}tool:ok{END}assistant:"


def test_tools_in_a_namespace_have_both_names_for_the_model_and_each_its_own_for_the_client(talk):
    one = talk(lambda prompt: "<tool>sums.add {}</tool>" if "tool:" not in prompt else "done")
    inner = {"type": "function", "name": "add", "parameters": {"type": "object"}}
    tools = [{"type": "namespace", "name": "sums", "description": "d", "tools": [inner]}, {**inner, "strict": False}]
    body = {"model": "m", "input": HI, "tools": tools}
    first = one.openai.post("/responses", body=body, cast_to=object)
    (call,) = first["output"]
    assert (call["type"], call["namespace"], call["name"]) == ("function_call", "sums", "add")
    names = [about["function"]["name"] for about in json.loads(one.engine.prompts[0].split(END)[0].removeprefix("tools:"))]
    assert names == ["sums.add", "add"]
    history = [*HI, call, {"type": "function_call_output", "call_id": call["call_id"], "output": "ok"}]
    one.openai.post("/responses", body=body | {"input": history}, cast_to=object)
    before, after = one.calls()
    assert read(after.prompt) == f"{read(before.prompt)}{read(before.completion.tokens)}tool:ok{END}assistant:"
    inner["type"] = "web_search"
    with pytest.raises(openai.BadRequestError, match="Hosted tool 'web_search'"):
        one.openai.post("/responses", body=body | {"tools": tools[:1]}, cast_to=object)


def test_a_custom_tool_of_chat_completions_too_in_a_stream_as_well(talk):
    one = talk(patching)
    about = {"name": "patch", "description": "Edits.", "format": {"type": "grammar", "grammar": GRAMMAR}}
    asked = {"model": "m", "messages": HI, "tools": [{"type": "custom", "custom": about}]}
    message = one.openai.chat.completions.create(**asked).choices[0].message
    calls = message.tool_calls
    assert [(call.type, call.custom.name, call.custom.input) for call in calls] == [
        ("custom", "patch", 'a "b"\n'),
        ("custom", "patch", "{broken"),
    ]
    chunks = [c.choices[0].delta.tool_calls for c in one.openai.chat.completions.create(**asked, stream=True)]
    assert [delta[0].custom["input"] for delta in chunks if delta] == ['a "b"\n', "{broken"]
    sent_back = [*HI, message.model_dump(), {"role": "tool", "tool_call_id": calls[0].id, "content": "ok"}]
    one.openai.chat.completions.create(**asked | {"messages": sent_back})
    assert one.engine.prompts[0].startswith(f"tools:{json.dumps([SHOWN])}{END}")
    last = one.engine.prompts[-1]
    assert last.startswith(one.engine.prompts[0] + tool("patch", input='a "b"\n'))
    assert last.endswith(f"tool:ok{END}assistant:")


def test_a_stored_response_is_had_again_by_its_id_until_it_is_deleted(talk):
    one, other = talk("four"), talk()
    said = one.openai.responses.create(model="m", input="2+2?")
    assert one.openai.responses.retrieve(said.id) == said
    with pytest.raises(openai.NotFoundError):
        other.openai.responses.retrieve(said.id)
    one.openai.responses.delete(said.id)
    unkept = one.openai.responses.create(model="m", input="2+2?", store=False)
    for id in (said.id, unkept.id, "resp_x"):
        with pytest.raises(openai.NotFoundError, match=f"Response with id '{id}' not found"):
            one.openai.responses.retrieve(id)
    with pytest.raises(openai.BadRequestError, match="keeps no response"):
        one.openai.responses.create(model="m", input="and?", previous_response_id=said.id)
    assert len(one.calls()) == 2


def test_a_session_keeps_the_latest_responses(talk, monkeypatch):
    monkeypatch.setattr("areal_x.agents.gateway.session.MOST_STORED", 2)
    one = talk()
    ids = [one.openai.responses.create(model="m", input=str(i)).id for i in range(3)]
    assert list(one.session.stored) == ids[1:]
    one.openai.responses.create(model="m", input="on", previous_response_id=ids[0])  # the conversation is kept


def test_the_tokens_of_a_response_are_counted_without_a_call(talk):
    one = talk()
    asked = {"model": "m", "input": "2+2?", "instructions": "be brief"}
    counted = one.openai.responses.input_tokens.count(**asked).input_tokens
    assert one.calls() == ()
    assert counted == one.openai.responses.create(**asked).usage.input_tokens
