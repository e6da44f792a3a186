"""The single-turn workflow, and the base class of workflows with a reward function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import gin
import numpy as np
from jaxtyping import Int32

from areal_x.errors import UserError, at_least, positive
from areal_x.hf.chat_form import chat_form, with_values
from areal_x.hf.endings import ends, stop_tokens
from areal_x.hf.image_reader import (
    image_urls,
    load_image_reader,
    read_images,
    with_image_placeholders,
)
from areal_x.protocols.engine import Request, SamplingParams
from areal_x.protocols.workflow import EpisodeResult, Generator, RewardProcesses, Workflow
from areal_x.rewards.pool import Reward, RewardLimits, RewardPool, SpreadPool
from areal_x.runtime.hosts import Hosts
from areal_x.runtime.thread import in_thread, inline_or_in_pool
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
class RewardedWorkflow(Workflow):
    """Base class of workflows that score a text with a reward function in worker processes. A
    subclass adds `run` and, for messages about its settings, `binding`."""

    reward: Reward
    """Function `(task, text) -> number`, or `-> (number, {name: number})` to report more numbers.
    The text has no special tokens."""

    sampling: SamplingParams = field(default_factory=SamplingParams)
    """How completions are sampled; the model's end tokens are added to its stop tokens."""

    reward_workers: int = 4
    """Maximum number of reward processes."""

    reward_timeout_seconds: float = 10.0
    """Time limit of one call of the reward, in seconds; the process of one that takes longer is
    killed."""

    reward_limits: RewardLimits = field(default_factory=RewardLimits)
    """Resource limits of a reward process."""

    tokenizer: Any = None
    pool: RewardProcesses | None = None

    def __post_init__(self) -> None:
        name = self.binding or type(self).__name__
        if not callable(self.reward):
            raise UserError(
                f"{name}.reward = {self.reward!r} cannot work: "
                "it must be a function (in gin `@name`, without parentheses)"
            )
        at_least(f"{name}.reward_workers", self.reward_workers, 1)
        positive(f"{name}.reward_timeout_seconds", self.reward_timeout_seconds)

    def setup(self, tokenizer: Any) -> Self:
        """Raises: UserError for a tokenizer without an end token, or a reward that cannot be sent to
        another process."""
        return replace(
            self,
            sampling=with_end(self.sampling, tokenizer),
            tokenizer=tokenizer,
            pool=self.reward_processes(self.reward_workers),
        )

    def on_hosts(self, hosts: Hosts) -> Self:
        assert isinstance(self.pool, RewardPool), "call setup(tokenizer) first"
        return replace(self, pool=SpreadPool(self.pool, hosts))

    def reward_function(self) -> Reward:
        return self.reward

    def reward_processes(self, workers: int) -> RewardPool:
        return RewardPool(self.reward, workers, self.reward_timeout_seconds, self.reward_limits)

    def greedy(self) -> Self:
        return replace(self, sampling=replace(self.sampling, temperature=0.0))

    async def score(self, task: Task, text: str) -> Outcome:
        """Runs the reward function on a text and returns the outcome."""
        assert self.pool is not None, "call setup(tokenizer) first"
        return await self.pool.score(task, text)

    async def close(self) -> None:
        if self.pool is not None:
            await self.pool.close()


@gin.configurable("single_turn", denylist=["tokenizer", "pool"])
@dataclass(frozen=True)
class SingleTurn(RewardedWorkflow):
    """Samples one completion of the task's prompt and scores it. Chat messages may contain images if
    the model accepts them."""

    binding: ClassVar[str] = "single_turn"

    def tokens_of(self, task: Task, tokenizer: Any) -> int | None:
        return prompt_tokens(task.prompt, tokenizer)

    async def run(self, task: Task, engine: Generator) -> EpisodeResult:
        urls = image_urls(task.prompt)
        images = await in_thread(read_images, self.tokenizer.name_or_path, urls) if urls else None
        prompt = await inline_or_in_pool(
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
            tokens=completion.tokens,
            logprobs=completion.logprobs,
            versions=completion.versions,
            reward=outcome.reward,
            finish_reason=completion.finish_reason,
            experts=completion.experts,
            images=images,
            kept=completion.kept,
        )
        return Episode(outcome, (trajectory,))


def with_end(sampling: SamplingParams, tokenizer: Any) -> SamplingParams:
    """Returns the sampling with the model's end tokens added to its stop tokens.

    Raises: UserError if the model has no end token.
    """
    return replace(
        sampling,
        stop_token_ids=tuple(dict.fromkeys((*sampling.stop_token_ids, *stop_tokens(tokenizer)))),
    )


def text_of(tokenizer: Any, tokens: Int32[np.ndarray, " N"]) -> str:
    """Decodes a completion without special tokens and without end tokens, which some tokenizers do
    not list as special."""
    kept = tokens[~np.isin(tokens, ends(tokenizer))]
    return str(tokenizer.decode(kept.tolist(), skip_special_tokens=True))


def prompt_tokens(prompt: str | Sequence[Message], tokenizer: Any) -> int | None:
    """Returns the number of tokens of a prompt; None if it has images, which would have to be read
    first."""
    return None if image_urls(prompt) else len(encode(tokenizer, prompt))


def encode(
    tokenizer: Any,
    prompt: str | Sequence[Message],
    images: Images | None = None,
    most: int | None = None,
) -> Int32[np.ndarray, " prompt"]:
    """Returns the token ids of a text, or of chat messages in the chat template up to the start of
    the assistant's turn.

    images: those of the messages, as `read_images` returns them. most: the engine's context, in
    tokens.

    Raises: UserError if the tokenizer has no chat template for messages, or the template no place
    for images; PromptTooLong for a text far longer than `most`.
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
    if images is None:
        form = chat_form(tokenizer)
        tokens = tokenizer.apply_chat_template(
            [form.message(with_values(message)) for message in prompt],
            add_generation_prompt=True,
            return_dict=False,
        )
        return np.asarray(tokens, np.int32)
    text = tokenizer.apply_chat_template(
        with_image_placeholders(prompt), add_generation_prompt=True, tokenize=False
    )
    return load_image_reader(tokenizer.name_or_path).tokens_of(tokenizer, text, images)
