"""Supervised fine-tuning with the chat templates of real families: which tokens are trained on, one by one.

What must be trained on is written here by each family's own notation; the contexts are the prompts that its template writes.
"""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest

from areal_x.types import Task
from areal_x.workflows.conversations import Conversations
from areal_x.workflows.single_turn import encode
from tests.agents.chat.real_templates import PACKAGES, REAL, TRL, missing, real_tokenizer
from tests.agents.chat.speaking import TOOLS

pytestmark = pytest.mark.skipif(missing is not None, reason=str(missing))
CALL = ("add", {"first": "12 and 30", "second": "<b>café</b>"}, "abcdefgh1")
SYSTEM = {"role": "system", "content": "You are a helpful assistant."}
# What a turn without reasoning begins with where the template could show one.
SILENT = {"qwen3": "<think>\n\n</think>\n\n", "qwen3.5": "\n</think>\n\n", "glm4.5": "\n<think></think>"}


def user(text):
    return {"role": "user", "content": text}


def assistant(content, thought=None, calls=()):
    """A message, as in a dataset of OpenAI's form: arguments are JSON text."""
    made = {"role": "assistant", "content": content}
    if thought is not None:
        made["reasoning_content"] = thought
    if calls:
        functions = [{"name": name, "arguments": json.dumps(given, ensure_ascii=False)} for name, given, _ in calls]
        made["tool_calls"] = [
            {"id": id, "type": "function", "function": f} for f, (_, _, id) in zip(functions, calls, strict=True)
        ]
    return made


RESULT = {"role": "tool", "tool_call_id": CALL[2], "name": "add", "content": "42"}
SETS = {
    "plain": [SYSTEM, user("what is the sum?"), assistant("it is 41"), user("no."), assistant("<b>it</b>\n\nis 42")],
    "thinking": [
        user("what is the sum?"),
        assistant("it is 41", "hm, 12"),
        user("no."),
        assistant("<b>it</b>\n\nis 42", "once more:\n30"),
    ],
    "trace": [
        SYSTEM,
        user("what is the sum?"),
        assistant("", None, [CALL]),
        RESULT,
        assistant("it is 42"),
        user("and now?"),
        assistant("rain"),
    ],
    "thinking trace": [
        user("what is the sum?"),
        assistant("", "I call", [CALL]),
        RESULT,
        assistant("it is 42", "I see"),
        user("and now?"),
        assistant("rain", "hm"),
    ],
}
CASES = [
    (name, kind)
    for name, family in REAL.items()
    for kind in SETS
    if (family.thinks or "thinking" not in kind) and (family.calls or "trace" not in kind)
]


def raw(name, message):
    """The message as the family's template wants it."""
    made = dict(message)
    thought = made.pop("reasoning_content", None)
    if thought is not None and REAL[name].key == "content":
        made["content"] = f"<think>\n{thought}\n</think>\n\n{made['content']}"
    elif thought is not None:
        made[REAL[name].key] = thought
    if calls := made.get("tool_calls"):
        functions = [{**c["function"], "arguments": json.loads(c["function"]["arguments"])} for c in calls]
        made["tool_calls"] = [{**c, "function": f} for c, f in zip(calls, functions, strict=True)]
    return made


def expected(name, messages, tools):
    """The prompt and the own text of each of the assistant's messages."""
    tokenizer, family = real_tokenizer(name), REAL[name]
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = [raw(name, m) for m in messages[:index]]
        prompt = tokenizer.apply_chat_template(before, tools=tools, add_generation_prompt=True, tokenize=False)
        calls = [
            (c["function"]["name"], json.loads(c["function"]["arguments"]), c["id"]) for c in message.get("tool_calls", ())
        ]
        thought = message.get("reasoning_content")
        silent = "" if thought is not None else SILENT.get(name, "")
        if thought is None and family.opens and name not in SILENT:
            prompt = prompt.removesuffix("<think>\n")  # DeepSeek's has nothing in place of a thought
        end = (family.call_end or family.end) if calls else family.end
        yield prompt, silent + family.write(thought, message["content"], calls) + end


@pytest.mark.parametrize("name, kind", CASES)
def test_exactly_the_assistants_tokens_are_trained_on_behind_the_prompt_of_each_turn(name, kind):
    messages, tokenizer = SETS[kind], real_tokenizer(name)
    tools = list(TOOLS) if "trace" in kind else None
    found = Conversations().setup(tokenizer).trajectories(Task("a", messages, None, {"tools": tools}))
    masks = [np.zeros(len(t), bool) for t in found]
    for prompt, turn in expected(name, messages, tools):
        before, own = (tokenizer.encode(text, add_special_tokens=False) for text in (prompt, turn))
        places = [i for i, t in enumerate(found) if t.tokens[: len(before) + len(own)].tolist() == before + own]
        assert places, f"no sequence has {turn!r} behind {prompt!r}: {[tokenizer.decode(t.tokens) for t in found]}"
        masks[places[0]][len(before) : len(before) + len(own)] = True
    assert [t.mask.tolist() for t in found] == [mask.tolist() for mask in masks]


