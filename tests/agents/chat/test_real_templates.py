"""Conversations in the formats of fourteen real families: prompts token for token, replies as they are read, refusals."""

from __future__ import annotations

import asyncio
import json
from collections import Counter

import numpy as np
import pytest

from areal_x.agents.chat.dialogue import ChatEngine, ChatRequest
from areal_x.agents.chat.harmony import read_harmony
from areal_x.agents.chat.merging import merge_calls
from areal_x.agents.chat.parsing import Reply, ToolCall, read
from areal_x.agents.chat.rendering import TemplateRenderer, Unrenderable
from areal_x.hf.chat_form import chat_form, encode_piece
from tests.agents.chat.real_templates import DEEPSEEK, REAL, missing, real_tokenizer
from tests.agents.chat.real_truth import real_truth
from tests.agents.chat.speaking import TOOLS, Says, byte_level
from tests.thorough import thorough

needs_templates = pytest.mark.skipif(missing is not None, reason=str(missing))
USER = {"role": "user", "content": "what is the sum?"}
TYPED = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"n": {"type": "integer"}}}}}
FEW, MANY = 8, 100  # conversations


def told(name, conversations):
    counts: Counter[str] = Counter()
    for seed in range(conversations):
        talk = real_truth(name, seed)
        assert talk.complaints == []
        counts += talk.counts
    return counts


@needs_templates
@pytest.mark.parametrize("name", REAL)
def test_prompts_are_what_the_template_writes_and_keep_the_tokens_of_replies(name):
    counts = told(name, FEW)
    rewrites = name.startswith("deepseek")  # which shows no reasoning of an earlier turn
    assert counts["rewritten" if rewrites else "kept"] > FEW / 2


@needs_templates
@thorough
@pytest.mark.parametrize("name", REAL)
def test_many_more_prompts_are_what_the_template_writes(name):
    counts = told(name, MANY)
    assert counts["compactions"] > MANY / 10
    assert counts["branches"] > MANY / 10


def speaking(name, *replies, **how):
    tokenizer = real_tokenizer(name)
    tokens = [tokenizer.encode(reply, add_special_tokens=False) for reply in replies]
    return ChatEngine(TemplateRenderer(tokenizer), Says(*tokens, **how)), tokenizer


def say(speaker, *messages, **how):
    return asyncio.run(speaker.answer(ChatRequest(tuple(messages), **how)))


@needs_templates
def test_the_form_of_messages_is_found_from_the_template():
    forms = {name: chat_form(real_tokenizer(name)) for name in REAL}
    reasoning = {name: form.reasoning for name, form in forms.items() if form.reasoning}
    inside = dict.fromkeys(("deepseek-v3", "deepseek-r1", "phi4"), "content")
    keyed = dict.fromkeys(("qwen3", "qwen3.5", "glm4.5"), "reasoning_content")
    assert reasoning == {**inside, **keyed, "gpt-oss": "thinking"}
    assert {name for name, form in forms.items() if form.arguments_as_text} == {"deepseek-v3", "deepseek-r1"}
    assert {name for name, form in forms.items() if form.empty_as_none} == {"deepseek-r1"}


@needs_templates
@pytest.mark.parametrize("name", ["phi4", "olmo2", "mistral-v7", "gemma3"])
def test_a_result_of_a_tool_that_the_template_leaves_out_or_refuses_is_refused(name):
    """Phi-4's and OLMo's templates leave such messages out without a word."""
    speaker, _ = speaking(name, "42")
    answer = {"role": "assistant", "content": "I look."}
    with pytest.raises(Unrenderable, match=r"'tool'|must alternate|Only user, system and assistant"):
        say(speaker, USER, answer, {"role": "tool", "tool_call_id": "abcdefgh1", "content": "42"})
    assert speaker.engine.prompts == []


