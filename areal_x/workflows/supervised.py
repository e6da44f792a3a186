"""Workflows that train on a dataset's own answers: demonstrations and preference pairs.

The rest of the ring is unchanged: the order of tasks, the queue, batches, checkpoints, `--resume`.

    train.workflow = @demonstrations()      # sft;   task.answer is a text
    train.workflow = @preference_pairs()    # dpo, ipo, reward_model;   task.answer is {"chosen": text, "rejected": text}
    train.engine = "none"                   # or an engine, to evaluate during training with train.evaluation
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import gin
import numpy as np

from areal_x.hf.endings import stop_tokens, text_ending, turn_ending
from areal_x.hf.image_reader import image_urls, read_prompt_images
from areal_x.protocols.workflow import EpisodeResult, Generator, Workflow
from areal_x.types import NOT_THE_POLICY, Episode, Scored, Task, Trajectory
from areal_x.workflows.single_turn import encode


@gin.configurable("demonstrations", denylist=["tokenizer"])
@dataclass(frozen=True)
class Demonstrations(Workflow):
    """Turns a task's answer into a trajectory to imitate, for supervised fine-tuning."""

    tokenizer: Any = None

    def setup(self, tokenizer: Any) -> Demonstrations:
        stop_tokens(tokenizer)
        return replace(self, tokenizer=tokenizer)

    def tokens_of(self, task: Task, tokenizer: Any) -> int | None:
        return None if image_urls(task.prompt) else len(demonstration(tokenizer, task, task.answer))

    async def run(self, task: Task, engine: Generator) -> EpisodeResult:
        return Episode(Scored(1.0), (demonstration(self.tokenizer, task, task.answer),))


@gin.configurable("preference_pairs", denylist=["tokenizer"])
@dataclass(frozen=True)
class PreferencePairs(Workflow):
    """Turns a task's chosen and rejected answers into a pair of trajectories, the chosen one first,
    for DPO, IPO and reward models."""

    last_token: bool = False
    """True trains on the last token of each answer only, where a reward model's score is read."""

    tokenizer: Any = None

    def setup(self, tokenizer: Any) -> PreferencePairs:
        stop_tokens(tokenizer)
        return replace(self, tokenizer=tokenizer)

    def tokens_of(self, task: Task, tokenizer: Any) -> int | None:
        if image_urls(task.prompt):
            return None
        return sum(
            len(demonstration(tokenizer, task, task.answer[which]))
            for which in ("chosen", "rejected")
        )

    async def run(self, task: Task, engine: Generator) -> EpisodeResult:
        answers = task.answer
        if not isinstance(answers, Mapping) or not {"chosen", "rejected"} <= answers.keys():
            raise ValueError(
                f'task {task.id!r} is not a pair: its answer must be {{"chosen": …, "rejected": …}},'
                f" not {answers!r}"
            )
        both = [
            demonstration(self.tokenizer, task, answers[which]) for which in ("chosen", "rejected")
        ]
        if self.last_token:
            both = [replace(t, mask=np.arange(len(t)) == len(t) - 1) for t in both]
        return Episode(Scored(1.0), tuple(both))


def demonstration(tokenizer: Any, task: Task, answer: str) -> Trajectory:
    """Returns prompt, answer and end token as a trajectory that no policy sampled: log-probability
    0, version -1. After chat messages, the end is what the chat template writes at the end of a
    turn.

    Raises: ValueError for an answer that is not text.
    """
    if not isinstance(answer, str):
        raise ValueError(f"task {task.id!r} has no text to train on: its answer is {answer!r}")
    images = read_prompt_images(tokenizer, task.prompt)
    prompt = encode(tokenizer, task.prompt, images)
    end = text_ending(tokenizer) if isinstance(task.prompt, str) else turn_ending(tokenizer)
    tokens = np.asarray(
        [*tokenizer.encode(answer + end.text, add_special_tokens=False), end.token], np.int32
    )
    return Trajectory.from_completion(
        prompt,
        tokens,
        logprobs=np.zeros(len(tokens), np.float32),
        versions=np.full(len(tokens), NOT_THE_POLICY, np.int32),
        reward=1.0,
        images=images,
    )
