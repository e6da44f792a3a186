"""Supervised fine-tuning on whole conversations: every assistant's turn is trained on, in its context,
and nothing else.

    train.algorithm = @sft()
    train.workflow = @conversations()
    train.engine = "none"
    train.dataset = @load_dataset()
    load_dataset.to_task = @conversation_task     # {"messages": [...], "tools": [...]}, a line each

Where the model's turns begin and end is what the chat template says: by its `{% generation %}` tags,
or else by rendering the conversation up to each turn, with the turn opened as for generation. Texts
are tokenised in the pieces that this gives, so that the context of a turn has the tokens of a prompt,
and the turn those that a policy would be asked for. A template that rewrites earlier turns (Qwen3 drops
their reasoning) makes several sequences of one conversation, each as the policy would see it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import gin
import numpy as np

from areal_x.errors import UserError
from areal_x.hf.endings import special_tokens, stop_tokens, turn_ending
from areal_x.protocols.workflow import EpisodeResult, Generator, Workflow
from areal_x.types import NOT_THE_POLICY, Episode, Message, Scored, Task, Trajectory

ASSISTANT = "assistant"
TAG = re.compile(r"{%-?\s*generation\s*-?%}")
Piece = tuple[str, bool]  # a text, and whether it is trained on


@gin.configurable
def conversation_task(record: Mapping[str, Any], id: str) -> Task:
    """Makes a task of a conversation: a record with `messages` (OpenAI's form, tool calls and results
    included) or ShareGPT's `conversations`, and perhaps `tools`. The rest becomes metadata.

    A message with `"weight": 0` is not trained on.

    Args:
        record: One of the dataset's.
        id: The task's.

    Raises: UserError for a record without a message of the assistant.
    """
    messages = record["conversations"] if "conversations" in record else record["messages"]
    prompt = [_message(message) for message in messages]
    if not any(message["role"] == ASSISTANT for message in prompt):
        raise UserError(f"the conversation {id!r} has no message of the assistant to train on")
    rest = {k: v for k, v in record.items() if k not in ("messages", "conversations")}
    return Task(id, prompt, None, rest)


SHAREGPT = {"human": "user", "gpt": ASSISTANT, "system": "system", "tool": "tool"}


def _message(message: Mapping[str, Any]) -> Message:
    if "from" in message:
        role = SHAREGPT.get(message["from"], message["from"])
        return {"role": role, "content": message["value"]}
    # Arrow's files give every message every key that any message has.
    return {name: x for name, x in message.items() if x is not None or name == "content"}


@gin.configurable("conversations", denylist=["tokenizer"])
@dataclass(frozen=True)
class Conversations(Workflow):
    """Turns a task's conversation into trajectories whose assistant's turns are imitated."""

    last_only: bool = False
    """True trains on the last turn of the assistant alone."""

    tokenizer: Any = None

    def setup(self, tokenizer: Any) -> Conversations:
        """Raises: UserError for a tokenizer without a chat template or an end token."""
        stop_tokens(tokenizer)
        if tokenizer.chat_template is None:
            raise UserError(
                "conversations need a chat template, which the tokenizer lacks: add"
                " chat_template.jinja to the model"
            )
        return replace(self, tokenizer=tokenizer)

    def tokens_of(self, task: Task, tokenizer: Any) -> int | None:
        return max(map(len, replace(self, tokenizer=tokenizer).trajectories(task)), default=0)

    async def run(self, task: Task, engine: Generator) -> EpisodeResult:
        return Episode(Scored(1.0), tuple(self.trajectories(task)))

    def trajectories(self, task: Task) -> list[Trajectory]:
        """Returns the sequences of a task's conversation, in order."""
        if isinstance(task.prompt, str):
            raise ValueError(f"task {task.id!r} is a text: its prompt must be a list of messages")
        messages, tools = list(task.prompt), task.metadata.get("tools") or None
        sequences = pieces_of(self.tokenizer, messages, tools)
        if self.last_only:
            sequences = [only_last(sequences[-1])] if sequences else []
        made = [trajectory_of(self.tokenizer, pieces) for pieces in sequences]
        return [trajectory for trajectory in made if trajectory.mask.any()]


