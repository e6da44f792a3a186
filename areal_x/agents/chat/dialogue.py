"""Chat over an engine, from messages to a message: the layer that the gateway and the workflows
call."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jaxtyping import Int32

from areal_x.agents.chat.calls import Call
from areal_x.agents.chat.parsing import Reply
from areal_x.agents.chat.prompts import (
    CachedReply,
    ReplyCache,
    ReplyMemory,
    build_prompt,
    reply_key,
)
from areal_x.agents.chat.rendering import Renderer, text_content
from areal_x.protocols.engine import Completion, Request, SamplingParams, max_new_tokens
from areal_x.protocols.workflow import Generator
from areal_x.runtime.thread import inline_or_in_pool
from areal_x.tasks.text_length import CHARACTERS_PER_TOKEN, estimate_characters
from areal_x.types import Images, Message


@dataclass(frozen=True)
class ChatRequest:
    """One request for a completion, in OpenAI's terms.

    messages: the whole conversation; content is a text or a list of parts. tools: each {"type":
    "function", "function": {…}}. sampling: complete, stop tokens included. stop: texts that end the
    reply; they and what follows are cut from the reply, not from the call. template: more variables
    of the chat template, such as {"enable_thinking": False}. continue_final: the last message is
    the beginning of an assistant's, to be continued. format: the JSON schema that the messages ask
    the reply to match; not enforced.
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
    """The answer to a ChatRequest. prompt: as the engine was given it. stopped_by: the text of
    `stop` that ended the reply, or None. images: those of the prompt."""

    prompt: Int32[np.ndarray, " P"]
    completion: Completion
    reply: Reply
    stopped_by: str | None = None
    images: Images | None = None


class ChatEngine:
    """Answers messages with a message, over an engine; keeps its conversations' tokens, so that no
    text is tokenised twice.

    Belongs to one episode. calls: every completion so far, in the order in which they finished.
    memory: where the episode's replies are kept, by default in this object.
    """

    def __init__(
        self, renderer: Renderer, engine: Generator, memory: ReplyMemory | None = None
    ) -> None:
        self.renderer = renderer
        self.engine = engine
        self.calls: list[Call] = []
        self._memory = ReplyCache() if memory is None else memory

    async def answer(self, request: ChatRequest, id: str | None = None) -> ChatAnswer:
        """Returns the reply to a request, and records it in `calls` under `id` (by default a
        number). Several requests may be in progress at once.

        Raises: PromptTooLong for a conversation that leaves no room for a reply; Unrenderable for
        messages that the chat template refuses; what the engine raises.
        """
        prompt = await build_prompt(
            self.renderer,
            self._memory,
            request.messages,
            tools=request.tools,
            template=request.template,
            continue_final=request.continue_final,
            most=self.engine.context,
        )
        engine_request = Request(
            prompt.tokens, request.sampling, images=prompt.images, stop=request.stop
        )
        max_new_tokens(engine_request, self.engine.context, "train.row_length")
        completion = await self.engine.generate(engine_request)
        id = str(len(self.calls)) if id is None else id
        self.calls.append(Call(id, prompt.tokens, completion, images=prompt.images))
        size = len(completion.tokens) * CHARACTERS_PER_TOKEN
        kept, stopped_by = await inline_or_in_pool(
            size, cut_at_stop, self.renderer, completion.tokens, request.stop
        )
        reply = await self.renderer.read(kept, request.tools, prompt.tokens)
        if completion.finish_reason != "abort":
            before = request.messages
            begun = ""
            if request.continue_final:
                before = request.messages[:-1]
                begun = text_content(request.messages[-1].get("content"))
            held = CachedReply(
                prompt.text,
                np.concatenate([prompt.tokens, kept]),
                reply,
                await inline_or_in_pool(size, self.renderer.written, kept),
                begun,
                ended=completion.finish_reason == "stop" and stopped_by is None,
            )
            key = await inline_or_in_pool(estimate_characters(before), reply_key, before, held)
            await self._memory.add(key, held)
        return ChatAnswer(prompt.tokens, completion, reply, stopped_by, prompt.images)


class Dialogue:
    """A workflow's conversation, which grows with each exchange.

    messages: of all roles so far. latest: the answer to the last messages.
    """

    def __init__(
        self,
        engine: ChatEngine,
        sampling: SamplingParams,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        stop: Sequence[str] = (),
        template: Mapping[str, Any] | None = None,
    ) -> None:
        self._engine = engine
        self._defaults = ChatRequest((), tuple(tools), sampling, tuple(stop), template or {})
        self.messages: tuple[Message, ...] = ()
        self.latest: ChatAnswer | None = None

    @property
    def calls(self) -> tuple[Call, ...]:
        """Every completion so far."""
        return tuple(self._engine.calls)

    @property
    def text(self) -> str:
        """The last completion as text, with reasoning and tool calls, without special tokens and
        without what a stop text cut off."""
        if self.latest is None:
            return ""
        text = self._engine.renderer.text(self.latest.completion.tokens)
        return (
            text if self.latest.stopped_by is None else text[: text.index(self.latest.stopped_by)]
        )

    async def say(self, *messages: Message) -> Reply:
        """Returns the model's reply to these messages; both become part of the conversation.

        Raises what `ChatEngine.answer` does; the conversation is then unchanged.
        """
        conversation = (*self.messages, *messages)
        self.latest = await self._engine.answer(replace(self._defaults, messages=conversation))
        self.messages = (*conversation, self.latest.reply.message())
        return self.latest.reply


def cut_at_stop(
    renderer: Renderer, tokens: Int32[np.ndarray, " N"], stop: Sequence[str]
) -> tuple[Int32[np.ndarray, " M"], str | None]:
    """Returns the tokens of the text before the first stop text in it, and that stop text; all
    tokens and None if there is none.

    A token that contains the start of a stop text after other text is replaced by the tokens of
    that other text.
    """
    text = renderer.text(tokens)
    stops = [(text.index(word), word) for word in stop if word and word in text]
    if not stops:
        return tokens, None
    place, word = min(stops)
    count = bisect_right(
        range(len(tokens)), place, key=lambda n: len(renderer.text(tokens[: n + 1]))
    )
    # an incomplete character decodes to a different one
    while not text[:place].startswith(renderer.text(tokens[:count])):
        count -= 1
    rest = text[len(renderer.text(tokens[:count])) : place]
    return np.concatenate([tokens[:count], renderer.encode(rest)]) if rest else tokens[:count], word
