"""Parses the responses of a vLLM server: tokens, log-probabilities, versions, experts, kept tokens,
errors."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import msgspec
import numpy as np
from jaxtyping import Float32, Int16

from areal_x.engines.fleet.failures import ServerFailed
from areal_x.engines.fleet.kept_tokens import kept_of
from areal_x.engines.fleet.versions import Span, versions_from
from areal_x.protocols.engine import Completion, EngineError
from areal_x.types import NOT_RECORDED, Kept

NO_LOGPROB = -9999.0  # what vLLM sends for a missing log-probability
ROUNDING = 1e-3  # how far above 0 rounding may put a log-probability
REPORT_KEPT = (
    "start it with VLLM_USE_V2_MODEL_RUNNER=0, without speculative decoding, areal-x installed"
    " beside it"
)
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
RECORD_EXPERTS = "--enable-return-routed-experts"


# A long response has thousands of these, none of which can be part of a cycle: gc=False, and a tuple
# where there is usually nothing, spare the collector them.
class TokenLogprob(msgspec.Struct, gc=False):
    """One of the likeliest tokens at a position."""

    logprob: float
    token_id: int | None = None
    token: str = ""
    """Before vLLM 0.32, "token_id:5" in place of the number."""

    @property
    def id(self) -> int:
        return int(self.token.removeprefix("token_id:")) if self.token_id is None else self.token_id


class TokenLogprobs(msgspec.Struct, gc=False):
    """The sampled token's log-probability, and those of the likeliest at its position."""

    logprob: float
    top_logprobs: tuple[TokenLogprob, ...] | None = None


class Logprobs(msgspec.Struct):
    content: list[TokenLogprobs] | None = None


class Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    logprobs: Logprobs | None = None
    weight_versions: list[Span] | None = None
    routed_experts: str | None = None
    sampling_mask: tuple[tuple[TokenId, ...], ...] | None = None


class Generated(msgspec.Struct):
    """The fields of a generate endpoint's response that are used: to parse these alone takes a
    fifth of the time that the whole JSON takes."""

    choices: tuple[Choice]


def generated_from(body: bytes) -> Generated:
    """Parses the response of a generate endpoint. Raises ServerFailed if it is none."""
    try:
        return msgspec.json.decode(body, type=Generated)
    except msgspec.MsgspecError as error:
        raise ServerFailed(f"vLLM responded to a generate request with {error}") from error


def completion_from(answer: Generated, version: int | None = None) -> Completion:
    """Returns the completion in a response. version: of all its tokens, from a server that does not
    report it. Raises EngineError if a log-probability or a version is missing."""
    (choice,) = answer.choices
    tokens, reason = choice.token_ids or [], choice.finish_reason
    if reason not in ("stop", "length", "abort"):
        raise ServerFailed(f"vLLM ended a request with {reason!r}")
    content = (choice.logprobs.content if choice.logprobs else None) or []
    logprobs = [entry.logprob for entry in content]
    if len(logprobs) != len(tokens) or min(logprobs, default=0.0) <= NO_LOGPROB:
        raise EngineError(
            "vLLM omitted the log-probability of a token: the weights may contain NaN"
        )
    return Completion(
        tokens=np.asarray(tokens, np.int32),
        logprobs=np.asarray(logprobs, np.float32),
        versions=np.full(len(tokens), version, np.int32)
        if version is not None
        else versions_from(choice.weight_versions or [], len(tokens)),
        finish_reason=reason,
    )


def completion_of(
    answer: Generated, prompt: int, experts: bool, kept: bool, version: int | None = None
) -> Completion:
    """Returns the completion in an answer, with the experts and kept tokens that are wanted.

    prompt: its length. version: of all tokens, where the answer has none. Raises EngineError as
    `completion_from`, `experts_from` and `kept_from`.
    """
    completion = completion_from(answer, version)
    if kept:
        completion = replace(completion, kept=kept_from(answer))
    if not experts:
        return completion
    return replace(completion, experts=experts_from(answer, prompt + len(completion.tokens)))


def experts_from(answer: Generated, length: int) -> Int16[np.ndarray, "length layers per_token"]:
    """Returns the experts of each token of a prompt and its completion; -1 for the last, which the
    server has sampled but not computed. Raises EngineError if the server recorded none, or not
    those of every token."""
    (choice,) = answer.choices
    encoded = choice.routed_experts
    if encoded is None:
        raise EngineError(
            f"vLLM did not record experts: start it with {RECORD_EXPERTS} and"
            " VLLM_USE_V2_MODEL_RUNNER=1"
        )
    recorded = np.load(io.BytesIO(base64.b64decode(encoded)), allow_pickle=False)
    if recorded.ndim != 3 or len(recorded) not in (length - 1, length):
        raise EngineError(
            f"vLLM recorded experts of shape {recorded.shape} for a sequence of {length} tokens"
        )
    experts = np.full((length, *recorded.shape[1:]), NOT_RECORDED, np.int16)
    experts[: length - 1] = recorded[: length - 1]
    return experts


def kept_from(answer: Generated) -> Kept:
    """Returns what top-p, top-k and min-p kept at each token of a completion. Raises EngineError if
    the server did not report it, or what it reported cannot be."""
    (choice,) = answer.choices
    tokens, reported = choice.token_ids or [], choice.sampling_mask
    if not tokens:
        return Kept.everything(0)
    if reported is None:
        raise EngineError(
            "vLLM did not report which tokens sampling.top_p, top_k and min_p kept, without which"
            f" they cannot be trained on: {REPORT_KEPT}"
        )
    try:
        return kept_of(reported, tokens, "vLLM")
    except EngineError as error:
        raise EngineError(f"{error}: {REPORT_KEPT}") from error


def scores_from(answer: Mapping[str, Any], tokens: Sequence[int]) -> Float32[np.ndarray, " T"]:
    """Returns the log-probabilities of a prompt's tokens, 0 for the first. Raises EngineError if
    one is missing or is a logit."""
    entries = answer["choices"][0].get("prompt_logprobs")
    if not entries or len(entries) != len(tokens):
        raise EngineError(
            "the server does not score prompts (prompt_logprobs of /v1/completions): it must be a"
            " vLLM server"
        )
    scores = [0.0]
    for entry, token in zip(entries[1:], tokens[1:], strict=True):
        score = (entry.get(str(token)) or {}).get("logprob")
        if score is None or not score > NO_LOGPROB:
            raise EngineError(
                "vLLM omitted the log-probability of a prompt token: the weights may contain NaN"
            )
        scores.append(float(score))
    if max(scores) > ROUNDING:
        raise EngineError(
            "vLLM returned logits instead of log-probabilities: start it without --logprobs-mode"
        )
    return np.asarray(scores, np.float32)


def next_from(answer: Generated, token: int) -> float:
    """Returns the log-probability of the token that a generate request named. Raises EngineError if
    it is missing."""
    (choice,) = answer.choices
    content = choice.logprobs.content if choice.logprobs else None
    likeliest = (content[0].top_logprobs if content else None) or ()
    found = {entry.id: entry.logprob for entry in likeliest}.get(token, NO_LOGPROB)
    if not NO_LOGPROB < found <= ROUNDING:
        raise EngineError(
            f"vLLM returned {found} as the log-probability of a requested token: the weights may"
            " contain NaN"
        )
    return float(found)
