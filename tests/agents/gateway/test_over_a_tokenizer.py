"""All three APIs over a real tokenizer, with the template of a real family and a policy that tokenises unusually."""

import json

import numpy as np
import openai
import pytest

from areal_x.agents.chat.merging import merge_calls
from areal_x.agents.chat.rendering import TemplateRenderer
from areal_x.protocols.engine import SamplingParams
from tests.agents.chat.speaking import Says, tokenizer_of
from tests.agents.gateway.scripted import Talk

FAMILY = "qwen3"
TURNS = [
    "<think>\nI look twice.\n</think>\n\nLet me see.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
    '<tool_call>\n{"name":  "weather", "arguments": {"city":"Paris"}}\n</tool_call>',
    "<think>\nBoth are known.\n</think>\n\nIt is raining in Rome, and fine in Paris.",
    "You are welcome.",
]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
RESULTS = ["raining", "fine"]


def spelled(text, seed):
    """Returns tokens of a text, split where no tokenizer would split it."""
    tokenizer, rng = tokenizer_of(FAMILY), np.random.default_rng(seed)
    tokens, at = [], 0
    while at < len(text):
        size = int(rng.integers(1, 12))
        tokens += tokenizer.encode(text[at : at + size], add_special_tokens=False)
        at += size
    return [*tokens, tokenizer.eos_token_id]


@pytest.fixture
def talk(gateway, run):
    tokenizer = tokenizer_of(FAMILY)
    sampling = SamplingParams(max_tokens=500, stop_token_ids=(tokenizer.eos_token_id,))
    opened = []

    def begin(*texts, **engine):
        async def open_one():
            says = Says(*(spelled(text, seed) for seed, text in enumerate(texts)), **engine)
            return Talk(gateway.open(says, TemplateRenderer(tokenizer), sampling), says, run)

        opened.append(run(open_one()))
        return opened[-1]

    yield begin
    for one in opened:
        one.close()


def by_chat_completions(one, turns):
    tools = [{"type": "function", "function": {"name": "weather", "description": "weather", "parameters": SCHEMA}}]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Rome? Paris?"}]
    said = []

    def ask():
        message = one.openai.chat.completions.create(model="m", messages=messages, tools=tools).choices[0].message
        messages.append(message.model_dump())
        said.append(message.content)
        return message

    for call, result in zip(ask().tool_calls, RESULTS, strict=True):
        assert call.function.name == "weather"
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    for _ in range(turns - 1):
        ask()
        messages.append({"role": "user", "content": "Thanks."})
    return said


def by_responses(one, turns, by_id):
    tools = [{"type": "function", "name": "weather", "description": "weather", "parameters": SCHEMA}]
    items, before, said = [{"role": "user", "content": "Rome? Paris?"}], None, []

    def ask():
        nonlocal items, before
        more = {"previous_response_id": before} if by_id and before else {}
        response = one.openai.responses.create(model="m", input=items, instructions="Be brief.", tools=tools, **more)
        items, before = ([] if by_id else [*items, *response.output]), response.id
        said.append(response.output_text)
        return [item for item in response.output if item.type == "function_call"]

    for call, result in zip(ask(), RESULTS, strict=True):
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
    for _ in range(turns - 1):
        ask()
        items.append({"role": "user", "content": "Thanks."})
    return said


def by_messages(one, turns):
    tools = [{"name": "weather", "description": "weather", "input_schema": SCHEMA}]
    messages, said = [{"role": "user", "content": "Rome? Paris?"}], []

    def ask():
        asked = {"model": "m", "max_tokens": 500, "system": "Be brief.", "messages": messages, "tools": tools}
        with one.anthropic.messages.stream(**asked) as stream:
            message = stream.get_final_message()
        messages.append({"role": "assistant", "content": message.content})
        said.append("".join(block.text for block in message.content if block.type == "text"))
        return [block for block in message.content if block.type == "tool_use"]

    results = [
        {"type": "tool_result", "tool_use_id": use.id, "content": result} for use, result in zip(ask(), RESULTS, strict=True)
    ]
    messages.append({"role": "user", "content": results})
    for _ in range(turns - 1):
        ask()
        messages.append({"role": "user", "content": "Thanks."})
    return said


