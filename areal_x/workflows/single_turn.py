"""Workflows that ask for one completion and score its text: the single turn, and what others build
on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import gin
import numpy as np
from jaxtyping import Int32

from areal_x.errors import UserError, at_least, positive
from areal_x.hf.endings import ends, stop_tokens
from areal_x.hf.image_reader import (
    image_urls,
    load_image_reader,
    read_images,
    with_image_placeholders,
)
from areal_x.protocols.engine import Request, SamplingParams
from areal_x.protocols.workflow import EpisodeResult, Generator, Workflow
from areal_x.rewards.pool import Reward, RewardLimits, RewardPool
from areal_x.runtime.thread import beside, in_thread
from areal_x.tasks.text_length import estimate_characters, raise_if_too_long, texts_of
from areal_x.types import (
    Episode,
    Failed,
    Images,
    Message,
    Outcome,
    Scored,
    Task,
    Trajectory,
)

ABORTED = Failed("the engine aborted the request")


@dataclass(frozen=True)
class Judged(Workflow):
    """A workflow that asks for completions and has a text of theirs judged. One that gin makes adds
    `run` and its own name.

    reward: a function (task, text) -> number, or -> (number, {name: number}); text is a completion
    without special tokens. sampling: how completions are drawn; the model's end tokens are added to
    its stop tokens. reward_workers: most processes that judge at once. reward_timeout_seconds:
    after which a reward is ended with its process. reward_limits: what that process may use beside
    time.
    """

    binding: ClassVar[str]  # its name in a gin file

    reward: Reward
    sampling: SamplingParams = field(default_factory=SamplingParams)
    reward_workers: int = 4
    reward_timeout_seconds: float = 10.0
    reward_limits: RewardLimits = field(default_factory=RewardLimits)
    tokenizer: Any = None
    pool: RewardPool | None = None

    def __post_init__(self) -> None:
        if not callable(self.reward):
            raise UserError(
                f"{self.binding}.reward = {self.reward!r} cannot work: "
                "it must be a function (in gin `@name`, without parentheses)"
            )
        at_least(f"{self.binding}.reward_workers", self.reward_workers, 1)
        positive(f"{self.binding}.reward_timeout_seconds", self.reward_timeout_seconds)

    def setup(self, tokenizer: Any) -> Self:
        """Raises UserError for a tokenizer without an end token, or a reward that no other process
        could run."""
        return replace(
            self,
            sampling=with_end(self.sampling, tokenizer),
            tokenizer=tokenizer,
            pool=self.reward_processes(self.reward_workers),
        )

    def reward_function(self) -> Reward:
        return self.reward

    def reward_processes(self, workers: int) -> RewardPool:
        return RewardPool(self.reward, workers, self.reward_timeout_seconds, self.reward_limits)

    def greedy(self) -> Self:
        return replace(self, sampling=replace(self.sampling, temperature=0.0))

    async def score(self, task: Task, text: str) -> Outcome:
        """What became of judging a text."""
        assert self.pool is not None, "call setup(tokenizer) first"
        return await self.pool.score(task, text)

    async def close(self) -> None:
        if self.pool is not None:
            await self.pool.close()


@gin.configurable("single_turn", denylist=["tokenizer", "pool"])
@dataclass(frozen=True)
class SingleTurn(Judged):
    """One prompt, one completion, one score. A prompt of messages may show images to a model that
    sees.

    reward: a function (task, text) -> number, or -> (number, {name: number}); text is the
    completion without special tokens. sampling: how completions are drawn; the model's end tokens
    are added to its stop tokens. reward_workers: most processes that judge at once.
    reward_timeout_seconds: after which a reward is ended with its process. reward_limits: what that
    process may use beside time.
    """

    binding: ClassVar[str] = "single_turn"

    def tokens_of(self, task: Task, tokenizer: Any) -> int | None:
        return prompt_tokens(task.prompt, tokenizer)

    async def run(self, task: Task, engine: Generator) -> EpisodeResult:
        urls = image_urls(task.prompt)
        images = await in_thread(read_images, self.tokenizer.name_or_path, urls) if urls else None
        prompt = await beside(
            estimate_characters(task.prompt),
            encode,
            self.tokenizer,
            task.prompt,
            images,
            engine.context,
        )
        completion = await engine.generate(Request(prompt, self.sampling, images=images))
        if completion.finish_reason == "abort":
            return ABORTED
        outcome = await self.score(task, text_of(self.tokenizer, completion.tokens))
        if not isinstance(outcome, Scored):
            return outcome
        trajectory = Trajectory.from_completion(
            prompt,
            completion.tokens,
            completion.logprobs,
            completion.versions,
            outcome.reward,
            completion.finish_reason,
            completion.experts,
            images,
        )
        return Episode(outcome, (trajectory,))


def with_end(sampling: SamplingParams, tokenizer: Any) -> SamplingParams:
    """The sampling with the model's end tokens among its stop tokens. Raises UserError where there
    is none."""
    return replace(
        sampling,
        stop_token_ids=tuple(dict.fromkeys((*sampling.stop_token_ids, *stop_tokens(tokenizer)))),
    )


def text_of(tokenizer: Any, tokens: Int32[np.ndarray, " N"]) -> str:
    """What a completion says, without special tokens and those that end one, which a tokenizer may
    not call special."""
    said = tokens[~np.isin(tokens, ends(tokenizer))]
    return str(tokenizer.decode(said.tolist(), skip_special_tokens=True))


def prompt_tokens(prompt: str | Sequence[Message], tokenizer: Any) -> int | None:
    """How many there are; None where it has images, of which only reading them tells."""
    return None if image_urls(prompt) else len(encode(tokenizer, prompt))


def encode(
    tokenizer: Any,
    prompt: str | Sequence[Message],
    images: Images | None = None,
    most: int | None = None,
) -> Int32[np.ndarray, " prompt"]:
    """Token ids of a text as it is, or of messages in the chat template with the assistant's turn
    opened.

    images: those of the messages, as `read_pictures` makes them. most: tokens that are of any use.
    Raises UserError for messages where the tokenizer has no chat template, or one without a place
    for images; PromptTooLong for many more than `most`.
    """
    if most is not None:
        texts = [prompt] if isinstance(prompt, str) else texts_of(prompt)
        raise_if_too_long(
            lambda piece: len(tokenizer.encode(piece, add_special_tokens=False)), texts, most
        )
    if isinstance(prompt, str):
        return np.asarray(tokenizer.encode(prompt), np.int32)
    if tokenizer.chat_template is None:
        raise UserError(
            "the prompt is a list of messages but the tokenizer has no chat template: add"
            " chat_template.jinja to the model"
        )
    messages = list(prompt) if images is None else with_image_placeholders(prompt)
    tokens = np.asarray(
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False),
        np.int32,
    )
    return (
        tokens
        if images is None
        else load_image_reader(tokenizer.name_or_path).expand_tokens(tokens, images)
    )
