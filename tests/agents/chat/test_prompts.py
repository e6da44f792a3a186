"""A prompt begins with the tokens that its conversation holds, as far as its template shows them."""

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_x.agents.chat.dialogue import ChatEngine, ChatRequest
from areal_x.agents.chat.merging import merge_calls
from areal_x.agents.chat.prompts import ReplyCache, build_prompt, keys
from areal_x.agents.chat.rendering import PlainRenderer, TemplateRenderer
from areal_x.protocols.engine import SamplingParams
from tests.agents.chat.conversations import FAMILIES, Policy
from tests.agents.chat.speaking import END, TOOLS, Says, tokenizer_of
from tests.agents.chat.truth import truth_of

USER = {"role": "user", "content": "what is the sum?"}
CALLED = "{{ m.tool_calls[0].function.arguments if m.tool_calls }}"
AGAIN = {"role": "user", "content": "try again"}


def speaking(family, *replies, **how):
    """A chat engine that will generate these texts, each in single characters, which no tokenizer would choose."""
    tokenizer = tokenizer_of(family)
    tokens = [reply if isinstance(reply, list) else spelt(tokenizer, reply) for reply in replies]
    return ChatEngine(TemplateRenderer(tokenizer), Says(*tokens, **how)), tokenizer


def spelt(tokenizer, text):
    """Tokenises character by character, except for special tokens."""
    special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    tokens = []
    while text:
        found = next((token for token in special if text.startswith(token)), text[0])
        tokens += tokenizer.encode(found, add_special_tokens=False)
        text = text[len(found) :]
    return tokens


def say(speaker, *messages, **how):
    return asyncio.run(speaker.answer(ChatRequest(tuple(messages), **how)))


def behind(tokenizer, first, second):
    """Returns the part of a prompt after the tokens of an earlier answer, or None if it does not begin with them."""
    held = np.concatenate([first.prompt, first.completion.tokens])
    if not np.array_equal(second.prompt[: len(held)], held):
        return None
    return tokenizer.decode(second.prompt[len(held) :])


@settings(max_examples=60)
@given(st.sampled_from(FAMILIES), st.integers(0, 2**32 - 1))
def test_prompts_begin_with_held_tokens_unless_the_template_rewrites_and_all_that_was_generated_is_trained(family, seed):
    assert asyncio.run(truth_of(family, seed)).complaints == ()


def test_the_conversations_of_that_property_hold_and_rewrite_much_and_are_written_in_tokens_no_tokenizer_chooses():
    found = {family: [asyncio.run(truth_of(family, seed)) for seed in range(12)] for family in FAMILIES}
    assert all(sum(truth.kept for truth in truths) > 20 for truths in found.values())
    assert sum(truth.rewritten for truth in found["qwen3"]) > 5
    tokenizer = tokenizer_of("qwen25")
    policy = Policy(tokenizer, "qwen25", np.random.default_rng(0), tools=True, thinks=False, noise=0.0)
    said = [policy.say()[0] for _ in range(20)]
    assert sum(tokenizer.encode(tokenizer.decode(tokens), add_special_tokens=False) != tokens for tokens in said) > 15


def test_a_conversation_in_tokens_of_ones_own_is_one_trajectory():
    speaker, tokenizer = speaking("qwen25", "it is 41<|im_end|>", "it is 42<|im_end|>")
    first = say(speaker, USER)
    second = say(speaker, USER, first.reply.message(), AGAIN)
    assert behind(tokenizer, first, second) == "\n<|im_start|>user\ntry again<|im_end|>\n<|im_start|>assistant\n"
    (item,) = merge_calls(speaker.calls).trajectories
    assert tokenizer.decode(item.trajectory.tokens[item.trajectory.mask]) == "it is 41<|im_end|>it is 42<|im_end|>"


def test_a_turn_cut_by_length_is_ended_by_the_template_as_context():
    speaker, tokenizer = speaking("qwen25", "it is", "42", finish_reason="length")
    first = say(speaker, USER)
    second = say(speaker, USER, first.reply.message(), AGAIN)
    assert behind(tokenizer, first, second).startswith("<|im_end|>\n<|im_start|>user\n")


