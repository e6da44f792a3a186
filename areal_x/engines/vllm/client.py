"""A client for every endpoint of a vLLM server that is used, in this one file: they changed in vLLM
0.18, 0.28 and 0.32.

Written for vLLM 0.32, started with VLLM_SERVER_DEV_MODE=1 and --enable-scale-out. A server that
only scores given tokens needs neither: every vLLM server offers the endpoints that `served`,
`tokenize` and `score` use.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from jaxtyping import Float32, Int32

from areal_x.engines.vllm.connections import exchange
from areal_x.engines.vllm.failures import ServerFailed, ServerLost, ServerRefused
from areal_x.engines.vllm.http import Pool
from areal_x.engines.vllm.plugin import BACKEND, RDT
from areal_x.engines.vllm.responses import (
    Generated,
    completion_from,
    error_message,
    experts_from,
    generated_from,
    next_from,
    scores_from,
)
from areal_x.errors import UserError
from areal_x.protocols.engine import Completion, EngineError, SamplingParams
from areal_x.runtime.loop import together
from areal_x.runtime.waits import waiting, whose

MODEL = "policy"  # the name that servers serve the model under
HEALTH_SECONDS = 5.0
CONTROL_SECONDS = 600.0  # loading the weights of a large model from a shared folder
ADAPTER_METRIC = "vllm:lora_requests_info"  # present if a server was started with --enable-lora
# endpoints that respond with a sentence instead of JSON
WORDLESS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
TEXT = (*WORDLESS, "/metrics")


@dataclass(frozen=True)
class ServedModel:
    """A model that a server serves."""

    name: str
    context: int
    """Maximum length of prompt and completion together, in tokens."""


def required_flags(transfer: str) -> str:
    beside = {
        BACKEND: ", areal-x installed beside it",
        RDT: ", areal-x installed beside it, on a node of the Ray cluster with RAY_ADDRESS set",
    }.get(transfer, "")
    return (
        "start it with VLLM_SERVER_DEV_MODE=1 and --enable-scale-out --logprobs-mode"
        " processed_logprobs "
        f"--served-model-name {MODEL} --weight-transfer-config"
        f' \'{{"backend":"{transfer}"}}\'{beside}'
    )


class VLLMClient:
    """A client of one server. Made inside the event loop that uses it. transfer: the
    weight-transfer backend that the server must have.

    Errors: ServerLost if the server is gone, ServerFailed and other EngineErrors if it responds
    with an error, UserError if it refuses the key or lacks an endpoint.
    """

    def __init__(self, url: str, key: str | None, transfer: str = BACKEND) -> None:
        self.url, self._transfer = url.rstrip("/"), transfer
        self._pool = Pool(self.url, key)

    async def close(self) -> None:
        self._pool.close()
        await asyncio.sleep(0)  # in which the loop closes the sockets

    async def is_healthy(self, seconds: float = HEALTH_SECONDS) -> bool:
        """True if the server responds within this time and its engine is alive. Raises: OutOfFiles
        if no request can be sent."""
        try:
            with waiting(whose(), f"a sign of life from {self.url}", idle=True):
                status, _ = await exchange(self._pool, self.url, "GET", "/health", seconds=seconds)
        except ConnectionError:
            return False
        return status == 200

    async def context(self) -> int:
        """Returns the maximum length of prompt and completion together. Raises UserError if the
        server serves no model named `policy`."""
        models = await self._models()
        for model in models:
            if model.name == MODEL:
                return model.context
        names = ", ".join(repr(model.name) for model in models)
        raise UserError(
            f"the vLLM server at {self.url} serves {names}, not {MODEL!r}:"
            f" {required_flags(self._transfer)}"
        )

    async def served(self) -> ServedModel:
        """Returns the model that the server was started with; adapters are listed after it."""
        models = await self._models()
        if not models:
            raise UserError(
                f"{self.url} serves no language model: give the address of a vLLM server that does"
            )
        return models[0]

    async def _models(self) -> list[ServedModel]:
        models = (await self._call("GET", "/v1/models"))["data"]
        return [
            ServedModel(model["id"], int(model["max_model_len"]))
            for model in models
            if model.get("max_model_len")
        ]

    async def generate(
        self,
        tokens: Int32[np.ndarray, " prompt"],
        sampling: SamplingParams,
        model: str = MODEL,
        experts: bool = False,
        stop: Sequence[str] = (),
        features: Mapping[str, Any] | None = None,
    ) -> Completion:
        """Generates from prompt tokens, with the model itself or an adapter by its name; versions
        are those of the model. Cancelling the coroutine aborts the request on the server.

        experts: see `experts_from`. stop: strings, searched in the output without special tokens,
        that end the completion with the token that completes one. features: of images, see
        areal_x.engines.vllm.features.
        """
        body = _generate_body(tokens, sampling, model, stop, features)
        answer = await self._generated(body)
        completion = completion_from(answer)
        if not experts:
            return completion
        return replace(
            completion, experts=experts_from(answer, len(tokens) + len(completion.tokens))
        )

    async def render(self, body: Mapping[str, Any]) -> list[int]:
        """Returns the prompt tokens of a chat completion request. body: the request without a
        model."""
        answer = await self._call(
            "POST",
            "/v1/chat/completions/render",
            {**body, "model": MODEL},
            retry=True,
            takes_slot=True,
        )
        tokens: list[int] = answer["token_ids"]
        return tokens

    async def derender(
        self, tokens: Sequence[int], body: Mapping[str, Any], before: Sequence[int]
    ) -> dict[str, Any]:
        """Returns the assistant message in a completion's tokens, parsed by the server's reasoning
        and tool-call parsers. body: the chat completion request. before: the last tokens of its
        prompt."""
        response = {
            "request_id": "areal-x",
            "choices": [{"index": 0, "token_ids": list(tokens), "finish_reason": "stop"}],
        }
        request = {
            "model": MODEL,
            "generate_response": response,
            "chat_request": {**body, "model": MODEL},
            "prompt_token_ids": list(before),
        }
        answer = await self._call(
            "POST",
            "/v1/chat/completions/derender",
            request,
            retry=True,
            takes_slot=True,
        )
        message: dict[str, Any] = answer["choices"][0]["message"]
        return message

    async def tokenize(self, model: str, text: str) -> list[int]:
        """Returns the text's tokens, without special tokens that the model would add."""
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        tokens: list[int] = (
            await self._call("POST", "/tokenize", body, retry=True, takes_slot=True)
        )["tokens"]
        return tokens

    async def score(self, model: str, tokens: Sequence[int]) -> Float32[np.ndarray, " T"]:
        """Returns the log-probability of each token given those before it, at temperature 1; 0 for
        the first. Scores at most context - 1 tokens, as the server generates one more. Not safe
        beside other requests on a server with adapters: see `probe`."""
        body = {"model": model, "prompt": list(tokens), "max_tokens": 1, "prompt_logprobs": 0}
        return scores_from(
            await self._call(
                "POST", "/v1/completions", body, retry=True, seconds=None, takes_slot=True
            ),
            tokens,
        )

    async def probe(self, model: str, tokens: Sequence[int]) -> Float32[np.ndarray, " T"]:
        """Returns the numbers of `score`, computed by the sampler: one request of one new token per
        position, at temperature 1.

        Safe beside running requests, which `score` is not on a server with adapters: there vLLM
        0.32 maps the positions of a scored prompt to adapters by the requests of the batch, and its
        engine dies of any other request in it.
        """
        beginnings = range(1, len(tokens))
        found = await together(
            self._next(model, tokens[:length], tokens[length]) for length in beginnings
        )
        return np.asarray([0.0, *found], np.float32)

    async def _next(self, model: str, tokens: Sequence[int], token: int) -> float:
        """Returns the log-probability that this token comes next."""
        # vLLM wants as many `logprobs` as named tokens, and returns as many entries, the sampled
        # token's among them: hence 2.
        wanted = {
            "max_tokens": 1,
            "temperature": 1.0,
            "logprobs": 2,
            "logprob_token_ids": [token, token],
            "detokenize": False,
        }
        body = {"model": model, "token_ids": list(tokens), "sampling_params": wanted}
        return next_from(await self._generated(msgspec.json.encode(body)), token)

    async def _generated(self, body: bytes) -> Generated:
        answer = await self._send(
            "POST", "/inference/v1/generate", body, retry=True, seconds=None, takes_slot=True
        )
        return generated_from(answer)

    async def pause(self) -> None:
        """Freezes requests in flight and drops all caches: theirs, which are recomputed after
        `resume` under the weights held then, and the prefix cache, whose blocks were computed under
        the weights held now."""
        await self._call("POST", "/pause?mode=keep&clear_cache=true", retry=True)

    async def hand_over(self) -> None:
        """Ends all requests in flight: each is answered with its tokens so far, and ends with
        "abort"."""
        await self._call("POST", "/abort_requests", {}, retry=True, seconds=HEALTH_SECONDS)

    async def resume(self, seconds: float = CONTROL_SECONDS) -> None:
        await self._call("POST", "/resume", retry=True, seconds=seconds)

    async def is_paused(self) -> bool:
        return bool((await self._call("GET", "/is_paused", retry=True))["is_paused"])

    async def accepts_without_key(self) -> bool:
        """True if it accepts control requests without a key."""
        with (
            contextlib.closing(Pool(self.url, key=None)) as stranger,
            contextlib.suppress(ConnectionError),
        ):
            status, _ = await exchange(
                stranger, self.url, "GET", "/is_paused", seconds=HEALTH_SECONDS
            )
            return status == 200
        return False

    async def metrics(self) -> str:
        """Returns metrics in Prometheus text format; none of the engine's if the server was started
        with --disable-log-stats."""
        return str(await self._call("GET", "/metrics", retry=True, seconds=HEALTH_SECONDS))

    async def workers(self) -> int:
        """Returns the number of processes that compute the model, each with a part or a copy of
        it."""
        return int((await self._call("GET", "/get_world_size", retry=True))["world_size"])

    async def init_weight_transfer(self, info: Mapping[str, Any]) -> None:
        """Initialises the transfer, once, before the first update. info: of the server's
        weight-transfer backend."""
        try:
            await self._call("POST", "/init_weight_transfer_engine", {"init_info": dict(info)})
        except EngineError as error:
            raise type(error)(
                f"{error} (its weight-transfer backend must be {self._transfer!r})"
            ) from error

    async def validate_folder(self, staging_root: Path, folder: Path) -> None:
        """Raises EngineError if the server could not load a staged folder; changes nothing and is
        safe beside running requests. (For servers whose weight-transfer backend is ours.)"""
        info = {"staging_root": str(staging_root), "folder": str(folder)}
        await self._call("POST", "/init_weight_transfer_engine", {"init_info": info}, retry=True)

    async def end_weight_transfer(self) -> None:
        """Frees what an earlier `init_weight_transfer` has set up, if any has."""
        await self._call("POST", "/shutdown_weight_transfer_engine")

    async def start_update(self) -> None:
        """Begins an update. The server must be paused: an update under running requests kills its
        engine."""
        await self._call("POST", "/start_weight_update")

    async def update_weights(self, info: Any) -> None:
        """Loads all weights, or a part of them. info: of the server's weight-transfer backend."""
        await self._call("POST", "/update_weights", {"update_info": info})

    async def finish_update(self, version: str) -> None:
        await self._call("POST", "/finish_weight_update", {"weight_version": version})

    async def abandon_update(self) -> None:
        """Ends an update that broke off and is still open; the weights keep their version."""
        await self._call("POST", "/finish_weight_update", {"weight_version": None}, retry=True)

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Loads an adapter under an unused name. Only requests for this name wait for it."""
        await self._call(
            "POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)}
        )

    async def unload_adapter(self, name: str) -> None:
        """Removes the name; its requests in flight go on, and may make the server read its folder
        again."""
        await self._call("POST", "/v1/unload_lora_adapter", {"lora_name": name})

    async def adapters(self) -> list[str]:
        """Returns the names of the loaded adapters."""
        models = (await self._call("GET", "/v1/models"))["data"]
        return [model["id"] for model in models if model.get("parent")]

    async def supports_adapters(self) -> bool:
        """True if, as far as visible from outside, it supports adapters: it has one, or it counts
        their requests."""
        with contextlib.suppress(EngineError, UserError):  # a server may count nothing
            return bool(await self.adapters()) or ADAPTER_METRIC in await self.metrics()
        return False

    async def set_version(self, version: int) -> None:
        """Sets the version of the weights that the server already has."""
        await self._call(
            "POST", "/update_weight_version", {"new_version": str(version)}, retry=True
        )

    async def version(self) -> str:
        """Returns the version of the server's weights; "default" if it was never set."""
        return str((await self._call("GET", "/weight_info", retry=True))["weight_version"])

    async def _call(self, method: str, path: str, body: Any = None, **how: Any) -> Any:
        """Returns the response's JSON, or its text where that is a sentence. how: see `_send`."""
        sent = None if body is None else msgspec.json.encode(body)
        answer = await self._send(method, path, sent, **how)
        if path in TEXT:
            return answer.decode()
        return json.loads(answer) if answer else None

    async def _send(
        self,
        method: str,
        path: str,
        body: bytes | None,
        *,
        retry: bool = False,
        seconds: float | None = CONTROL_SECONDS,
        takes_slot: bool = False,
    ) -> bytes:
        """Returns the response to a JSON body. retry: the request may be sent again if the
        connection breaks before any response, as happens when a pooled connection was closed
        meanwhile. takes_slot: see `exchange`."""
        try:
            with waiting(whose(), f"the vLLM server at {self.url} to answer {path}"):
                status, answer = await exchange(
                    self._pool,
                    self.url,
                    method,
                    path,
                    body=body,
                    seconds=seconds,
                    retry=retry,
                    takes_slot=takes_slot,
                )
        except ConnectionError as error:
            raise ServerLost(f"{error}") from error
        if status == 200:
            return answer
        raise self._refusal(path, status, error_message(answer))

    def _refusal(self, path: str, status: int, words: str) -> Exception:
        server, endpoint = f"the vLLM server at {self.url}", path.partition("?")[0]
        if status == 401:
            return UserError(
                f"{server} refused the key: set the environment variable that vllm.key_variable"
                " names to the server's key"
            )
        if status == 404 and endpoint in ("/v1/models", "/tokenize", "/v1/completions"):
            wanted = "give a vLLM server's address without a path, like http://127.0.0.1:8000"
            return UserError(f"{server} does not offer {endpoint} ({status} {words}): {wanted}")
        # with other words the adapter was not found
        if status == 404 and endpoint in WORDLESS and words == "Not Found":
            wanted = (
                "start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora --max-lora-rank"
                " RANK"
            )
            return UserError(f"{server} has no adapters enabled: {wanted}, at least lora.rank")
        if 300 <= status < 400:
            return UserError(
                f"{server} redirects {endpoint}: give the address that it redirects to"
            )
        if status in (403, 404) and endpoint not in WORDLESS:
            return UserError(
                f"{server} does not offer {endpoint} ({status} {words}):"
                f" {required_flags(self._transfer)}"
            )
        message = f"{server} answered {endpoint} with {status}: {words}"
        return ServerFailed(message) if status >= 500 else ServerRefused(message, words)


def _generate_body(
    tokens: Int32[np.ndarray, " prompt"],
    sampling: SamplingParams,
    model: str,
    stop: Sequence[str],
    features: Mapping[str, Any] | None,
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
            "stop_token_ids": list(sampling.stop_token_ids),
            # `stop_token_ids` alone end a completion, as on every other engine.
            "ignore_eos": True,
            "logprobs": 0,
            "stop": list(stop),
            "detokenize": bool(stop),
            # No "seed": a seeded request that meets a cache-clearing pause kills the engine on
            # CPU.
        },
    }
    if features is not None:
        body["features"] = features
    return msgspec.json.encode(body)