def pieces_of(
    tokenizer: Any, messages: Sequence[Message], tools: Sequence[Any] | None = None
) -> list[list[Piece]]:
    """Returns the sequences of a conversation, each as texts of which some are trained on.

    Raises: ValueError if the template does not render a turn after what precedes it.
    """
    if TAG.search(str(tokenizer.chat_template)):
        return [_tagged(tokenizer, messages, tools)]
    end = special_tokens(tokenizer).get(turn_ending(tokenizer).token, "")
    sequences: list[list[Piece]] = []
    for index, message in enumerate(messages):
        if message.get("role") != ASSISTANT:
            continue
        context, turn = _turn(tokenizer, messages[: index + 1], tools)
        # what the template writes after the end of a turn, a policy does not generate
        turn = turn[: turn.rindex(end) + len(end)] if end and end in turn else turn
        is_trained = message.get("weight", 1) != 0
        so_far = "".join(text for text, _ in sequences[-1]) if sequences else None
        if so_far is not None and context.startswith(so_far):
            sequences[-1] += [(context[len(so_far) :], False), (turn, is_trained)]
        else:
            sequences.append([(context, False), (turn, is_trained)])
    return sequences


def only_last(pieces: Sequence[Piece]) -> list[Piece]:
    """Returns the pieces with the last one that is trained on as the only one."""
    last = max((i for i, (_, trained) in enumerate(pieces) if trained), default=-1)
    return [(text, i == last) for i, (text, _) in enumerate(pieces)]


def trajectory_of(tokenizer: Any, pieces: Sequence[Piece]) -> Trajectory:
    """Returns texts as a trajectory that no policy sampled: log-probability 0, version -1."""
    encoded = [tokenizer.encode(text, add_special_tokens=False) for text, _ in pieces]
    tokens = np.asarray([token for ids in encoded for token in ids], np.int32)
    mask = np.repeat([trained for _, trained in pieces], [len(ids) for ids in encoded])
    return Trajectory(
        tokens=tokens,
        mask=mask.astype(np.bool_),
        logprobs=np.zeros(len(tokens), np.float32),
        versions=np.full(len(tokens), NOT_THE_POLICY, np.int32),
        reward=1.0,
    )


def _turn(
    tokenizer: Any, messages: Sequence[Message], tools: Sequence[Any] | None
) -> tuple[str, str]:
    """Returns the context of the last message and its own text, as rendered at the end of a
    conversation."""

    def rendered(part: Sequence[Message], opened: bool = False) -> str:
        shown = [{k: v for k, v in message.items() if k != "weight"} for message in part]
        return str(
            tokenizer.apply_chat_template(
                shown, tools=tools, tokenize=False, add_generation_prompt=opened
            )
        )

    whole, before = rendered(messages), rendered(messages[:-1]) if len(messages) > 1 else ""
    opened = rendered(messages[:-1], opened=True) if len(messages) > 1 else ""
    # an opened turn may begin with a thought, where the conversation has none
    same = (i for i, (a, b) in enumerate(zip(opened, whole, strict=False)) if a != b)
    context = whole[: next(same, min(len(opened), len(whole)))]
    if not context.startswith(before):
        raise ValueError(
            "the chat template does not write the assistant's turn after the messages before it:"
            " mark it with {% generation %} … {% endgeneration %}"
        )
    return context, whole[len(context) :]


def _tagged(
    tokenizer: Any, messages: Sequence[Message], tools: Sequence[Any] | None
) -> list[Piece]:
    """Returns the texts inside and outside of the template's generation tags."""
    from transformers.utils.chat_template_utils import render_jinja_template

    texts, spans = render_jinja_template(
        [list(messages)],
        tools=tools,
        chat_template=tokenizer.chat_template,
        return_assistant_tokens_mask=True,
        **tokenizer.special_tokens_map,
    )
    weights = [m.get("weight", 1) != 0 for m in messages if m.get("role") == ASSISTANT]
    if len(weights) != len(spans[0]):
        raise ValueError(
            f"the chat template has {len(spans[0])} generation spans for {len(weights)} messages of"
            " the assistant"
        )
    pieces, at = [], 0
    for (first, end), is_trained in zip(spans[0], weights, strict=True):
        pieces += [(texts[0][at:first], False), (texts[0][first:end], is_trained)]
        at = end
    return pieces
