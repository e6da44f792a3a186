"""Every endpoint of a vLLM server that is used, in this one file: they changed in vLLM 0.18, 0.28
and 0.32.

Written for vLLM 0.32, started with VLLM_SERVER_DEV_MODE=1 and --enable-scale-out. A server that
only scores given tokens needs neither: what `served`, `tokenize` and `score` ask for is offered by
every vLLM server.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32, Int16, Int32

from areal_x.engines.vllm.connections import exchange, session
from areal_x.engines.vllm.plugin import BACKEND
from areal_x.errors import UserError
from areal_x.protocols.engine import Completion, EngineError, SamplingParams
from areal_x.runtime.loop import together
from areal_x.runtime.waits import waiting, whose
from areal_x.types import NOT_RECORDED

VLLM_RELEASE = "0.32"
MODEL = "policy"  # the name that servers serve the model under
NO_LOGPROB = -9999.0  # what vLLM sends for a log-probability it does not have
ROUNDING = 1e-3  # how far above 0 a log-probability may come out
HEALTH_SECONDS = 5.0
CONTROL_SECONDS = 600.0  # loading the weights of a large model from a shared folder
ADAPTER_METRIC = "vllm:lora_requests_info"  # there where a server was started with --enable-lora
RECORD_EXPERTS = "--enable-return-routed-experts"
# whose answer is a sentence and no JSON
WORDLESS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
TEXT = (*WORDLESS, "/metrics")


class ServerLost(EngineError):
    """The server gave no answer."""


class ServerRestarted(ServerLost):
    """Its answer shows that it does not hold the weights that it was given."""


class ServerTorn(EngineError):
    """An update broke off in the middle: the server holds parts of two policies, and is paused."""


class ServerFailed(EngineError):
    """The server answered with an error that is its own and not the request's."""


class ServerRefused(EngineError):
    """The server found a mistake in what was asked. words: its own."""

    def __init__(self, message: str, words: str = "") -> None:
        super().__init__(message)
        self.words = words


@dataclass(frozen=True)
class ServedModel:
    """A model that a server serves. context: the longest prompt and completion together."""

    name: str
    context: int


def required_flags(transfer: str) -> str:
    beside = ", areal-x installed beside it" if transfer == BACKEND else ""
    return (
        "start it with VLLM_SERVER_DEV_MODE=1 and --enable-scale-out --logprobs-mode"
        " processed_logprobs "
        f"--served-model-name {MODEL} --weight-transfer-config"
        f' \'{{"backend":"{transfer}"}}\'{beside}'
    )


