"""The form in which a chat template expects messages, which differs between model families.

Messages come in OpenAI's form. Templates disagree on three points, each found by rendering a probe or
from the template's source:

    reasoning   in `reasoning_content` (Qwen3, GLM), `thinking` (gpt-oss), `reasoning`, or, if the
                template has none of them but knows </think>, inside the content (Phi-4, DeepSeek)
    arguments   of a tool call: values (Qwen2.5, Llama) or JSON text (DeepSeek concatenates them)
    content     beside a tool call and empty: "" (Llama 4 iterates over anything else) or None
                (DeepSeek-R1 leaves the call out unless the content is None)
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
from jaxtyping import Int32

from areal_x.hf.endings import CACHED, special_tokens, template_of
from areal_x.types import Message

THINK, THOUGHT = "<think>", "</think>"
REASONING = ("reasoning_content", "reasoning", "thinking")  # the keys, the commonest first
ACCESS = r"(?:\.|\[['\"]){}\b"  # how a template reads a key of a message
ID = "placehol1"  # Mistral's template refuses ids of tool calls that are not nine letters or digits
WORD = "placeholder2"


@dataclass(frozen=True)
class ChatForm:
    """reasoning: the key for it, "content" for inside the content, or None if the template shows
    none. arguments_as_text, empty_as_none: see above."""

    reasoning: str | None
    arguments_as_text: bool
    empty_as_none: bool
    # (role, is first) of the messages that the template was seen to show
    _shown: set[tuple[str, bool]] = field(default_factory=set, compare=False)

    def message(self, message: Message) -> dict[str, Any]:
        """Returns a message, whose arguments are values, in the template's form."""
        made = dict(message)
        given = [made.pop(key) for key in REASONING if key in made]
        thought = next((text for text in given if isinstance(text, str) and text), None)
        if thought is not None and made.get("role") == "assistant":
            if self.reasoning == "content" and isinstance(made.get("content") or "", str):
                if THOUGHT not in (made.get("content") or ""):
                    made["content"] = (
                        f"{THINK}\n{thought}\n{THOUGHT}\n\n{made.get('content') or ''}"
                    )
            elif self.reasoning is not None:
                made[self.reasoning] = thought
        if calls := made.get("tool_calls"):
            made["tool_calls"] = [self._call(call) for call in calls]
            if self.empty_as_none and made.get("content") == "":
                made["content"] = None
        return made

    def _call(self, call: Any) -> Any:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not self.arguments_as_text or not isinstance(function, Mapping):
            return call
        arguments = function.get("arguments", {})
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        return {**call, "type": "function", "function": {**function, "arguments": arguments}}

    def unshown_role(
        self, messages: Sequence[Message], render: Callable[[list[Message]], str]
    ) -> str | None:
        """Returns the role of a message that the template leaves out of the prompt (Phi-4 leaves
        out the results of tools), or None.

        Costs one rendering for each role that was not yet seen to be shown. messages: in the
        template's form. A system message is judged only where the user speaks last: Mistral's
        template shows it nowhere else.
        """
        for index, message in enumerate(messages):
            role, is_first = str(message.get("role")), index == 0
            ends_with_user = messages[-1].get("role") == "user"
            if role == "assistant" or (role, is_first) in self._shown:
                continue
            if role == "system" and not ends_with_user:
                continue
            marked = [*messages[:index], {**message, "content": WORD}, *messages[index + 1 :]]
            if WORD not in render(marked):
                return role
            self._shown.add((role, is_first))
        return None


def chat_form(tokenizer: Any) -> ChatForm:
    """Returns the form that the tokenizer's chat template expects."""
    return _chat_form(tokenizer, template_of(tokenizer))


@lru_cache(maxsize=CACHED)
def _chat_form(tokenizer: Any, template: str) -> ChatForm:
    known = [key for key in REASONING if re.search(ACCESS.format(key), template)]
    reasoning = known[0] if known else "content" if THOUGHT in template else None
    for content, as_text in product(("", None), (False, True)):
        if WORD in _probed(tokenizer, content, as_text):
            return ChatForm(reasoning, as_text, content is None)
    return ChatForm(reasoning, False, False)


def _probed(tokenizer: Any, content: str | None, as_text: bool) -> str:
    """Returns a rendered conversation with a tool call whose argument is WORD; "" if the template
    refuses it."""
    arguments = json.dumps({"a": WORD}) if as_text else {"a": WORD}
    call = {
        "id": ID,
        "type": "function",
        "function": {"name": "placeholder", "arguments": arguments},
    }
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": ID, "name": "placeholder", "content": "b"},
    ]
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False))
    except Exception:  # a template may raise anything
        return ""


def with_values(message: Message) -> dict[str, Any]:
    """Returns a message of a dataset with the arguments of its tool calls as values and not as JSON
    text, an empty text for no content, and without its weight."""
    made = {name: x for name, x in message.items() if name != "weight"}
    if made.get("content") is None:
        made["content"] = ""
    if calls := made.get("tool_calls"):
        made["tool_calls"] = [_with_value(call) for call in calls]
    else:
        made.pop("tool_calls", None)
    return made


def _with_value(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping):
        return dict(call)
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    return {**call, "function": {**function, "arguments": arguments}}


def encode_plain(tokenizer: Any, text: str) -> Int32[np.ndarray, " N"]:
    """Returns the tokens of a text as it is, written-out special tokens included.

    They are asked of the library that transformers calls: what it makes of them besides, masks and
    types of tokens, takes a third of the time.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.truncation or backend.padding or backend.encode_special_tokens:
        return np.asarray(tokenizer.encode(text, add_special_tokens=False), np.int32)
    return np.asarray(backend.encode(text, add_special_tokens=False).ids, np.int32)


def encode_piece(tokenizer: Any, text: str) -> Int32[np.ndarray, " N"]:
    """Returns the tokens of a text that stands inside a sequence, written-out special tokens
    included.

    Tokenizers of the SentencePiece kind write a blank before the first word of a text, which must
    not be there in the middle of one.
    """
    anchor = _anchor(tokenizer)
    skipped = 0 if anchor is None else 1
    return encode_plain(tokenizer, (anchor or "") + text)[skipped:]


@lru_cache(maxsize=CACHED)
def _anchor(tokenizer: Any) -> str | None:
    """Returns the special token behind which a text has no blank before its first word, or None for
    a tokenizer that writes none."""
    alone = tokenizer.encode("a", add_special_tokens=False)
    for token, name in special_tokens(tokenizer).items():
        within = tokenizer.encode(name + "a", add_special_tokens=False)
        if within[:1] == [token]:
            return None if within[1:] == alone else name
    return None
