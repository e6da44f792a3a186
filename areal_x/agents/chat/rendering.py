"""Renders messages into the tokens of a prompt, and parses the tokens of a completion into a reply."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from jaxtyping import Int32

from areal_x.agents.chat.harmony import is_harmony, read_harmony
from areal_x.agents.chat.parsing import (
    MARKERS,
    Reply,
    ToolCall,
    arguments_of,
    call_id,
    read,
)
from areal_x.agents.json_checks import json_bounds
from areal_x.errors import TaskError, UserError
from areal_x.hf.chat_form import THINK, THOUGHT, chat_form, encode_piece, encode_plain
from areal_x.hf.endings import ends, structural_ends
from areal_x.hf.image_reader import Urls, is_image, load_image_reader, read_each, reads_images
from areal_x.runtime.thread import inline_or_in_pool
from areal_x.tasks.text_length import CHARACTERS_PER_TOKEN, estimate_characters, raise_if_too_long
from areal_x.types import Images, Message

Tools = Sequence[Mapping[str, Any]]

OPENED_WITHIN = 16  # tokens at a prompt's end in which a template opens the reasoning, if it does
ROLES = {"developer": "system"}  # OpenAI's newer name, which chat templates do not know
# the names under which a tokenizer's own parser may return it
REASONING = ("reasoning_content", "reasoning", "thinking")


class Unrenderable(TaskError, ValueError):
    """Messages, tools or template variables from which the model's chat template cannot render a
    prompt."""


class Renderer(Protocol):
    """The notation in which a model reads and writes conversations. Messages and tools are OpenAI's
    dicts; template: more variables of the chat template.

    special: ids of the special tokens, some of which end a turn. ends: ids of the tokens that end a
    completion. structural: those of them that the template gives a meaning of their own, so that
    none may stand where the template writes another (gpt-oss's <|return|>, GLM's <|observation|>).
    """

    special: frozenset[int]
    ends: frozenset[int]
    structural: frozenset[int]

    async def rendered(
        self,
        messages: Sequence[Message],
        tools: Tools,
        template: Mapping[str, Any],
        continue_final: bool = False,
    ) -> str:
        """Returns the prompt as text: with the assistant's turn opened after the messages, or, with
        `continue_final`, with the last message, an assistant's, left open. Raises: Unrenderable."""
        ...

    def encode(
        self, text: str, begins: bool = False, images: Images | None = None
    ) -> Int32[np.ndarray, " N"]:
        """Returns the tokens of a text as it is, written-out special tokens included. begins: the
        text starts a prompt. images: those that the template wrote into the text."""
        ...

    @property
    def sees_images(self) -> bool:
        """True if the model reads images."""
        ...

    def images(self, urls: Urls) -> Images:
        """Returns the images of these URLs as the model reads them. Raises: Unrenderable for a model
        that reads none, or an image that cannot be read."""
        ...

    def shows(self, images: Images, tokens: Int32[np.ndarray, " P"]) -> bool:
        """True if the tokens of a prompt are those of exactly these images."""
        ...

    async def prompt(
        self,
        messages: Sequence[Message],
        tools: Tools,
        template: Mapping[str, Any],
        continue_final: bool = False,
    ) -> Int32[np.ndarray, " P"]:
        """Returns the tokens of `rendered`."""
        ...

    async def read(
        self,
        tokens: Int32[np.ndarray, " N"],
        tools: Tools,
        prompt: Int32[np.ndarray, " P"] | None = None,
    ) -> Reply:
        """Parses a completion's tokens, with or without an end token, into a reply. prompt: its
        prompt, in which a template may have begun the reply, for example by opening its reasoning.
        """
        ...

    def text(self, tokens: Int32[np.ndarray, " N"]) -> str:
        """Returns the text without special tokens."""
        ...

    def written(self, tokens: Int32[np.ndarray, " N"]) -> str:
        """Returns the text with special tokens."""
        ...


