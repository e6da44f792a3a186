"""The bodies of requests to a vLLM server for tokens and of chats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from jaxtyping import Int32

from areal_x.engines.fleet.client import MODEL
from areal_x.protocols.engine import SamplingParams


def generate_body(
    tokens: Int32[np.ndarray, " prompt"],
    sampling: SamplingParams,
    model: str,
    stop: Sequence[str],
    features: Mapping[str, Any] | None,
    seed: int | None = None,
) -> bytes:
    """Returns the JSON of a generate request. It is made at once, as thousands of requests wait with
    theirs, and the collector would look at every token of a list."""
    body: dict[str, Any] = {
        "model": model,
        "token_ids": np.asarray(tokens).tolist(),
        "sampling_params": {
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "stop_token_ids": list(sampling.stop_token_ids),
            # `stop_token_ids` alone end a completion, as on every other engine.
            "ignore_eos": True,
            "logprobs": 0,
            "stop": list(stop),
            "detokenize": bool(stop),
        },
    }
    if seed is not None:
        body["sampling_params"]["seed"] = seed
    if features is not None:
        body["features"] = features
    return msgspec.json.encode(body)


def next_body(model: str, tokens: Sequence[int], token: int) -> bytes:
    """Returns the JSON of a request for the log-probability that a token comes next, at temperature
    1."""
    # vLLM wants as many `logprobs` as named tokens, and returns as many entries, the sampled
    # token's among them: hence 2.
    wanted = {
        "max_tokens": 1,
        "temperature": 1.0,
        "logprobs": 2,
        "logprob_token_ids": [token, token],
        "detokenize": False,
    }
    return msgspec.json.encode(
        {"model": model, "token_ids": list(tokens), "sampling_params": wanted}
    )


def derender_body(
    tokens: Sequence[int], chat: Mapping[str, Any], before: Sequence[int]
) -> dict[str, Any]:
    """Returns a request to parse a completion's tokens. chat: the request that they answer. before:
    the last tokens of its prompt."""
    response = {
        "request_id": "areal-x",
        "choices": [{"index": 0, "token_ids": list(tokens), "finish_reason": "stop"}],
    }
    return {
        "model": MODEL,
        "generate_response": response,
        "chat_request": {**chat, "model": MODEL},
        "prompt_token_ids": list(before),
    }