def test_another_end_token_than_the_templates_is_followed_by_the_templates():
    speaker, tokenizer = speaking("qwen25", "it is<|endoftext|>", "42")
    first = say(speaker, USER)
    assert first.reply.content == "it is"
    second = say(speaker, USER, first.reply.message(), AGAIN)
    assert behind(tokenizer, first, second).startswith("<|im_end|>\n<|im_start|>user\n")


@pytest.mark.parametrize("family", ["qwen25", "qwen3", "llama31"])
@pytest.mark.parametrize("ended", [True, False])
def test_tool_calls_are_answered_behind_the_tokens_that_called(family, ended):
    call = {"qwen25": '<tool_call>\n{"name": "add",  "arguments": {"first": 1}}\n</tool_call>'}
    call["qwen3"] = "<think>\nhm\n</think>\n\n" + call["qwen25"]
    call["llama31"] = '{"name": "add",  "parameters": {"first":1}}'
    end = END[family]
    speaker, tokenizer = speaking(family, call[family] + (end if ended else ""), "42")
    first = say(speaker, USER, tools=TOOLS)
    assert [c.name for c in first.reply.tool_calls] == ["add"]
    message = {key: value for key, value in first.reply.message().items() if key != "reasoning_content"}
    second = say(speaker, USER, message, {"role": "tool", "content": "42"}, tools=TOOLS)
    rest = behind(tokenizer, first, second)
    if family == "llama31":
        opened = (
            '<|start_header_id|>ipython<|end_header_id|>\n\n"42"<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n'
        )
    else:
        opened = "\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert rest == ("" if ended else end) + opened


def test_reasoning_that_the_template_leaves_out_of_earlier_turns_makes_a_trajectory_of_its_own():
    speaker, tokenizer = speaking("qwen3", "<think>\nhm\n</think>\n\nit is 41<|im_end|>", "42<|im_end|>")
    first = say(speaker, USER)
    assert first.reply.reasoning == "hm"
    second = say(speaker, USER, first.reply.message(), AGAIN)
    assert behind(tokenizer, first, second) is None
    assert "hm" not in tokenizer.decode(second.prompt)
    merged = merge_calls(speaker.calls)
    assert merged.counts == {"first": 1, "continued": 0, "rewritten": 1, "forked": 0}
    assert [tokenizer.decode(item.trajectory.tokens[item.trajectory.mask]) for item in merged.trajectories] == [
        "<think>\nhm\n</think>\n\nit is 41<|im_end|>",
        "42<|im_end|>",
    ]


def test_where_the_last_reply_is_rewritten_those_before_it_keep_their_tokens():
    speaker, tokenizer = speaking("qwen3", "it is 40<|im_end|>", "<think>\nhm\n</think>\n\nit is 41<|im_end|>", "42<|im_end|>")
    first = say(speaker, USER)
    second = say(speaker, USER, first.reply.message(), AGAIN)
    third = say(speaker, USER, first.reply.message(), AGAIN, second.reply.message(), AGAIN)
    assert behind(tokenizer, second, third) is None
    assert behind(tokenizer, first, third).startswith(
        "\n<|im_start|>user\ntry again<|im_end|>\n<|im_start|>assistant\nit is 41<|im_end|>"
    )
    assert merge_calls(speaker.calls).counts == {"first": 1, "continued": 1, "rewritten": 1, "forked": 0}


@pytest.mark.parametrize(
    "message",
    [
        "{{ m.content }}",
        CALLED + "{{ m.content }}",
        CALLED,
        "{{ raise_exception('no') if 'placeholder' in m.content }}{{ m.content }}" + CALLED,
    ],
)
def test_a_template_that_does_not_show_a_reply_as_it_was_written_is_given_all_as_text(message):
    speaker, tokenizer = speaking(
        "qwen25", 'I look.<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call><|im_end|>', "42"
    )
    template = tokenizer.chat_template
    try:
        tokenizer.chat_template = f"{{% for m in messages %}}<|im_start|>{message}<|im_end|>{{% endfor %}}{{# tools #}}"
        first = say(speaker, USER, tools=TOOLS)
        answer = first.reply.message()
        second = say(speaker, USER, answer, {"role": "tool", "content": "42"}, tools=TOOLS)
        assert behind(tokenizer, first, second) is None
    finally:
        tokenizer.chat_template = template


