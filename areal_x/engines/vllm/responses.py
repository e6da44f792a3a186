"""Parses the responses of a vLLM server: tokens, log-probabilities, versions, experts, errors."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float32, Int16, Int32

from areal_x.engines.vllm.failures import ServerFailed, ServerRestarted
from areal_x.protocols.engine import Completion, EngineError
from areal_x.types import NOT_RECORDED

NO_LOGPROB = -9999.0  # what vLLM sends for a missing log-probability
ROUNDING = 1e-3  # how far above 0 rounding may put a log-probability
RECORD_EXPERTS = "--enable-return-routed-experts"


def completion_from(answer: Mapping[str, Any]) -> Completion:
    """Parses the response of a generate endpoint. Raises EngineError if a log-probability or a
    version is missing."""
    (choice,) = answer["choices"]
    tokens, reason = choice["token_ids"] or [], choice["finish_reason"]
    if reason not in ("stop", "length", "abort"):
        raise ServerFailed(f"vLLM ended a request with {reason!r}")
    content = (choice["logprobs"] or {}).get("content") or []
    logprobs = [entry["logprob"] for entry in content]
    if len(logprobs) != len(tokens) or min(logprobs, default=0.0) <= NO_LOGPROB:
        raise EngineError(
            "vLLM omitted the log-probability of a token: the weights may contain NaN"
        )
    return Completion(
        tokens=np.asarray(tokens, np.int32),
        logprobs=np.asarray(logprobs, np.float32),
        versions=versions_from(choice["weight_versions"] or [], len(tokens)),
        finish_reason=reason,
    )


def experts_from(
    answer: Mapping[str, Any], length: int
) -> Int16[np.ndarray, "length layers per_token"]:
    """Returns the experts of each token of a prompt and its completion; -1 for the last, which the
    server has sampled but not computed. Raises EngineError if the server recorded none, or not
    those of every token."""
    (choice,) = answer["choices"]
    encoded = choice.get("routed_experts")
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


def next_from(answer: Mapping[str, Any], token: int) -> float:
    """Returns the log-probability of the token that a generate request named. Raises EngineError if
    it is missing."""
    content = (answer["choices"][0]["logprobs"] or {}).get("content") or [{}]
    found = {
        entry["token_id"]: entry["logprob"] for entry in content[0].get("top_logprobs") or []
    }.get(token, NO_LOGPROB)
    if not NO_LOGPROB < found <= ROUNDING:
        raise EngineError(
            f"vLLM returned {found} as the log-probability of a requested token: the weights may"
            " contain NaN"
        )
    return float(found)


def versions_from(spans: Sequence[Mapping[str, Any]], length: int) -> Int32[np.ndarray, " N"]:
    """Expands half-open spans over the output tokens to one version per token. Raises
    ServerRestarted unless they cover each token once."""
    versions: list[int] = []
    for span in spans:
        if span["start"] != len(versions) or not str(span["version"]).isdigit():
            break
        versions += [int(span["version"])] * (span["end"] - span["start"])
    if len(versions) != length:
        cause = "it may have been restarted, or updated by someone else"
        raise ServerRestarted(
            f"vLLM returned the weight versions {list(spans)} for {length} tokens: {cause}"
        )
    return np.asarray(versions, np.int32)


def error_message(text: str) -> str:
    """Returns the message in a server's JSON error."""
    try:
        answer = json.loads(text)
    except ValueError:
        return text.strip()[:300]
    error = (
        answer.get("error", answer.get("detail", answer)) if isinstance(answer, dict) else answer
    )
    return str(error["message"] if isinstance(error, dict) and "message" in error else error)