class VLLMClient:
    """One server. Made inside the event loop that uses it. transfer: the weight-transfer backend
    that it shall have.

    Errors: ServerLost when the server is gone, ServerFailed and other EngineErrors when it answers
    with an error, UserError when it refuses the key or lacks an endpoint.
    """

    def __init__(self, url: str, key: str | None, transfer: str = BACKEND) -> None:
        self.url, self._transfer = url.rstrip("/"), transfer
        self._session = session(key)

    async def close(self) -> None:
        await self._session.close()

    async def is_healthy(self, seconds: float = HEALTH_SECONDS) -> bool:
        """Whether the server answers within this time and its engine lives. Raises: OutOfFiles
        where nothing can be asked."""
        try:
            with waiting(whose(), f"a sign of life from {self.url}", idle=True):
                status, _ = await exchange(
                    self._session, self.url, "GET", "/health", seconds=seconds
                )
        except ConnectionError:
            return False
        return status == 200

    async def context(self) -> int:
        """Longest prompt and completion together. Raises UserError when the server serves no model
        named `policy`."""
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
        """The model that the server was started with; adapters come after it."""
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
        """Tokens in, tokens out, from the model itself or an adapter by its name; versions are
        those of the model. Cancelling the coroutine aborts the request on the server. experts: see
        `experts_from`. stop: texts, looked for in what is generated without special tokens, that
        end it with the token that completes one. features: of images, see
        areal_x.engines.vllm.features."""
        body: dict[str, Any] = {
            "model": model,
            "token_ids": [int(t) for t in tokens],
            "sampling_params": {
                "max_tokens": sampling.max_tokens,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "stop_token_ids": list(sampling.stop_token_ids),
                # What ends a completion is said in `stop_token_ids` alone, as on every other
                # engine.
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
        answer = await self._call(
            "POST", "/inference/v1/generate", body, retry=True, seconds=None, takes_slot=True
        )
        completion = completion_from(answer)
        if not experts:
            return completion
        return replace(
            completion, experts=experts_from(answer, len(tokens) + len(completion.tokens))
        )

    async def render(self, body: Mapping[str, Any]) -> list[int]:
        """The tokens of a prompt, from the body of a chat completion without a model."""
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
        """The assistant's message that a completion's tokens are, by the server's parsers of
        reasoning and tool calls. body: of the chat completion that it answers. before: the last
        tokens of its prompt."""
        said = {
            "request_id": "areal-x",
            "choices": [{"index": 0, "token_ids": list(tokens), "finish_reason": "stop"}],
        }
        asked = {
            "generate_response": said,
            "chat_request": {**body, "model": MODEL},
            "prompt_token_ids": list(before),
        }
        answer = await self._call(
            "POST",
            "/v1/chat/completions/derender",
            {"model": MODEL, **asked},
            retry=True,
            takes_slot=True,
        )
        message: dict[str, Any] = answer["choices"][0]["message"]
        return message

    async def tokenize(self, model: str, text: str) -> list[int]:
        """The text's tokens, without any that the model would put before or after it."""
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        tokens: list[int] = (
            await self._call("POST", "/tokenize", body, retry=True, takes_slot=True)
        )["tokens"]
        return tokens

    async def score(self, model: str, tokens: Sequence[int]) -> Float32[np.ndarray, " T"]:
        """Log-probability of each token given those before it, at temperature 1; 0 for the first.
        At most context - 1 tokens can be scored, as the server generates one more. Never beside
        other requests on a server with adapters: see `probe`."""
        body = {"model": model, "prompt": list(tokens), "max_tokens": 1, "prompt_logprobs": 0}
        return scores_from(
            await self._call(
                "POST", "/v1/completions", body, retry=True, seconds=None, takes_slot=True
            ),
            tokens,
        )

    async def probe(self, model: str, tokens: Sequence[int]) -> Float32[np.ndarray, " T"]:
        """The numbers of `score`, computed by the sampler: one request of one new token per
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
        """Log-probability that this token comes next."""
        # As many `logprobs` as named tokens are wanted, and as many entries come back, the sampled
        # token's among them: hence 2.
        wanted = {
            "max_tokens": 1,
            "temperature": 1.0,
            "logprobs": 2,
            "logprob_token_ids": [token, token],
            "detokenize": False,
        }
        body = {"model": model, "token_ids": list(tokens), "sampling_params": wanted}
        answer = await self._call(
            "POST", "/inference/v1/generate", body, retry=True, seconds=None, takes_slot=True
        )
        return next_from(answer, token)

    async def pause(self) -> None:
        """Freezes requests in flight and drops all caches: theirs, which are computed again after
        `resume` under the weights held then, and the prefix cache, whose blocks were computed under
        the weights held now."""
        await self._call("POST", "/pause?mode=keep&clear_cache=true", retry=True)

    async def resume(self, seconds: float = CONTROL_SECONDS) -> None:
        await self._call("POST", "/resume", retry=True, seconds=seconds)

    async def is_paused(self) -> bool:
        return bool((await self._call("GET", "/is_paused", retry=True))["is_paused"])

    async def accepts_without_key(self) -> bool:
        """True if it takes requests that steer it without a key."""
        async with session(key=None) as stranger:
            with contextlib.suppress(ConnectionError):
                status, _ = await exchange(
                    stranger, self.url, "GET", "/is_paused", seconds=HEALTH_SECONDS
                )
                return status == 200
        return False

    async def metrics(self) -> str:
        """In Prometheus' text; nothing of the engine's where the server was started with
        --disable-log-stats."""
        return str(await self._call("GET", "/metrics", retry=True, seconds=HEALTH_SECONDS))

    async def workers(self) -> int:
        """The processes that compute the model, each with a part or a copy of it."""
        return int((await self._call("GET", "/get_world_size", retry=True))["world_size"])

    async def init_weight_transfer(self, info: Mapping[str, Any]) -> None:
        """Once, before the first update. info: of the server's weight-transfer backend."""
        try:
            await self._call("POST", "/init_weight_transfer_engine", {"init_info": dict(info)})
        except EngineError as error:
            raise EngineError(
                f"{error} (its weight-transfer backend must be {self._transfer!r})"
            ) from error

    async def validate_folder(self, staging_root: Path, folder: Path) -> None:
        """Raises EngineError where a staged folder is none that the server can load; changes
        nothing, and may be asked beside running requests. (For servers whose weight-transfer
        backend is ours.)"""
        info = {"staging_root": str(staging_root), "folder": str(folder)}
        await self._call("POST", "/init_weight_transfer_engine", {"init_info": info}, retry=True)

    async def end_weight_transfer(self) -> None:
        """Frees what an earlier `init_weight_transfer` has set up, if any has."""
        await self._call("POST", "/shutdown_weight_transfer_engine")

    async def start_update(self) -> None:
        """The server must be paused: an update under running requests kills its engine."""
        await self._call("POST", "/start_weight_update")

    async def update_weights(self, info: Any) -> None:
        """All weights, or a part of them. info: of the server's weight-transfer backend."""
        await self._call("POST", "/update_weights", {"update_info": info})

    async def finish_update(self, version: str) -> None:
        await self._call("POST", "/finish_weight_update", {"weight_version": version})

    async def abandon_update(self) -> None:
        """Ends an update that broke off and is open still; the weights are called what they were
        called."""
        await self._call("POST", "/finish_weight_update", {"weight_version": None}, retry=True)

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Under a name that no adapter has. Nothing waits for it but what asks for this name."""
        await self._call(
            "POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)}
        )

    async def unload_adapter(self, name: str) -> None:
        """Forgets the name; requests that are on it go on, and may have the server read its folder
        again."""
        await self._call("POST", "/v1/unload_lora_adapter", {"lora_name": name})

    async def adapters(self) -> list[str]:
        """The names of those that it holds."""
        models = (await self._call("GET", "/v1/models"))["data"]
        return [model["id"] for model in models if model.get("parent")]

    async def supports_adapters(self) -> bool:
        """As far as it can be seen from outside: it holds one, or it counts their requests."""
        with contextlib.suppress(EngineError, UserError):  # a server may count nothing
            return bool(await self.adapters()) or ADAPTER_METRIC in await self.metrics()
        return False

    async def set_version(self, version: int) -> None:
        """Names the weights that the server holds already."""
        await self._call(
            "POST", "/update_weight_version", {"new_version": str(version)}, retry=True
        )

    async def version(self) -> str:
        """What the server calls its weights; "default" when it was never told."""
        return str((await self._call("GET", "/weight_info", retry=True))["weight_version"])

    async def _call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        retry: bool = False,
        seconds: float | None = CONTROL_SECONDS,
        takes_slot: bool = False,
    ) -> Any:
        """The answer's JSON. retry: safe to send again when the connection breaks before any
        answer, as it does when a pooled one has been closed meanwhile, and after each internal
        error of the server. waits: see `exchange`."""
        try:
            how = {"body": body, "seconds": seconds, "retry": retry, "waits": takes_slot}
            with waiting(whose(), f"the vLLM server at {self.url} to answer {path}"):
                status, text = await exchange(self._session, self.url, method, path, **how)
        except ConnectionError as error:
            raise ServerLost(f"{error}") from error
        if status == 200:
            return text if path in TEXT else json.loads(text) if text else None
        raise self._refusal(path, status, error_message(text))

    def _refusal(self, path: str, status: int, words: str) -> Exception:
        server, endpoint = f"the vLLM server at {self.url}", path.partition("?")[0]
        if status == 401:
            return UserError(
                f"{server} refused the key: put its own into the variable that vllm.key_variable"
                " names"
            )
        if status == 404 and endpoint in ("/v1/models", "/tokenize", "/v1/completions"):
            wanted = "give a vLLM server's address without a path, like http://127.0.0.1:8000"
            return UserError(f"{server} does not offer {endpoint} ({status} {words}): {wanted}")
        # else it is the adapter that was not found
        if status == 404 and endpoint in WORDLESS and words == "Not Found":
            wanted = (
                "start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora --max-lora-rank"
                " RANK"
            )
            return UserError(f"{server} takes no adapters: {wanted}, of at least lora.rank")
        if status in (403, 404) and endpoint not in WORDLESS:
            return UserError(
                f"{server} does not offer {endpoint} ({status} {words}):"
                f" {required_flags(self._transfer)}"
            )
        said = f"{server} answered {endpoint} with {status}: {words}"
        return ServerFailed(said) if status >= 500 else ServerRefused(said, words)


def completion_from(answer: Mapping[str, Any]) -> Completion:
    """A generate endpoint's answer as a completion. Raises EngineError when a log-probability or a
    version is missing."""
    (choice,) = answer["choices"]
    tokens, reason = choice["token_ids"] or [], choice["finish_reason"]
    if reason not in ("stop", "length", "abort"):
        raise ServerFailed(f"vLLM ended a request with {reason!r}")
    content = (choice["logprobs"] or {}).get("content") or []
    logprobs = [entry["logprob"] for entry in content]
    if len(logprobs) != len(tokens) or min(logprobs, default=0.0) <= NO_LOGPROB:
        raise EngineError("vLLM left out the log-probability of a token: the weights may hold NaN")
    return Completion(
        tokens=np.asarray(tokens, np.int32),
        logprobs=np.asarray(logprobs, np.float32),
        versions=versions_from(choice["weight_versions"] or [], len(tokens)),
        finish_reason=reason,
    )


def experts_from(
    answer: Mapping[str, Any], length: int
) -> Int16[np.ndarray, "length layers per_token"]:
    """The experts of each token of a prompt and its completion; -1 for the last, which the server
    has drawn but not computed. Raises EngineError where the server recorded none, or not those of
    each token."""
    (choice,) = answer["choices"]
    encoded = choice.get("routed_experts")
    if encoded is None:
        raise EngineError(
            f"vLLM recorded no experts: start it with {RECORD_EXPERTS} and"
            " VLLM_USE_V2_MODEL_RUNNER=1"
        )
    recorded = np.load(io.BytesIO(base64.b64decode(encoded)), allow_pickle=False)
    if recorded.ndim != 3 or len(recorded) not in (length - 1, length):
        raise EngineError(
            f"vLLM recorded experts of the shape {recorded.shape} for a sequence of {length} tokens"
        )
    experts = np.full((length, *recorded.shape[1:]), NOT_RECORDED, np.int16)
    experts[: length - 1] = recorded[: length - 1]
    return experts


def scores_from(answer: Mapping[str, Any], tokens: Sequence[int]) -> Float32[np.ndarray, " T"]:
    """The log-probabilities of a prompt's tokens, 0 for the first. Raises EngineError when one is
    missing or is a logit."""
    entries = answer["choices"][0].get("prompt_logprobs")
    if not entries or len(entries) != len(tokens):
        raise EngineError(
            "the server scores no prompts (prompt_logprobs of /v1/completions): it must be a vLLM"
            " server"
        )
    scores = [0.0]
    for entry, token in zip(entries[1:], tokens[1:], strict=True):
        score = (entry.get(str(token)) or {}).get("logprob")
        if score is None or not score > NO_LOGPROB:
            raise EngineError(
                "vLLM left out the log-probability of a token of a prompt: the weights may hold NaN"
            )
        scores.append(float(score))
    if max(scores) > ROUNDING:
        raise EngineError(
            "vLLM gave logits in place of log-probabilities: start it without --logprobs-mode"
        )
    return np.asarray(scores, np.float32)


def next_from(answer: Mapping[str, Any], token: int) -> float:
    """The log-probability of a token that a generate endpoint was asked about. Raises EngineError
    when it is missing."""
    content = (answer["choices"][0]["logprobs"] or {}).get("content") or [{}]
    found = {
        entry["token_id"]: entry["logprob"] for entry in content[0].get("top_logprobs") or []
    }.get(token, NO_LOGPROB)
    if not NO_LOGPROB < found <= ROUNDING:
        raise EngineError(
            f"vLLM gave {found} as the log-probability of a token that it was asked about: the"
            " weights may hold NaN"
        )
    return float(found)


def versions_from(spans: Sequence[Mapping[str, Any]], length: int) -> Int32[np.ndarray, " N"]:
    """Half-open spans over the output tokens to one version a token. Raises ServerRestarted unless
    they cover each once."""
    versions: list[int] = []
    for span in spans:
        if span["start"] != len(versions) or not str(span["version"]).isdigit():
            break
        versions += [int(span["version"])] * (span["end"] - span["start"])
    if len(versions) != length:
        cause = "it may have been restarted, or updated by someone else"
        raise ServerRestarted(
            f"vLLM gave the weight versions {list(spans)} for {length} tokens: {cause}"
        )
    return np.asarray(versions, np.int32)


def error_message(text: str) -> str:
    """What the server said, out of its error's JSON."""
    try:
        answer = json.loads(text)
    except ValueError:
        return text.strip()[:300]
    error = (
        answer.get("error", answer.get("detail", answer)) if isinstance(answer, dict) else answer
    )
    return str(error["message"] if isinstance(error, dict) and "message" in error else error)