@needs_templates
@pytest.mark.parametrize("name", [name for name, family in REAL.items() if not family.calls])
def test_tools_are_refused_where_the_template_has_no_place_for_them(name):
    speaker, _ = speaking(name, "42")
    with pytest.raises(Unrenderable, match="does not support tools"):
        say(speaker, USER, tools=TOOLS)


@needs_templates
def test_an_end_of_the_last_turn_does_not_stand_within_a_conversation():
    """gpt-oss ends its last message with <|return|>, which its template writes as <|end|> in those before."""
    said = "<|channel|>final<|message|>41<|return|>"
    speaker, tokenizer = speaking("gpt-oss", said, said)
    first = say(speaker, USER)
    second = say(speaker, USER, first.reply.message(), USER)
    assert "<|return|>" not in tokenizer.decode(second.prompt)
    assert "<|channel|>final<|message|>41<|end|><|start|>user" in tokenizer.decode(second.prompt)
    assert merge_calls(speaker.calls).counts["rewritten"] == 1


@needs_templates
def test_a_marker_of_the_next_role_is_not_kept_where_another_role_speaks():
    """GLM ends a turn with the marker of the tool or of the user."""
    reply = "\n<think></think>\n<tool_call>add\n<arg_key>first</arg_key>\n<arg_value>1</arg_value>\n</tool_call><|observation|>"
    speaker, tokenizer = speaking("glm4.5", reply, "\n<think></think>\n42<|user|>")
    first = say(speaker, USER, tools=TOOLS)
    second = say(speaker, USER, first.reply.message(), USER, tools=TOOLS)
    assert "<|observation|>" not in tokenizer.decode(second.prompt)


V31 = (  # the form of DeepSeek V3.1
    "{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
    "{% elif m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>"
    "{% else %}<｜Assistant｜>{{ m.content }}{% for c in m.tool_calls %}{% if loop.first %}<｜tool▁calls▁begin｜>{% endif %}"
    "<｜tool▁call▁begin｜>{{ c.function.name }}<｜tool▁sep｜>{{ c.function.arguments | tojson }}<｜tool▁call▁end｜>{% endfor %}"
    "{% if m.tool_calls %}<｜tool▁calls▁end｜>{% endif %}<｜end▁of▁sentence｜>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
)


@pytest.mark.parametrize("ended", [True, False])
def test_a_call_that_three_special_tokens_close_is_closed_once(ended):
    """As DeepSeek's calls are, which its servers' parser reads."""
    tokenizer = byte_level(DEEPSEEK, (), bos=DEEPSEEK[0], eos=DEEPSEEK[1])
    tokenizer.chat_template = V31
    call = '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{ "first":1}<｜tool▁call▁end｜>'
    reply = call + ("<｜tool▁calls▁end｜><｜end▁of▁sentence｜>" if ended else "")
    speaker = ChatEngine(TemplateRenderer(tokenizer), Says(*(tokenizer.encode(text) for text in (reply, "42"))))

    async def parsed(tokens, tools, prompt=None):
        return Reply(None, None, (ToolCall("abcdefgh1", "add", json.dumps({"first": 1})),))

    speaker.renderer.read = parsed
    first = say(speaker, USER)
    second = say(speaker, USER, first.reply.message(), {"role": "tool", "tool_call_id": "abcdefgh1", "content": "42"})
    shown = tokenizer.decode(second.prompt)
    assert shown == (
        f"<｜User｜>what is the sum?<｜Assistant｜>{call}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>"
        "<｜tool▁output▁begin｜>42<｜tool▁output▁end｜><｜Assistant｜>"
    )
    held = np.concatenate([first.prompt, first.completion.tokens])
    assert np.array_equal(second.prompt[: len(held)], held)


