"""Check that prompts are what fourteen real chat templates write, and the time that this takes in a conversation of 128 turns.

    python benchmarks/chat_templates.py                              # 10,000 conversations of each template
    python benchmarks/chat_templates.py --conversations 200 --templates qwen3 gpt-oss
    python benchmarks/chat_templates.py --turns 128                  # the time, in one conversation of each

Claim: no prompt differs from what the template writes, token for token; the work is below 1 % of an episode's time.

The conversations are those of tests/agents/chat/real_truth.py: with and without system prompt, tools, parallel calls and
reasoning, with branches, compaction, replies that are cut and replies of arbitrary tokens. Columns: completions, tokens
generated, prompts that begin with the tokens of the latest reply, prompts in which the template writes it otherwise, requests
that the template refuses, prompts that are wrong.

The time is the processor's, for rendering, tokenising, parsing and merging, without the engine. Each turn generates about 100
tokens and adds about 100. It is compared with the generation of these tokens at --speed tokens a second.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from areal_x.agents.chat.dialogue import ChatEngine, ChatRequest
from areal_x.agents.chat.merging import merge_calls
from areal_x.agents.chat.rendering import TemplateRenderer
from areal_x.protocols.engine import SamplingParams
from tests.agents.chat.real_templates import REAL, missing, real_tokenizer
from tests.agents.chat.real_truth import real_truth
from tests.agents.chat.speaking import TOOLS, Says

COLUMNS = ("calls", "tokens", "kept", "rewritten", "refused")
WORDS = ["the", "sum", "weather", "city", "answer", "think", "again", "Paris", "Rome", "twelve", "thirty", "is", "not", "right"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--templates", nargs="*", default=list(REAL), choices=list(REAL), metavar="NAME")
    parser.add_argument("--conversations", type=int, default=10_000, help="of each template")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--completions", type=int, default=4, help="in each conversation")
    parser.add_argument("--turns", type=int, default=0, help="measures the time of a conversation of as many turns instead")
    parser.add_argument("--speed", type=float, default=50.0, help="tokens a second that a request generates")
    options = parser.parse_args()
    if missing:
        print(missing)
        return 1
    return timed(options) if options.turns else checked(options)


def checked(options: argparse.Namespace) -> int:
    print(f"{'template':12}{'conversations':>15}{''.join(f'{name:>11}' for name in COLUMNS)}{'wrong':>7}")
    wrong = 0
    for name in options.templates:
        counts: Counter[str] = Counter()
        complaints: list[str] = []
        for seed in range(options.first_seed, options.first_seed + options.conversations):
            talk = real_truth(name, seed, options.completions)
            counts += talk.counts
            complaints += talk.complaints
        wrong += len(complaints)
        numbers = "".join(f"{counts[column]:11,}" for column in COLUMNS)
        print(f"{name:12}{options.conversations:15,}{numbers}{len(complaints):7,}", flush=True)
        for complaint in complaints[:3]:
            print(f"  {complaint}")
    return 1 if wrong else 0


def timed(options: argparse.Namespace) -> int:
    print(f"{'template':12}{'generated':>10}{'prompt':>9}{'ms a turn':>11}{'work, s':>9}{'episode, s':>12}{'share':>8}")
    for name in options.templates:
        speaker, spent = asyncio.run(talked(name, options.turns))
        began = time.process_time()
        merge_calls(speaker.calls)
        spent += time.process_time() - began
        generated = sum(len(call.completion.tokens) for call in speaker.calls)
        episode = generated / options.speed
        numbers = f"{generated:10,}{len(speaker.calls[-1].prompt):9,}{1000 * spent / options.turns:11.1f}{spent:9.2f}"
        print(f"{name:12}{numbers}{episode:12.0f}{spent / episode:8.2%}", flush=True)
    return 0


async def talked(name: str, turns: int) -> tuple[ChatEngine, float]:
    """Returns the engine of a conversation with as many turns, and the processor's time for it, in seconds."""
    tokenizer, family, rng = real_tokenizer(name), REAL[name], np.random.default_rng(0)
    engine = Says(context=10**7)
    speaker = ChatEngine(TemplateRenderer(tokenizer), engine)
    messages = [{"role": "user", "content": words(rng, 60)}]
    spent = 0.0
    for _ in range(turns):
        called = [("add", {"first": words(rng, 15 if family.thinks else 50)}, "abcdefgh1")] if family.calls else []
        content = "" if called else words(rng, 15 if family.thinks else 50)
        end = family.call_end if called and family.call_end else family.end
        written = family.write(words(rng, 45) if family.thinks else None, content, called) + end
        engine.replies.append(tokenizer.encode(written, add_special_tokens=False))
        began = time.process_time()
        tools = TOOLS if called else ()
        message = (await speaker.answer(ChatRequest(tuple(messages), tools, SamplingParams()))).reply.message()
        spent += time.process_time() - began
        calls = message.get("tool_calls")
        answer = {"role": "tool", "tool_call_id": calls[0]["id"]} if calls else {"role": "user"}
        messages += [message, {**answer, "content": words(rng, 60)}]
    return speaker, spent


def words(rng: np.random.Generator, count: int) -> str:
    return " ".join(rng.choice(WORDS, count))


if __name__ == "__main__":
    sys.exit(main())
