"""The conformance checks of an engine: each takes a started engine, whatever is behind it, and compares it with transformers.

The engine serves the model in `directory` as its current version. Checks are coroutines for the loop that started it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_x.errors import UserError
from areal_x.hf.tokenizer import load_tokenizer
from areal_x.protocols.engine import Completion, Engine, Request, SamplingParams

TOLERANCE = 1e-4


@cache
def reference(directory: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def full_forward(directory: Path, tokens: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """Log-probabilities [length, vocabulary] of the next token after each token, by transformers."""
    import torch

    with torch.inference_mode():
        logits = reference(directory)(torch.as_tensor(np.asarray(tokens))[None].long()).logits[0].double()
    return torch.log_softmax(logits / temperature, -1).numpy()


def expected_logprobs(directory: Path, request: Request, completion: Completion) -> np.ndarray:
    """Each generated token's log-probability in one forward over prompt and completion (temperature 0 means 1)."""
    prompt, count = len(request.tokens), len(completion.tokens)
    table = full_forward(directory, np.concatenate([request.tokens, completion.tokens]), request.sampling.temperature or 1.0)
    return table[np.arange(prompt - 1, prompt + count - 1), completion.tokens]


def truncated(logprobs: np.ndarray, top_k: int, top_p: float, min_p: float = 0.0) -> np.ndarray:
    """The distribution [vocabulary] after min_p, then top_k and then top_p, entry by entry."""
    order = [token for token in np.argsort(-logprobs) if np.exp(logprobs[token] - logprobs.max()) >= min_p]
    kept, mass = [], 0.0
    most_likely = order[: top_k or len(order)]
    within_k = np.exp(logprobs[most_likely]).sum()
    for token in most_likely:
        kept.append(token)
        mass += np.exp(logprobs[token]) / within_k
        if mass >= top_p:
            break
    left = np.zeros_like(logprobs)
    left[kept] = np.exp(logprobs[kept])
    return left / left.sum()


def prompts(directory: Path, count: int, longest: int, seed: int = 0) -> list[np.ndarray]:
    """Random prompts of 1 to `longest` tokens."""
    rng = np.random.default_rng(seed)
    vocabulary = reference(directory).config.vocab_size
    return [rng.integers(2, vocabulary, rng.integers(1, longest + 1)).astype(np.int32) for _ in range(count)]


async def all_of(engine: Engine, requests: list[Request]) -> list[Completion]:
    return list(await asyncio.gather(*(engine.generate(request) for request in requests)))


