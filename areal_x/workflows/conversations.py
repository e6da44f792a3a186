"""Supervised fine-tuning on whole conversations: every assistant's turn is trained on, in its context,
and nothing else.

    train.algorithm = @sft()
    train.workflow = @conversations()
    train.engine = "none"
    train.dataset = @load_dataset()
    load_dataset.to_task = @conversation_task     # {"messages": [...], "tools": [...]}, a line each

Where the model's turns begin and end is what the chat template says (areal_x.workflows.turns). Texts
are tokenised in the pieces that this gives, so that the context of a turn has the tokens of a prompt,
and the turn those that a policy would be asked for. A template that rewrites earlier turns (Qwen3 drops
their reasoning) makes several sequences of one conversation, each as the policy would see it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import gin
import numpy as np

from areal_x.errors import UserError
from areal_x.hf.chat_form import encode_piece
from areal_x.hf.endings import stop_tokens
from areal_x.protocols.workflow import EpisodeResult, Generator, Workflow
from areal_x.types import NOT_THE_POLICY, Episode, Message, Scored, Task, Trajectory
from areal_x.workflows.turns import ASSISTANT, Piece, only_last, pieces_of


@gin.configurable
def conversation_task(record: Mapping[str, Any], id: str) -> Task:
    """Makes a task of a conversation: a record with `messages` (OpenAI's form, tool calls and results
    included) or ShareGPT's `conversations`, and perhaps `tools` and `chat_template_kwargs`, variables of the
    chat template such as {"enable_thinking": false}. The rest becomes metadata.

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
        variables = task.metadata.get("chat_template_kwargs")
        sequences = pieces_of(self.tokenizer, messages, tools, variables)
        if self.last_only:
            sequences = [only_last(sequences[-1])] if sequences else []
        made = [trajectory_of(self.tokenizer, pieces) for pieces in sequences]
        return [trajectory for trajectory in made if trajectory.mask.any()]


def trajectory_of(tokenizer: Any, pieces: Sequence[Piece]) -> Trajectory:
    """Returns texts as a trajectory that no policy sampled: log-probability 0, version -1."""
    encoded = [
        tokenizer.encode(text, add_special_tokens=False)
        if index == 0
        else encode_piece(tokenizer, text).tolist()
        for index, (text, _) in enumerate(pieces)
    ]
    tokens = np.asarray([token for ids in encoded for token in ids], np.int32)
    mask = np.repeat([trained for _, trained in pieces], [len(ids) for ids in encoded])
    return Trajectory(
        tokens=tokens,
        mask=mask.astype(np.bool_),
        logprobs=np.zeros(len(tokens), np.float32),
        versions=np.full(len(tokens), NOT_THE_POLICY, np.int32),
        reward=1.0,
    )