WAYS = {
    "chat completions": by_chat_completions,
    "responses": lambda one, turns: by_responses(one, turns, by_id=False),
    "responses by id": lambda one, turns: by_responses(one, turns, by_id=True),
    "messages": by_messages,
}


@pytest.mark.parametrize("way", WAYS)
def test_a_conversation_with_tools_is_one_line_of_the_very_tokens_that_were_generated(talk, way):
    one = talk(*TURNS[:2])
    said = WAYS[way](one, 2)
    assert said == ["Let me see.", "It is raining in Rome, and fine in Paris."]
    first, second = one.calls()
    held = [*first.prompt, *first.completion.tokens]
    assert second.prompt[: len(held)].tolist() == held
    tokenizer = tokenizer_of(FAMILY)
    assert tokenizer.decode(second.prompt[len(held) :]) == (
        "\n<|im_start|>user\n<tool_response>\nraining\n</tool_response>\n<tool_response>\nfine\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    merged = merge_calls(one.calls())
    (item,) = merged.trajectories
    assert merged.counts == {"first": 1, "continued": 1, "rewritten": 0, "forked": 0}
    trained = item.trajectory.tokens[item.trajectory.mask].tolist()
    assert trained == [*spelled(TURNS[0], 0), *spelled(TURNS[1], 1)]
    assert item.trajectory.logprobs[item.trajectory.mask].tolist() == [-1.0 - n for n in range(len(trained))]


def test_all_ways_show_the_model_the_same(talk):
    prompts = []
    for way in WAYS.values():
        one = talk(*TURNS)
        assert way(one, 3)[2] == "You are welcome."
        prompts.append([call.prompt.tolist() for call in one.calls()])
    assert all(shown == prompts[0] for shown in prompts)
    text = tokenizer_of(FAMILY).decode(prompts[0][0])
    assert text.startswith("<|im_start|>system\nBe brief.")
    assert json.dumps({"type": "function", "function": {"name": "weather"}})[:-3] in text


def test_a_stop_text_within_a_token_ends_the_reply_and_the_conversation_goes_on_behind_it(talk):
    one = talk("the answer is 42. And more", "fine")
    messages = [{"role": "user", "content": "?"}]
    first = one.openai.chat.completions.create(model="m", messages=messages, stop=[" is"]).choices[0]
    assert (first.message.content, first.finish_reason) == ("the answer", "stop")
    assert one.calls()[0].completion.tokens.tolist() == spelled("the answer is 42. And more", 0)
    messages += [first.message.model_dump(), {"role": "user", "content": "so?"}]
    assert one.openai.chat.completions.create(model="m", messages=messages).choices[0].message.content == "fine"
    shown = tokenizer_of(FAMILY).decode(one.calls()[1].prompt)
    assert "the answer<|im_end|>" in shown
    assert "42" not in shown


def test_what_the_template_refuses_is_the_clients_mistake(talk):
    one = talk()
    for name in ("chat_template", "tokenize", "messages", "max_length"):
        with pytest.raises(openai.BadRequestError, match=f"'{name}'") as error:
            one.chat(extra_body={"chat_template_kwargs": {name: "x"}})
        assert error.value.code == "invalid_request"
    assert one.calls() == ()


def test_a_prompt_beyond_the_context_is_refused_before_the_engine_is_asked(talk):
    one = talk("x", context=20)
    with pytest.raises(openai.BadRequestError, match="too long") as error:
        one.chat("the weather in the city of Paris " * 5)
    assert error.value.code == "context_length_exceeded"
    assert one.engine.prompts == []
