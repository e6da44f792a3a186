"""A client for every endpoint of an SGLang server that is used, in this one file.

Written for SGLang 0.5.23; 0.5.20 is the first release that returns the version of every token.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float32, Int32

from areal_x.engines.fleet.calls import FOR_TOKENS, Calls, encoded
from areal_x.engines.fleet.client import (
    CACHES,
    CONTROL_SECONDS,
    HEALTH_SECONDS,
    MODEL,
    WEIGHTS,
)
from areal_x.engines.fleet.concurrency import Load
from areal_x.engines.fleet.connections import status_without_key
from areal_x.engines.fleet.failures import ServerFailed, ServerRefused
from areal_x.engines.fleet.scorer import ServedModel
from areal_x.engines.sglang.installed import check_version
from areal_x.engines.sglang.proof import PROVE, REPORT
from areal_x.engines.sglang.refusals import explained
from areal_x.engines.sglang.requests import generate_body, score_body
from areal_x.engines.sglang.responses import (
    Generated,
    completion_from,
    generated_from,
    scores_from,
)
from areal_x.engines.sglang.truncation import WHOLE_SHARE, combines
from areal_x.engines.sglang.weights import check_covers
from areal_x.errors import TaskError, UserError
from areal_x.hf.config_defaults import vocabulary_of
from areal_x.protocols.engine import Completion, SamplingParams

KIND = "SGLang"
# By how many tokens SGLang 0.5.23 wants a prompt to be shorter than its context, less the one that is
# needed. A prompt and its completion get the whole context if the server's is as much longer.
MARGIN = 6


class SGLangClient:
    """A client of one server (areal_x.engines.fleet.client.Client).

    key, admin_key: the server accepts the first for tokens and the second for everything that
    changes it, and neither in place of the other. model: directory of the served model. ours:
    areal_x.engines.sglang.launcher has started it.
    """

    kind: ClassVar[str] = KIND
    context_flag: ClassVar[str] = "--context-length"
    spare_tokens: ClassVar[int] = MARGIN + 1

    def __init__(
        self, url: str, key: str | None, admin_key: str | None, model: Path, ours: bool = False
    ) -> None:
        self.url, self._model, self._ours = url.rstrip("/"), model, ours
        explain = partial(explained, model)
        self.calls = Calls(self.url, key, KIND, explain)
        same = admin_key == key
        self._admin = self.calls if same else Calls(self.url, admin_key, KIND, explain)
        self._samples_by_seeds = False
        self._largest = -1  # token that the server has accepted

    async def close(self) -> None:
        await self.calls.close()
        await self._admin.close()

    async def is_healthy(self, seconds: float = HEALTH_SECONDS) -> bool:
        # /health generates a token, and so fails while the server is paused; /ping does not. A server
        # that refuses the key is alive: the next call tells what it refuses.
        return await self.calls.status("/ping", seconds) in (200, 401)

    async def is_paused(self) -> bool:
        status = await self.calls.status("/ready")
        return status == 503 and await self.is_healthy()

    async def accepts_without_key(self) -> bool:
        status = await status_without_key(
            KIND,
            self.url,
            "POST",
            "/update_weight_version",
            body=b"[]",  # refused as a body, where the key is not what is refused
            seconds=HEALTH_SECONDS,
        )
        return status not in (None, 401, 403)

    async def load_figures(self) -> Load | None:
        return None  # it counts no preemptions

    async def negotiate(self, ours: bool) -> None:
        """Does nothing: `context` refuses a release that is too old."""

    # ---- tokens

    async def context(self) -> int:
        """Returns the maximum length of prompt and completion together. Raises UserError if the
        server is too old. (The name of its model says nothing: SGLang makes it the folder of the
        last weights.)"""
        info = await self._server_info()
        self._samples_by_seeds = bool(info.get("enable_deterministic_inference"))
        # A prompt must be shorter than the server's context by more than one token.
        return int(info["max_req_input_len"]) + 1

    async def served(self) -> ServedModel:
        """Returns the model that the server was started with, with the context of its command
        line."""
        info = await self._server_info()
        return ServedModel(MODEL, int(info["max_req_input_len"]) + MARGIN)

    async def _server_info(self) -> dict[str, Any]:
        info: dict[str, Any] = await self.calls.json("GET", "/server_info", retry=True)
        check_version(str(info.get("version", "")), f"the SGLang server at {self.url}")
        return info

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
        """Generates from prompt tokens. A completion that the model's own end token ended, which
        the request has not named, has the finish reason "length" and fewer tokens than that. kept:
        is there in any case, as it comes with the log-probabilities. seed: only counts on a server with
        --enable-deterministic-inference.

        Raises: TaskError for a token outside the vocabulary, and UserError for a min_p beside seeds,
        which would end the whole server, and for a top_p that means something else on it.
        """
        self._check_tokens(np.asarray(tokens))
        if sampling.min_p and sampling.temperature and self._samples_by_seeds:
            raise UserError(
                f"sampling.min_p = {sampling.min_p} ends the SGLang server at {self.url}, which has"
                " --enable-deterministic-inference: set it to 0, or start the server without"
            )
        if combines(sampling) and not self._ours:
            raise UserError(
                f"sampling.top_p = {sampling.top_p} beside top_k or min_p means another share on the"
                f" SGLang server at {self.url}, {WHOLE_SHARE}"
            )
        body = generate_body(tokens, sampling, model, stop, self._vocabulary, seed)
        answer = await self._generated(body)
        return completion_from(answer, sampling.stop_token_ids, sampling.truncates)

    async def tokenize(self, model: str, text: str) -> list[int]:
        """Returns the text's tokens, without special tokens that the model would add. model: any."""
        body = {"prompt": text, "add_special_tokens": False}
        answer = await self.calls.json("POST", "/tokenize", body, retry=True, takes_slot=True)
        tokens: list[int] = answer["tokens"]
        return tokens

    async def check_scores(self) -> None:
        """Does nothing: a server with adapters scores too, the model itself."""

    async def score(self, model: str, tokens: Sequence[int]) -> Float32[np.ndarray, " T"]:
        """Returns the log-probability of each token given those before it, at temperature 1; 0 for
        the first. Raises: ServerRefused for a token outside the server's vocabulary."""
        body = score_body(tokens, model)
        # Tokens of a prompt outside the vocabulary would end the whole server; among those whose
        # log-probabilities are asked for the server itself looks for them.
        largest = max(tokens)
        if largest > self._largest:
            body["token_ids_logprob"] = [largest]
        found = scores_from(await self._generated(body), tokens)
        self._largest = max(self._largest, largest)
        return found

    async def probe(self, model: str, tokens: Sequence[int]) -> Float32[np.ndarray, " T"]:
        self._check_tokens(np.asarray(tokens))
        return scores_from(await self._generated(score_body(tokens, model)), tokens)

    async def hand_over(self) -> None:
        await self._control("/abort_request", {"abort_all": True}, seconds=HEALTH_SECONDS)

    def _check_tokens(self, tokens: np.ndarray) -> None:
        outside = tokens[(tokens < 0) | (tokens >= self._vocabulary)]
        if len(outside):
            raise TaskError(
                f"the token {int(outside[0])} of a prompt is outside the model's vocabulary of"
                f" {self._vocabulary}: another tokenizer made it"
            )

    @cached_property
    def _vocabulary(self) -> int:
        return vocabulary_of(self._model)

    async def _generated(self, body: Mapping[str, Any]) -> Generated:
        answer = await self.calls.send("POST", "/generate", encoded(body), **FOR_TOKENS)
        return generated_from(answer)

    # ---- weights

    async def init_weight_transfer(self, info: Mapping[str, Any]) -> None:
        """Does nothing: the server reads any folder."""

    async def set_version(self, version: int) -> None:
        await self._label(str(version))

    async def validate_folder(self, staging_root: Path, folder: Path) -> None:
        await asyncio.to_thread(check_covers, self._model, staging_root, folder)

    async def pause(self) -> None:
        """Freezes requests in flight, whose caches are dropped: they are recomputed after `resume`
        under the weights held then. ("in_place" would keep the caches of the old weights.)"""
        await self._control("/pause_generation", {"mode": "retract"})

    async def sleep(self, keep_weights: bool) -> None:
        """Pauses, and releases the memory of caches and weights: the server must have been started
        with --enable-memory-saver, or compute on a CPU (areal_x.engines.sglang.cpu_sleep).
        keep_weights: needs --enable-weights-cpu-backup."""
        await self.pause()
        await self._control("/release_memory_occupation", {"tags": [CACHES, WEIGHTS]})

    async def wake(self, memory: str) -> None:
        await self._control("/resume_memory_occupation", {"tags": [memory]})

    async def start_update(self) -> None:
        """Does nothing: weights from files need no session, as those from tensors do."""

    async def update_weights(self, info: Any) -> None:
        """Loads all weights of a paused server, and drops its prefix cache, which later requests
        would continue otherwise. info: `folder`."""
        body = {"model_path": info["folder"], "flush_cache": True, "abort_all_requests": False}
        answer = await self._control("/update_weights_from_disk", body)
        if not answer.get("success"):
            raise ServerFailed(
                f"the SGLang server at {self.url} did not load the weights: {answer.get('message')}"
            )

    async def finish_update(self, version: str) -> None:
        await self._label(version)

    async def abandon_update(self) -> None:
        """Does nothing, as `start_update` does."""

    async def make_version(self, order: str) -> list[Any]:
        raise ServerRefused("SGLang has no call that would apply a delta")

    async def forget_versions(self) -> None:
        """Does nothing: it has no cache."""

    async def prove(self, question: str) -> list[Any]:
        if not self._ours:
            raise ServerRefused(
                "only SGLang servers that the run starts show what their workers use"
            )
        try:
            answer = await self._control("/weights_checker", {"action": PROVE + question})
            return [json.loads(worker["checksums"][REPORT]) for worker in answer["ranks"]]
        except (ServerRefused, KeyError, TypeError, ValueError) as error:  # it repeats the question
            raise ServerRefused(
                "its /weights_checker has no action for proofs, which the launcher gives to SGLang 0.5.23"
            ) from error

    async def resume(self, seconds: float = CONTROL_SECONDS) -> None:
        await self._control("/continue_generation", {}, seconds=seconds)

    async def _label(self, version: str) -> None:
        body = {"new_version": version, "abort_all_requests": False}
        await self._control("/update_weight_version", body)

    # ---- adapters

    async def load_adapter(self, name: str, folder: Path) -> None:
        await self._control("/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})

    async def unload_adapter(self, name: str) -> None:
        """Removes the name once its requests have ended. A later request that names it makes the
        server read its folder again: that must be removed."""
        await self._control("/unload_lora_adapter", {"lora_name": name})

    async def adapters(self) -> list[str]:
        models = (await self.calls.json("GET", "/v1/models", retry=True))["data"]
        return [model["id"] for model in models if model.get("parent")]

    async def _control(
        self, path: str, body: Mapping[str, Any], seconds: float | None = CONTROL_SECONDS
    ) -> dict[str, Any]:
        """Makes a call that may be repeated, with the admin key. (An empty body is refused.)"""
        answer = await self._admin.json("POST", path, body, retry=True, seconds=seconds)
        return dict(answer or {})


async def serves(url: str) -> bool | None:
    """True if an SGLang server answers at the address, whatever its key; None if nothing answers.
    Costs it nothing: only SGLang has this path, which a POST is not for."""
    path = "/health_generate"
    status = await status_without_key(
        KIND, url.rstrip("/"), "POST", path, body=b"{}", seconds=HEALTH_SECONDS
    )
    return None if status is None else status == 405
