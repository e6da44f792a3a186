"""Messages to the tokens of a prompt, and the tokens of a completion to a reply."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import numpy as np
from jaxtyping import Int32

from areal_x.agents.chat.parsing import (
    MARKERS,
    THINK,
    THOUGHT,
    Reply,
    ToolCall,
    arguments_of,
    call_id,
    read,
)
from areal_x.agents.json_checks import json_bounds
from areal_x.errors import TaskError, UserError
from areal_x.hf.endings import ends
from areal_x.runtime.thread import beside
from areal_x.tasks.text_length import CHARACTERS_PER_TOKEN, estimate_characters, raise_if_too_long
from areal_x.types import Message

Tools = Sequence[Mapping[str, Any]]

OPENED_WITHIN = 16  # tokens at a prompt's end in which a template opens the reasoning, if it does
ROLES = {"developer": "system"}  # OpenAI's newer name, of which chat templates do not know
# what a tokenizer's own reading may call it
REASONING = ("reasoning_content", "reasoning", "thinking")


class Unrenderable(TaskError, ValueError):
    """Messages, tools or variables of which the model's chat template makes no prompt."""


class Renderer(Protocol):
    """How a model writes conversations. Messages and tools are OpenAI's dicts; template: more
    variables of its chat template.

    special: ids of the tokens that are no text, of which some end a turn.
    """

    special: frozenset[int]

    async def rendered(
        self,
        messages: Sequence[Message],
        tools: Tools,
        template: Mapping[str, Any],
        continue_final: bool = False,
    ) -> str:
        """The prompt as text: the assistant's turn opened behind the messages, or with
        `continue_final` the last message, an assistant's, left open. Raises Unrenderable."""
        ...

    def encode(self, text: str, begins: bool = False) -> Int32[np.ndarray, " N"]:
        """The tokens of a text as it is, special tokens that are written out included. begins: it
        begins a prompt."""
        ...

    async def prompt(
        self,
        messages: Sequence[Message],
        tools: Tools,
        template: Mapping[str, Any],
        continue_final: bool = False,
    ) -> Int32[np.ndarray, " P"]:
        """The tokens of `rendered`."""
        ...

    async def read(
        self,
        tokens: Int32[np.ndarray, " N"],
        tools: Tools,
        prompt: Int32[np.ndarray, " P"] | None = None,
    ) -> Reply:
        """The reply that a completion's tokens are, with or without an end token. prompt: what they
        continue, in which a template may have begun the reply, as by opening its reasoning."""
        ...

    def text(self, tokens: Int32[np.ndarray, " N"]) -> str:
        """Special tokens left out."""
        ...


class TemplateRenderer:
    """By a tokenizer's chat template. Where the tokenizer says how its replies are read
    (`response_template`), so they are.

    Raises UserError for a tokenizer without a chat template.
    """

    def __init__(self, tokenizer: Any) -> None:
        if tokenizer.chat_template is None:
            raise UserError(
                "the prompt is a list of messages but the tokenizer has no chat template: add"
                " chat_template.jinja to the model"
            )
        self.tokenizer = tokenizer
        self.special = special_tokens(tokenizer)
        self._not_text = self.special - {
            tokenizer.convert_tokens_to_ids(marker) for marker in MARKERS
        }
        self._reasons = THOUGHT in tokenizer.get_chat_template()
        self._reserved = set(inspect.signature(tokenizer.apply_chat_template).parameters) | {
            "messages"
        }

    async def rendered(
        self,
        messages: Sequence[Message],
        tools: Tools,
        template: Mapping[str, Any],
        continue_final: bool = False,
    ) -> str:
        return await beside(
            estimate_characters((messages, tools)),
            self._rendered_now,
            messages,
            tools,
            template,
            continue_final,
        )

    def _rendered_now(
        self,
        messages: Sequence[Message],
        tools: Tools,
        template: Mapping[str, Any],
        continue_final: bool,
    ) -> str:
        if taken := self._reserved & set(template):
            raise Unrenderable(
                f"{min(taken)!r} cannot be set as a variable of the chat template: it has its own"
                " place"
            )
        if tools and "tools" not in self.tokenizer.get_chat_template(tools=list(tools)):
            raise Unrenderable(
                "the model's chat template has no place for tools: use a model that was trained"
                " with them"
            )
        ready = [for_templates(message) for message in messages]
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    ready,
                    tools=[dict(tool) for tool in tools] or None,
                    add_generation_prompt=not continue_final,
                    continue_final_message=continue_final,
                    tokenize=False,
                    **template,
                )
            )
        except Exception as error:  # a template may raise anything
            reason = " ".join(str(error).split())[:300]
            raise Unrenderable(
                f"the model's chat template makes no prompt of the messages: {reason}"
            ) from error

    def encode(self, text: str, begins: bool = False) -> Int32[np.ndarray, " N"]:
        return np.asarray(self.tokenizer.encode(text, add_special_tokens=False), np.int32)

    async def prompt(
        self,
        messages: Sequence[Message],
        tools: Tools,
        template: Mapping[str, Any],
        continue_final: bool = False,
    ) -> Int32[np.ndarray, " P"]:
        text = await self.rendered(messages, tools, template, continue_final)
        return await beside(len(text), self.encode, text, True)

    async def read(
        self,
        tokens: Int32[np.ndarray, " N"],
        tools: Tools,
        prompt: Int32[np.ndarray, " P"] | None = None,
    ) -> Reply:
        return await beside(
            len(tokens) * CHARACTERS_PER_TOKEN, self._read_now, tokens, tools, prompt
        )

    def _read_now(
        self, tokens: Int32[np.ndarray, " N"], tools: Tools, prompt: Int32[np.ndarray, " P"] | None
    ) -> Reply:
        before = np.zeros(0, np.int32) if prompt is None else prompt
        key = before.tobytes() + tokens.tobytes()
        if getattr(self.tokenizer, "response_template", None) is not None:
            try:
                prefix = decoded(self.tokenizer, before)
                return reply_of(
                    self.tokenizer.parse_response(
                        tokens.tolist(), prefix=prefix, tools=list(tools) or None
                    ),
                    key,
                )
            except (ValueError, RecursionError):
                return Reply(self.text(tokens))
        text = decoded(self.tokenizer, without(tokens, self._not_text))
        opened = decoded(self.tokenizer, before[-OPENED_WITHIN:]).rstrip().endswith(THINK)
        return read(text, reasons=self._reasons, opened=opened, tools=bool(tools), key=key)

    def text(self, tokens: Int32[np.ndarray, " N"]) -> str:
        return decoded(
            self.tokenizer, without(tokens, ends(self.tokenizer)), skip_special_tokens=True
        )


