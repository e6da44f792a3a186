"""Log-probabilities of given tokens from servers: for a reference or teacher that need not fit
beside the trainer.

    packed rows ──each sequence once──▶ the least busy server ──▶ one number a token, back in its place
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from jaxtyping import Float32, Int64

from areal_x.errors import ConfigError, UserError
from areal_x.protocols.engine import EngineError
from areal_x.protocols.tries import paths
from areal_x.runtime.loop import run, together
from areal_x.types import Batch

# Requests in flight per server: enough to fill its batches, few enough to share it.
CONCURRENCY = 32
# Digits, white space, code and non-ASCII letters: where tokenizers differ.
PROBE = "It's 1234567.89 km²,\n\tdef f(x): return x**2  # naïve, 北京, Ωμέγα"


@dataclass(frozen=True)
class ServedModel:
    """A model that a server serves."""

    name: str
    context: int
    """Maximum length of prompt and completion together, in tokens."""


class ScoringClient(Protocol):
    """A client of a server that scores given tokens, made inside the event loop that uses it.

    Errors: ServerLost if the server is gone, other EngineErrors if it responds with an error,
    UserError if it refuses the key or lacks an endpoint.
    """

    url: str

    @property
    def kind(self) -> str:
        """The program's name."""
        ...

    @property
    def context_flag(self) -> str:
        """The server's argument that sets its context."""
        ...

    @property
    def spare_tokens(self) -> int:
        """By how many tokens a sequence to score must be shorter than the context."""
        ...

    async def close(self) -> None: ...

    async def served(self) -> ServedModel:
        """Returns the model that the server was started with. Raises: UserError if it has none that
        scores."""
        ...

    async def tokenize(self, model: str, text: str) -> list[int]:
        """Returns the text's tokens, without special tokens that the model would add."""
        ...

    async def check_scores(self) -> None:
        """Raises: UserError for a server that would not survive scoring."""
        ...

    async def score(self, model: str, tokens: Sequence[int]) -> Float32[np.ndarray, " T"]:
        """Returns the log-probability of each token given those before it, at temperature 1; 0 for
        the first."""
        ...


def check_temperature(temperature: float) -> None:
    """Raises: ConfigError for a temperature, of sampling, at which servers cannot score.

    Both vLLM and SGLang return a prompt's log-probabilities before any temperature, whatever the
    request and the server's arguments say.
    """
    if temperature != 1:
        wanted = (
            "1.0 if a server is the reference or teacher, as it scores given tokens at no other"
            " temperature"
        )
        raise ConfigError(
            "sampling.temperature",
            temperature,
            f"{wanted} (a model directory supports any)",
        )


class ServerScorer:
    """Computes log-probabilities of given tokens (areal_x.protocols.trainer.Scorer) on servers of
    one model.

    It keeps no connection open between calls, and may be called from any thread, also one with a
    running event loop.

    servers: each makes a client of one. tokenizer: of the model whose tokens are scored; the servers
    must tokenise text identically.

    Raises: UserError for a server that is unreachable, refuses the key, has other tokens or cannot
    score.
    """

    def __init__(self, servers: Sequence[Callable[[], ScoringClient]], tokenizer: Any) -> None:
        self._servers = tuple(servers)
        self._served = run(
            self._inspect_servers(tokenizer.encode(PROBE, add_special_tokens=False)), "scorer"
        )

    def logprobs(self, batch: Batch) -> Float32[np.ndarray, "rows length"]:
        """Computes log-probabilities as `areal_x.protocols.trainer.Scorer` does.

        Raises: EngineError if a server is lost or responds with an error; UserError for a sequence
        longer than the server's context, for a batch with images and for truncated sampling.
        """
        if batch.has_images:
            raise UserError(
                "the batch has images, which servers do not score: name a model directory instead,"
                " which is loaded here"
            )
        if batch.kept is not None:
            raise UserError(
                "the tokens were sampled with top_p, top_k or min_p, and servers score them among"
                " the whole vocabulary: name a model directory instead, which is loaded here"
            )
        tokens, scored = np.asarray(batch.tokens), np.zeros(batch.shape, np.float32)
        places: dict[tuple[int, ...], list[tuple[int, np.ndarray]]] = {}
        for row, place in sequences(batch):
            if len(place) > 1:
                places.setdefault(tuple(tokens[row, place].tolist()), []).append((row, place))
        for alike, found in zip(
            places.values(), run(self._score(list(places)), "scorer"), strict=True
        ):
            for row, place in alike:
                scored[row, place] = found
        return scored

    def _check_length(self, clients: Sequence[ScoringClient], longest: int) -> None:
        for client, served in zip(clients, self._served, strict=True):
            needed = longest + client.spare_tokens
            if needed > served.context:
                raise UserError(
                    f"a sequence of {longest} tokens does not fit into the context of the"
                    f" {client.kind} server at {client.url}: start it with {client.context_flag}"
                    f" {needed} or more (it has {served.context}), or lower train.row_length"
                )

    async def _score(self, sequences: Sequence[Sequence[int]]) -> list[Float32[np.ndarray, " T"]]:
        async with self._clients() as clients:
            self._check_length(clients, max(map(len, sequences), default=0))
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

        async def look(client: ScoringClient) -> ServedModel:
            served = await client.served()
            if await client.tokenize(served.name, PROBE) != list(probe):
                other = (
                    f"the {client.kind} server at {client.url} serves {served.name!r}, which"
                    " tokenises text differently"
                )
                raise UserError(f"{other}: it must have the trained model's vocabulary")
            await client.check_scores()
            return served

        try:
            async with self._clients() as clients:
                return await together(look(client) for client in clients)
        except EngineError as error:
            raise UserError(f"{error}") from error

    @asynccontextmanager
    async def _clients(self) -> AsyncIterator[list[ScoringClient]]:
        async with AsyncExitStack() as closing:
            clients = [connect() for connect in self._servers]
            for client in clients:
                closing.push_async_callback(client.close)
            yield clients


def sequences(batch: Batch) -> list[tuple[int, Int64[np.ndarray, " T"]]]:
    """Returns the row and the positions of the fewest sequences that hold every token: each segment,
    or, where sequences share tokens (`Batch.parents`), each that no other continues."""
    ids = np.asarray(batch.segment_ids)
    if batch.parents is None:
        found = []
        for row, own in enumerate(ids):
            edges = np.flatnonzero(np.diff(own)) + 1
            places = np.split(np.arange(len(own)), edges)
            found += [(row, place) for place in places if own[place[0]] > 0]
        return found
    rows = enumerate(zip(np.asarray(batch.parents), ids, strict=True))
    return [(row, place) for row, (parents, own) in rows for place in paths(parents, own)]
