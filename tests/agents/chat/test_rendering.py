"""Prompts as chat templates write them, completions as they are parsed, and errors as one sentence."""

import asyncio
import copy

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

from areal_x.agents.chat.parsing import Reply
from areal_x.agents.chat.rendering import PlainRenderer, TemplateRenderer, Unrenderable
from areal_x.errors import UserError
from tests.agents.chat.speaking import TOOLS, tokenizer_of

USER = {"role": "user", "content": "what is the sum?"}
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"first": 1}'}}


def rendered(family, messages, tools=(), continue_final=False, **template):
    return asyncio.run(TemplateRenderer(tokenizer_of(family)).rendered(messages, tools, template, continue_final))


def read(family, text, *, tools=(), prompt="", tokenizer=None):
    tokenizer = tokenizer or tokenizer_of(family)
    tokens, before = (np.asarray(tokenizer.encode(x, add_special_tokens=False), np.int32) for x in (text, prompt))
    return asyncio.run(TemplateRenderer(tokenizer).read(tokens, tools, before))


def test_a_prompt_is_what_the_tokenizers_own_template_makes_with_the_assistants_turn_opened():
    tokenizer = tokenizer_of("qwen25")
    prompt = asyncio.run(TemplateRenderer(tokenizer).prompt([USER], TOOLS, {}))
    assert prompt.dtype == np.int32
    assert prompt.tolist() == tokenizer.apply_chat_template(
        [USER], tools=list(TOOLS), add_generation_prompt=True, return_dict=False
    )


def test_a_template_that_writes_the_first_token_has_it_once():
    tokenizer = tokenizer_of("llama31")
    prompt = asyncio.run(TemplateRenderer(tokenizer).prompt([USER], (), {}))
    assert prompt.tolist().count(tokenizer.bos_token_id) == 1


def test_arguments_of_tool_calls_are_values_to_a_template_and_text_where_they_are_no_json():
    text = rendered("qwen25", [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}])
    assert '<|im_start|>assistant\n<tool_call>\n{"name": "add", "arguments": {"first": 1}}\n</tool_call><|im_end|>' in text
    broken = {**CALL, "function": {"name": "add", "arguments": "{broken"}}
    assert '"arguments": {broken}' in rendered("qwen3", [USER, {"role": "assistant", "tool_calls": [broken]}])


def test_parts_are_joined_nothing_is_no_text_and_a_developer_is_a_system():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    text = rendered("qwen25", [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}])
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\none\ntwo<|im_end|>\n")
    assert "<|im_start|>assistant\n<|im_end|>" in rendered("qwen25", [USER, {"role": "assistant", "content": None}, USER])


def test_keys_without_a_value_are_not_there():
    for nothing in (None, []):
        text = rendered("llama31", [USER, {"role": "assistant", "content": "x", "tool_calls": nothing}, USER])
        assert "<|end_header_id|>\n\nx<|eot_id|>" in text


def test_a_tokenizer_that_begins_texts_with_a_token_begins_plain_prompts_with_it_and_nothing_else():
    tokenizer = copy.deepcopy(tokenizer_of("llama31"))
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<|begin_of_text|> $A", None, [("<|begin_of_text|>", bos)])
    assert tokenizer.encode("1")[0] == bos
    plain, chat = PlainRenderer(tokenizer), TemplateRenderer(tokenizer)
    assert asyncio.run(plain.prompt([USER], (), {})).tolist().count(bos) == 1
    assert asyncio.run(chat.prompt([USER], (), {})).tolist().count(bos) == 1
    for renderer in (plain, chat):
        assert bos not in renderer.encode("1")


def test_the_last_message_is_left_open_where_it_shall_be_continued():
    text = rendered("qwen25", [USER, {"role": "assistant", "content": "It is"}], continue_final=True)
    assert text.endswith("<|im_start|>assistant\nIt is")


def test_variables_of_the_template_reach_it():
    assert rendered("qwen3", [USER], enable_thinking=False).endswith("<think>\n\n</think>\n\n")


@pytest.mark.parametrize(
    "messages, how, says",
    [
        ([], {}, "empty conversation"),
        (["hello"], {}, r"role and content, not 'hello'"),
        ([{"content": "hello"}], {}, r"role and content"),
        (
            [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}],
            {},
            "must be of the type 'text', not .*input_audio",
        ),
        ([{"role": "user", "content": 3}], {}, "not '3'"),
        ([{"role": "user", "content": ["x"]}], {}, "not 'x'"),
        ([USER, {"role": "assistant", "tool_calls": ["add"]}], {}, "tool call must be an object with a function"),
        ([USER, {"role": "assistant", "tool_calls": [CALL, CALL]}], {}, "only supports single tool-calls at once"),
        ([USER], {"continue_final": True, "tools": TOOLS, "chat_template": "{{ 1 }}"}, "'chat_template' cannot be set"),
        ([USER], {"add_generation_prompt": False}, "'add_generation_prompt' cannot be set"),
        ([USER], {"tokenize": True}, "'tokenize' cannot be set"),
    ],
)
def test_what_a_template_refuses_is_one_sentence(messages, how, says):
    with pytest.raises(Unrenderable, match=says) as error:
        rendered("llama31", messages, **how)
    assert "\n" not in str(error.value)


