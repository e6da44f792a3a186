"""The contract of an engine: token ids in, token ids out. Text is never re-tokenised on the way to
the trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import gin
import numpy as np
from jaxtyping import Float32, Int16, Int32

from areal_x.errors import EngineError as EngineError  # part of the contract, as the next
from areal_x.errors import PromptTooLong as PromptTooLong
from areal_x.errors import TaskError, UserError, at_least, positive, within
from areal_x.types import Images


@gin.configurable("sampling")
@dataclass(frozen=True)
class SamplingParams:
    """Sampling of completions. Training samples from the whole distribution, at a temperature above
    0."""

    max_tokens: int = 256
    """Maximum number of new tokens."""

    temperature: float = 1.0
    """0 decodes greedily. Training needs more than 0, with vLLM at least 0.01."""

    top_p: float = 1.0
    """Nucleus sampling: the probability mass to keep; 1 keeps everything, as training needs."""

    top_k: int = 0
    """Number of most likely tokens to keep; 0 keeps all, as training needs."""

    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a completion and belong to it. A workflow adds the model's end tokens."""

    def __post_init__(self) -> None:
        positive("sampling.max_tokens", self.max_tokens)
        at_least("sampling.temperature", self.temperature, 0)
        within("sampling.top_p", self.top_p, 0, 1)
        positive("sampling.top_p", self.top_p)
        at_least("sampling.top_k", self.top_k, 0)


@dataclass(frozen=True)
class Request:
    """One prompt to continue."""

    tokens: Int32[np.ndarray, " prompt"]
    """The prompt."""

    sampling: SamplingParams

    seed: int | None = None
    """Makes the completion reproducible on engines that honour it: with the embedded one, the n-th
    new token depends on (seed, n) alone, never on the rest of the batch. None lets the engine
    choose."""

    images: Images | None = None
    """The images that tokens of the prompt stand for; an engine without image support raises
    UserError."""

    stop: tuple[str, ...] = ()
    """Strings after which the rest is worthless: an engine that detokenises while sampling ends the
    completion with the token that completes one; other engines ignore them."""


@dataclass(frozen=True)
class Completion:
    """The tokens that the policy sampled for a request of P prompt tokens."""

    tokens: Int32[np.ndarray, " N"]

    logprobs: Float32[np.ndarray, " N"]
    """Under the distribution that was sampled from (after temperature, top-p and top-k)."""

    versions: Int32[np.ndarray, " N"]
    """The policy version that sampled each token."""

    finish_reason: str
    """"stop" (a stop token or string, which is included), "length" or "abort"."""

    experts: Int16[np.ndarray, "P+N layers per_token"] | None = None
    """For a mixture of experts whose engine records them: the experts that each token of prompt and
    completion was routed to; -1 for the last token, which has not been routed yet."""


def max_new_tokens(request: Request, context: int, binding: str) -> int:
    """Returns the request's max_tokens, cut to what the prompt leaves of the context.

    Raises: PromptTooLong naming `binding`, the setting to raise; TaskError for an empty prompt.
    """
    prompt = len(request.tokens)
    if prompt == 0:
        raise TaskError("an empty prompt cannot be continued: give at least one token")
    if prompt >= context:
        raise PromptTooLong(
            f"a prompt of {prompt} tokens leaves no room in a context of {context}: raise {binding}"
        )
    return min(request.sampling.max_tokens, context - prompt)


@dataclass(frozen=True)
class Staged:
    """Weights that are ready to be swapped in. Engines subclass it to add where they are."""

    version: int
    """The policy version of the weights."""

    bytes: int = 0
    """Bytes written to files for the servers; 0 if nothing was written."""

    reads_trainer: bool = False
    """True if the swap reads the trainer's own memory, which must not change before it ends."""


class ChatServer(Protocol):
    """A server that applies the model's chat template and parsers itself."""

    async def render(self, body: Mapping[str, Any]) -> list[int]:
        """Returns the prompt tokens of a chat completion request, given without a model."""
        ...

    async def derender(
        self, tokens: Sequence[int], body: Mapping[str, Any], before: Sequence[int]
    ) -> dict[str, Any]:
        """Returns the assistant message that a completion's tokens parse to. body: the request.
        before: the last tokens of its prompt."""
        ...


class Engine(Protocol):
    """Generates while the trainer trains. All coroutines run on the rollout's event loop; `stage`
    runs on the trainer's thread.

    An engine of your own subclasses this class. It implements start, generate, stage, swap and
    close; the other methods have defaults.
    """

    concurrency: int
    """Number of requests worth keeping in flight."""

    context: int
    """Maximum length of prompt and completion together, in tokens; 0 if the engine sets none."""

    version: int
    """The policy version of the current weights; -1 before the first."""

    async def start(self) -> None:
        """Returns once the engine can generate. Raises EngineError or UserError with the reason in
        one sentence."""
        ...

    async def generate(self, request: Request) -> Completion:
        """Raises UserError for a prompt that leaves no room in the context, EngineError if the
        engine is lost."""
        ...

    def stage(self, trainer: Any, version: int | None = None) -> Staged:
        """Copies the trainer's weights to where the swap will find them, while generation goes on.
        version: of these weights, by default the trainer's."""
        ...

    async def swap(self, staged: Any) -> float:
        """Makes the weights that this engine's `stage` returned current, and returns the seconds
        that generation was paused. Requests in flight continue under the new weights with their
        KV cache recomputed, so every token has one true version."""
        ...

    async def close(self) -> None:
        """Ends everything that `start` began; safe to call twice and after a failed start."""
        ...

    def submit(self, requests: Sequence[Request]) -> list[asyncio.Future[Completion]]:
        """Starts requests that the engine schedules together, so that repeated runs compute the
        same bits. Cancelling a future drops its request.

        Raises: UserError by default: only the embedded engine is deterministic.
        """
        raise UserError("train.deterministic = True needs train.engine = 'embedded'")

    def chat_servers(self) -> Sequence[ChatServer]:
        """Returns the servers that can render chat templates now. Raises: UserError by default."""
        raise UserError(
            "rendering = 'server' needs vLLM servers (train.engine = 'vllm') and a model with a chat"
            " template"
        )

    def balance(self, trainer_idle: float, rollout_idle: float) -> dict[str, float]:
        """Called after each step with the shares of it in which the trainer waited for groups, and
        in which no request was in flight; may change how much generates. Returns metrics of the
        step."""
        return {}

    async def join(self, url: str) -> None:
        """Adds a running server to the engine. Raises: UserError by default."""
        raise UserError("servers can join and leave with train.engine = 'vllm' alone")

    async def leave(self, url: str) -> None:
        """Removes a server from the engine. Raises: UserError by default."""
        raise UserError("servers can join and leave with train.engine = 'vllm' alone")