@pytest.mark.parametrize(
    "text, called",
    [
        ("<tool_call>\n<function=add>\n<parameter=n>\n12\n</parameter>\n</function>\n</tool_call>", {"n": 12}),
        ("<tool_call>\n<function=add>\n<parameter=s>\n12\nx\n</parameter>\n</function>\n</tool_call>", {"s": "12\nx"}),
        ("<tool_call>\n<function=add>\n</function>\n</tool_call>", {}),
        ("<tool_call>add\n<arg_key>n</arg_key>\n<arg_value>12</arg_value>\n</tool_call>", {"n": 12}),
        ("<tool_call>add\n<arg_key>s</arg_key>\n<arg_value>1 < 2</arg_value>\n</tool_call>", {"s": "1 < 2"}),
        ('[TOOL_CALLS] [{"name": "add", "arguments": {"n": 12}, "id": "abcdefgh1"}]', {"n": 12}),
        ('<|python_start|><|python_end|>{"name": "add", "parameters": {"n": 12}}', {"n": 12}),
    ],
)
def test_calls_are_read_in_the_notation_of_each_family(text, called):
    reply = read(text, tools=True, schemas=[TYPED])
    assert [(c.name, json.loads(c.arguments)) for c in reply.tool_calls] == [("add", called)]
    assert reply.content is None
    assert all(c.id == "abcdefgh1" for c in reply.tool_calls if "TOOL_CALLS" in text)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\n<function=add>\n<parameter=n>\n12\n</function>\n</tool_call>",
        "<tool_call>\n<function=add>\n</function>\nmore</tool_call>",
        "<tool_call>add<arg_key>n</arg_key></tool_call>",
        "<tool_call>it is not a call</tool_call>",
        "<tool_call><parameter=n>" + "<parameter=n>" * 1000,
        "[TOOL_CALLS] [3]",
        '[TOOL_CALLS] [{"name": "add"}]',
        '{"name": "add", "parameters": {}} {"name": "add"}',
    ],
)
def test_what_is_no_whole_call_in_these_notations_stays_content(text):
    assert read(text, tools=True, schemas=[TYPED]) == Reply(text)


@pytest.mark.parametrize(
    "text, reply",
    [
        ("<|channel|>final<|message|>42<|return|>", Reply("42")),
        ("<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>42", Reply("42", "hm")),
        ("<|channel|>analysis<|message|>hm, and", Reply(None, "hm, and")),
        ("<|channel|>commentary<|message|>I look.<|end|>", Reply("I look.")),
        ("no channel", Reply("no channel")),
        ("", Reply("")),
    ],
)
def test_harmonys_channels_are_reasoning_and_content(text, reply):
    assert read_harmony(text, tools=True) == reply


@pytest.mark.parametrize(
    "header",
    [
        " to=functions.add<|channel|>commentary json",
        "<|channel|>commentary to=functions.add <|constrain|>json",
        "<|channel|>analysis to=functions.add code",
    ],
)
def test_harmonys_calls_name_their_function_in_the_role_or_the_channel(header):
    text = f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant{header}<|message|>" + '{"n": 1}<|call|>'
    reply = read_harmony(text, tools=True, key=b"x")
    assert (reply.content, reply.reasoning, [(c.name, c.arguments) for c in reply.tool_calls]) == (
        None,
        "hm",
        [("add", '{"n": 1}')],
    )
    assert read_harmony(text).tool_calls == ()


def test_a_piece_within_a_text_has_no_blank_of_its_own():
    """As tokenizers of the SentencePiece kind put before a text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<unk>": 0, **{c: i + 1 for i, c in enumerate("▁abc")}}
    made = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    made.decoder = decoders.Metaspace(prepend_scheme="first")
    made.add_special_tokens([AddedToken("</s>", special=True, normalized=False)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>")
    assert tokenizer.decode(tokenizer.encode("ab", add_special_tokens=False)[:1]) != "a"
    whole = tokenizer.encode("a</s>b c", add_special_tokens=False)
    begun = tokenizer.encode("a</s>", add_special_tokens=False)
    assert [*begun, *encode_piece(tokenizer, "b"), *encode_piece(tokenizer, " c")] == whole