def test_a_template_that_shows_nothing_beside_a_call_is_given_all_as_text():
    speaker, tokenizer = speaking(
        "llama31", 'I look.<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call><|eot_id|>', "42"
    )
    first = say(speaker, USER, tools=TOOLS)
    assert first.reply.content == "I look."
    second = say(speaker, USER, first.reply.message(), {"role": "tool", "content": "42"}, tools=TOOLS)
    assert behind(tokenizer, first, second) is None


def test_what_the_agent_said_differently_is_made_of_text_anew():
    for changed in ({"content": "it is 43"}, {"role": "user"}):
        speaker, tokenizer = speaking("qwen25", "it is 41<|im_end|>", "42<|im_end|>")
        first = say(speaker, USER)
        second = say(speaker, USER, {**first.reply.message(), **changed}, AGAIN)
        assert behind(tokenizer, first, second) is None
        assert second.prompt.tolist() == spelt_by(tokenizer, [USER, {**first.reply.message(), **changed}, AGAIN])


@pytest.mark.parametrize("how", [{"tools": TOOLS}, {"template": {"enable_thinking": False}}])
def test_a_prompt_whose_beginning_the_template_writes_in_another_way_is_made_of_text_anew(how):
    speaker, tokenizer = speaking("qwen3", "it is 41<|im_end|>", "42<|im_end|>", "43<|im_end|>")
    first = say(speaker, USER, **how)
    second = say(speaker, USER, first.reply.message(), AGAIN)
    assert behind(tokenizer, first, second) is None


def test_variables_that_change_nothing_before_the_reply_change_nothing():
    speaker, tokenizer = speaking("qwen3", "it is 41<|im_end|>", "42<|im_end|>")
    first = say(speaker, USER)
    second = say(speaker, USER, first.reply.message(), AGAIN, template={"enable_thinking": False, "tool_choice": "none"})
    assert behind(tokenizer, first, second).endswith("<think>\n\n</think>\n\n")


def test_each_of_several_answers_to_one_prompt_is_gone_on_with_by_its_own_tokens():
    speaker, tokenizer = speaking("qwen25", "one<|im_end|>", "two<|im_end|>", "a", "b")
    one, two = (say(speaker, USER) for _ in range(2))
    for answer in (one, two):
        on = say(speaker, USER, answer.reply.message(), AGAIN)
        assert behind(tokenizer, answer, on) is not None
    assert merge_calls(speaker.calls).counts == {"first": 1, "continued": 2, "rewritten": 0, "forked": 1}


def test_an_assistants_beginning_is_continued_and_gone_on_with():
    speaker, tokenizer = speaking("qwen25", " 42<|im_end|>", "yes<|im_end|>")
    begun = {"role": "assistant", "content": "The answer is"}
    first = say(speaker, USER, begun, continue_final=True)
    assert tokenizer.decode(first.prompt).endswith("<|im_start|>assistant\nThe answer is")
    assert first.reply.content == " 42"
    second = say(speaker, USER, {"role": "assistant", "content": "The answer is 42"}, AGAIN)
    assert behind(tokenizer, first, second).startswith("\n<|im_start|>user\ntry again")


@pytest.mark.parametrize("ended", [True, False])
def test_a_reply_of_ours_may_be_continued_itself(ended):
    speaker, tokenizer = speaking("qwen25", "it is" + ("<|im_end|>" if ended else ""), " 42<|im_end|>", "yes")
    first = say(speaker, USER)
    second = say(speaker, USER, first.reply.message(), continue_final=True)
    held = np.concatenate([first.prompt, first.completion.tokens])
    assert second.prompt.tolist() == held.tolist()[: len(held) - ended]
    third = say(speaker, USER, {"role": "assistant", "content": "it is 42"}, AGAIN)
    assert behind(tokenizer, second, third).startswith("\n<|im_start|>user")


def test_a_reply_that_a_stop_text_ended_goes_on_from_there():
    speaker, tokenizer = speaking("qwen25", "it is 41. Observation: it is", "42<|im_end|>")
    first = say(speaker, USER, stop=("Observation:", "41. O"))
    assert (first.reply.content, first.stopped_by) == ("it is ", "41. O")
    assert tokenizer.decode(first.completion.tokens) == "it is 41. Observation: it is"
    second = say(speaker, USER, first.reply.message(), AGAIN)
    kept = np.concatenate([first.prompt, first.completion.tokens[: len("it is ")]])
    assert np.array_equal(second.prompt[: len(kept)], kept)
    assert tokenizer.decode(second.prompt[len(kept) :]).startswith("<|im_end|>\n<|im_start|>user\ntry again")
    assert merge_calls(speaker.calls).counts["rewritten"] == 1


