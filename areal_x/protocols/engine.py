"""The contract of an engine: token ids in, token ids out. Text is never re-tokenised on the way to
the trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import gin
import numpy as np
from jaxtyping import Float32, Int16, Int32

from areal_x.errors import EngineError as EngineError  # part of the contract, as the next
from areal_x.errors import PromptTooLong as PromptTooLong
from areal_x.errors import TaskError, UserError, at_least, positive, within
from areal_x.types import Images, Kept

NO_SLEEP = "train.colocate = True needs train.engine = 'vllm' or 'sglang'"
CHANGES = (
    "it changes the distribution in a way that the trainer does not compute; top_p, top_k, min_p"
    " and temperature are exact"
)


@gin.configurable("sampling")
@dataclass(frozen=True)
class SamplingParams:
    """Sampling of completions. Truncation (top-p, top-k, min-p) is exact in training: the engine
    reports which tokens were kept, and the trainer's distribution is over the same ones."""

    max_tokens: int = 256
    """Maximum number of new tokens."""

    temperature: float = 1.0
    """0 decodes greedily. Training needs more than 0, with vLLM at least 0.01."""

    top_p: float = 1.0
    """Nucleus sampling: keeps the fewest most likely tokens with this probability together; 1 keeps
    all. Applied after min_p and top_k, to what they keep."""

    top_k: int = 0
    """Number of most likely tokens to keep; 0 keeps all."""

    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a completion and belong to it. A workflow adds the model's end tokens."""

    min_p: float = 0.0
    """Keeps the tokens that are at least this share as likely as the most likely one; 0 keeps
    all."""

    REFUSED: ClassVar[Mapping[str, str]] = {
        "min_tokens": "it forbids the end tokens at first, which the trainer's distribution has:"
        " score short answers lower instead",
        "stop": "not every engine decodes text while it samples: end completions with"
        " sampling.stop_token_ids, or cut the text in the reward",
        "n": "the attempts at a task are train.group_size",
        "seed": "the run's is train.seed",
        "logit_bias": CHANGES,
        "presence_penalty": CHANGES,
        "frequency_penalty": CHANGES,
        "repetition_penalty": CHANGES,
        "length_penalty": CHANGES,
        "bad_words": CHANGES,
        "allowed_token_ids": CHANGES,
    }
    """Parameters of other engines that this class lacks, and why."""

    def __post_init__(self) -> None:
        positive("sampling.max_tokens", self.max_tokens)
        at_least("sampling.temperature", self.temperature, 0)
        within("sampling.top_p", self.top_p, 0, 1)
        positive("sampling.top_p", self.top_p)
        at_least("sampling.top_k", self.top_k, 0)
        within("sampling.min_p", self.min_p, 0, 1)

    @property
    def truncates(self) -> bool:
        """True if some tokens can never be sampled. A greedy completion takes the most likely one of
        all."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


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

    adapter: str | None = None
    """The adapter to sample with, of those that an embedded engine was given (`put_adapter`), or
    servers (`FleetEngine.add_adapter`); None for the model that they have. Other engines sample with
    what they have."""

    kept: bool = True
    """Whether an engine of servers that reports what truncated sampling kept reports it here."""


@dataclass(frozen=True)
class Completion:
    """The tokens that the policy sampled for a request of P prompt tokens."""

    tokens: Int32[np.ndarray, " N"]

    logprobs: Float32[np.ndarray, " N"]
    """Under the distribution that was sampled from (after temperature, min-p, top-k and top-p)."""

    versions: Int32[np.ndarray, " N"]
    """The policy version that sampled each token."""

    finish_reason: str
    """"stop" (a stop token or string, which is included), "length" or "abort"."""

    experts: Int16[np.ndarray, "P+N layers per_token"] | None = None
    """For a mixture of experts whose engine records them: the experts that each token of prompt and
    completion was routed to; -1 for the last token, which has not been routed yet."""

    kept: Kept | None = None
    """Which tokens could be sampled at each of the N positions, if `sampling.truncates`."""


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

    async def sleep(self) -> None:
        """Freezes requests in flight and releases the memory of the engine's accelerators, which the
        trainer uses until the next `swap` or `wake`. Raises: UserError by default."""
        raise UserError(NO_SLEEP)

    async def wake(self) -> None:
        """Goes on after `sleep` with the weights of the last `swap`. Raises: UserError by default."""
        raise UserError(NO_SLEEP)

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
        raise UserError("servers can join and leave with train.engine = 'vllm' or 'sglang' alone")

    async def leave(self, url: str) -> None:
        """Removes a server from the engine. Raises: UserError by default."""
        raise UserError("servers can join and leave with train.engine = 'vllm' or 'sglang' alone")