async def check_logprobs_are_those_of_a_full_forward(engine: Engine, directory: Path) -> None:
    """Greedy and sampled, more requests than the engine runs at once, all of different lengths."""
    count = min(2 * engine.concurrency + 3, 40)
    temperatures = (0.0, 0.7, 1.0, 1.3)
    requests = [
        Request(prompt, SamplingParams(max_tokens=1 + 3 * i % 40, temperature=temperatures[i % 4]), seed=i)
        for i, prompt in enumerate(prompts(directory, count, longest=engine.context // 2))
    ]
    for request, completion in zip(requests, await all_of(engine, requests), strict=True):
        assert len(completion.tokens) == request.sampling.max_tokens
        assert completion.finish_reason == "length"
        assert (completion.versions == engine.version).all()
        np.testing.assert_allclose(completion.logprobs, expected_logprobs(directory, request, completion), atol=TOLERANCE)


async def check_greedy_takes_the_most_likely_token(engine: Engine, directory: Path) -> None:
    (prompt,) = prompts(directory, 1, longest=8, seed=1)
    completion = await engine.generate(Request(prompt, SamplingParams(max_tokens=24, temperature=0.0)))
    table = full_forward(directory, np.concatenate([prompt, completion.tokens]))[len(prompt) - 1 : -1]
    assert (completion.tokens == table.argmax(-1)).all()


async def check_a_stop_token_ends_the_completion_and_belongs_to_it(engine: Engine, directory: Path) -> None:
    """Any of several stop tokens ends it, as a model may have several end tokens; it has its true log-probability, as every
    other token."""
    (prompt,) = prompts(directory, 1, longest=8, seed=2)
    free = await engine.generate(Request(prompt, SamplingParams(max_tokens=30, temperature=0.0)))
    places = {int(token): int(np.flatnonzero(free.tokens == token)[0]) for token in free.tokens}
    never = next(token for token in range(44) if token not in places)
    late = sorted(places, key=places.__getitem__)[-2:]  # the two that come last for the first time
    for stops in ((late[0],), (late[1],), (never, late[1], late[0])):
        first = min(places[stop] for stop in stops if stop in places)
        request = Request(prompt, SamplingParams(max_tokens=30, temperature=0.0, stop_token_ids=stops))
        completion = await engine.generate(request)
        assert completion.tokens.tolist() == free.tokens[: first + 1].tolist()
        assert completion.finish_reason == "stop"
        np.testing.assert_allclose(completion.logprobs, expected_logprobs(directory, request, completion), atol=TOLERANCE)


async def check_truncated_sampling(
    engine: Engine,
    directory: Path,
    top_k: int,
    top_p: float,
    min_p: float = 0.0,
    samples: int = 400,
    deviations: float = 4,
    truncate: Callable[[np.ndarray, int, float, float], np.ndarray] = truncated,
) -> None:
    """Frequencies (chi-square), log-probabilities and kept tokens of one token against the distribution computed entry by
    entry.

    deviations: at which the statistic fails; an engine without seeds, which samples anew in every run, needs more.
    truncate: the distribution after top_k and top_p.
    """
    (prompt,) = prompts(directory, 1, longest=8, seed=3)
    sampling = SamplingParams(max_tokens=1, temperature=0.9, top_k=top_k, top_p=top_p, min_p=min_p)
    expected = truncate(full_forward(directory, prompt, 0.9)[-1], top_k, top_p, min_p)
    completions = await all_of(engine, [Request(prompt, sampling, seed=i) for i in range(samples)])
    drawn = np.array([completion.tokens[0] for completion in completions])
    logprobs = np.array([completion.logprobs[0] for completion in completions])
    assert (expected[drawn] > 0).all()
    for completion in completions:
        assert (completion.kept is not None) == sampling.truncates
        if completion.kept is not None:
            assert np.array_equal(np.sort(completion.kept.ids), np.flatnonzero(expected))
    np.testing.assert_allclose(logprobs, np.log(expected[drawn]), atol=TOLERANCE)
    assert chi_square(np.bincount(drawn, minlength=len(expected)), expected * samples) < deviations


async def check_requests_report_what_they_kept(engine: Engine) -> None:
    """Greedy ones and those that sample from everything report nothing, and long ones each of their tokens' own."""
    of_each = [
        SamplingParams(60, 0.8, 0.7),
        SamplingParams(30, 0.8),
        SamplingParams(50, 0.0, 0.5, 3),
        SamplingParams(40, 1.3, top_k=3),
    ]
    requests = [Request(np.arange(2, 14, dtype=np.int32), of_each[i % 4]) for i in range(24)]
    for request, completion in zip(requests, await all_of(engine, requests), strict=True):
        kept = completion.kept
        assert (kept is not None) == request.sampling.truncates
        if kept is not None:
            assert len(kept) == request.sampling.max_tokens
            assert kept.contain(completion.tokens)
            assert kept.counts.min() >= 1
            assert kept.counts.max() <= (request.sampling.top_k or 43)


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """Standard deviations by which Pearson's statistic lies above its mean, with rare tokens merged into one cell."""
    often = expected >= 5
    counts = np.append(counts[often], counts[~often].sum())
    expected = np.append(expected[often], expected[~often].sum())
    there = expected > 0
    statistic = ((counts - expected)[there] ** 2 / expected[there]).sum()
    freedom = max(there.sum() - 1, 1)
    return float((statistic - freedom) / np.sqrt(2 * freedom))


async def check_weights_swapped_in_flight(
    engine: Engine, directory: Path, trainer: Any, after: Path, through: Callable[[], Awaitable[None]] | None = None
) -> None:
    """Each token has one true version: tokens before the swap have the old policy's log-probability, those after it the new
    policy's in a full forward over everything before them. No request fails or is cut. `trainer` has the model in `after`.
    through: what happens before the swap."""
    before = engine.version
    staged = await asyncio.to_thread(engine.stage, trainer)
    count = min(engine.concurrency - 1, 8)
    requests = [
        Request(prompt, SamplingParams(max_tokens=engine.context - len(prompt)), seed=i)
        for i, prompt in enumerate(prompts(directory, count, longest=20, seed=4))
    ]

    async def until_swapped(request: Request) -> Completion:
        """Asks again if an answer ended before the swap, however fast a server is."""
        while True:
            completion = await engine.generate(request)
            if engine.version != before:
                return completion

    generating = [asyncio.ensure_future(until_swapped(request)) for request in requests]
    short = Request(requests[0].tokens, SamplingParams(max_tokens=2))
    await engine.generate(short)  # that this one ended says that decoding goes on
    if through is not None:
        await through()
    seconds = await engine.swap(staged)
    assert 0 < seconds < 60
    assert engine.version == trainer.version != before
    completions = await asyncio.gather(*generating)
    versions = np.concatenate([completion.versions for completion in completions])
    assert set(versions) == {before, trainer.version}
    for request, completion in zip(requests, completions, strict=True):
        assert len(completion.tokens) == request.sampling.max_tokens
        assert (np.diff(completion.versions) >= 0).all()
        for version, model in ((before, directory), (trainer.version, after)):
            mine = completion.versions == version
            expected = expected_logprobs(model, request, completion)
            np.testing.assert_allclose(completion.logprobs[mine], expected[mine], atol=TOLERANCE)


async def check_a_swap_leaves_no_prefix_of_the_old_weights(engine: Engine, trainer: Any, after: Path) -> None:
    """Tokens carry the version that was published last, also those that continue a prompt that was computed before. `trainer`
    has the model in `after`."""
    # Longer than a block of a server's prefix cache (128 tokens of vLLM's).
    prompt = np.arange(200, dtype=np.int32) % 40 + 2
    greedy = Request(prompt, SamplingParams(max_tokens=20, temperature=0.0))
    np.testing.assert_array_equal((await engine.generate(greedy)).versions, engine.version)
    await engine.swap(await asyncio.to_thread(engine.stage, trainer))
    completion = await engine.generate(greedy)
    np.testing.assert_array_equal(completion.versions, trainer.version)
    np.testing.assert_allclose(completion.logprobs, expected_logprobs(after, greedy, completion), atol=TOLERANCE)


async def check_a_cancelled_request_gives_its_place_to_others(engine: Engine, directory: Path) -> None:
    (prompt,) = prompts(directory, 1, longest=4, seed=5)
    endless = Request(prompt, SamplingParams(max_tokens=engine.context))
    generating = [asyncio.ensure_future(engine.generate(endless)) for _ in range(2 * engine.concurrency)]
    await engine.generate(Request(prompt, SamplingParams(max_tokens=1)))
    for task in generating:
        task.cancel()
    results = await asyncio.gather(*generating, return_exceptions=True)
    assert any(isinstance(result, asyncio.CancelledError) for result in results)
    completion = await asyncio.wait_for(engine.generate(Request(prompt, SamplingParams(max_tokens=3))), timeout=60)
    assert len(completion.tokens) == 3


async def check_greedy_logprobs_are_of_the_plain_softmax_whatever_top_p_and_top_k_say(engine: Engine, directory: Path) -> None:
    (prompt,) = prompts(directory, 1, longest=12, seed=6)
    greedy = Request(prompt, SamplingParams(max_tokens=40, temperature=0.0, top_p=0.5, top_k=1))
    sampled = [Request(prompt, SamplingParams(max_tokens=40, top_p=0.9))] * 7
    completion, *_ = await all_of(engine, [greedy, *sampled])
    np.testing.assert_allclose(completion.logprobs, expected_logprobs(directory, greedy, completion), atol=TOLERANCE)


async def check_a_stop_text_ends_a_completion_with_the_token_that_completes_it(engine: Engine, directory: Path) -> None:
    """On an engine that detokenises while it samples."""
    tokenizer, stop = load_tokenizer(directory), ("7", "12")
    (prompt,) = prompts(directory, 1, longest=12, seed=7)
    request = Request(prompt, SamplingParams(max_tokens=100, temperature=2.0), stop=stop)
    completions = await all_of(engine, [request] * 16)
    assert sum(completion.finish_reason == "stop" for completion in completions) > 8
    for completion in completions:
        texts = [tokenizer.decode(completion.tokens[:count], skip_special_tokens=True) for count in (-1, None)]
        assert [any(word in text for word in stop) for text in texts] == [False, completion.finish_reason == "stop"]
        assert len(completion.tokens) == 100 or completion.finish_reason == "stop"
        np.testing.assert_allclose(completion.logprobs, expected_logprobs(directory, request, completion), atol=TOLERANCE)


# What every engine over servers must do, beside what needs more than the engine and the model's directory.
OF_SERVERS = (
    check_logprobs_are_those_of_a_full_forward,
    check_greedy_takes_the_most_likely_token,
    check_a_stop_token_ends_the_completion_and_belongs_to_it,
    check_a_cancelled_request_gives_its_place_to_others,
    check_greedy_logprobs_are_of_the_plain_softmax_whatever_top_p_and_top_k_say,
    check_a_stop_text_ends_a_completion_with_the_token_that_completes_it,
)


async def check_a_prompt_without_room_is_refused(engine: Engine, binding: str) -> None:
    for length in (engine.context, engine.context + 7):
        with pytest.raises(UserError, match=f"{length} tokens.*{engine.context}.*{binding}") as refused:
            await engine.generate(Request(np.full(length, 3, np.int32), SamplingParams()))
        assert isinstance(refused.value, ValueError)


async def check_max_tokens_is_cut_to_the_room_left(engine: Engine) -> None:
    prompt = np.full(engine.context - 5, 3, np.int32)
    completion = await engine.generate(Request(prompt, SamplingParams(max_tokens=100)))
    assert len(completion.tokens) == 5
    assert completion.finish_reason == "length"


# A sampler by itself.