def test_an_aborted_reply_is_not_gone_on_with():
    speaker, tokenizer = speaking("qwen25", "it is", "42", finish_reason="abort")
    first = say(speaker, USER)
    assert behind(tokenizer, first, say(speaker, USER, first.reply.message(), AGAIN)) is None


def test_plain_text_goes_on_behind_the_tokens_too():
    tokenizer = tokenizer_of("qwen25")
    speaker = ChatEngine(PlainRenderer(tokenizer), Says(spelt(tokenizer, "41<|im_end|>"), spelt(tokenizer, "42")))
    first = say(speaker, {"role": "user", "content": "6*7="})
    assert tokenizer.decode(first.prompt) == "6*7="
    second = say(speaker, {"role": "user", "content": "6*7="}, first.reply.message(), {"role": "user", "content": " no: "})
    assert behind(tokenizer, first, second) == " no: "


def test_messages_are_the_same_in_all_ways_that_clients_write_them():
    def call(**changes):
        return {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}, **changes}

    same = [
        {"role": "assistant", "content": None, "tool_calls": [call()]},
        {"role": "assistant", "content": "", "tool_calls": [call(id="2", index=0)], "refusal": None, "audio": None},
        {"role": "assistant", "tool_calls": [call(function={"name": "add", "arguments": '{"b":2,\n"a":1}'})]},
        {
            "role": "assistant",
            "content": [],
            "reasoning_content": "hm",
            "tool_calls": [call(function={"name": "add", "arguments": {"a": 1, "b": 2}})],
        },
    ]
    assert len({keys([USER, message])[1] for message in same}) == 1
    others = [
        {"role": "assistant", "content": "x", "tool_calls": [call()]},
        {"role": "assistant", "tool_calls": [call(function={"name": "add", "arguments": '{"a": 1}'})]},
        {"role": "assistant", "tool_calls": [call(), call()]},
        {"role": "assistant", "tool_calls": [call(function={"name": "sub", "arguments": '{"a": 1, "b": 2}'})]},
    ]
    assert len({keys([USER, message])[1] for message in [same[0], *others]}) == 5
    assert keys([USER, same[0]])[1] != keys([AGAIN, same[0]])[1]
    blanks = [
        {"role": role, "content": content}
        for role in ("assistant", "user")
        for content in ("x", [{"type": "text", "text": " x\n"}])
    ]
    assert [len({keys([m])[0] for m in blanks[i : i + 2]}) for i in (0, 2)] == [1, 2]


def test_a_word_of_the_conversation_is_never_taken_for_the_mark_of_a_reply():
    speaker, tokenizer = speaking("qwen25", "placeholder0c<|im_end|>", "42")
    user = {"role": "user", "content": "placeholder0c placeholder1c"}
    first = say(speaker, user)
    second = say(speaker, user, first.reply.message(), user)
    assert behind(tokenizer, first, second) == (
        "\n<|im_start|>user\nplaceholder0c placeholder1c<|im_end|>\n<|im_start|>assistant\n"
    )


def test_replies_are_remembered_by_conversation():
    memory = ReplyCache()
    renderer = TemplateRenderer(tokenizer_of("qwen25"))
    prompt = asyncio.run(build_prompt(renderer, memory, [USER]))
    assert prompt.tokens.tolist() == renderer.encode(prompt.text).tolist()
    assert asyncio.run(memory.reasonings(keys([USER, {"role": "assistant", "content": "x"}]))) == {}


def spelt_by(tokenizer, messages):
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def test_what_is_asked_of_the_engine_is_the_asks_sampling():
    speaker, _ = speaking("qwen25", "42")
    requests = []
    generate = speaker.engine.generate

    async def noting(request):
        requests.append(request)
        return await generate(request)

    speaker.engine.generate = noting
    say(speaker, USER, sampling=SamplingParams(max_tokens=3, temperature=0.5))
    assert [request.sampling for request in requests] == [SamplingParams(max_tokens=3, temperature=0.5)]
