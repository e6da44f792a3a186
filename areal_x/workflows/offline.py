"""Learning from what is written already: workflows that make episodes of a dataset's answers.

Everything else of the ring stays: the order of tasks, the queue, batches, checkpoints, `--resume`.

    train.workflow = @demonstrations()      # sft;   task.answer is a text
    train.workflow = @preference_pairs()    # dpo, ipo, reward_model;   task.answer is {"chosen": text, "rejected": text}
    train.engine = "none"                   # unless something is evaluated on the way: then train.evaluation says how
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
    """The task's answer as if the policy had given it: what supervised fine-tuning learns."""

    tokenizer: Any = None

    def setup(self, tokenizer: Any) -> Demonstrations:
        stop_tokens(tokenizer)
        return replace(self, tokenizer=tokenizer)

    def tokens_of(self, task: Task, tokenizer: Any) -> int | None:
        return None if image_urls(task.prompt) else len(written(tokenizer, task, task.answer))

    async def run(self, task: Task, engine: Generator) -> EpisodeResult:
        return Episode(Scored(1.0), (written(self.tokenizer, task, task.answer),))


@gin.configurable("preference_pairs", denylist=["tokenizer"])
@dataclass(frozen=True)
class PreferencePairs(Workflow):
    """Two answers to the task of which one was preferred: what DPO, IPO and reward models learn.
    chosen first.

    last_token: mask but the last token of each, which is all that a reward model is judged by.
    """

    last_token: bool = False
    tokenizer: Any = None

    def setup(self, tokenizer: Any) -> PreferencePairs:
        stop_tokens(tokenizer)
        return replace(self, tokenizer=tokenizer)

    def tokens_of(self, task: Task, tokenizer: Any) -> int | None:
        if image_urls(task.prompt):
            return None
        return sum(
            len(written(tokenizer, task, task.answer[which])) for which in ("chosen", "rejected")
        )

    async def run(self, task: Task, engine: Generator) -> EpisodeResult:
        answers = task.answer
        if not isinstance(answers, Mapping) or not {"chosen", "rejected"} <= answers.keys():
            raise ValueError(
                f'task {task.id!r} is no pair: its answer must be {{"chosen": …, "rejected": …}},'
                f" not {answers!r}"
            )
        both = [written(self.tokenizer, task, answers[which]) for which in ("chosen", "rejected")]
        if self.last_token:
            both = [replace(t, mask=np.arange(len(t)) == len(t) - 1) for t in both]
        return Episode(Scored(1.0), tuple(both))


def written(tokenizer: Any, task: Task, answer: str) -> Trajectory:
    """The prompt, the answer and its end, as no policy has drawn them: log-probability 0, version
    -1. Behind messages the end is the turn's, as the chat template writes it."""
    if not isinstance(answer, str):
        raise ValueError(f"task {task.id!r} has no text to learn: its answer is {answer!r}")
    images = read_prompt_images(tokenizer, task.prompt)
    prompt = encode(tokenizer, task.prompt, images)
    end = text_ending(tokenizer) if isinstance(task.prompt, str) else turn_ending(tokenizer)
    tokens = np.asarray(
        [*tokenizer.encode(answer + end.text, add_special_tokens=False), end.token], np.int32
    )
    logprobs, versions = (
        np.zeros(len(tokens), np.float32),
        np.full(len(tokens), NOT_THE_POLICY, np.int32),
    )
    return Trajectory.from_completion(prompt, tokens, logprobs, versions, 1.0, images=images)
