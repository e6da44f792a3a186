"""A prompt that begins with exactly the tokens already held.

Text that a policy generated, tokenised again, may give other tokens than it generated. So the
prompt of a conversation in which we said something is the tokens of then, its prompt's and its
completion's, and made of text is only what the chat template puts behind that reply. Where it ends
shows a rendering with a word in the reply's place that occurs nowhere else:

    the messages up to the reply, as the template wrote them then │ word │ end of turn, what came after, the next turn opened
    ──────────────────── must be the same now ────────────────────┘      └─ of this, what the held tokens do not have already

Where the template writes what came before, or the reply, in another way by now (Qwen3 leaves out
the reasoning of earlier turns), the held tokens are not what it would show. Then an earlier reply's
are taken, or the whole is made of text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
from jaxtyping import Int32

from areal_x.agents.chat.parsing import Reply
from areal_x.agents.chat.rendering import Renderer, Tools, Unrenderable, encoded, text_content
from areal_x.agents.json_checks import json_bounds
from areal_x.runtime.thread import beside
from areal_x.tasks.text_length import estimate_characters
from areal_x.types import Message

# replies, from the last one back, whose tokens a prompt may begin with: each costs a rendering
MOST_REPLIES = 3
# what may change while the message is the same
IGNORED_KEYS = ("id", "index", "tool_call_id", "reasoning_content", "reasoning")


@dataclass(frozen=True)
class Prompt:
    """text: as the template wrote it, of which `tokens` may be other tokens than a tokenizer's."""

    text: str
    tokens: Int32[np.ndarray, " P"]


@dataclass(frozen=True)
class CachedReply:
    """A reply of ours. before: the text of the prompt that it answered. tokens: of that prompt and
    of the reply. begun: what of the assistant's turn was there already."""

    before: str
    tokens: Int32[np.ndarray, " held"]
    reply: Reply
    begun: str = ""


class ReplyCache:
    """The replies of one episode, found by the conversation that led to them and what they said.

    Messages are the same whatever the ids of their tool calls, the spelling of arguments in JSON,
    keys without a value, and blanks around what an assistant said. A reply whose reasoning the
    agent left out is the same too, and gets it back: whether it is shown is for the template to
    say.
    """

    def __init__(self) -> None:
        self._held: dict[bytes, CachedReply] = {}

    def add(self, messages: Sequence[Message], held: CachedReply) -> None:
        """messages: what the reply answers, without its own turn."""
        said = {**held.reply.message(), "content": held.begun + (held.reply.content or "")}
        self._held[keys((*messages, said))[-1]] = held

    def find(self, messages: Sequence[Message]) -> dict[int, CachedReply]:
        """Which of these messages are replies of ours, by their places."""
        return {
            place: self._held[key] for place, key in enumerate(keys(messages)) if key in self._held
        }


async def build_prompt(
    renderer: Renderer,
    memory: ReplyCache,
    messages: Sequence[Message],
    tools: Tools = (),
    template: Mapping[str, Any] | None = None,
    continue_final: bool = False,
    most: int | None = None,
) -> Prompt:
    """The prompt of a conversation, beginning with the tokens of the latest reply in it that can be
    gone on with.

    most: tokens that are of any use. Raises Unrenderable for messages that the chat template
    refuses, PromptTooLong.
    """
    template = template or {}
    found = await beside(estimate_characters(messages), memory.find, messages)
    whole = [
        _with_reasoning(message, found[place].reply) if place in found else message
        for place, message in enumerate(messages)
    ]
    text = await renderer.rendered(whole, tools, template, continue_final)
    for place in sorted(found, reverse=True)[:MOST_REPLIES]:
        held = found[place]
        if text.startswith(held.before):
            marked, words = _marked(whole[place], held.begun, text)
            with suppress(Unrenderable):  # of the word, not of the messages
                shown = await renderer.rendered(
                    [*whole[:place], marked, *whole[place + 1 :]], tools, template, continue_final
                )
                rest = await beside(len(shown), _behind, renderer, held, shown, words, most)
                if rest is not None:
                    open_end = continue_final and place == len(whole) - 1
                    start = without_end_token(renderer, held.tokens) if open_end else held.tokens
                    return Prompt(text, np.concatenate([start, rest]))
    return Prompt(text, await beside(len(text), encoded, renderer, text, True, most))


def keys(messages: Sequence[Message]) -> list[bytes]:
    """One for each message, of it and all before it."""
    digest, made = blake2b(), []
    for message in messages:
        digest.update(json.dumps(normal(message), sort_keys=True, default=str).encode() + b"\n")
        made.append(digest.digest())
    return made


def normal(message: Message) -> dict[str, Any]:
    """What of a message makes it the same as another. Of what is no message, something: it is
    refused where it is rendered."""
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
    """The tokens of a turn that shall go on: without the special token that ended it, if one
    did."""
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


def _with_reasoning(message: Message, reply: Reply) -> Message:
    return message if reply.reasoning is None else {**message, "reasoning_content": reply.reasoning}


def _marked(message: Message, begun: str, text: str) -> tuple[Message, list[str]]:
    """The message with words in the place of what the reply says, and the words, as they must stand
    one after the other."""
    # no text holds its own digest
    name = f"placeholder{blake2b(text.encode(errors='replace'), digest_size=8).hexdigest()}"
    marked, words = dict(message), []
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
    renderer: Renderer, held: CachedReply, shown: str, words: Sequence[str], most: int | None
) -> Int32[np.ndarray, " N"] | None:
    """The tokens behind the reply. None where the template does not show all of it behind what it
    showed before, or not in the order in which replies are read."""
    places = [shown.rfind(word) for word in words]
    if places != sorted(places) or places[0] < len(held.before):
        return None
    rest = encoded(renderer, shown[places[-1] + len(words[-1]) :], False, most)
    special = np.flatnonzero(np.isin(rest, list(renderer.special)))
    if len(special) and rest[special[0]] == held.tokens[-1]:
        return rest[special[0] + 1 :]
    if held.reply.tool_calls:  # the rest of the call's JSON stands before the end of the turn
        return rest[special[0] :] if len(special) else None
    return rest
