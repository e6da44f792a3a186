"""Log-probabilities of given tokens from vLLM servers: for a reference or teacher that need not fit
beside the trainer.

    packed rows ──each sequence once──▶ the least busy server ──▶ one number a token, back in its place

Any vLLM server works, started with nothing but `vllm serve MODEL`: only /v1/models, /tokenize and
/v1/completions are used, and /metrics, if present, to detect adapters, which a scoring server must
not have.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import numpy as np
from jaxtyping import Float32, Int64

from areal_x.engines.vllm.client import ServedModel, VLLMClient
from areal_x.engines.vllm.installed import VLLM_RELEASE
from areal_x.errors import ConfigError, UserError
from areal_x.protocols.engine import EngineError
from areal_x.runtime.loop import run, together
from areal_x.types import Batch

# Requests in flight per server: enough to fill its batches, few enough to share it.
CONCURRENCY = 32
# Digits, white space, code and non-ASCII letters: where tokenizers differ.
PROBE = "It's 1234567.89 km²,\n\tdef f(x): return x**2  # naïve, 北京, Ωμέγα"


class ServerScorer:
    """Computes log-probabilities of given tokens (areal_x.protocols.trainer.Scorer) on vLLM servers
    of one model.

    It keeps no connection open between calls, and may be called from any thread, also one with a
    running event loop.

    tokenizer: of the model whose tokens are scored; the servers must tokenise text identically.
    temperature: that the tokens are sampled at. Only 1 can be scored: vLLM returns a prompt's
    log-probabilities before any temperature, whatever the request and --logprobs-mode say.

    Raises: ConfigError for another temperature; UserError for a server that is unreachable, refuses
    the key, has other tokens or has adapters enabled.
    """

    def __init__(
        self, urls: Sequence[str], key: str | None, tokenizer: Any, temperature: float = 1.0
    ) -> None:
        if temperature != 1:
            wanted = (
                "1.0 if a vLLM server is the reference or teacher, as it scores given tokens at no"
                " other temperature"
            )
            raise ConfigError(
                "sampling.temperature",
                temperature,
                f"{wanted} (a model directory supports any)",
            )
        self.urls = tuple(urls)
        self._key = key
        self._served = run(
            self._inspect_servers(tokenizer.encode(PROBE, add_special_tokens=False)), "scorer"
        )

    def logprobs(self, batch: Batch) -> Float32[np.ndarray, "rows length"]:
        """Computes log-probabilities as `areal_x.protocols.trainer.Scorer` does; but after a shared
        prompt a segment's first token has one too.

        Raises: EngineError if a server is lost or responds with an error; UserError for a sequence
        longer than the server's context and for a batch with images.
        """
        if batch.has_images:
            raise UserError(
                "the batch has images, which servers do not score: name a model directory instead,"
                " which is loaded here"
            )
        tokens, scored = np.asarray(batch.tokens), np.zeros(batch.shape, np.float32)
        places: dict[tuple[int, ...], list[tuple[int, np.ndarray]]] = {}
        for row, place in sequences(batch):
            if len(place) > 1:
                places.setdefault(tuple(tokens[row, place].tolist()), []).append((row, place))
        self._check_length(max(map(len, places), default=0))
        for alike, found in zip(
            places.values(), run(self._score(list(places)), "scorer"), strict=True
        ):
            for row, place in alike:
                scored[row, place] = found
        return scored

    def _check_length(self, longest: int) -> None:
        url, served = min(
            zip(self.urls, self._served, strict=True), key=lambda pair: pair[1].context
        )
        if longest >= served.context:  # scoring needs room for one more token
            raise UserError(
                f"a sequence of {longest} tokens does not fit into the context of the vLLM server"
                f" at {url}: start it with --max-model-len {longest + 1} or more (it has"
                f" {served.context}), or lower train.row_length"
            )

    async def _score(self, sequences: Sequence[Sequence[int]]) -> list[Float32[np.ndarray, " T"]]:
        async with self._clients() as clients:
            free, in_flight = asyncio.Semaphore(CONCURRENCY * len(clients)), [0] * len(clients)

            async def score(tokens: Sequence[int]) -> Float32[np.ndarray, " T"]:
                async with free:
                    index = min(range(len(clients)), key=in_flight.__getitem__)
                    in_flight[index] += 1
                    try:
                        return await clients[index].score(self._served[index].name, tokens)
                    finally:
                        in_flight[index] -= 1

            return await together(score(tokens) for tokens in sequences)

    async def _inspect_servers(self, probe: Sequence[int]) -> list[ServedModel]:
        """Returns the model that each server serves. Raises: UserError for a server that cannot
        score."""

        async def look(client: VLLMClient) -> ServedModel:
            served = await client.served()
            if await client.tokenize(served.name, PROBE) != list(probe):
                other = (
                    f"the vLLM server at {client.url} serves {served.name!r}, which tokenises text"
                    " differently"
                )
                raise UserError(f"{other}: it must have the trained model's vocabulary")
            if await client.supports_adapters():
                dies = (
                    f"with adapters the engine of vLLM {VLLM_RELEASE} dies if it scores a prompt"
                    " beside other requests"
                )
                wanted = "start a separate server without --enable-lora, or name a model directory"
                raise UserError(
                    f"the vLLM server at {client.url} has adapters enabled, and {dies}: {wanted}"
                )
            return served

        try:
            async with self._clients() as clients:
                return await together(look(client) for client in clients)
        except EngineError as error:
            raise UserError(f"{error}") from error

    @asynccontextmanager
    async def _clients(self) -> AsyncIterator[list[VLLMClient]]:
        async with AsyncExitStack() as closing:
            clients = [VLLMClient(url, self._key) for url in self.urls]
            for client in clients:
                closing.push_async_callback(client.close)
            yield clients


def sequences(batch: Batch) -> list[tuple[int, Int64[np.ndarray, " T"]]]:
    """Returns the row and the positions of every sequence: of each segment, preceded by those of
    the prompt that it shares with others."""
    found = []
    for row, ids in enumerate(np.asarray(batch.segment_ids)):
        edges = np.flatnonzero(np.diff(ids)) + 1
        of_ids = {
            int(ids[place[0]]): place
            for place in np.split(np.arange(len(ids)), edges)
            if ids[place[0]] > 0
        }
        prompts = [0] * len(of_ids)
        if batch.prefix_ids is not None:
            prompts = [int(batch.prefix_ids[row, place[0]]) for place in of_ids.values()]
        whole = [
            np.concatenate([of_ids[p], place]) if p else place
            for p, place in zip(prompts, of_ids.values(), strict=True)
        ]
        found += [
            (row, place) for id_, place in zip(of_ids, whole, strict=True) if id_ not in prompts
        ]
    return found