def test_tools_without_a_place_in_the_template_are_refused():
    tokenizer = tokenizer_of("qwen25")
    template = tokenizer.chat_template
    try:
        tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
        with pytest.raises(Unrenderable, match="does not support tools"):
            rendered("qwen25", [USER], TOOLS)
    finally:
        tokenizer.chat_template = template
    with pytest.raises(Unrenderable, match="need a model with a chat template"):
        asyncio.run(PlainRenderer(tokenizer).rendered([USER], TOOLS, {}))


def test_a_tokenizer_without_a_chat_template_is_refused():
    class Without:
        chat_template = None

    with pytest.raises(UserError, match=r"add chat_template\.jinja"):
        TemplateRenderer(Without())


def test_special_tokens_are_no_text_and_those_that_mark_a_call_are_read():
    assert read("qwen25", "it <|im_start|>is<|im_end|>") == Reply("it is")
    said = read("llama31", '<|python_tag|>{"name": "add", "parameters": {}}<|eom_id|>', tools=TOOLS)
    assert [call.name for call in said.tool_calls] == ["add"]
    assert read("llama31", '<|python_tag|>{"name": "add", "parameters": {}}<|eom_id|>').content.endswith("}")


def test_reasoning_is_read_where_the_template_knows_of_it_and_where_the_prompt_opened_it():
    assert read("qwen3", "<think>\nhm\n</think>\n\n42<|im_end|>") == Reply("42", "hm")
    assert read("qwen3", "hm\n</think>\n\n42<|im_end|>", prompt="<|im_start|>assistant\n<think>\n") == Reply("42", "hm")
    assert read("qwen3", "42<|im_end|>", prompt="<|im_start|>assistant\n<think>\n\n</think>\n\n") == Reply("42")
    assert read("qwen25", "<think>hm</think>42<|im_end|>") == Reply("<think>hm</think>42")


def test_blanks_before_punctuation_are_part_of_what_was_said():
    tokenizer = copy.deepcopy(tokenizer_of("qwen25"))
    tokenizer.clean_up_tokenization_spaces = (
        tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output
    ) = True
    assert tokenizer.decode(tokenizer.encode("f (x , y) .")) != "f (x , y) ."
    assert read("qwen25", "f (x , y) .", tokenizer=tokenizer) == Reply("f (x , y) .")
    renderer = TemplateRenderer(tokenizer)
    assert renderer.text(renderer.encode("f (x , y) .")) == "f (x , y) ."


def test_ids_of_calls_are_those_of_prompt_and_completion():
    text = '<tool_call>{"name": "now"}</tool_call>'
    ids = [read("qwen25", text, tools=TOOLS, prompt=prompt).tool_calls[0].id for prompt in ("a", "a", "b")]
    assert ids[0] == ids[1] != ids[2]


def test_a_tokenizer_that_says_how_it_is_read_is_read_so():
    tokenizer = tokenizer_of("qwen25")
    tokenizer.response_template = {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "thinking": {"open": "<think>", "close": "</think>"},
            "tool_calls": {
                "open": "<tool_call>",
                "close": "</tool_call>",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": {"close": ["<|im_end|>", "eos"]},
        },
    }
    try:
        said = read(
            "qwen25", '<think>hm</think>so<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|im_end|>', tools=TOOLS
        )
        assert (said.reasoning, said.content) == ("hm", "so")
        assert [(call.name, call.arguments) for call in said.tool_calls] == [("add", '{"a": 1}')]
        assert read("qwen25", "so<tool_call>{broken</tool_call>", tools=TOOLS).tool_calls == ()
    finally:
        tokenizer.response_template = None


def test_plain_text_is_contents_one_after_the_other():
    renderer = PlainRenderer(tokenizer_of("qwen25"))
    messages = [
        {"role": "user", "content": "6*7="},
        {"role": "assistant", "content": "41"},
        {"role": "user", "content": ". No: "},
    ]
    assert asyncio.run(renderer.rendered(messages, (), {})) == "6*7=41. No: "
    assert renderer.text(asyncio.run(renderer.prompt(messages, (), {}))) == "6*7=41. No: "
    tokens = renderer.encode("<think>hm</think>42<|im_end|>")
    assert asyncio.run(renderer.read(tokens, ())) == Reply("<think>hm</think>42")
