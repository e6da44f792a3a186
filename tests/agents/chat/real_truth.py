"""Random conversations in the formats of real chat templates, and what each of their prompts must be, token for token.

The oracle knows nothing of how prompts are made. It keeps the tokens of each reply, renders the whole conversation with the
template itself, and demands: where that text begins with the text of a reply's tokens, the prompt begins with exactly these
tokens, and goes on with the tokens of the rest; where it begins with none, the prompt is the tokens of the text. That holds
where all replies are written as the template writes them. After one in arbitrary tokens the prompt may still begin with it:
then what follows must be what the template writes behind a reply.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from areal_x.agents.chat.dialogue import ChatEngine, ChatRequest
from areal_x.agents.chat.merging import merge_calls
from areal_x.agents.chat.prompts import MOST_REPLIES
from areal_x.agents.chat.rendering import TemplateRenderer, Unrenderable
from areal_x.protocols.engine import SamplingParams
from tests.agents.chat.calls import generated, trained
from tests.agents.chat.conversations import SAYINGS, begins
from tests.agents.chat.real_templates import REAL, Called, real_tokenizer
from tests.agents.chat.speaking import TOOLS, Says

MARK = "Zmarkz"


@dataclass(frozen=True)
class Place:
    """A point of a conversation. messages: as they are. sent: as the agent sends them. held: the tokens up to here, of a reply.
    exact: all replies so far are written as the template would write them."""

    messages: tuple[dict[str, Any], ...] = ()
    sent: tuple[dict[str, Any], ...] = ()
    held: np.ndarray | None = None
    exact: bool = True
    before: Place | None = None


@dataclass
class Talk:
    """One episode of an agent in a family's format."""

    name: str
    seed: int
    noise: float = 0.12
    complaints: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.family, self.tokenizer = REAL[self.name], real_tokenizer(self.name)
        self.rng = np.random.default_rng(self.seed)
        self.tools = TOOLS if self.family.calls and self.rng.random() < 0.6 else ()
        self.thinks = self.family.thinks and (bool(self.rng.random() < 0.6) or (self.family.opens and self.family.off is None))
        self.variables = self.family.off if self.family.off and not self.thinks else {}
        self.engine = Says(context=10**6)
        self.speaker = ChatEngine(TemplateRenderer(self.tokenizer), self.engine)
        self.number = 0

    async def run(self, turns: int) -> None:
        places = [Place()]
        for _ in range(turns):
            choice = self.rng.random()
            latest = places[-1]
            if choice < 0.15:
                latest = places[self.rng.integers(len(places))]
                self.counts["branches"] += 1
            elif choice < 0.25 and latest.messages:
                latest = Place()  # compaction: the agent goes on with a summary alone
                self.counts["compactions"] += 1
            if (made := await self.turn(latest)) is not None:
                places.append(made)
        calls = self.speaker.calls
        if trained([item.trajectory for item in merge_calls(calls).trajectories]) != generated(calls):
            self.complain("what is trained on is not what was generated", "")
        self.counts["calls"] += len(calls)
        self.counts["tokens"] += sum(len(call.completion.tokens) for call in calls)

    async def turn(self, latest: Place) -> Place | None:
        asked = self.next_messages(latest)
        messages = (*latest.messages, *asked)
        sent = (*latest.sent, *map(self.as_sent, asked))
        tokens, written, ended = self.reply()
        self.engine.replies.append(tokens)
        self.engine.finish_reason = "stop" if ended else "length"
        try:
            got = await self.speaker.answer(ChatRequest(sent, self.tools, SamplingParams(), (), self.variables))
        except Unrenderable as error:
            self.engine.replies.clear()
            self.counts["refused"] += 1
            if self.rendered(messages) is not None:
                self.complain(f"a prompt was refused that the template writes: {error}", "")
            return None
        self.judge(latest, messages, got.prompt)
        message = got.reply.message()
        if written is not None and self.seen(message) != self.seen(written):
            self.complain(f"a reply was read as {self.seen(message)}, not {self.seen(written)}", "")
        message = message if written is None else {**message, **written, "tool_calls": message.get("tool_calls") or []}
        message = {key: value for key, value in message.items() if value or key == "content"}
        held = np.concatenate([got.prompt, got.completion.tokens])
        exact = latest.exact and written is not None
        return Place((*messages, message), (*sent, self.as_sent(message)), held, exact, latest)

    def next_messages(self, latest: Place) -> list[dict[str, Any]]:
        user = {"role": "user", "content": str(self.rng.choice(SAYINGS))}
        if not latest.messages:
            return [{"role": "system", "content": "Be brief."}, user] if self.rng.random() < 0.5 else [user]
        calls = latest.messages[-1].get("tool_calls") or []
        if not calls or self.rng.random() < 0.1:
            return [user]
        return [{"role": "tool", "tool_call_id": c["id"], "content": str(self.rng.choice(SAYINGS))} for c in calls]

    def reply(self) -> tuple[list[int], dict[str, Any] | None, bool]:
        """Returns a reply's tokens, the message that it is (None for arbitrary tokens), and whether it is ended."""
        self.number += 1
        ended = bool(self.rng.random() < 0.85)
        if self.rng.random() < self.noise:
            ends = {self.tokenizer.convert_tokens_to_ids(e) for e in (*self.family.ends, self.family.end)}
            tokens = [int(t) for t in self.rng.integers(0, len(self.tokenizer), self.rng.integers(8, 30)) if t not in ends]
            return self.closed(tokens, self.family.end, ended), None, ended
        count = int(self.rng.integers(0, self.family.calls + 1)) if self.tools else 0
        saying = f"{self.rng.choice(SAYINGS)} {self.number}"
        ids = ["".join(self.rng.choice(list("abcdefgh123456789"), 9)) for _ in range(count)]
        called: list[Called] = [("add", {"first": f"{saying} {n}"}, ids[n]) for n in range(count)]
        content = saying if not called or (self.family.beside and self.rng.random() < 0.5) else ""
        thought = f"hm, {self.rng.choice(SAYINGS)}" if self.thinks and (self.family.opens or self.rng.random() < 0.7) else None
        end = (self.family.call_end or self.family.end) if called else self.family.end
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if thought is not None:
            message["reasoning_content"] = thought
        if called:
            message["tool_calls"] = [{"function": {"name": n, "arguments": dict(given)}} for n, given, _ in called]
        if self.family.empty and thought is None and self.variables != self.family.off:
            thought = ""
        tokens = self.closed(self.pieces(self.family.write(thought, content, called)), end, ended)
        return tokens, message, ended

    def closed(self, tokens: list[int], end: str, ended: bool) -> list[int]:
        return [*tokens, self.tokenizer.convert_tokens_to_ids(end)] if ended else tokens

    def pieces(self, text: str) -> list[int]:
        """Returns the text's tokens when it is split at random positions, but not within special tokens."""
        known = sorted((str(t) for t in self.tokenizer.get_added_vocab()), key=len, reverse=True)
        tokens, at = [], 0
        while at < len(text):
            size = int(self.rng.integers(1, 8))
            marks = [(text.find(k, at), len(k)) for k in known if 0 <= text.find(k, at) < at + size]
            if marks:
                place, length = min(marks)
                size = length if place == at else place - at
            tokens += encoded(self.name, text[at : at + size])
            at += size
        return tokens

    def as_sent(self, message: dict[str, Any]) -> dict[str, Any]:
        """Returns a message as some client would send it."""
        sent = dict(message)
        if self.rng.random() < 0.5:
            sent.pop("reasoning_content", None)
        if isinstance(sent.get("content"), str) and self.rng.random() < 0.3:
            sent["content"] = [{"type": "text", "text": sent["content"]}]
        if calls := sent.get("tool_calls"):
            sent["tool_calls"] = [
                {**c, "function": {**c["function"], "arguments": json.dumps(arguments(c), indent=1)}} for c in calls
            ]
        return sent

    def rendered(self, messages: Any, opened: bool = True) -> str | None:
        """Returns the whole conversation as the template writes it, or None if it refuses."""
        ready = []
        for message in messages:
            made = {key: value for key, value in message.items() if key != "reasoning_content"}
            made["content"] = message.get("content") or ""
            if thought := message.get("reasoning_content"):
                if self.family.key == "content":
                    made["content"] = (
                        f"<think>\n{thought}\n</think>\n\n{made['content']}" if self.family.thinks else made["content"]
                    )
                else:
                    made[self.family.key] = thought
            if calls := message.get("tool_calls"):
                made["tool_calls"] = [{**c, "function": {**c["function"], "arguments": arguments(c)}} for c in calls]
            ready.append(made)
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    ready, tools=list(self.tools) or None, add_generation_prompt=opened, tokenize=False, **self.variables
                )
            )
        except Exception:  # a template may raise anything
            return None

    def judge(self, latest: Place, messages: tuple[dict[str, Any], ...], prompt: np.ndarray) -> None:
        text = self.rendered(messages)
        if text is None:
            self.complain("a prompt was made that the template refuses", "")
            return
        replies = []
        place: Place | None = latest
        while place is not None:
            replies += [place] if place.held is not None else []
            place = place.before
        if latest.exact:
            held = next((p for p in replies[:MOST_REPLIES] if text.startswith(self.tokenizer.decode(p.held))), None)
            start = [] if held is None else held.held.tolist()
            rest = text if held is None else text[len(self.tokenizer.decode(held.held)) :]
            expected = [*start, *self.tokenizer.encode(rest, add_special_tokens=False)]
            self.counts["kept" if held is latest else "rewritten" if replies else "first"] += 1
            if prompt.tolist() != expected:
                self.complain(f"a prompt is {self.tokenizer.decode(prompt)!r}", self.tokenizer.decode(expected))
            return
        held = next((p for p in replies if begins(prompt, p.held)), None)
        if held is None:
            self.counts["rewritten"] += 1
            if prompt.tolist() != self.tokenizer.encode(text, add_special_tokens=False):
                self.complain(f"a prompt is {self.tokenizer.decode(prompt)!r}", text)
            return
        self.counts["kept"] += 1
        behind = self.tokenizer.decode(prompt[len(held.held) :])
        expected_text = self.behind(held, messages)
        if behind != expected_text:
            self.complain(f"a prompt goes on with {behind!r}", expected_text)

    def behind(self, held: Place, messages: tuple[dict[str, Any], ...]) -> str:
        """Returns what the template writes behind the reply that `held` ends with, by rendering one that only says MARK."""
        last = len(held.messages) - 1
        reply: dict[str, Any] = {"role": "assistant", "content": MARK}
        if calls := held.messages[last].get("tool_calls"):
            marked = {**calls[-1], "function": {"name": "add", "arguments": {"first": MARK}}}
            reply = {"role": "assistant", "content": "", "tool_calls": [*calls[:-1], marked]}
        text = self.rendered((*messages[:last], reply, *messages[last + 1 :]))
        rest = (text or "").rpartition(MARK)[2]
        ends = (*self.family.ends, self.family.end, self.family.call_end, self.family.later_end)
        at, end = min((rest.find(end), end) for end in ends if end and end in rest)
        return rest[at + len(end) :] if self.tokenizer.decode(held.held).endswith(end) else rest[at:]

    def seen(self, message: dict[str, Any]) -> Any:
        calls = [(c["function"]["name"], arguments(c)) for c in message.get("tool_calls") or []]
        return (message.get("content") or "").strip(), message.get("reasoning_content") or None, calls

    def complain(self, what: str, wanted: str) -> None:
        self.complaints.append(f"{self.name}, seed {self.seed}: {what}" + (f", not {wanted!r}" if wanted else ""))


@lru_cache(maxsize=1 << 16)
def encoded(name: str, text: str) -> list[int]:
    return list(real_tokenizer(name).encode(text, add_special_tokens=False))


def arguments(call: dict[str, Any]) -> Any:
    given = call["function"]["arguments"]
    try:
        return json.loads(given) if isinstance(given, str) else given
    except ValueError:
        return given


def real_truth(name: str, seed: int, turns: int = 6) -> Talk:
    talk = Talk(name, seed)
    asyncio.run(talk.run(turns))
    return talk
