"""The engine's contract: token ids in, token ids out. Text is never re-tokenised on the way to the
trainer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import gin
import numpy as np
from jaxtyping import Float32, Int16, Int32

from areal_x.errors import EngineError as EngineError  # part of the contract below
from areal_x.errors import PromptTooLong as PromptTooLong
from areal_x.errors import TaskError, at_least, positive, within
from areal_x.types import Images


@gin.configurable("sampling")
@dataclass(frozen=True)
class SamplingParams:
    """How a completion is drawn.

    max_tokens: most new tokens. temperature: 0 is greedy. top_p: 1 keeps all. top_k: 0 keeps all.
    Training samples from the whole distribution, at a temperature above 0 (vLLM: of at least 0.01).
    stop_token_ids: tokens that end a completion and belong to it; a workflow adds the model's end
    tokens.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        positive("sampling.max_tokens", self.max_tokens)
        at_least("sampling.temperature", self.temperature, 0)
        within("sampling.top_p", self.top_p, 0, 1)
        positive("sampling.top_p", self.top_p)
        at_least("sampling.top_k", self.top_k, 0)


@dataclass(frozen=True)
class Request:
    """One prompt to continue.

    tokens: the prompt. seed: fixes the completion on engines that honour it (the embedded one: the
    draw of the n-th new token depends on (seed, n) alone, never on what else is in the batch); None
    lets the engine choose. images: those that tokens of the prompt stand for; an engine that cannot
    see them raises UserError. stop: texts that make the rest worthless: an engine that reads what
    it draws ends the completion with the token that completes one, others go on.
    """

    tokens: Int32[np.ndarray, " prompt"]
    sampling: SamplingParams
    seed: int | None = None
    images: Images | None = None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Completion:
    """What the policy said, token by token.

    logprobs: under the distribution actually sampled from (after temperature, top-p and top-k).
    versions: the policy version of each token. finish_reason: "stop" (a stop token or text, which
    is included), "length" or "abort". experts: of a mixture, where the engine records them: those
    that each token of prompt and completion went through (-1 for the last, which none has yet).
    """

    tokens: Int32[np.ndarray, " N"]
    logprobs: Float32[np.ndarray, " N"]
    versions: Int32[np.ndarray, " N"]
    finish_reason: str
    experts: Int16[np.ndarray, "P+N layers per_token"] | None = None


def room(request: Request, context: int, binding: str) -> int:
    """How many tokens may be generated: the request's max_tokens, cut to what the context leaves.

    Raises: PromptTooLong naming `binding`, the setting to raise; TaskError for an empty prompt.
    """
    prompt = len(request.tokens)
    if prompt == 0:
        raise TaskError("a prompt of no tokens cannot be continued: give at least one token")
    if prompt >= context:
        raise PromptTooLong(
            f"a prompt of {prompt} tokens leaves no room in a context of {context}: raise {binding}"
        )
    return min(request.sampling.max_tokens, context - prompt)


class Engine(Protocol):
    """Generates while the trainer trains. All coroutines run on the rollout's event loop; `stage`
    on the trainer's thread.

    concurrency: requests worth keeping in flight. context: longest prompt and completion together.
    version: weights held now.
    """

    concurrency: int
    context: int
    version: int

    async def start(self) -> None:
        """Ready to generate when this returns. Raises EngineError or UserError with the reason in
        one sentence."""
        ...

    async def generate(self, request: Request) -> Completion:
        """Raises ValueError for a prompt that leaves no room in the context, EngineError when the
        engine is lost."""
        ...

    def stage(self, trainer: Any, version: int | None = None) -> Any:
        """Copies the trainer's weights to where the swap will find them, while generation goes on.
        version: of these weights, by default the trainer's."""
        ...

    async def swap(self, staged: Any) -> float:
        """Makes the staged weights current and returns the seconds that generation stood still.
        Requests in flight continue under the new weights with their caches recomputed, so every
        token has one true version."""
        ...

    async def close(self) -> None:
        """Ends everything that `start` began; safe to call twice and after a failed start."""
        ...
