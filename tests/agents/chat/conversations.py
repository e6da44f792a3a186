"""Random conversations, and what each of their prompts must be: from the families' known formats, not by rendering.

Nothing here knows how prompts are made: it is given a function that answers, and says what was wrong with the answers' prompts.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.agents.chat.speaking import END, TOOLS

FAMILIES = ("qwen25", "qwen3", "llama31")
SAYINGS = ("the answer is 42", "it is raining in Rome, is it not?", "I try again.\n\nThe sum: 12 + 30", "café — ça va", "x")
OPEN = {
    "qwen25": "<|im_start|>assistant\n",
    "qwen3": "<|im_start|>assistant\n",
    "llama31": "<|start_header_id|>assistant<|end_header_id|>\n\n",
}


@dataclass(frozen=True)
class Said:
    """The result of an answering function. message: the reply, as an agent sees it."""

    prompt: np.ndarray
    tokens: np.ndarray
    message: dict[str, Any]


@dataclass(frozen=True)
class Place:
    """A point of a conversation from which it may continue. thought: a reply since the last user message has reasoning. exact:
    every reply is written as the template would write it."""

    messages: tuple[dict[str, Any], ...] = ()
    shown: tuple[dict[str, Any], ...] = ()  # the same as the agent sends them
    held: np.ndarray | None = None
    ended: bool = True
    thought: bool = False
    exact: bool = True


@dataclass
class Policy:
    """Generates sayings, thoughts and calls in tokens that no tokenizer would choose for them, or any tokens."""

    tokenizer: Any
    family: str
    rng: np.random.Generator
    tools: bool
    thinks: bool
    noise: float = 0.2
    most_noise: int = 30

    def say(self) -> tuple[list[int], bool, bool]:
        """Returns tokens, whether they end the turn, and whether they are written as the template would write them."""
        end = self.tokenizer.convert_tokens_to_ids(END[self.family])
        ended = bool(self.rng.random() < 0.8)
        if noisy := self.rng.random() < self.noise:
            tokens = [
                int(t) for t in self.rng.integers(0, len(self.tokenizer), self.rng.integers(0, self.most_noise)) if t != end
            ]
        else:
            tokens = self.pieces(self.reply())
        return [*tokens, *([end] if ended else [])], ended, not noisy

    def reply(self) -> str:
        saying = str(self.rng.choice(SAYINGS))
        calls = int(self.rng.integers(0, 3)) if self.tools else 0
        thought = (
            "<think>\nhm, " + str(self.rng.choice(SAYINGS)) + "\n</think>\n\n"
            if self.thinks and self.rng.random() < 0.7
            else ""
        )
        if not calls:
            return thought + saying
        if self.family == "llama31":
            return json.dumps({"name": "add", "parameters": {"first": saying}}, ensure_ascii=False)
        written = [
            json.dumps({"name": "add", "arguments": {"first": saying, "n": n}}, ensure_ascii=False) for n in range(calls)
        ]
        said = saying + "\n" if self.rng.random() < 0.5 else ""
        return thought + said + "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in written)

    def pieces(self, text: str) -> list[int]:
        """Returns the text's tokens when it is split at random positions."""
        tokens, at = [], 0
        while at < len(text):
            size = int(self.rng.integers(1, 8))
            tokens += self.tokenizer.encode(text[at : at + size], add_special_tokens=False)
            at += size
        return tokens


def begins(tokens: np.ndarray, held: np.ndarray) -> bool:
    return np.array_equal(tokens[: len(held)], held)


def looks(place: Place) -> list[Any]:
    """Returns what an agent sees of a message: everything except ids and reasoning."""

    def of(message: dict[str, Any]) -> Any:
        calls = [call["function"] for call in message.get("tool_calls") or []]
        return message["role"], (message.get("content") or "").strip(), calls

    return [of(message) for message in place.messages]


