"""Supervised fine-tuning on conversations: which tokens are trained on, one by one, and how runs use them."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest

from areal_x.errors import UserError
from areal_x.types import NOT_THE_POLICY, Task
from areal_x.workflows.conversations import Conversations, conversation_task
from areal_x.workflows.single_turn import encode
from tests.agents.chat.speaking import END, TEMPLATES, TOOLS, tokenizer_of

FAMILIES = sorted(file.stem for file in TEMPLATES.glob("*.jinja"))
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"first": 12, "second": 30}}}
PLAIN = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "what is the sum of 12 and 30?"},
    {"role": "assistant", "content": "it is 41"},
    {"role": "user", "content": "the answer is not right, think about it once more."},
    {"role": "assistant", "content": "the sum\n\nis 42. <b>café</b>"},
]
TRACE = [
    {"role": "user", "content": "what is the sum of 12 and 30?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "name": "add", "content": '{"sum": 42}'},
    {"role": "assistant", "content": "the sum is 42"},
    {"role": "user", "content": "and now?"},
    {"role": "assistant", "content": "it is raining."},
]
SETS = {"plain": (PLAIN, None), "trace": (TRACE, list(TOOLS))}


def trained_texts(tokenizer, trajectory):
    """The texts of the runs of trained tokens."""
    edges = np.flatnonzero(np.diff(np.r_[0, trajectory.mask.astype(int), 0])).reshape(-1, 2)
    return [tokenizer.decode(trajectory.tokens[a:b]) for a, b in edges]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", SETS)
def test_exactly_the_tokens_that_a_policy_would_generate_are_trained_on(family, kind):
    """Token by token against the prompt of each turn and the tokens of its own text, made here."""
    messages, tools = SETS[kind]
    tokenizer = tokenizer_of(family)
    task = Task("a", messages, None, {"tools": tools})
    found = Conversations().setup(tokenizer).trajectories(task)
    trained = 0
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = tokenizer.apply_chat_template(messages[:index], tools=tools, add_generation_prompt=True, return_dict=False)
        holding = [t for t in found if len(t) > len(prompt) and t.tokens[: len(prompt)].tolist() == prompt]
        assert holding, f"no sequence begins with the prompt of message {index}"
        (trajectory,) = holding[:1]
        assert not trajectory.mask[len(prompt) - 1]
        end = tokenizer.convert_tokens_to_ids(END[family])
        after = trajectory.tokens[len(prompt) :].tolist()
        turn = after[: after.index(end) + 1]
        assert trajectory.mask[len(prompt) : len(prompt) + len(turn)].all()
        assert not trajectory.mask[len(prompt) + len(turn) : len(prompt) + len(turn) + 1].any()
        text = tokenizer.decode(turn)
        assert turn == tokenizer.encode(text, add_special_tokens=False)
        assert (message["content"] or '"add"') in text
        trained += len(turn)
    assert sum(int(t.mask.sum()) for t in found) == trained
    for trajectory in found:
        assert (trajectory.versions == NOT_THE_POLICY).all()
        shown = "".join(trained_texts(tokenizer, trajectory))
        assert all(m["content"] not in shown for m in messages if m["role"] != "assistant")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_context_of_a_single_turn_is_the_prompt_that_a_run_samples_from(family):
    tokenizer = tokenizer_of(family)
    (found,) = Conversations().setup(tokenizer).trajectories(Task("a", PLAIN[:3]))
    prompt = encode(tokenizer, PLAIN[:2])
    assert found.tokens[: len(prompt)].tolist() == prompt.tolist()
    assert np.flatnonzero(found.mask)[0] == len(prompt)


def test_a_template_that_drops_earlier_thoughts_gives_each_turn_in_the_context_that_it_had():
    tokenizer = tokenizer_of("qwen3")
    thinking = [{**m, "reasoning_content": f"thought {i}"} if m["role"] == "assistant" else m for i, m in enumerate(PLAIN)]
    found = Conversations().setup(tokenizer).trajectories(Task("a", thinking))
    texts = [tokenizer.decode(t.tokens) for t in found]
    assert ["thought 2" in text for text in texts] == [True, False]
    assert ["thought 4" in text for text in texts] == [False, True]
    assert [len(trained_texts(tokenizer, t)) for t in found] == [1, 1]


def tagged():
    tokenizer = copy.copy(tokenizer_of("qwen25"))
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n"
        "{% endfor %}"
    )
    return tokenizer


def test_the_generation_tags_of_a_template_decide_where_it_has_any():
    tokenizer = tagged()
    (found,) = Conversations().setup(tokenizer).trajectories(Task("a", PLAIN))
    assert trained_texts(tokenizer, found) == [m["content"] + "<|im_end|>" for m in PLAIN if m["role"] == "assistant"]
    own = tokenizer.apply_chat_template(PLAIN, tokenize=False)
    assert tokenizer.decode(found.tokens) == own.rstrip("\n")


@pytest.mark.parametrize("make", [lambda: tokenizer_of("qwen25"), tagged])
def test_turns_of_no_weight_and_all_but_the_last_can_be_left_out(make):
    tokenizer = make()
    weighed = [{**m, "weight": 0} if m["content"] == "it is 41" else m for m in PLAIN]
    last = ["the sum\n\nis 42. <b>café</b><|im_end|>"]
    (found,) = Conversations().setup(tokenizer).trajectories(Task("a", weighed))
    assert trained_texts(tokenizer, found) == last
    (found,) = Conversations(last_only=True).setup(tokenizer).trajectories(Task("a", PLAIN))
    assert trained_texts(tokenizer, found) == last
    assert Conversations().tokens_of(Task("a", PLAIN), tokenizer) == len(found)


def test_records_of_both_forms_become_tasks():
    plain = conversation_task({"messages": PLAIN, "tools": list(TOOLS), "source": "here"}, "x")
    assert (plain.prompt, plain.metadata) == (PLAIN, {"tools": list(TOOLS), "source": "here"})
    shared = conversation_task({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, "x")
    assert shared.prompt == [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    padded = conversation_task({"messages": [{**m, "tool_calls": None, "name": None} for m in PLAIN]}, "x")
    assert padded.prompt == PLAIN
    with pytest.raises(UserError, match="no message of the assistant"):
        conversation_task({"messages": PLAIN[:2]}, "x")


def test_what_cannot_be_trained_on_is_refused():
    without = copy.copy(tokenizer_of("qwen25"))
    without.chat_template = None
    with pytest.raises(UserError, match="chat template"):
        Conversations().setup(without)
    workflow = Conversations().setup(tokenizer_of("qwen25"))
    with pytest.raises(ValueError, match="is a text"):
        workflow.trajectories(Task("a", "text"))
    reversing = copy.copy(tokenizer_of("qwen25"))
    reversing.chat_template = "{% for m in messages|reverse %}{{ m.content }}<|im_end|>{% endfor %}"
    with pytest.raises(ValueError, match="does not write the assistant's turn after"):
        Conversations().setup(reversing).trajectories(Task("a", PLAIN))
    bad = replace(Conversations().setup(tagged()))
    bad.tokenizer.chat_template += "{% generation %}more{% endgeneration %}"
    with pytest.raises(ValueError, match="3 generation spans for 2"):
        bad.trajectories(Task("a", PLAIN))
