"""Conversations rendered and parsed by a real vLLM server, compared with transformers."""

from __future__ import annotations

import numpy as np
import pytest
from transformers import AutoTokenizer

from areal_x.agents.chat.dialogue import ChatEngine, ChatRequest
from areal_x.agents.chat.merging import merge_calls
from areal_x.agents.chat.rendering import TemplateRenderer, Unrenderable
from areal_x.agents.chat.server_renderer import ServerRenderer
from areal_x.protocols.engine import SamplingParams
from tests.servers import TEMPLATE

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("vllm")]

TALK = [{"role": "user", "content": "1+2="}, {"role": "assistant", "content": "3"}, {"role": "user", "content": "ok"}]


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture
def renderer(tokenizer, vllm_engine):
    return ServerRenderer(tokenizer, vllm_engine.chat_servers)


def test_a_server_makes_the_tokens_that_transformers_makes_of_the_same_template(renderer, tokenizer, run):
    of_server = run(renderer.prompt(TALK, [], {}))
    np.testing.assert_array_equal(of_server, run(TemplateRenderer(tokenizer).prompt(TALK, [], {})))
    assert run(renderer.rendered(TALK, [], {})) == "u>1+2=.a>3.u>ok.a>"


def test_a_reply_is_read(renderer, tokenizer, run):
    tokens = np.asarray(tokenizer.encode("4+5"), np.int32)
    assert run(renderer.read(tokens, [])).content == "4+5"
    assert run(renderer.read(tokens[:0], [])).content == ""


def test_messages_that_the_template_refuses_are_the_askers_mistake(renderer, run):
    with pytest.raises(Unrenderable, match="no tools here"):
        run(renderer.prompt([{"role": "tool", "content": "1"}], [], {}))


def test_a_conversation_goes_on_with_the_tokens_that_were_generated(renderer, vllm_engine, run):
    async def talk():
        speaker = ChatEngine(renderer, vllm_engine)
        messages = [{"role": "user", "content": "1+2="}]
        for _ in range(3):
            answer = await speaker.answer(ChatRequest(tuple(messages), sampling=SamplingParams(max_tokens=6)))
            messages += [answer.reply.message(), {"role": "user", "content": "go on"}]
        return speaker.calls

    calls = run(talk())
    (item,) = merge_calls(calls).trajectories
    said = np.concatenate([call.completion.tokens for call in calls])
    np.testing.assert_array_equal(item.trajectory.tokens[item.trajectory.mask], said)
