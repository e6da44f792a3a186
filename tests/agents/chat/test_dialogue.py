"""The calls that a chat engine records, where a stop text cuts, and how a dialogue grows."""

import asyncio
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_x.agents.chat.dialogue import ChatEngine, ChatRequest, Dialogue, cut_at_stop
from areal_x.agents.chat.rendering import TemplateRenderer, Unrenderable
from areal_x.protocols.engine import PromptTooLong, SamplingParams
from tests.agents.chat.speaking import TOOLS, Says, tokenizer_of

USER = {"role": "user", "content": "what is the sum?"}
TOKENIZER = tokenizer_of("qwen25")
RENDERER = TemplateRenderer(TOKENIZER)


def says(*replies, **how):
    return Says(*(TOKENIZER.encode(reply, add_special_tokens=False) for reply in replies), **how)


def test_every_completion_is_recorded_as_the_engine_gave_it_under_the_id_that_was_asked_for():
    engine = says("one<|im_end|>", "two<|im_end|>")
    speaker = ChatEngine(RENDERER, engine)
    answers = [asyncio.run(speaker.answer(ChatRequest((USER,)), id)) for id in (None, "chatcmpl-7")]
    assert [call.id for call in speaker.calls] == ["0", "chatcmpl-7"]
    for call, answer, prompt in zip(speaker.calls, answers, engine.prompts, strict=True):
        assert call.prompt is answer.prompt is prompt
        assert call.completion is answer.completion
        assert call.reward is None
    assert [answer.reply.content for answer in answers] == ["one", "two"]


def test_several_asks_may_be_under_way_at_once():
    engine = says("one<|im_end|>", "two<|im_end|>", "three<|im_end|>")
    speaker = ChatEngine(RENDERER, engine)

    async def ask():
        asks = [ChatRequest(({"role": "user", "content": str(n)},)) for n in range(3)]
        return await asyncio.gather(*(speaker.answer(ask) for ask in asks))

    assert sorted(answer.reply.content for answer in asyncio.run(ask())) == ["one", "three", "two"]
    assert len({call.id for call in speaker.calls}) == 3


def test_a_conversation_without_room_for_a_reply_is_refused_before_the_engine_is_asked():
    engine = says("one", context=5)
    with pytest.raises(PromptTooLong, match="leaves no room in a context of 5"):
        asyncio.run(ChatEngine(RENDERER, engine).answer(ChatRequest((USER,))))
    assert engine.prompts == []


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(0, 3) | st.sampled_from(["", "user", "assistant", "text", "{}", "add"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "text", "function", "name", "arguments", "id"]), inner, max_size=3)
    ),
    max_leaves=6,
)
ROLES = st.sampled_from(["user", "assistant", "tool", "system", "developer", "critic"])
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": ROLES | ANYTHING, "content": ANYTHING}, optional={"tool_calls": ANYTHING, "name": ANYTHING})
    | ANYTHING,
    max_size=3,
)


@given(MESSAGES, st.booleans(), st.sampled_from(["qwen25", "qwen3", "llama31"]))
def test_whatever_an_agent_sends_is_answered_or_refused_as_unrenderable(messages, continued, family):
    engine = says("42", context=10**6)
    speaker = ChatEngine(TemplateRenderer(tokenizer_of(family)), engine)
    with suppress(Unrenderable):
        assert asyncio.run(speaker.answer(ChatRequest(tuple(messages), continue_final=continued))).reply.content == "42"


def test_a_dialogue_grows_by_both_sides_and_stays_as_it_was_where_nothing_came_of_it():
    engine = says('<tool_call>\n{"name": "add", "arguments": {"first": 1}}\n</tool_call><|im_end|>', "42<|im_end|>")
    dialogue = Dialogue(
        ChatEngine(RENDERER, engine), SamplingParams(max_tokens=7), tools=TOOLS, template={"tool_choice": "auto"}
    )
    assert (dialogue.messages, dialogue.latest, dialogue.text) == ((), None, "")

    async def talk():
        called = await dialogue.say(USER)
        with pytest.raises(Unrenderable):
            await dialogue.say({"role": "tool", "content": 3})
        answered = await dialogue.say({"role": "tool", "content": "42"})
        return called, answered

    called, answered = asyncio.run(talk())
    assert dialogue.messages == (USER, called.message(), {"role": "tool", "content": "42"}, answered.message())
    assert answered.content == dialogue.text == "42"
    assert [len(call.completion.tokens) > 0 for call in dialogue.calls] == [True, True]
    assert dialogue.latest.reply is answered


def test_the_variables_of_a_dialogue_reach_the_template():
    tokenizer = tokenizer_of("qwen3")
    speaker = ChatEngine(TemplateRenderer(tokenizer), says("42"))
    asyncio.run(Dialogue(speaker, SamplingParams(), template={"enable_thinking": False}).say(USER))
    assert tokenizer.decode(speaker.calls[0].prompt).endswith("</think>\n\n")


def test_the_text_of_a_dialogue_ends_where_a_stop_text_does():
    dialogue = Dialogue(ChatEngine(RENDERER, says("it is 42. Done. Or not")), SamplingParams(), stop=("Done",))
    assert asyncio.run(dialogue.say(USER)).content == "it is 42. "
    assert dialogue.text == "it is 42. "
    assert dialogue.latest.stopped_by == "Done"


@given(
    st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=30),
    st.lists(st.text(st.sampled_from("aeit 42.�é"), min_size=1, max_size=3), max_size=3),
)
def test_what_is_kept_is_the_text_before_the_first_stop_text_in_the_tokens_that_were_generated(ids, stop):
    tokens = np.asarray(ids, np.int32)
    text = RENDERER.text(tokens)
    kept, stopped_by = cut_at_stop(RENDERER, tokens, stop)
    places = [text.index(word) for word in stop if word in text]
    if not places:
        assert stopped_by is None
        assert kept is tokens
        return
    assert RENDERER.text(kept) == text[: min(places)]
    assert text[min(places) :].startswith(stopped_by)
    whole = max(n for n in range(len(tokens) + 1) if text[: min(places)].startswith(RENDERER.text(tokens[:n])))
    assert np.array_equal(kept[:whole], tokens[:whole])


def test_a_token_that_ends_a_character_and_begins_a_stop_text_gives_way_as_the_whole_character_does():
    words = [b"a", b"\xe2\x80", b"\x9d\n", b"b", "”".encode()]

    class Bytes:
        def text(self, tokens):
            return b"".join(words[token] for token in tokens).decode("utf-8", "replace")

        def encode(self, text):
            assert text == "”"
            return np.asarray([4], np.int32)

    kept, stopped_by = cut_at_stop(Bytes(), np.asarray([0, 1, 2, 3], np.int32), ("\n",))
    assert (kept.tolist(), stopped_by) == ([0, 4], "\n")
