"""Parses the responses of a vLLM server: tokens, log-probabilities, versions, experts, errors."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from jaxtyping import Float32, Int16, Int32

from areal_x.engines.vllm.failures import ServerFailed, ServerRestarted
from areal_x.protocols.engine import Completion, EngineError
from areal_x.types import NOT_RECORDED

NO_LOGPROB = -9999.0  # what vLLM sends for a missing log-probability
ROUNDING = 1e-3  # how far above 0 rounding may put a log-probability
RECORD_EXPERTS = "--enable-return-routed-experts"


# A long response has thousands of these, none of which can be part of a cycle: gc=False, and a tuple
# where there is usually nothing, spare the collector them.
class TokenLogprob(msgspec.Struct, gc=False):
    """One of the likeliest tokens at a position."""

    token_id: int
    logprob: float


class TokenLogprobs(msgspec.Struct, gc=False):
    """The sampled token's log-probability, and those of the likeliest at its position."""

    logprob: float
    top_logprobs: tuple[TokenLogprob, ...] | None = None


class Logprobs(msgspec.Struct):
    content: list[TokenLogprobs] | None = None


class Span(msgspec.Struct, gc=False):
    """Output tokens of one version of the weights, half open."""

    start: int
    end: int
    version: str | int


class Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    logprobs: Logprobs | None = None
    weight_versions: list[Span] | None = None
    routed_experts: str | None = None


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


def completion_from(answer: Generated) -> Completion:
    """Returns the completion in a response. Raises EngineError if a log-probability or a version is
    missing."""
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
        versions=versions_from(choice.weight_versions or [], len(tokens)),
        finish_reason=reason,
    )


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
    found = {entry.token_id: entry.logprob for entry in likeliest}.get(token, NO_LOGPROB)
    if not NO_LOGPROB < found <= ROUNDING:
        raise EngineError(
            f"vLLM returned {found} as the log-probability of a requested token: the weights may"
            " contain NaN"
        )
    return float(found)


def versions_from(spans: Sequence[Span], length: int) -> Int32[np.ndarray, " N"]:
    """Expands half-open spans over the output tokens to one version per token. Raises
    ServerRestarted unless they cover each token once."""
    versions, known = np.empty(length, np.int32), 0
    for span in spans:
        contiguous = span.start == known <= span.end <= length
        if not contiguous or not str(span.version).isdigit():
            break
        versions[known : span.end] = int(span.version)
        known = span.end
    if known != length:
        cause = "it may have been restarted, or updated by someone else"
        raise ServerRestarted(
            f"vLLM returned the weight versions {list(map(msgspec.to_builtins, spans))} for {length}"
            f" tokens: {cause}"
        )
    return versions


def error_message(body: bytes) -> str:
    """Returns the message in a server's JSON error."""
    text = body.decode(errors="replace")
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        return text.strip()[:300]
    error = (
        answer.get("error", answer.get("detail", answer)) if isinstance(answer, dict) else answer
    )
    return str(error["message"] if isinstance(error, dict) and "message" in error else error)
