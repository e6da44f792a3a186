"""A model whose every word a test decides: its tokens are characters, and its template shows everything that it was given."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass, field

import anthropic
import numpy as np
import openai

from areal_x.agents.chat.parsing import Reply, ToolCall
from areal_x.protocols.engine import Completion, SamplingParams, max_new_tokens

END = "\0"
THOUGHT = re.compile(r"<think>(.*?)</think>", re.DOTALL)
TOOL = re.compile(r"<tool>([\w.]+) (.*?)</tool>", re.DOTALL)


def tool(name, **arguments):
    return f"<tool>{name} {json.dumps(arguments)}</tool>"


def letters(text):
    return np.asarray([ord(letter) for letter in text], np.int32)


def read(tokens):
    return "".join(map(chr, tokens))


class Letters:
    """A renderer (areal_x.agents.chat.rendering): `role:text` and an end token for each message."""

    special = ends = frozenset({0})
    structural = frozenset()
    sees_images = False

    async def rendered(self, messages, tools, template, continue_final=False):
        parts = [f"tools:{json.dumps(list(tools))}{END}"] if tools else []
        parts += [f"template:{json.dumps(dict(template), sort_keys=True)}{END}"] if template else []
        parts += [f"{message['role']}:{self.shown(message)}{END}" for message in messages]
        text = "".join(parts)
        return text.removesuffix(END) if continue_final else f"{text}assistant:"

    def shown(self, message):
        thought = message.get("reasoning_content")
        calls = [call["function"] for call in message.get("tool_calls", ())]
        text = "" if thought is None else f"<think>{thought}</think>"
        text += message["content"] or ""
        return text + "".join(f"<tool>{call['name']} {call['arguments']}</tool>" for call in calls)

    def written(self, tokens):
        return read(tokens)

    def encode(self, text, begins=False):
        return letters(text)

    async def prompt(self, messages, tools, template, continue_final=False):
        return letters(await self.rendered(messages, tools, template, continue_final))

    async def read(self, tokens, tools, prompt=None):
        text = self.text(tokens)
        thoughts = THOUGHT.findall(text)
        text = THOUGHT.sub("", text)
        calls = []
        if tools:
            calls = [ToolCall(f"call_{len(tokens)}_{i}", *found) for i, found in enumerate(TOOL.findall(text))]
            text = TOOL.sub("", text)
        return Reply(text or (None if calls or thoughts else ""), thoughts[0] if thoughts else None, tuple(calls))

    def text(self, tokens):
        return read(tokens).replace(END, "")


class Scripted:
    """An engine that generates `says` of the prompt's text, once the test allows it."""

    def __init__(self, says="hello", *, context=100_000, held=False):
        self.says = says if callable(says) else lambda prompt: says
        self.context, self.version = context, 7
        self.requests, self.cancelled, self.waiting = [], 0, 0
        self.finish_reason, self.error = None, None
        self.gate = asyncio.Event()
        if not held:
            self.gate.set()

    async def generate(self, request):
        most = max_new_tokens(request, self.context, "Scripted.context")
        self.requests.append(request)
        self.waiting += 1
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.waiting -= 1
        if self.error is not None:
            raise self.error
        said = letters(self.says(read(request.tokens)) + END)
        tokens = said[:most]
        logprobs = -np.arange(1, len(tokens) + 1, dtype=np.float32) / 8
        reason = self.finish_reason or ("stop" if len(tokens) == len(said) else "length")
        return Completion(tokens, logprobs, np.full(len(tokens), self.version, np.int32), reason)

    @property
    def prompts(self):
        return [read(request.tokens) for request in self.requests]


RUN = SamplingParams(max_tokens=2000, temperature=1.0, stop_token_ids=(0,))


@dataclass
class Talk:
    """A session and everything that a test does with it, from a thread other than the gateway's."""

    session: object
    engine: Scripted
    run: object
    clients: list = field(default_factory=list)

    @property
    def openai(self):
        return self.client(openai.OpenAI)

    @property
    def openai_async(self):
        return openai.AsyncOpenAI(base_url=self.session.base_url, api_key=self.session.key)

    @property
    def anthropic(self):
        return self.client(anthropic.Anthropic, base_url=self.session.url)

    def client(self, kind, **how):
        """Returns a client of the test's own, closed with the session."""
        self.clients.append(kind(**{"base_url": self.session.base_url, "api_key": self.session.key, **how}))
        return self.clients[-1]

    def close(self):
        for client in self.clients:
            client.close()
        self.do(self.session.close)

    def chat(self, text="hi", **more):
        return self.openai.chat.completions.create(model="policy", messages=[{"role": "user", "content": text}], **more)

    def calls(self):
        return self.do(self.session.calls)

    def do(self, function, *arguments):
        """Calls a function on the gateway's loop."""

        async def done():
            return function(*arguments)

        return self.run(done())

    def until(self, condition):
        """Runs the gateway's loop until a condition holds there."""

        async def turn():
            while not condition():
                await asyncio.sleep(0)

        self.run(turn())