class TemplateRenderer:
    """Renders by a tokenizer's chat template, and parses by its `response_template` if it has one.

    Raises: UserError for a tokenizer without a chat template.
    """

    def __init__(self, tokenizer: Any) -> None:
        if tokenizer.chat_template is None:
            raise UserError(
                "the prompt is a list of messages but the tokenizer has no chat template: add"
                " chat_template.jinja to the model"
            )
        self.tokenizer = tokenizer
        self.special = special_tokens(tokenizer)
        self.ends = frozenset(ends(tokenizer))
        self.structural = structural_ends(tokenizer)
        self._not_text = self.special - {
            tokenizer.convert_tokens_to_ids(marker) for marker in MARKERS
        }
        self._form = chat_form(tokenizer)
        self._reasons = THOUGHT in tokenizer.get_chat_template()
        self._harmony = is_harmony(tokenizer.get_chat_template())
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
        return await inline_or_in_pool(
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
                f"{min(taken)!r} cannot be set as a variable of the chat template: it is a"
                " parameter of its own"
            )
        if tools and "tools" not in self.tokenizer.get_chat_template(tools=list(tools)):
            raise Unrenderable(
                "the model's chat template does not support tools: use a model that was trained"
                " with them"
            )
        ready = [self._form.message(for_templates(message, images=True)) for message in messages]

        def shown(messages: Sequence[Mapping[str, Any]]) -> str:
            return str(
                self.tokenizer.apply_chat_template(
                    messages,
                    tools=[dict(tool) for tool in tools] or None,
                    add_generation_prompt=not continue_final,
                    continue_final_message=continue_final,
                    tokenize=False,
                    **template,
                )
            )

        try:
            text = shown(ready)
            unshown = self._form.unshown_role(ready, shown)
        except Exception as error:  # a template may raise anything
            reason = " ".join(str(error).split())[:300]
            raise Unrenderable(
                f"the model's chat template cannot render the messages: {reason}"
            ) from error
        if unshown is not None:
            raise Unrenderable(
                f"the model's chat template leaves out messages of the role {unshown!r}: use a"
                " model that was trained with them"
            )
        return text

    def encode(
        self, text: str, begins: bool = False, images: Images | None = None
    ) -> Int32[np.ndarray, " N"]:
        def plain(text: str) -> Int32[np.ndarray, " N"]:
            if not begins:
                return encode_piece(self.tokenizer, text)
            return encode_plain(self.tokenizer, text)

        if images is None:
            return plain(text)
        try:
            reader = load_image_reader(self.tokenizer.name_or_path)
            return reader.tokens_of(self.tokenizer, text, images, plain)
        except UserError as error:  # the template, or a text with the tokens of an image
            raise Unrenderable(f"{error}") from error

    @cached_property
    def sees_images(self) -> bool:
        return reads_images(self.tokenizer.name_or_path)

    def images(self, urls: Urls) -> Images:
        try:
            return read_each(self.tokenizer.name_or_path, urls)
        except (UserError, ValueError) as error:
            raise Unrenderable(f"{error}") from error

    def shows(self, images: Images, tokens: Int32[np.ndarray, " P"]) -> bool:
        return load_image_reader(self.tokenizer.name_or_path).stand_for(images, tokens)

    async def prompt(
        self,
        messages: Sequence[Message],
        tools: Tools,
        template: Mapping[str, Any],
        continue_final: bool = False,
    ) -> Int32[np.ndarray, " P"]:
        text = await self.rendered(messages, tools, template, continue_final)
        return await inline_or_in_pool(len(text), self.encode, text, True)

    async def read(
        self,
        tokens: Int32[np.ndarray, " N"],
        tools: Tools,
        prompt: Int32[np.ndarray, " P"] | None = None,
    ) -> Reply:
        return await inline_or_in_pool(
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
        if self._harmony:
            return read_harmony(decoded(self.tokenizer, tokens), tools=bool(tools), key=key)
        text = decoded(self.tokenizer, without(tokens, self._not_text))
        opened = decoded(self.tokenizer, before[-OPENED_WITHIN:]).rstrip().endswith(THINK)
        return read(
            text,
            reasons=self._reasons,
            opened=opened,
            tools=bool(tools),
            schemas=tools,
            key=key,
        )

    def text(self, tokens: Int32[np.ndarray, " N"]) -> str:
        return decoded(
            self.tokenizer, without(tokens, ends(self.tokenizer)), skip_special_tokens=True
        )

    def written(self, tokens: Int32[np.ndarray, " N"]) -> str:
        return decoded(self.tokenizer, tokens)


class PlainRenderer:
    """For a model without a chat template: concatenates the contents, whatever their roles, and
    takes completions as they are."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.special = special_tokens(tokenizer)
        self.ends = frozenset(ends(tokenizer))
        self.structural: frozenset[int] = frozenset()

    async def rendered(
        self,
        messages: Sequence[Message],
        tools: Tools,
        template: Mapping[str, Any],
        continue_final: bool = False,
    ) -> str:
        if tools:
            raise Unrenderable(
                "tools need a model with a chat template: plain text cannot express them"
            )
        return "".join(text_content(message.get("content")) for message in messages)

    def encode(
        self, text: str, begins: bool = False, images: Images | None = None
    ) -> Int32[np.ndarray, " N"]:
        if not begins:
            return encode_piece(self.tokenizer, text)
        return np.asarray(self.tokenizer.encode(text, add_special_tokens=True), np.int32)

    @property
    def sees_images(self) -> bool:
        return False

    def images(self, urls: Urls) -> Images:
        raise Unrenderable("images need a model with a chat template that has a place for them")

    def shows(self, images: Images, tokens: Int32[np.ndarray, " P"]) -> bool:
        return False

    async def prompt(
        self,
        messages: Sequence[Message],
        tools: Tools,
        template: Mapping[str, Any],
        continue_final: bool = False,
    ) -> Int32[np.ndarray, " P"]:
        text = await self.rendered(messages, tools, template, continue_final)
        return await inline_or_in_pool(len(text), self.encode, text, True)

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

    def written(self, tokens: Int32[np.ndarray, " N"]) -> str:
        return decoded(self.tokenizer, tokens)


def encoded(
    renderer: Renderer,
    text: str,
    begins: bool,
    most: int | None,
    images: Images | None = None,
) -> Int32[np.ndarray, " N"]:
    """Returns the tokens of a text of which more than `most` are useless. images: those in the text.
    Raises: PromptTooLong, before tokenising much more than that."""
    if most is not None:
        raise_if_too_long(lambda piece: len(renderer.encode(piece)), [text], most)
    if images is None:
        return renderer.encode(text, begins=begins)
    return renderer.encode(text, begins=begins, images=images)


def special_tokens(tokenizer: Any) -> frozenset[int]:
    added = {token for token, about in tokenizer.added_tokens_decoder.items() if about.special}
    return frozenset(added | set(tokenizer.all_special_ids) | set(ends(tokenizer)))


def without(tokens: Int32[np.ndarray, " N"], left_out: Collection[int]) -> Int32[np.ndarray, " M"]:
    return tokens[~np.isin(tokens, list(left_out))]


def decoded(tokenizer: Any, tokens: Int32[np.ndarray, " N"], **how: Any) -> str:
    """Decodes with every space, some of which tokenizers would remove before punctuation."""
    return str(tokenizer.decode(tokens.tolist(), clean_up_tokenization_spaces=False, **how))


def for_templates(message: Message, images: bool = False) -> dict[str, Any]:
    """Returns the message in the form that chat templates expect: content as text, or as parts if it
    has images and these may be there; the arguments of tool calls as values and not as JSON text.

    Raises: Unrenderable for an invalid message, or content other than text.
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise Unrenderable(
            f"a message must be an object with a role and content, not {str(message)[:100]!r}"
        )
    # many templates test whether a key exists
    made = {name: value for name, value in message.items() if value not in (None, [], ())}
    made["role"] = ROLES.get(made["role"], made["role"])
    content = message.get("content")
    if images and content is not None and has_images(content):
        made["content"] = [
            {"type": "image"} if is_image(part) else {"type": "text", "text": text_content([part])}
            for part in content
        ]
    else:
        made["content"] = text_content(content)
    if calls := made.get("tool_calls"):
        made["tool_calls"] = [
            _call_for_templates(call)
            for call in (calls if isinstance(calls, Sequence) else [calls])
        ]
    return made


def has_images(content: Any) -> bool:
    return isinstance(content, list | tuple) and any(is_image(part) for part in content)


def text_content(content: Any) -> str:
    """Raises: Unrenderable for content that is neither a text nor a list of text parts."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence):
        raise Unrenderable(
            f"content must be a text or parts of the type 'text', not {str(content)[:100]!r}"
        )
    for part in content:
        if (
            not isinstance(part, Mapping)
            or part.get("type") != "text"
            or not isinstance(part.get("text"), str)
        ):
            raise Unrenderable(
                f"parts of content must be of the type 'text', not {str(part)[:100]!r}"
            )
    return "\n".join(part["text"] for part in content)


def reply_of(parsed: Mapping[str, Any], key: bytes) -> Reply:
    """Converts what the tokenizer parsed. Raises: ValueError for tool calls that cannot be encoded."""
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
            f"a tool call must be an object with a function, not {str(call)[:100]!r}"
        )
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        with suppress(ValueError):  # otherwise the template shows the model's own text
            arguments = json_bounds.loads(arguments)
    return {**call, "function": {**function, "arguments": arguments}}