@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-r1"])
def test_a_template_that_wants_arguments_as_text_is_given_text(name):
    tokenizer = real_tokenizer(name)
    found = Conversations().setup(tokenizer).trajectories(Task("a", SETS["trace"], None, {}))
    text = tokenizer.decode(found[0].tokens[found[0].mask])
    assert 'function<｜tool▁sep｜>add\n```json\n{"first": "12 and 30", "second": "<b>café</b>"}\n```' in text
    assert text.endswith("<｜end▁of▁sentence｜>")


@pytest.mark.parametrize("name", REAL)
def test_a_conversation_that_the_assistant_begins_trains_on_its_words_alone_or_is_refused(name):
    family, tokenizer = REAL[name], real_tokenizer(name)
    workflow, task = Conversations().setup(tokenizer), Task("a", [assistant("hello"), user("hi")])
    if name in ("gemma3", "mistral-v3", "qwen3.5"):
        with pytest.raises(ValueError, match=r"cannot render the messages: .*(must alternate|No user query)"):
            workflow.trajectories(task)
        return
    (found,) = workflow.trajectories(task)
    silent = "" if name == "qwen3" else SILENT.get(name, "")  # whose template shows a thought only behind a user's message
    assert tokenizer.decode(found.tokens[found.mask]) == silent + family.write(None, "hello", []) + family.end


def test_variables_of_the_template_come_from_the_record():
    tokenizer = real_tokenizer("qwen3.5")
    task = Task("a", SETS["plain"][:3], None, {"chat_template_kwargs": {"enable_thinking": False}})
    (found,) = Conversations().setup(tokenizer).trajectories(task)
    assert tokenizer.decode(found.tokens[found.mask]) == "it is 41<|im_end|>"
    assert tokenizer.decode(found.tokens[~found.mask]).endswith("<think>\n\n</think>\n\n")


def test_a_message_that_the_template_leaves_out_is_an_error():
    workflow = Conversations().setup(real_tokenizer("phi4"))
    with pytest.raises(ValueError, match="leaves out messages of the role 'tool'"):
        workflow.trajectories(Task("a", [user("a"), RESULT, assistant("b")]))


TAGGED = ("qwen2_5", "qwen3", "qwen3_5_think", "llama3", "gemma3", "glm4moe", "gptoss", "phi3", "deepseekv3")


@pytest.mark.parametrize("source", TAGGED)
def test_generation_tags_decide_in_templates_that_have_them(source):
    name = {"qwen2_5": "qwen2.5", "qwen3_5_think": "qwen3.5", "llama3": "llama3.1", "glm4moe": "glm4.5", "gptoss": "gpt-oss"}
    name |= {"deepseekv3": "deepseek-v3", "phi3": "phi4"}
    tokenizer = copy.copy(real_tokenizer(name.get(source, source)))
    tokenizer.chat_template = (PACKAGES / TRL / f"{source}_training.jinja").read_text()
    (found,) = Conversations().setup(tokenizer).trajectories(Task("a", SETS["plain"]))
    marked = tokenizer.apply_chat_template(SETS["plain"], tokenize=False)
    edges = np.flatnonzero(np.diff(np.r_[0, found.mask.astype(int), 0])).reshape(-1, 2)
    spans = [tokenizer.decode(found.tokens[a:b]) for a, b in edges]
    assert len(spans) == 2
    for span, message in zip(spans, [m for m in SETS["plain"] if m["role"] == "assistant"], strict=True):
        assert message["content"] in span
        assert span in marked
    assert marked.startswith(tokenizer.decode(found.tokens))


@pytest.mark.parametrize("name", [*(name for name, family in REAL.items() if family.calls), "deepseek-v3", "deepseek-r1"])
def test_a_prompt_with_calls_in_its_history_is_the_same_in_runs_that_sample(name):
    """A task's messages, in OpenAI's form, against the messages in the template's own."""
    tokenizer, messages = real_tokenizer(name), SETS["trace"][:4]
    made = [raw(name, message) for message in messages]
    if name.startswith("deepseek"):
        made[2] = {**SETS["trace"][2], "content": None}
    own = tokenizer.apply_chat_template(made, add_generation_prompt=True, tokenize=False)
    assert tokenizer.decode(encode(tokenizer, messages)) == own
    assert "12 and 30" in own
