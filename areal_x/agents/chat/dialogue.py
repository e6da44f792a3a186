"""Messages in, message out, over an engine: what a gateway or a workflow calls."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jaxtyping import Int32

from areal_x.agents.chat.calls import Call
from areal_x.agents.chat.parsing import Reply
from areal_x.agents.chat.prompts import CachedReply, ReplyCache, build_prompt
from areal_x.agents.chat.rendering import Renderer, text_content
from areal_x.protocols.engine import Completion, Request, SamplingParams, max_new_tokens
from areal_x.protocols.workflow import Generator
from areal_x.runtime.thread import beside
from areal_x.tasks.text_length import CHARACTERS_PER_TOKEN, estimate_characters
from areal_x.types import Message


@dataclass(frozen=True)
class ChatRequest:
    """One request for a completion, in OpenAI's terms.

    messages: the whole conversation, content a text or a list of parts. tools: {"type": "function",
    "function": {…}} each. sampling: complete, stop tokens included. stop: texts that end the reply;
    they and what was generated behind them are left out of the reply, not of the call. template:
    more variables of the chat template, as {"enable_thinking": False}. continue_final: the last
    message is an assistant's beginning, to be continued. format: the JSON schema that the messages
    ask the reply to fit; nothing holds it to that.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: tuple[str, ...] = ()
    template: Mapping[str, Any] = field(default_factory=dict)
    continue_final: bool = False
    format: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class ChatAnswer:
    """What came of an Ask. prompt: as the engine was given it. stopped_by: the text of `stop` that
    ended the reply, or None."""

    prompt: Int32[np.ndarray, " P"]
    completion: Completion
    reply: Reply
    stopped_by: str | None = None


class ChatEngine:
    """Messages in, message out, over an engine; remembers its conversation's tokens so that no
    token is made from text twice.

    Belongs to one episode. calls: every completion so far, in the order in which they ended.
    """

    def __init__(self, renderer: Renderer, engine: Generator) -> None:
        self.renderer, self.engine = renderer, engine
        self.calls: list[Call] = []
        self._memory = ReplyCache()

    async def answer(self, ask: ChatRequest, id: str | None = None) -> ChatAnswer:
        """The reply to an ask, recorded in `calls` under `id` (by default a number). Several may be
        under way at once.

        Raises: PromptTooLong for a conversation that leaves no room for a reply; Unrenderable for
        messages that the chat template refuses; what the engine raises.
        """
        prompt = await build_prompt(
            self.renderer,
            self._memory,
            ask.messages,
            ask.tools,
            ask.template,
            ask.continue_final,
            self.engine.context,
        )
        request = Request(prompt.tokens, ask.sampling, stop=ask.stop)
        max_new_tokens(request, self.engine.context, "train.row_length")
        completion = await self.engine.generate(request)
        self.calls.append(
            Call(str(len(self.calls)) if id is None else id, prompt.tokens, completion)
        )
        size = len(completion.tokens) * CHARACTERS_PER_TOKEN
        kept, stopped_by = await beside(
            size, cut_at_stop, self.renderer, completion.tokens, ask.stop
        )
        reply = await self.renderer.read(kept, ask.tools, prompt.tokens)
        if completion.finish_reason != "abort":
            before, begun = ask.messages, ""
            if ask.continue_final:
                before, begun = ask.messages[:-1], text_content(ask.messages[-1].get("content"))
            held = CachedReply(prompt.text, np.concatenate([prompt.tokens, kept]), reply, begun)
            await beside(estimate_characters(before), self._memory.add, before, held)
        return ChatAnswer(prompt.tokens, completion, reply, stopped_by)


class Dialogue:
    """A conversation of a workflow, which grows by what is said in it.

    messages: of all sides so far. latest: the answer to what was said last.
    """

    def __init__(
        self,
        speaker: ChatEngine,
        sampling: SamplingParams,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        stop: Sequence[str] = (),
        template: Mapping[str, Any] | None = None,
    ) -> None:
        self._speaker = speaker
        self._ask = ChatRequest((), tuple(tools), sampling, tuple(stop), template or {})
        self.messages: tuple[Message, ...] = ()
        self.latest: ChatAnswer | None = None

    @property
    def calls(self) -> tuple[Call, ...]:
        """Every completion so far."""
        return tuple(self._speaker.calls)

    @property
    def text(self) -> str:
        """What was generated last, reasoning and tool calls included, special tokens and what a
        stop text cut off left out."""
        if self.latest is None:
            return ""
        text = self._speaker.renderer.text(self.latest.completion.tokens)
        return (
            text if self.latest.stopped_by is None else text[: text.index(self.latest.stopped_by)]
        )

    async def say(self, *messages: Message) -> Reply:
        """What the model replies to these messages, which like its reply are part of the
        conversation from now on.

        Raises what `Speaker.answer` does; the conversation is then as it was.
        """
        asked = (*self.messages, *messages)
        self.latest = await self._speaker.answer(replace(self._ask, messages=asked))
        self.messages = (*asked, self.latest.reply.message())
        return self.latest.reply


def cut_at_stop(
    renderer: Renderer, tokens: Int32[np.ndarray, " N"], stop: Sequence[str]
) -> tuple[Int32[np.ndarray, " M"], str | None]:
    """The tokens of the text before the first of the stop texts in it, and which that was; all
    tokens where none is.

    A token in which a stop text begins behind other text gives way to the tokens of that other
    text.
    """
    text = renderer.text(tokens)
    stops = [(text.index(word), word) for word in stop if word and word in text]
    if not stops:
        return tokens, None
    place, word = min(stops)
    count = bisect_right(
        range(len(tokens)), place, key=lambda n: len(renderer.text(tokens[: n + 1]))
    )
    # half of a character is shown as another
    while not text[:place].startswith(renderer.text(tokens[:count])):
        count -= 1
    rest = text[len(renderer.text(tokens[:count])) : place]
    return np.concatenate([tokens[:count], renderer.encode(rest)]) if rest else tokens[:count], word
