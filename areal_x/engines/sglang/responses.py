"""Parses the responses of an SGLang server: tokens, log-probabilities, versions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from jaxtyping import Float32

from areal_x.engines.fleet.failures import ServerFailed
from areal_x.engines.fleet.kept_tokens import kept_of
from areal_x.engines.fleet.versions import Span, versions_from
from areal_x.protocols.engine import Completion, EngineError

ROUNDING = 1e-3  # how far above 0 rounding may put a log-probability


class FinishReason(msgspec.Struct, gc=False):
    type: str
    matched: int | str | None = None
    """The token or the string that ended the completion."""
    message: str | None = None


class Meta(msgspec.Struct):
    finish_reason: FinishReason | None = None
    weight_versions: list[Span] | None = None
    output_token_logprobs: list[tuple[float | None, int, Any]] | None = None
    """Log-probability, token and text of each new token."""
    output_token_sampling_logprobs: list[float | None] | None = None
    """Under the distribution after top-k, top-p and min-p, where the request asked for it."""
    output_token_sampling_mask: list[list[int]] | None = None
    """The tokens that these kept, for each new token, where the request asked for it."""
    input_token_logprobs: list[tuple[float | None, int, Any]] | None = None


class Generated(msgspec.Struct):
    """The fields of a response to /generate that are used."""

    meta_info: Meta
    output_ids: list[int] = msgspec.field(default_factory=list)


def generated_from(body: bytes) -> Generated:
    """Parses the response to /generate. Raises ServerFailed if it is none."""
    try:
        return msgspec.json.decode(body, type=Generated)
    except msgspec.MsgspecError as error:
        raise ServerFailed(f"SGLang responded to a generate request with {error}") from error


def completion_from(
    answer: Generated, stop_token_ids: Sequence[int], is_truncated: bool
) -> Completion:
    """Returns the completion in a response.

    A completion that the model's own end token ended, although the request has not named that,
    ends with "length": whoever wants more continues it. is_truncated: the log-probabilities of the
    distribution after top-k, top-p and min-p were asked for; what these kept comes with them.

    Raises: EngineError if a log-probability or a version is missing.
    """
    tokens, meta = answer.output_ids, answer.meta_info
    ended = meta.finish_reason
    if ended is None or ended.type not in ("stop", "length", "abort"):
        raise ServerFailed(f"SGLang ended a request with {ended and ended.type!r}")
    if meta.weight_versions is None:
        raise EngineError(
            "the SGLang server does not return the weight version of every token: 0.5.20 or later"
            " does"
        )
    entries = meta.output_token_logprobs or []
    if [entry[1] for entry in entries] != tokens:
        raise EngineError("SGLang returned log-probabilities of other tokens than it sampled")
    logprobs = [entry[0] for entry in entries]
    if is_truncated:
        logprobs = list(meta.output_token_sampling_logprobs or [])
    found = np.asarray([np.nan if x is None else x for x in logprobs], np.float32)
    if len(found) != len(tokens) or not np.isfinite(found).all():
        raise EngineError(
            "SGLang omitted the log-probability of a token: the weights may contain NaN"
        )
    reason = ended.type
    if reason == "stop" and not isinstance(ended.matched, str):
        reason = "stop" if tokens and tokens[-1] in stop_token_ids else "length"
    return Completion(
        tokens=np.asarray(tokens, np.int32),
        logprobs=found,
        versions=versions_from(meta.weight_versions, len(tokens)),
        finish_reason=reason,
        kept=kept_of(meta.output_token_sampling_mask or [], tokens, "SGLang")
        if is_truncated
        else None,
    )


def scores_from(answer: Generated, tokens: Sequence[int]) -> Float32[np.ndarray, " T"]:
    """Returns the log-probabilities of a prompt's tokens, 0 for the first. Raises EngineError if
    one is missing."""
    entries = answer.meta_info.input_token_logprobs or []
    # SGLang 0.5.23 names the vocabulary's last token 0, beside the right log-probability.
    if len(entries) != len(tokens) or not all(
        entry[1] in (token, 0) for entry, token in zip(entries, tokens, strict=True)
    ):
        raise EngineError(
            "the server does not score prompts (input_token_logprobs of /generate): it must be an"
            " SGLang server"
        )
    scores = [0.0]
    for logprob, _, _ in entries[1:]:
        if logprob is None or not -np.inf < logprob <= ROUNDING:
            raise EngineError(
                "SGLang omitted the log-probability of a prompt token: the weights may contain NaN"
            )
        scores.append(logprob)
    return np.asarray(scores, np.float32)
