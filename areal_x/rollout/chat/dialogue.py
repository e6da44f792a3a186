"""Messages in, message out, over an engine: what a gateway or a workflow calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Int32

from areal_x.rollout.chat.calls import Call
from areal_x.rollout.chat.reading import Reply
from areal_x.rollout.chat.rendering import Renderer
from areal_x.rollout.engine import Completion, Request, SamplingParams
from areal_x.rollout.workflows import Generator
from areal_x.types import Message


@dataclass(frozen=True)
class Ask:
    """One request for a completion, in OpenAI's terms.

    messages: the whole conversation, content a text or a list of parts. tools: {"type": "function", "function": {…}} each.
    sampling: complete, stop tokens included. stop: texts that end the reply; they and what was generated behind them are left
    out of the reply, not of the call. template: more variables of the chat template, as {"enable_thinking": False}.
    continue_final: the last message is an assistant's beginning, to be continued.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: tuple[str, ...] = ()
    template: Mapping[str, Any] = field(default_factory=dict)
    continue_final: bool = False


@dataclass(frozen=True)
class Answer:
    """What came of an Ask. prompt: as the engine was given it. stopped_by: the text of `stop` that ended it, or None."""

    prompt: Int32[np.ndarray, " P"]
    completion: Completion
    reply: Reply
    stopped_by: str | None = None


class Speaker:
    """Messages in, message out, over an engine; remembers its conversation's tokens so that no token is made from text twice.

    Belongs to one episode. calls: every completion so far, in the order in which they ended.
    """

    def __init__(self, renderer: Renderer, engine: Generator) -> None:
        self.renderer, self.engine = renderer, engine
        self.calls: list[Call] = []

    async def answer(self, ask: Ask, id: str | None = None) -> Answer:
        """The reply to an ask, recorded in `calls` under `id` (by default a number). Several may be under way at once.

        Raises: PromptTooLong for a conversation that leaves no room for a reply; UserError for messages that the chat template
        refuses; what the engine raises.
        """
        prompt = await self.renderer.prompt(ask.messages, ask.tools, ask.template, ask.continue_final)
        completion = await self.engine.generate(Request(prompt, ask.sampling))
        reply = await self.renderer.read(completion.tokens, ask.tools, prompt)
        self.calls.append(Call(id if id is not None else str(len(self.calls)), prompt, completion))
        return Answer(prompt, completion, reply)
