"""What is sampled: sequences, and the log-probabilities of tokens that are there.

Sequences come from an engine (`SampledWeights`), log-probabilities of prompts from the trainer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeAlias

import numpy as np

from areal_x.errors import UserError
from areal_x.hf import endings
from areal_x.protocols.engine import Completion, Request, SamplingParams, max_new_tokens
from areal_x.runtime.thread import OneThread, inline_or_in_pool
from areal_x.tinker import requests, results
from areal_x.tinker.host import TrainerHost
from areal_x.tinker.models import Shape, Source

MOST_SAMPLES = 1024
UNSUPPORTED = ("prompt_alt_tokens_k",)
MOST_TOP = 64  # most likely tokens at a position

Generate: TypeAlias = Callable[[Sequence[Request]], Awaitable[Sequence[Completion]]]


class SampledWeights(Protocol):
    """An engine, and how the weights of many models come into it. Used on one event loop."""

    def check(self, shape: Shape) -> None:
        """Raises: UserError for a model that cannot be sampled."""
        ...

    def holding(self, source: Source) -> AbstractAsyncContextManager[Generate]:
        """Gives what samples from these weights, which stay until the end."""
        ...

    async def close(self) -> None: ...


class Samplers:
    """Answers requests to sample. Used on one event loop."""

    def __init__(
        self, host: TrainerHost, thread: OneThread, tokenizer: Any, weights: SampledWeights
    ) -> None:
        self.host = host
        self.tokenizer = tokenizer
        self.ends = endings.ends(tokenizer)
        self.weights = weights
        self._thread = thread

    async def close(self) -> None:
        await self.weights.close()

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
        async with self.weights.holding(source) as generate:
            completions = await generate(
                [Request(prompt, sampling, seed=seed, stop=texts, kept=False) for seed in seeds]
            )
            likely = partial(self._most_likely, generate)
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
        generate: Generate,
        tokens: np.ndarray,
        first: int,
        k: int,
    ) -> np.ndarray:
        """Returns the ids of the k most likely tokens in the places from `first` on, -1 if there are
        fewer: those that sampling one more token with top_k keeps."""
        sampling = SamplingParams(max_tokens=1, top_k=k)
        places = range(first, len(tokens))
        completions = await generate([Request(tokens[:x], sampling, seed=0) for x in places])
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