@dataclass
class Conversation:
    """One agent's conversation with a policy: it continues, goes back, and is sent in the ways that clients send it."""

    family: str
    seed: int
    tokenizer: Any
    noise: float = 0.2
    most_noise: int = 30
    complaints: list[str] = field(default_factory=list)
    kept: int = 0  # prompts that had to begin with tokens that were held
    rewritten: int = 0

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.tools = bool(self.rng.random() < 0.6)
        thinks = self.family == "qwen3" and bool(self.rng.random() < 0.7)
        self.template = {"enable_thinking": False} if self.family == "qwen3" and not thinks else {}
        self.policy = Policy(self.tokenizer, self.family, self.rng, self.tools, thinks, self.noise, self.most_noise)

    async def run(self, answer: Callable[..., Awaitable[Said]], turns: int, branches: float = 0.2) -> None:
        """answer(messages, tools, template, tokens, ended) returns what the policy's tokens become."""
        places = [Place()]
        for _ in range(turns):
            latest = places[-1] if self.rng.random() >= branches else places[self.rng.integers(len(places))]
            said = self.next_messages(latest)
            tokens, ended, exact = self.policy.say()
            shown = (*latest.shown, *map(self.as_told, said))
            tools = TOOLS if self.tools else ()
            got = await answer(shown, tools, self.template, tokens, ended)
            self.judge(self.told_of(latest, places, got), said, got)
            message = dict(got.message)
            messages = (*latest.messages, *said, message)
            asked = said[-1]["role"] == "user"
            thought = bool(message.get("reasoning_content")) or (latest.thought and not asked)
            shown = (*shown, self.as_told(message))
            held = np.concatenate([got.prompt, got.tokens])
            places.append(Place(messages, shown, held, ended, thought, latest.exact and exact))

    def told_of(self, latest: Place, places: list[Place], got: Said) -> Place:
        """Returns the point itself, or another with the same texts in other tokens, with which the prompt begins: after two
        equal requests with equal answers, a client cannot specify which of the two it continues."""
        said = looks(latest)
        alike = [latest, *(place for place in places if place.held is not None and looks(place) == said)]
        return next((place for place in alike if place.held is not None and begins(got.prompt, place.held)), latest)

    def next_messages(self, latest: Place) -> list[dict[str, Any]]:
        if not latest.messages:
            system = [{"role": "system", "content": "Be brief."}] if self.rng.random() < 0.5 else []
            return [*system, {"role": "user", "content": str(self.rng.choice(SAYINGS))}]
        calls = latest.messages[-1].get("tool_calls") or []
        if calls and self.rng.random() < 0.9:
            return [{"role": "tool", "tool_call_id": c["id"], "content": str(self.rng.choice(SAYINGS))} for c in calls]
        return [{"role": "user", "content": str(self.rng.choice(SAYINGS))}]

    def as_told(self, message: dict[str, Any]) -> dict[str, Any]:
        """Returns the message as some client would send it."""
        told = dict(message)
        if self.rng.random() < 0.5:
            told.pop("reasoning_content", None)
        if told.get("content") is None and self.rng.random() < 0.5:
            told.pop("content", None)
        if isinstance(told.get("content"), str) and self.rng.random() < 0.3:
            told["content"] = [{"type": "text", "text": told["content"]}]
        if told.get("tool_calls"):
            told["tool_calls"] = [
                {
                    **call,
                    "id": f"toolu_{self.rng.integers(1000)}",
                    "function": {**call["function"], "arguments": self.spelt(call)},
                }
                for call in told["tool_calls"]
            ]
        if self.rng.random() < 0.2:
            told |= {"refusal": None, "annotations": []}
        return told

    def spelt(self, call: dict[str, Any]) -> str:
        try:
            return json.dumps(json.loads(call["function"]["arguments"]), indent=int(self.rng.integers(0, 3)) or None)
        except ValueError:
            return str(call["function"]["arguments"])

    def judge(self, latest: Place, said: list[dict[str, Any]], got: Said) -> None:
        if latest.held is None:
            return
        if self.keeps(latest, said):
            self.kept += 1
            if not begins(got.prompt, latest.held):
                self.complain("does not begin with the tokens held", got, latest)
            elif (rest := self.tokenizer.decode(got.prompt[len(latest.held) :])) != (wanted := self.behind(latest, said)):
                self.complain(f"goes on with {rest!r}, not {wanted!r}", got, latest)
        elif latest.exact:
            self.rewritten += 1
            text = self.tokenizer.decode(got.prompt)
            if text != (wanted := self.written([*latest.messages, *said])):
                self.complain(f"is {text!r}, not {wanted!r}", got, latest)

    def keeps(self, latest: Place, said: list[dict[str, Any]]) -> bool:
        """Returns True if the family's format still shows what is held: Qwen3 drops the reasoning from before the last user
        message, and the empty one with which it opens turns without thinking; Llama shows nothing beside a call."""
        message = latest.messages[-1]
        if self.family == "llama31":
            return not (message.get("tool_calls") and message.get("content"))
        return self.family == "qwen25" or not (self.template or (said[0]["role"] == "user" and latest.thought))

    def behind(self, latest: Place, said: list[dict[str, Any]]) -> str:
        """Returns the text after a held reply: the rest of its turn, the following messages, and the next turn opened."""
        end = "" if latest.ended else END[self.family]
        if self.family == "llama31":
            turns = [
                f"<|start_header_id|>ipython<|end_header_id|>\n\n{json.dumps(m['content'], ensure_ascii=False)}<|eot_id|>"
                if m["role"] == "tool"
                else f"<|start_header_id|>user<|end_header_id|>\n\n{m['content']}<|eot_id|>"
                for m in said
            ]
            return end + "".join(turns) + OPEN[self.family]
        if said[0]["role"] == "tool":
            answers = "".join(f"\n<tool_response>\n{m['content']}\n</tool_response>" for m in said)
            return f"{end}\n<|im_start|>user{answers}<|im_end|>\n{OPEN[self.family]}"
        return f"{end}\n<|im_start|>user\n{said[0]['content']}<|im_end|>\n{OPEN[self.family]}"

    def written(self, messages: list[dict[str, Any]]) -> str:
        """Renders the whole conversation by the template, with each reply's reasoning."""
        ready = [{**m, "content": m.get("content") or ""} for m in messages]
        for message in ready:
            if calls := message.get("tool_calls"):
                message["tool_calls"] = [
                    {"function": {"name": c["function"]["name"], "arguments": json.loads(c["function"]["arguments"])}}
                    for c in calls
                ]
        tools = list(TOOLS) if self.tools else None
        return str(
            self.tokenizer.apply_chat_template(ready, tools=tools, add_generation_prompt=True, tokenize=False, **self.template)
        )

    def complain(self, what: str, got: Said, latest: Place) -> None:
        held, prompt = (self.tokenizer.decode(tokens)[-300:] for tokens in (latest.held, got.prompt))
        self.complaints.append(f"{self.family}, seed {self.seed}: a prompt {what}; held {held!r}, prompt {prompt!r}")
