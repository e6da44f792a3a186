"""Sampling from many weights with one engine: the base and all adapters beside it at once, whole
models one at a time.

    adapters of the base ──▶ engine with the base and the adapters of all running requests
    a whole model ──▶ line   running requests end, then its weights are loaded

Requests for what is loaded join at once while nobody waits for other weights; a swap takes turns in
the order of arrival. An adapter comes with its first request, and running ones go on. So every token
of a request has the weights that it asked for.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from areal_x.engines.embedded import EmbeddedEngine, StagedSnapshot
from areal_x.errors import UserError
from areal_x.hf import endings
from areal_x.protocols.engine import Completion, Request, SamplingParams, max_new_tokens
from areal_x.runtime import background
from areal_x.runtime.thread import OneThread, inline_or_in_pool
from areal_x.tinker import requests, results
from areal_x.tinker.host import TrainerHost
from areal_x.tinker.models import Source

MOST_SAMPLES = 1024
UNSUPPORTED = ("prompt_alt_tokens_k",)
MOST_TOP = 64  # most likely tokens at a position
DECODE_STEPS = 8  # after which a request of another client joins the sequences that run
MOST_ADAPTERS = 16  # in the engine, besides those whose requests run
BASE = ""  # the name of the base with its adapters, which no other weights have


@dataclass(eq=False)
class Adapter:
    """An adapter in the engine, or on its way there. users: its requests."""

    users: int = 0
    ready: asyncio.Future[None] | None = None


class Samplers:
    """The engine, and the line before it. Used on one event loop."""

    def __init__(self, host: TrainerHost, thread: OneThread, tokenizer: Any, slots: int) -> None:
        self.host = host
        self.tokenizer = tokenizer
        self.ends = endings.ends(tokenizer)
        self._thread = thread
        self._slots = slots
        self._engine: EmbeddedEngine | None = None
        self._loaded: str | None = None
        self._users = 0
        self._swap: asyncio.Task[None] | None = None
        self._swaps = 0
        self._line: deque[tuple[Source, str, asyncio.Future[None]]] = deque()
        # The adapters in the engine, the least recently used first, and their requests.
        self._adapters: dict[str, Adapter] = {}

    @asynccontextmanager
    async def holding(self, source: Source) -> AsyncIterator[tuple[EmbeddedEngine, str | None]]:
        """Gives the engine with these weights, which stay until the end, and the adapter's name there
        if they are an adapter's."""
        at_once = await self._thread.run(self.host.samples_at_once, source)
        async with self._holding(source, BASE if at_once else source.name) as engine:
            if not at_once or source.shape is None:
                yield engine, None
                return
            adapter = self._adapters[source.name] = self._adapters.pop(source.name, Adapter())
            adapter.users += 1
            try:
                if adapter.ready is None:
                    adapter.ready = asyncio.get_running_loop().create_future()
                    background.start(self._put(engine, source, adapter.ready), "an adapter")
                await asyncio.shield(adapter.ready)
                yield engine, source.name
            finally:
                adapter.users -= 1

    async def _put(
        self, engine: EmbeddedEngine, source: Source, ready: asyncio.Future[None]
    ) -> None:
        """Brings an adapter into the engine, in place of some that nobody uses."""
        try:
            idle = [name for name, x in self._adapters.items() if not x.users]
            gone = idle[: max(len(self._adapters) - MOST_ADAPTERS, 0)]
            for name in gone:  # before anything waits: adapters come at the same time
                del self._adapters[name]
            await asyncio.gather(*(engine.put_adapter(name, None) for name in gone))
            given = await self._thread.run(self.host.adapter, source)
            await engine.put_adapter(source.name, given)
        except Exception as failure:
            self._adapters.pop(source.name, None)
            ready.set_exception(failure)
        else:
            ready.set_result(None)

    @asynccontextmanager
    async def _holding(self, source: Source, key: str) -> AsyncIterator[EmbeddedEngine]:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.append((source, key, turn))
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._leave()  # it was admitted meanwhile
            raise
        try:
            assert self._engine is not None
            yield self._engine
        finally:
            self._leave()

    def _leave(self) -> None:
        self._users -= 1
        self._admit()

    def _admit(self) -> None:
        """Admits whoever is first in the line, as long as the weights are theirs."""
        while self._line and self._swap is None:
            source, key, turn = self._line[0]
            if turn.done():  # cancelled
                self._line.popleft()
            elif key == self._loaded:
                self._line.popleft()
                self._users += 1
                turn.set_result(None)
            elif self._users == 0:
                self._swap = background.start(self._load(source, key), "a swap of weights")
            else:
                return

    async def _load(self, source: Source, key: str) -> None:
        error: Exception | None = None
        try:
            if self._engine is None:
                sampler = await self._thread.run(self.host.sampler, self._slots)
                engine = EmbeddedEngine(sampler, DECODE_STEPS)
                await engine.start()
                self._engine = engine
            snapshot = await self._thread.run(self.host.snapshot, source)
            self._swaps += 1
            await self._engine.swap(StagedSnapshot(snapshot=snapshot, version=self._swaps))
            self._loaded = key
        except Exception as failure:
            error = failure
        self._swap = None
        if error is not None:
            *_, turn = self._line.popleft()
            if not turn.done():
                turn.set_exception(error)
        self._admit()

    async def close(self) -> None:
        if self._engine is not None:
            await self._engine.close()

    async def sample(self, source: Source, request: requests.Sample, chance: int) -> results.Result:
        """chance: the seed of a request without one. Raises: UserError for a request that cannot be
        answered."""
        prompt = check(request)
        sampling, texts = self._sampling(request.sampling_params)
        max_new_tokens(Request(prompt, sampling), self.host.context, "--context")
        if prompt.max(initial=0) >= self.host.vocabulary:
            raise UserError(
                f"the prompt has the token {prompt.max()}, and the model's vocabulary has"
                f" {self.host.vocabulary}"
            )
        seed = request.sampling_params.seed
        first = chance % 2**30 if seed is None else seed * MOST_SAMPLES
        seeds = [(first + index) % 2**31 for index in range(request.num_samples)]
        last = request.prompt_logprobs_last_n or len(prompt)
        top: list[np.ndarray] = []
        async with self.holding(source) as (engine, adapter):
            asked = [Request(prompt, sampling, seed=seed, adapter=adapter) for seed in seeds]
            completions: Sequence[Completion] = await asyncio.gather(*engine.submit(asked))
            likely = partial(self._most_likely, engine, adapter)
            found = [
                await inline_or_in_pool(len(x.tokens), cut, x, texts, self.tokenizer)
                for x in completions
            ]
            if k := request.topk_prompt_logprobs:
                top.append(await likely(prompt, max(len(prompt) - last, 1), k))
            if k := request.topk_sample_logprobs:
                whole = [np.concatenate([prompt, x.tokens]) for x in found]
                top += [await likely(x, len(prompt), k) for x in whole]
        prompt_top = top.pop(0) if request.topk_prompt_logprobs else None
        scored = await self._scored(source, prompt, last, request, prompt_top)
        for index, ids in enumerate(top):
            tokens = np.concatenate([prompt, found[index].tokens])
            own = await self._ranked(source, tokens, ids)
            found[index] = replace(found[index], top=own)
        size = sum(len(x.tokens) for x in found) + len(prompt)
        return await inline_or_in_pool(size, results.samples, found, scored)

    async def _most_likely(
        self,
        engine: EmbeddedEngine,
        adapter: str | None,
        tokens: np.ndarray,
        first: int,
        k: int,
    ) -> np.ndarray:
        """Returns the ids of the k most likely tokens in the places from `first` on, -1 if there are
        fewer: those that sampling one more token with top_k keeps."""
        sampling = SamplingParams(max_tokens=1, top_k=k)
        places = range(first, len(tokens))
        asked = [Request(tokens[:place], sampling, seed=0, adapter=adapter) for place in places]
        completions: Sequence[Completion] = await asyncio.gather(*engine.submit(asked))
        found = np.full((len(places), k), -1, np.int32)
        for row, completion in zip(found, completions, strict=True):
            kept = completion.kept
            everything = np.arange(self.host.vocabulary, dtype=np.int32)
            ids = kept.ids if kept is not None and kept.counts[0] else everything
            row[: min(len(ids), k)] = ids[:k]
        return found

    async def _ranked(self, source: Source, tokens: np.ndarray, ids: np.ndarray) -> results.Top:
        """Returns the ids of the last places of a sequence, the most likely first."""
        targets = np.full((len(tokens) - 1, ids.shape[1]), -1, np.int32)
        if len(ids):
            targets[-len(ids) :] = ids
        logprobs = await self._thread.run(self.host.logprobs, source, tokens, targets)
        logprobs = np.where(targets < 0, -np.inf, logprobs)[len(targets) - len(ids) :]
        order = np.argsort(-logprobs, axis=1, kind="stable")
        return results.Top(*(np.take_along_axis(x, order, axis=1) for x in (ids, logprobs)))

    async def _scored(
        self,
        source: Source,
        prompt: np.ndarray,
        last: int,
        request: requests.Sample,
        top: np.ndarray | None,
    ) -> results.Scored:
        """Returns what the request asks of its prompt."""
        logprobs = ranked = named = sparse = None
        if request.prompt_logprobs:
            logprobs = np.full(len(prompt), np.nan, np.float32)
            if len(prompt) > 1:
                own = self._thread.run(self.host.logprobs, source, prompt, prompt[1:, None])
                logprobs[1:] = (await own)[:, 0]
                logprobs[: len(prompt) - last] = np.nan
        if top is not None:
            found = await self._ranked(source, prompt, top)
            before = ((len(prompt) - len(top), 0), (0, 0))  # places without
            ids = np.pad(found.ids, before, constant_values=-1)
            ranked = results.Top(ids, np.pad(found.logprobs, before))
        if (given := request.target_prompt_logprobs) is not None:
            cells = requests.cells_of(given, len(prompt))
            named = await self._thread.run(self.host.logprobs, source, prompt, cells)
            if given.sparse_crow_indices is not None:
                sparse = given.sparse_crow_indices, given.sparse_col_indices or []
        return results.Scored(logprobs, ranked, named, sparse)

    def _sampling(self, asked: requests.Sampling) -> tuple[SamplingParams, tuple[str, ...]]:
        """Returns the engine's parameters, and the texts that end a sequence."""
        stops = [asked.stop] if isinstance(asked.stop, str) else asked.stop
        tokens = [] if stops == [] else list(self.ends)
        texts = []
        for stop in stops or ():
            if isinstance(stop, int):
                tokens.append(stop)
            elif stop:
                texts.append(stop)
        most = self.host.context if asked.max_tokens is None else asked.max_tokens
        sampling = SamplingParams(
            max_tokens=most,
            temperature=asked.temperature,
            top_p=asked.top_p,
            top_k=max(asked.top_k, 0),
            stop_token_ids=tuple(tokens),
        )
        return sampling, tuple(texts)


