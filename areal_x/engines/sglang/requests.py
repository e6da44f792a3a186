"""The bodies of requests to an SGLang server for tokens."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int32

from areal_x.engines.fleet.client import MODEL
from areal_x.protocols.engine import SamplingParams

SEEDS = 2**31


def request_body(tokens: Sequence[int], sampling: Mapping[str, Any], model: str) -> dict[str, Any]:
    """Returns a request to /generate."""
    body: dict[str, Any] = {
        # Aborting a request aborts all whose name begins like its own: names have one length.
        "rid": uuid.uuid4().hex,
        "input_ids": np.asarray(tokens).tolist(),
        "sampling_params": dict(sampling),
        "return_logprob": True,
        "logprob_start_len": -1,
        "top_logprobs_num": 0,
        "stream": False,
    }
    if model != MODEL:
        body["lora_path"] = model
    return body


def score_body(tokens: Sequence[int], model: str) -> dict[str, Any]:
    """Returns a request to /generate for the log-probabilities of its own tokens."""
    body = request_body(tokens, {"max_new_tokens": 0, "temperature": 1.0}, model)
    return body | {"logprob_start_len": 0}


def generate_body(
    tokens: Int32[np.ndarray, " prompt"],
    sampling: SamplingParams,
    model: str,
    stop: Sequence[str],
    vocabulary: int,
    seed: int | None = None,
) -> dict[str, Any]:
    """Returns a request to /generate. Every parameter is given: the server has defaults that its
    command line may change."""
    parameters = {
        "max_new_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        # What is kept is reported with a finite top-k alone, and none above what may be reported.
        "top_k": min(sampling.top_k or vocabulary, vocabulary) if sampling.truncates else -1,
        "min_p": sampling.min_p,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
        "n": 1,
        "stop": list(stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        # It would switch `stop_token_ids` off too. Where they are given, and the model's own end
        # token is not among them, `completion_from` tells that the completion goes on.
        "ignore_eos": not sampling.stop_token_ids,
        # A server that samples by seeds gives all requests without one the same.
        "sampling_seed": secrets.randbelow(SEEDS) if seed is None else seed % SEEDS,
    }
    body = request_body(tokens, parameters, model)
    if sampling.truncates:
        # The plain log-probabilities are of the distribution before top-k, top-p and min-p.
        body["return_sampling_mask"] = True
    return body