class PlainRenderer:
    """Of a model without a chat template: the contents one after the other, whoever said them, and
    replies as they are."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.special = special_tokens(tokenizer)

    async def rendered(
        self,
        messages: Sequence[Message],
        tools: Tools,
        template: Mapping[str, Any],
        continue_final: bool = False,
    ) -> str:
        if tools:
            raise Unrenderable(
                "tools need a model with a chat template: plain text has no place for them"
            )
        return "".join(text_content(message.get("content")) for message in messages)

    def encode(self, text: str, begins: bool = False) -> Int32[np.ndarray, " N"]:
        return np.asarray(self.tokenizer.encode(text, add_special_tokens=begins), np.int32)

    async def prompt(
        self,
        messages: Sequence[Message],
        tools: Tools,
        template: Mapping[str, Any],
        continue_final: bool = False,
    ) -> Int32[np.ndarray, " P"]:
        text = await self.rendered(messages, tools, template, continue_final)
        return await beside(len(text), self.encode, text, True)

    async def read(
        self,
        tokens: Int32[np.ndarray, " N"],
        tools: Tools,
        prompt: Int32[np.ndarray, " P"] | None = None,
    ) -> Reply:
        return Reply(self.text(tokens))

    def text(self, tokens: Int32[np.ndarray, " N"]) -> str:
        return decoded(
            self.tokenizer, without(tokens, ends(self.tokenizer)), skip_special_tokens=True
        )


def encoded(
    renderer: Renderer, text: str, begins: bool, most: int | None
) -> Int32[np.ndarray, " N"]:
    """The tokens of a text of which more than `most` are of no use. Raises: PromptTooLong, without
    having tokenised much more than that."""
    if most is not None:
        raise_if_too_long(lambda piece: len(renderer.encode(piece)), [text], most)
    return renderer.encode(text, begins=begins)


def special_tokens(tokenizer: Any) -> frozenset[int]:
    added = {token for token, about in tokenizer.added_tokens_decoder.items() if about.special}
    return frozenset(added | set(tokenizer.all_special_ids) | set(ends(tokenizer)))


def without(tokens: Int32[np.ndarray, " N"], left_out: Collection[int]) -> Int32[np.ndarray, " M"]:
    return tokens[~np.isin(tokens, list(left_out))]


def decoded(tokenizer: Any, tokens: Int32[np.ndarray, " N"], **how: Any) -> str:
    """Every blank included, of which some tokenizers take those before punctuation away."""
    return str(tokenizer.decode(tokens.tolist(), clean_up_tokenization_spaces=False, **how))


def for_templates(message: Message) -> dict[str, Any]:
    """The message as chat templates want it: content a text, the arguments of tool calls values and
    not JSON text.

    Raises Unrenderable for what is no message, or has other content than text.
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise Unrenderable(
            f"a message must be an object with a role and content, this is {str(message)[:100]!r}"
        )
    # many ask whether a key is there
    made = {name: value for name, value in message.items() if value not in (None, [], ())}
    made["role"] = ROLES.get(made["role"], made["role"])
    made["content"] = text_content(message.get("content"))
    if calls := made.get("tool_calls"):
        made["tool_calls"] = [
            _call_for_templates(call)
            for call in (calls if isinstance(calls, Sequence) else [calls])
        ]
    return made


def text_content(content: Any) -> str:
    """Raises Unrenderable for content that is neither a text nor parts that are."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence):
        raise Unrenderable(
            f"content must be a text or parts of the type 'text', this is {str(content)[:100]!r}"
        )
    for part in content:
        if (
            not isinstance(part, Mapping)
            or part.get("type") != "text"
            or not isinstance(part.get("text"), str)
        ):
            raise Unrenderable(
                f"parts of content must be of the type 'text', this is {str(part)[:100]!r}"
            )
    return "\n".join(part["text"] for part in content)


def reply_of(parsed: Mapping[str, Any], key: bytes) -> Reply:
    """What a tokenizer's own reading found. Raises ValueError for tool calls that cannot be sent on
    as text."""
    calls = [call.get("function", call) for call in parsed.get("tool_calls") or ()]
    made = tuple(
        ToolCall(call_id(key, i), str(c["name"]), arguments_of(c.get("arguments", {})))
        for i, c in enumerate(calls)
    )
    reasoning = next((parsed[name] for name in REASONING if parsed.get(name)), None)
    content = parsed.get("content")
    return Reply(content if content or made or reasoning else "", reasoning, made)


def _call_for_templates(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise Unrenderable(
            f"a tool call must be an object with a function, this is {str(call)[:100]!r}"
        )
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        with suppress(ValueError):  # else the template shows it as the model wrote it
            arguments = json_bounds.loads(arguments)
    return {**call, "function": {**function, "arguments": arguments}}
