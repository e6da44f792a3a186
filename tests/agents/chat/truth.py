"""Checks conversations with a `ChatEngine`: that prompts are what they must be, and that exactly the generated tokens are
trained on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from areal_x.agents.chat.dialogue import ChatEngine, ChatRequest
from areal_x.agents.chat.merging import merge_calls
from areal_x.agents.chat.rendering import TemplateRenderer
from areal_x.protocols.engine import SamplingParams
from tests.agents.chat.calls import generated, trained
from tests.agents.chat.conversations import Conversation, Said
from tests.agents.chat.speaking import Says, tokenizer_of


@dataclass(frozen=True)
class Truth:
    """The result of one conversation. complaints: errors, in words. kept: prompts that had to begin with held tokens.
    rewritten: prompts that had to be tokenised. different: prompts whose text has another tokenisation."""

    complaints: tuple[str, ...]
    kept: int
    rewritten: int
    different: int
    calls: int
    tokens: int
    merged: int


async def truth_of(
    family: str, seed: int, turns: int = 8, branches: float = 0.2, noise: float = 0.2, most_noise: int = 30
) -> Truth:
    """turns: number of completions. noise: share of completions with arbitrary tokens."""
    tokenizer = tokenizer_of(family)
    engine = Says(context=10**6)
    speaker = ChatEngine(TemplateRenderer(tokenizer), engine)
    talk = Conversation(family, seed, tokenizer, noise, most_noise)

    async def answer(messages, tools, template, tokens, ended):
        engine.replies.append(tokens)
        engine.finish_reason = "stop" if ended else "length"
        got = await speaker.answer(ChatRequest(tuple(messages), tuple(tools), SamplingParams(), (), template))
        return Said(got.prompt, got.completion.tokens, got.reply.message())

    await talk.run(answer, turns, branches)
    merged = merge_calls(speaker.calls)
    complaints = list(talk.complaints)
    if trained([item.trajectory for item in merged.trajectories]) != generated(speaker.calls):
        complaints.append(f"{family}, seed {seed}: what is trained on is not what was generated")
    if not all(np.array_equal(asked, call.prompt) for asked, call in zip(engine.prompts, speaker.calls, strict=True)):
        complaints.append(f"{family}, seed {seed}: a call's prompt is not what the engine was given")
    tokens = sum(len(call.completion.tokens) for call in speaker.calls)
    different = sum(not np.array_equal(call.prompt, anew(tokenizer, call.prompt)) for call in speaker.calls)
    return Truth(tuple(complaints), talk.kept, talk.rewritten, different, len(speaker.calls), tokens, len(merged.trajectories))


def anew(tokenizer, tokens):
    return tokenizer.encode(tokenizer.decode(tokens.tolist()), add_special_tokens=False)
