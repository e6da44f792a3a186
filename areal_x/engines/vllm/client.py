"""A client for every endpoint of a vLLM server that is used, in this one file.

The server is started with VLLM_SERVER_DEV_MODE=1 and, from vLLM 0.30 on, --enable-scale-out; what
older ones do in another way is in areal_x.engines.vllm.dialects. A server that only scores given
tokens needs neither: every vLLM server offers the endpoints that `served`, `tokenize` and `score`
use.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float32, Int32

from areal_x.engines.fleet.calls import FOR_TOKENS, Calls
from areal_x.engines.fleet.client import CONTROL_SECONDS, HEALTH_SECONDS, MODEL
from areal_x.engines.fleet.concurrency import Load, parse_load
from areal_x.engines.fleet.connections import status_without_key
from areal_x.engines.fleet.replica import Replica
from areal_x.engines.fleet.scorer import ServedModel
from areal_x.engines.vllm import dialects
from areal_x.engines.vllm.cpu_sleep import DROPS_WEIGHTS
from areal_x.engines.vllm.plugin import BACKEND
from areal_x.engines.vllm.proof.worker import PROVE
from areal_x.engines.vllm.refusals import LOAD_ADAPTER, UNLOAD_ADAPTER, explained, required_flags
from areal_x.engines.vllm.requests import derender_body, generate_body, next_body
from areal_x.engines.vllm.responses import (
    Generated,
    completion_of,
    generated_from,
    next_from,
    scores_from,
)
from areal_x.engines.vllm.turns import GENERATE, Tokens, Turns, in_parts
from areal_x.engines.vllm.versions import FORGET, MAKE
from areal_x.errors import UserError
from areal_x.protocols.engine import Completion, EngineError, SamplingParams
from areal_x.runtime.loop import together

KIND = "vLLM"
LOAD_METRICS = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "cache": "vllm:kv_cache_usage_perc",
    "preemptions": "vllm:num_preemptions_total",
}
INIT_TRANSFER = "/init_weight_transfer_engine"
ADAPTER_METRIC = "vllm:lora_requests_info"  # present if a server was started with --enable-lora


class VLLMClient:
    """A client of one server. Made inside the event loop that uses it. transfer: the
    weight-transfer backend that the server must have.

    Errors: ServerLost if the server is gone, ServerFailed and other EngineErrors if it responds
    with an error, UserError if it refuses the key or lacks an endpoint.
    """

    kind: ClassVar[str] = KIND
    context_flag: ClassVar[str] = "--max-model-len"
    spare_tokens: ClassVar[int] = 1
    """To score a prompt, a server generates one more token."""

    def __init__(
        self, url: str, key: str | None, transfer: str = BACKEND, guesses: bool = False
    ) -> None:
        """guesses: the server decodes speculatively."""
        self.url, self._transfer, self._guesses = url.rstrip("/"), transfer, guesses
        self.calls = Calls(self.url, key, KIND, partial(explained, transfer))
        self.dialect = dialects.LATEST
        """What the server can do, once `negotiate` has read it."""
        self._turns = Turns(self.url)  # where the server reports no versions

    async def negotiate(self, ours: bool) -> None:
        """Reads the server's release. ours: the run has started it.

        Raises: UserError for a release that cannot be used.
        """
        found = await self.calls.json("GET", "/version", retry=True, seconds=HEALTH_SECONDS)
        self.dialect = dialects.of(str(found["version"]), f"the vLLM server at {self.url}")
        if not ours:
            dialects.check_given(self.url, self.dialect)

    @property
    def _tells_versions(self) -> bool:
        return self.dialect.has(dialects.TOKEN_VERSIONS)

    async def close(self) -> None:
        await self.calls.close()

    async def is_healthy(self, seconds: float = HEALTH_SECONDS) -> bool:
        """True if the server responds within this time and its engine is alive. Raises: OutOfFiles
        if no request can be sent."""
        return await self.calls.status("/health", seconds) == 200

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
        models = (await self.calls.json("GET", "/v1/models"))["data"]
        return [
            ServedModel(model["id"], int(model["max_model_len"]))
            for model in models
            if model.get("max_model_len")
        ]

    # ---- tokens

    async def generate(
        self,
        tokens: Int32[np.ndarray, " prompt"],
        sampling: SamplingParams,
        model: str = MODEL,
        experts: bool = False,
        kept: bool = False,
        stop: Sequence[str] = (),
        features: Mapping[str, Any] | None = None,
        seed: int | None = None,
    ) -> Completion:
        """Generates from prompt tokens, with the model itself or an adapter by its name; versions
        are those of the model. Cancelling the coroutine aborts the request on the server.

        experts: see `experts_from`. kept: if `sampling.truncates`, see `kept_from`. stop: strings,
        searched in the output without special tokens, that end the completion with the token that
        completes one. features: of images, see areal_x.engines.vllm.features. seed: not for servers on
        a CPU without areal-x beside them, see areal_x.engines.vllm.cpu_seeds.

        Raises: UserError if the server is too old to report kept tokens.
        """
        kept = kept and sampling.truncates
        if kept and not self.dialect.has(dialects.KEPT_TOKENS):
            why = self.dialect.reason(dialects.KEPT_TOKENS)
            raise UserError(
                f"sampling.top_p, top_k and min_p must be 1, 0 and 0 with the vLLM server at {self.url}"
                f" in training: {why}"
            )
        if self._tells_versions:
            body = generate_body(tokens, sampling, model, stop, features, seed)
            return completion_of(await self._generated(body), len(tokens), experts, kept)

        async def part(prompt: Tokens, most: int) -> tuple[Completion, bool]:
            asked = replace(sampling, max_tokens=most)
            body = generate_body(prompt, asked, model, stop, features, seed)
            answer, version, swapped = await self._turns.answered(partial(self._generated, body))
            return completion_of(answer, len(prompt), experts, kept, version), swapped

        return await in_parts(part, tokens, sampling.max_tokens, stop)

    async def render(self, body: Mapping[str, Any]) -> list[int]:
        """Returns the prompt tokens of a chat completion request. body: the request without a
        model."""
        path = "/v1/chat/completions/render"
        request = {**body, "model": MODEL}
        answer = await self.calls.json("POST", path, request, retry=True, takes_slot=True)
        tokens: list[int] = answer["token_ids"]
        return tokens

    async def derender(
        self, tokens: Sequence[int], body: Mapping[str, Any], before: Sequence[int]
    ) -> dict[str, Any]:
        """Returns the assistant message in a completion's tokens, parsed by the server's reasoning
        and tool-call parsers. body: the chat completion request. before: the last tokens of its
        prompt. Raises: UserError if the server is too old for it."""
        if not self.dialect.has(dialects.DERENDER):
            why = self.dialect.reason(dialects.DERENDER)
            raise UserError(f"the vLLM server at {self.url} cannot parse chats: {why}")
        path, request = "/v1/chat/completions/derender", derender_body(tokens, body, before)
        answer = await self.calls.json("POST", path, request, retry=True, takes_slot=True)
        message: dict[str, Any] = answer["choices"][0]["message"]
        return message

    async def tokenize(self, model: str, text: str) -> list[int]:
        """Returns the text's tokens, without special tokens that the model would add."""
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        answer = await self.calls.json("POST", "/tokenize", body, retry=True, takes_slot=True)
        tokens: list[int] = answer["tokens"]
        return tokens

    async def score(self, model: str, tokens: Sequence[int]) -> Float32[np.ndarray, " T"]:
        """Returns the log-probability of each token given those before it, at temperature 1; 0 for
        the first. Not safe beside other requests on a server with adapters: see `probe`."""
        body = {"model": model, "prompt": list(tokens), "max_tokens": 1, "prompt_logprobs": 0}
        answer = await self.calls.json("POST", "/v1/completions", body, **FOR_TOKENS)
        return scores_from(answer, tokens)

    async def probe(self, model: str, tokens: Sequence[int]) -> Float32[np.ndarray, " T"]:
        """Returns the numbers of `score`, computed by the sampler: one request of one new token per
        position, at temperature 1.

        Safe beside running requests, which `score` is not on a server with adapters: there vLLM
        0.32 maps the positions of a scored prompt to adapters by the requests of the batch, and its
        engine dies of any other request in it. A server that guesses has no adapters, and scores
        instead: its engine dies of named tokens (`logprob_token_ids`) in a batch with guesses.
        """
        if self._guesses:
            return await self.score(model, tokens)
        beginnings = range(1, len(tokens))
        found = await together(
            self._next(model, tokens[:length], tokens[length]) for length in beginnings
        )
        return np.asarray([0.0, *found], np.float32)

    async def _next(self, model: str, tokens: Sequence[int], token: int) -> float:
        """Returns the log-probability that this token comes next."""
        return next_from(await self._generated(next_body(model, tokens, token)), token)

    async def _generated(self, body: bytes) -> Generated:
        return generated_from(await self.calls.send("POST", GENERATE, body, **FOR_TOKENS))

    # ---- pauses and sleep

    async def pause(self) -> None:
        """Freezes requests in flight and drops all caches: theirs, which are recomputed after
        `resume` under the weights held then, and the prefix cache, whose blocks were computed under
        the weights held now."""
        if self._tells_versions:
            await self.calls.json("POST", "/pause?mode=keep&clear_cache=true", retry=True)
        else:  # ends them instead: see areal_x.engines.vllm.turns
            await self._turns.hold(self._end_requests)

    async def _end_requests(self) -> None:
        """Pauses the server and ends its requests: each is answered with its tokens so far."""
        await self.calls.json("POST", "/pause?mode=abort&clear_cache=true", retry=True)

    async def sleep(self, keep_weights: bool) -> None:
        """Pauses, and releases the memory of caches and weights. The server must be started with
        --enable-sleep-mode, or compute on a CPU (areal_x.engines.vllm.cpu_sleep)."""
        await self.pause()
        level = 1 if keep_weights else DROPS_WEIGHTS
        await self.calls.json("POST", f"/sleep?level={level}&mode=keep", retry=True)

    async def wake(self, memory: str) -> None:
        await self.calls.json("POST", f"/wake_up?tags={memory}", retry=True)

    async def hand_over(self) -> None:
        """Ends all requests in flight: each is answered with its tokens so far, and ends with
        "abort"."""
        if self.dialect.has(dialects.ABORT_ALL):
            await self.calls.json("POST", "/abort_requests", {}, retry=True, seconds=HEALTH_SECONDS)
        elif not await self.is_paused():  # a swap ends them itself
            await self._end_requests()
            await self.resume(HEALTH_SECONDS)

    async def resume(self, seconds: float = CONTROL_SECONDS) -> None:
        await self.calls.json("POST", "/resume", retry=True, seconds=seconds)
        self._turns.release()

    async def is_paused(self) -> bool:
        return bool((await self.calls.json("GET", "/is_paused", retry=True))["is_paused"])

    # ---- what a server tells of itself

    async def accepts_without_key(self) -> bool:
        """True if it accepts control requests without a key."""
        path = "/is_paused"
        return await status_without_key(KIND, self.url, "GET", path, seconds=HEALTH_SECONDS) == 200

    async def metrics(self) -> str:
        """Returns metrics in Prometheus text format; none of the engine's if the server was started
        with --disable-log-stats."""
        return await self.calls.text("GET", "/metrics", retry=True, seconds=HEALTH_SECONDS)

    async def load_figures(self) -> Load | None:
        return parse_load(await self.metrics(), LOAD_METRICS)

    async def workers(self) -> int:
        """Returns how many processes compute the model, each with a part or a copy of it."""
        return int((await self.calls.json("GET", "/get_world_size", retry=True))["world_size"])

    # ---- weights

    async def init_weight_transfer(self, info: Mapping[str, Any]) -> None:
        """Initialises the transfer, once, before the first update. info: of the server's
        weight-transfer backend."""
        try:
            await self.calls.json("POST", INIT_TRANSFER, {"init_info": dict(info)})
        except EngineError as error:
            raise type(error)(
                f"{error} (its weight-transfer backend must be {self._transfer!r})"
            ) from error

    async def validate_folder(self, staging_root: Path, folder: Path) -> None:
        """Raises EngineError if the server could not load a staged folder; changes nothing and is
        safe beside running requests. (For servers whose weight-transfer backend is ours.)"""
        body = {"init_info": {"staging_root": str(staging_root), "folder": str(folder)}}
        await self.calls.json("POST", INIT_TRANSFER, body, retry=True)

    async def end_weight_transfer(self) -> None:
        """Frees what an earlier `init_weight_transfer` has set up, if any has; where the server cannot,
        the next one replaces it."""
        if self.dialect.has(dialects.END_OF_TRANSFER):
            await self.calls.json("POST", "/shutdown_weight_transfer_engine")

    async def set_version(self, version: int) -> None:
        """Sets the version of the weights that the server already has."""
        self._turns.version = version
        if self._tells_versions:
            body = {"new_version": str(version)}
            await self.calls.json("POST", "/update_weight_version", body, retry=True)

    async def version(self) -> str:
        """Returns the version of the server's weights; "default" if it was never set."""
        if not self._tells_versions:
            return str(self._turns.version)
        return str((await self.calls.json("GET", "/weight_info", retry=True))["weight_version"])

    async def start_update(self) -> None:
        """Begins an update. The server must be paused: an update under running requests kills its
        engine."""
        kept = self._transfer != BACKEND  # our backend loads by itself
        own = None if self.dialect.has(dialects.OWN_LOADING) else {"is_checkpoint_format": kept}
        await self.calls.json("POST", "/start_weight_update", own)

    async def update_weights(self, info: Any) -> None:
        """Loads all weights, or a part of them. info: of the server's weight-transfer backend."""
        await self.calls.json("POST", "/update_weights", {"update_info": info})

    async def finish_update(self, version: str) -> None:
        await self.calls.json("POST", "/finish_weight_update", {"weight_version": version})
        self._turns.version = int(version)

    async def abandon_update(self) -> None:
        """Ends an update that broke off and is still open; the weights keep their version."""
        await self.calls.json("POST", "/finish_weight_update", {"weight_version": None}, retry=True)

    async def prove(self, question: str) -> list[Any]:
        """Returns what each worker has, see areal_x.engines.vllm.proof.worker.prove."""
        return await self._of_workers(PROVE, question)

    async def make_version(self, order: str) -> list[Any]:
        return await self._of_workers(MAKE, order)

    async def forget_versions(self) -> None:
        await self._of_workers(FORGET)

    async def _of_workers(self, method: str, *arguments: str) -> list[Any]:
        """Calls a method of each worker, which may be repeated, and returns what they return."""
        body = {"method": method, "args": list(arguments)}
        answer = await self.calls.json("POST", "/collective_rpc", body, retry=True)
        return list(answer["results"])

    # ---- adapters

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Loads an adapter under an unused name. Only requests for this name wait for it."""
        body = {"lora_name": name, "lora_path": str(folder)}
        await self.calls.text("POST", LOAD_ADAPTER, body)

    async def unload_adapter(self, name: str) -> None:
        """Removes the name; its requests in flight go on, and may make the server read its folder
        again."""
        await self.calls.text("POST", UNLOAD_ADAPTER, {"lora_name": name})

    async def adapters(self) -> list[str]:
        """Returns the names of the loaded adapters."""
        models = (await self.calls.json("GET", "/v1/models"))["data"]
        return [model["id"] for model in models if model.get("parent")]

    async def check_scores(self) -> None:
        """Raises: UserError for a server with adapters."""
        if await self.supports_adapters():
            dies = (
                f"with adapters the engine of {dialects.LATEST.name} dies if it scores a prompt"
                " beside other requests"
            )
            wanted = "start a separate server without --enable-lora, or name a model directory"
            raise UserError(
                f"the vLLM server at {self.url} has adapters enabled, and {dies}: {wanted}"
            )

    async def supports_adapters(self) -> bool:
        """True if, as far as visible from outside, it supports adapters: it has one, or it counts
        their requests."""
        with contextlib.suppress(EngineError, UserError):  # a server may count nothing
            return bool(await self.adapters()) or ADAPTER_METRIC in await self.metrics()
        return False


def vllm_client(replica: Replica) -> VLLMClient:
    """Returns the client of a vLLM server, with the calls that only vLLM has."""
    client: Any = replica.client
    return client  # type: ignore[no-any-return]
