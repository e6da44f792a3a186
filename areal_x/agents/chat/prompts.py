"""Prompts that begin with exactly the tokens of the conversation so far.

Tokenising text that the policy generated may give other tokens than the policy sampled. So the
prompt of a conversation with an earlier reply starts with that reply's prompt and completion
tokens, and only what the chat template appends to the reply is tokenised. A reply whose text is what
the template writes ends where that text does. To find where another one ends, the conversation is
rendered with a placeholder, a word that occurs nowhere else, in place of the reply:

    the messages up to the reply, as the template wrote them then │ word │ end of turn, later messages, the next turn opened
    ──────────────────── must be the same now ────────────────────┘      └─ the part that the held tokens lack

If the template now renders the earlier messages, or the reply, differently (Qwen3 drops the
reasoning of earlier turns), the held tokens are not what it would produce. Then an earlier reply is
tried, or the whole prompt is tokenised.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np
from jaxtyping import Int32, Int64

from areal_x.agents.chat.parsing import Reply
from areal_x.agents.chat.rendering import (
    Renderer,
    Tools,
    Unrenderable,
    encoded,
    has_images,
    text_content,
)
from areal_x.agents.json_checks import json_bounds
from areal_x.hf.image_reader import image_urls
from areal_x.runtime.thread import in_thread, inline_or_in_pool
from areal_x.tasks.text_length import estimate_characters
from areal_x.types import Images, Message

# replies, from the last one back, that are tried as the start of a prompt: each costs a rendering
MOST_REPLIES = 3
# keys whose values do not distinguish messages
IGNORED_KEYS = ("id", "index", "tool_call_id", "reasoning_content", "reasoning")


@dataclass(frozen=True)
class Prompt:
    """text: as the template wrote it; `tokens` may differ from its tokenisation. images: those of all
    messages, in their order."""

    text: str
    tokens: Int32[np.ndarray, " P"]
    images: Images | None = None


@dataclass(frozen=True)
class CachedReply:
    """A reply of the policy. before: the text of its prompt. tokens: of the prompt and the reply.
    written: the text of the reply's own tokens. begun: the part of the assistant's turn that the
    prompt already held. ended: the policy ended its turn, with the last of `tokens`."""

    before: str
    tokens: Int32[np.ndarray, " held"]
    reply: Reply
    written: str
    begun: str = ""
    ended: bool = True


# the replies of an episode by their keys, each with its reasoning
Replies = dict[bytes, tuple[str | None, Any]]


class ReplyMemory(Protocol):
    """The replies of one episode, found by the conversation that led to them and their own content
    (see `keys`), in this process or another.

    Messages are equal if they differ only in the ids of tool calls, the spelling of JSON arguments,
    keys without a value, or spaces around an assistant's content. A reply whose reasoning the agent
    dropped is also equal, and gets it back: the template decides whether it is shown.
    """

    async def add(self, key: bytes, held: CachedReply) -> None: ...

    async def reasonings(self, keys: Sequence[bytes]) -> dict[int, str | None]:
        """Returns the reasoning of each reply among the messages with these keys, by its index."""
        ...

    async def get(self, key: bytes) -> CachedReply:
        """Returns a reply that `reasonings` found."""
        ...


@dataclass(frozen=True)
class ReplyCache:
    """The replies in this process."""

    replies: Replies = field(default_factory=dict)

    async def add(self, key: bytes, held: CachedReply) -> None:
        self.replies[key] = held.reply.reasoning, held

    async def reasonings(self, keys: Sequence[bytes]) -> dict[int, str | None]:
        return reasonings_of(self.replies, keys)

    async def get(self, key: bytes) -> CachedReply:
        held: CachedReply = self.replies[key][1]
        return held


def reasonings_of(replies: Replies, keys: Sequence[bytes]) -> dict[int, str | None]:
    return {place: replies[key][0] for place, key in enumerate(keys) if key in replies}


async def build_prompt(
    renderer: Renderer,
    memory: ReplyMemory,
    messages: Sequence[Message],
    tools: Tools = (),
    template: Mapping[str, Any] | None = None,
    continue_final: bool = False,
    most: int | None = None,
) -> Prompt:
    """Returns the prompt of a conversation, which starts with the tokens of the latest reply that
    can be continued.

    most: largest useful number of tokens. Raises: Unrenderable for messages that the chat template
    refuses, PromptTooLong.
    """
    template = template or {}
    images = await images_of(renderer, messages)
    digests = await inline_or_in_pool(estimate_characters(messages), keys, messages)
    found = await memory.reasonings(digests)
    whole = [
        {**message, "reasoning_content": reasoning}
        if (reasoning := found.get(place)) is not None
        else message
        for place, message in enumerate(messages)
    ]
    text = await renderer.rendered(whole, tools, template, continue_final)
    for place in sorted(found, reverse=True)[:MOST_REPLIES]:
        held = await memory.get(digests[place])
        later = await images_of(renderer, whole[place + 1 :])
        rest = await _after(
            renderer, held, whole, place, text, tools, template, continue_final, most, later
        )
        if rest is None:
            continue
        open_end = continue_final and place == len(whole) - 1
        start = without_end_token(renderer, held.tokens) if open_end else held.tokens
        prompt = Prompt(text, np.concatenate([start, rest]), images)
        # a reply in which the model wrote an image's token cannot stand before images
        if images is None or renderer.shows(images, prompt.tokens):
            return prompt
    tokens = await inline_or_in_pool(len(text), encoded, renderer, text, True, most, images)
    return Prompt(text, tokens, images)


async def images_of(renderer: Renderer, messages: Sequence[Message]) -> Images | None:
    """Returns the images of messages; None without any. Raises: Unrenderable for one that cannot be
    read."""
    shown = [m for m in messages if isinstance(m, Mapping) and has_images(m.get("content"))]
    if not shown:
        return None
    try:
        urls = image_urls(shown)
    except ValueError as error:
        raise Unrenderable(f"{error}") from error
    return await in_thread(renderer.images, urls)


async def _after(
    renderer: Renderer,
    held: CachedReply,
    messages: Sequence[Message],
    place: int,
    text: str,
    tools: Tools,
    template: Mapping[str, Any],
    continue_final: bool,
    most: int | None,
    images: Images | None,
) -> Int32[np.ndarray, " N"] | None:
    """Returns the tokens after the reply `messages[place]`, or None if its tokens are not what the
    template shows. text: the conversation as rendered. images: those after the reply."""
    if not text.startswith(held.before):
        return None
    if text.startswith(held.written, len(held.before)):  # as the template itself writes it
        later = text[len(held.before) + len(held.written) :]
        return await inline_or_in_pool(len(later), encoded, renderer, later, False, most, images)
    marked, words = _marked(messages[place], held.begun, text)
    with suppress(Unrenderable):  # because of the placeholder, not the messages
        shown = await renderer.rendered(
            [*messages[:place], marked, *messages[place + 1 :]], tools, template, continue_final
        )
        return await inline_or_in_pool(
            len(shown), _behind, renderer, held, shown, words, most, images
        )
    return None


def keys(messages: Sequence[Message]) -> list[bytes]:
    """Returns a digest for each message, of it and all messages before it."""
    digest = blake2b()
    made = []
    for message in messages:
        digest.update(json.dumps(normal(message), sort_keys=True, default=str).encode() + b"\n")
        made.append(digest.digest())
    return made


def reply_key(messages: Sequence[Message], held: CachedReply) -> bytes:
    """Returns the key of a reply. messages: the conversation that it answers, without it."""
    reply = {**held.reply.message(), "content": held.begun + (held.reply.content or "")}
    return keys((*messages, reply))[-1]


def normal(message: Message) -> dict[str, Any]:
    """Returns the part of a message that identifies it. An invalid message gets a key too: it is
    refused when it is rendered."""
    if not isinstance(message, Mapping):
        return {"content": message}
    made = {
        name: value
        for name, value in message.items()
        if name not in IGNORED_KEYS and value not in (None, [], (), {})
    }
    content = made.get("content")
    with suppress(Unrenderable):
        content = text_content(content)
    if message.get("role") == "assistant" and isinstance(content, str):
        content = content.strip()
    made["content"] = content
    if isinstance(calls := made.get("tool_calls"), Sequence):
        made["tool_calls"] = [_normal_call(call) for call in calls]
    return made


def without_end_token(
    renderer: Renderer, tokens: Int32[np.ndarray, " N"]
) -> Int32[np.ndarray, " M"]:
    """Returns the tokens of a turn that is to be continued: without the special token that ended
    it, if any."""
    return tokens[:-1] if len(tokens) and int(tokens[-1]) in renderer.special else tokens


def _normal_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        with suppress(ValueError):
            arguments = json_bounds.loads(arguments)
    return [function.get("name"), arguments]


def _marked(message: Message, begun: str, text: str) -> tuple[Message, list[str]]:
    """Returns the message with placeholders for the reply's content, and the placeholders, in the
    order in which they must appear."""
    # a text cannot contain its own digest
    name = f"placeholder{blake2b(text.encode(errors='replace'), digest_size=8).hexdigest()}"
    marked = dict(message)
    words = []
    if message.get("reasoning_content"):
        marked["reasoning_content"] = f"{name}r"
        words.append(f"{name}r")
    calls = list(message.get("tool_calls") or ())
    if not calls or text_content(message.get("content")).strip():
        marked["content"] = f"{begun}{name}c"
        words.append(f"{name}c")
    if calls:
        word = f"{name}t"
        marked["tool_calls"] = [
            *calls[:-1],
            {
                **calls[-1],
                "function": {**calls[-1]["function"], "arguments": json.dumps({word: word})},
            },
        ]
        words.append(word)
    return marked, words


def _behind(
    renderer: Renderer,
    held: CachedReply,
    shown: str,
    words: Sequence[str],
    most: int | None,
    images: Images | None,
) -> Int32[np.ndarray, " N"] | None:
    """Returns the tokens after the reply; None if the template does not render all of it after what
    it rendered before, or not in the order in which replies are parsed."""
    places = [shown.rfind(word) for word in words]
    if places != sorted(places) or places[0] < len(held.before):
        return None
    rest = encoded(renderer, shown[places[-1] + len(words[-1]) :], False, most, images)
    special = np.flatnonzero(np.isin(rest, list(renderer.special)))
    last = int(held.tokens[-1])
    closing = _closing(renderer, rest, special)
    if last in rest[closing]:
        return rest[int(closing[rest[closing] == last][-1]) + 1 :]
    if len(closing) and held.ended and last in renderer.structural:
        return None  # the template ends this reply with another token, which has another meaning
    if held.reply.tool_calls:  # the rest of the call's JSON precedes the end of the turn
        return rest[special[0] :] if len(special) else None
    return rest


def _closing(
    renderer: Renderer, rest: Int32[np.ndarray, " N"], special: Int64[np.ndarray, " S"]
) -> Int64[np.ndarray, " C"]:
    """Returns the positions of the special tokens with which the template closes a reply, up to the
    end of the turn: one for most, three for DeepSeek's calls of tools."""
    is_end = np.isin(rest[special], list(renderer.ends))
    count = int(np.argmax(is_end)) + 1 if is_end.any() else 1
    return special[:count]
