"""Preference pairs in the forms of public datasets, as tasks for `@preference_pairs()`: DPO, IPO and
reward models."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import gin

from areal_x.errors import UserError
from areal_x.types import Message, Task

SPEAKERS = {"Human": "user", "Assistant": "assistant"}
TURN = re.compile(r"(?:^|\n\n)(Human|Assistant):[ ]?")


@gin.configurable
def preference_task(record: Mapping[str, Any], id: str) -> Task:
    """Makes a pair of a record with `chosen` and `rejected`, in any of three forms: transcripts
    ("\\n\\nHuman: … \\n\\nAssistant: …", Anthropic's hh-rlhf), lists of chat messages, or texts beside a
    `prompt`. What both have in common before their last message is the prompt.

    Args:
        record: One of the dataset's.
        id: The task's.

    Raises: UserError for two conversations that differ before their last message, or do not end with
    the assistant's.
    """
    both = {name: conversation(record[name]) for name in ("chosen", "rejected")}
    given = record.get("prompt")
    rest = {k: v for k, v in record.items() if k not in ("chosen", "rejected", "prompt")}
    if any(messages is None for messages in both.values()):
        if given is None:
            raise UserError(f"the pair {id!r} has answers that are texts, and no prompt")
        answers = {name: record[name] for name in both}
        return Task(id, given, answers, rest)
    prompts: dict[str, list[Message]] = {}
    answers = {}
    for name, messages in both.items():
        assert messages is not None
        if not messages or messages[-1]["role"] != "assistant":
            raise UserError(f"{name} of the pair {id!r} does not end with the assistant's message")
        before = [{"role": "user", "content": given}] if isinstance(given, str) else given or []
        # some datasets repeat the prompt in both conversations
        repeats = list(messages[: len(before)]) == list(before)
        prompts[name] = [*([] if repeats else before), *messages[:-1]]
        answers[name] = messages[-1]["content"]
    if prompts["chosen"] != prompts["rejected"]:
        raise UserError(
            f"the conversations of the pair {id!r} differ before their last message: only answers to"
            " the same prompt can be compared"
        )
    return Task(id, prompts["chosen"], answers, rest)


def conversation(value: str | Sequence[Message]) -> list[Message] | None:
    """Returns the messages of a transcript or of a list of messages; None for any other text."""
    if not isinstance(value, str):
        return [{"role": m["role"], "content": m["content"]} for m in value]
    parts = TURN.split(value)
    if parts[0].strip() or len(parts) < 3:
        return None
    turns = zip(parts[1::2], parts[2::2], strict=True)
    return [{"role": SPEAKERS[who], "content": text.strip()} for who, text in turns]