def check(request: requests.Sample) -> np.ndarray:
    """Returns the prompt. Raises: UserError for what no server of this kind answers."""
    for name in UNSUPPORTED:
        if getattr(request, name):
            raise UserError(f"this server does not compute {name} yet: leave it out")
    if not 1 <= request.num_samples <= MOST_SAMPLES:
        raise UserError(f"num_samples is from 1 to {MOST_SAMPLES}, not {request.num_samples}")
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs"):
        if not 0 <= getattr(request, name) <= MOST_TOP:
            raise UserError(f"{name} is from 0 to {MOST_TOP}, not {getattr(request, name)}")
    prompt = requests.tokens_of(request.prompt)
    if request.target_prompt_logprobs is not None:
        requests.cells_of(request.target_prompt_logprobs, len(prompt))
    last = request.prompt_logprobs_last_n
    if last is not None and not 1 <= last < len(prompt):
        raise UserError(
            f"prompt_logprobs_last_n = {last} is not from 1 to {len(prompt) - 1}, one less than"
            " the prompt"
        )
    return prompt


def cut(completion: Completion, texts: Sequence[str], tokenizer: Any) -> results.SampledSequence:
    """Returns a completion up to the token that completes one of the texts."""
    tokens, stopped = completion.tokens, completion.finish_reason == "stop"

    def ended(count: int) -> bool:
        text = tokenizer.decode(tokens[:count].tolist())
        return any(stop in text for stop in texts)

    count = len(tokens)
    if texts and ended(count):
        count = next(n for n in range(1, count + 1) if ended(n))
        stopped = True
    return results.SampledSequence(tokens[:count], completion.logprobs[:count], stopped)
