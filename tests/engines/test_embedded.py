"""The embedded engine over a counting sampler: scheduling, threads, cancellation, swaps and errors."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_x.engines.embedded import EmbeddedConfig, EmbeddedEngine, SlotScheduler
from areal_x.errors import ConfigError, UserError
from areal_x.protocols.engine import Completion, EngineError, PromptTooLong, Request, SamplingParams
from areal_x.protocols.sampler import Decoded, SlotRequest
from areal_x.types import Images

STOP = 7


def next_token(tokens: list[int], seed: int) -> int:
    return (sum(tokens) * 31 + len(tokens) + seed) % 50


def expected(request: Request, seed: int) -> list[int]:
    """The counting sampler's completion of a request that runs alone."""
    tokens = request.tokens.tolist()
    while len(tokens) < len(request.tokens) + request.sampling.max_tokens:
        tokens.append(next_token(tokens, seed))
        if tokens[-1] in request.sampling.stop_token_ids:
            break
    return tokens[len(request.tokens) :]


class Counting:
    """A sampler whose tokens follow from the sequence and the seed, and whose log-probabilities are minus the weights."""

    supports_images = False

    def __init__(self, slots: int, context: int = 64) -> None:
        self.slots, self.context = slots, context
        self.held: dict[int, tuple[list[int], SlotRequest]] = {}
        self.weights: float | None = None
        self.decodes = threading.Semaphore(0)  # released once for each decode that may begin
        self.free_running = True
        self.begun = threading.Semaphore(0)
        self.fails: Exception | None = None

    def load(self, snapshot: float) -> None:
        self.weights = snapshot
        self.held.clear()

    def fill(self, requests: list[SlotRequest]) -> None:
        for request in requests:
            assert request.slot not in self.held
            self.held[request.slot] = (request.tokens.tolist(), request)

    def decode(self, steps: int, until_free: int) -> Decoded:
        self.begun.release()
        if not self.free_running:
            self.decodes.acquire()
        if self.fails is not None:
            raise self.fails
        steps = min(steps, 4)
        decoded = Decoded(
            np.zeros((self.slots, steps), np.int32),
            np.zeros((self.slots, steps), np.float32),
            np.zeros(self.slots, np.int32),
            np.zeros(self.slots, bool),
        )
        for _ in range(steps):
            for slot, (tokens, request) in list(self.held.items()):
                count = decoded.counts[slot]
                tokens.append(next_token(tokens, request.seed))
                decoded.tokens[slot, count], decoded.logprobs[slot, count] = tokens[-1], -(self.weights or 0)
                decoded.counts[slot] += 1
                generated = request.generated + len(tokens) - len(request.tokens)
                if tokens[-1] in request.sampling.stop_token_ids or generated >= request.sampling.max_tokens:
                    decoded.finished[slot] = True
                    del self.held[slot]
            if not self.held or decoded.finished.sum() >= until_free:
                break
        return decoded

    def free(self, slots: list[int]) -> None:
        for slot in slots:
            del self.held[slot]


class Model:
    def __init__(self, version: int) -> None:
        self.version = version

    def snapshot(self) -> float:
        return float(self.version)


def request(prompt: int, most: int, *, stop: bool = False, seed: int | None = None) -> Request:
    sampling = SamplingParams(max_tokens=most, stop_token_ids=(STOP,) if stop else ())
    return Request(np.arange(1, prompt + 1, dtype=np.int32), sampling, seed)


def with_engine(sampler: Counting, body: Callable[[EmbeddedEngine], Coroutine[Any, Any, None]], version: int = 0) -> None:
    async def run() -> None:
        engine = EmbeddedEngine(sampler)
        await engine.start()
        if version >= 0:
            await engine.swap(engine.stage(Model(version)))
        try:
            await asyncio.wait_for(body(engine), 60)
        finally:
            sampler.free_running = True
            sampler.decodes.release(1000)
            await engine.close()

    asyncio.run(run())
    assert not [thread for thread in threading.enumerate() if thread.name == "embedded-engine"]


async def begun(sampler: Counting) -> None:
    """Returns when another decode has begun."""
    await asyncio.to_thread(sampler.begun.acquire)


@settings(max_examples=60, deadline=None)
@given(
    slots=st.integers(1, 4),
    actions=st.lists(
        st.one_of(
            st.tuples(st.just("submit"), st.integers(1, 9), st.integers(1, 12)),
            st.tuples(st.just("decode"), st.integers(1, 4), st.integers(1, 4)),
            st.tuples(st.just("cancel"), st.integers(0, 12), st.just(0)),
            st.tuples(st.just("swap"), st.just(0), st.just(0)),
        ),
        max_size=40,
    ),
)
def test_whatever_the_order_each_request_finishes_once_with_what_it_would_say_alone(slots: int, actions: list) -> None:
    sampler, table = Counting(slots), SlotScheduler(slots)
    requests: dict[int, Request] = {}
    cancelled: set[int] = set()
    finished: dict[int, Completion] = {}
    version = 0
    for name, a, b in [*actions, *[("decode", 4, 4)] * 200]:
        if name == "submit":
            new = request(a, b, stop=b % 2 == 0)
            requests[table.submit(new, a)] = new
        elif name == "cancel" and a in requests and a not in finished:
            slot = table.cancel(a)
            cancelled.add(a)
            if slot is not None:
                sampler.free([slot])
        elif name == "swap":
            version += 1
            sampler.load(version)
            sampler.fill(table.refill())
        elif name == "decode":
            sampler.fill(table.admit())
            assert len(table.running) + len(table.free) == slots
            for ticket, completion in table.record(sampler.decode(a, b), version):
                assert ticket not in finished
                finished[ticket] = completion
    assert set(finished) == set(requests) - cancelled
    assert sorted(table.free) == list(range(slots))
    for ticket, completion in finished.items():
        assert completion.tokens.tolist() == expected(requests[ticket], len(requests[ticket].tokens))
        assert completion.finish_reason == (
            "stop" if completion.tokens[-1] in requests[ticket].sampling.stop_token_ids else "length"
        )
        assert (np.diff(completion.versions) >= 0).all()


def test_waiting_requests_get_slots_in_the_order_they_came() -> None:
    table = SlotScheduler(2)
    tickets = [table.submit(request(1, 1)) for _ in range(4)]
    table.admit()
    assert [running.ticket for running in table.running.values()] == tickets[:2]
    table.cancel(tickets[0])
    assert [r.seed for r in table.admit()] == [tickets[2]]


def test_what_new_weights_recompute_is_the_prompt_and_all_that_was_generated() -> None:
    sampler, table = Counting(1), SlotScheduler(1)
    table.submit(request(3, 9), seed=5)
    sampler.fill(table.admit())
    table.record(sampler.decode(4, 1), 0)
    (again,) = table.refill()
    assert again.tokens.tolist() == [1, 2, 3, *expected(request(3, 4), 5)]
    assert (again.slot, again.generated, again.seed) == (0, 4, 5)


def test_more_requests_than_slots_all_finish() -> None:
    async def body(engine: EmbeddedEngine) -> None:
        requests = [request(1 + i % 7, 1 + i % 11, seed=i) for i in range(30)]
        completions = await asyncio.gather(*(engine.generate(r) for r in requests))
        for i, (r, completion) in enumerate(zip(requests, completions, strict=True)):
            assert completion.tokens.tolist() == expected(r, i)
            assert (completion.versions == 3).all()
            assert (completion.logprobs == -3).all()

    with_engine(Counting(4), body, version=3)


def test_requests_without_a_seed_differ_from_each_other() -> None:
    async def body(engine: EmbeddedEngine) -> None:
        first, second = await asyncio.gather(engine.generate(request(2, 8)), engine.generate(request(2, 8)))
        assert first.tokens.tolist() != second.tokens.tolist()

    with_engine(Counting(2), body)


def test_tokens_carry_the_version_that_made_them() -> None:
    sampler = Counting(2)
    sampler.free_running = False

    async def body(engine: EmbeddedEngine) -> None:
        generating = asyncio.ensure_future(engine.generate(request(2, 10, seed=1)))
        await begun(sampler)
        swapping = asyncio.ensure_future(engine.swap(engine.stage(Model(5))))
        await asyncio.sleep(0)  # the request to swap is made; the decode that has begun ends first
        sampler.decodes.release(1000)
        assert await swapping >= 0
        completion = await generating
        assert completion.versions.tolist() == [0] * 4 + [5] * 6
        assert completion.logprobs.tolist() == [0.0] * 4 + [-5.0] * 6
        assert completion.tokens.tolist() == expected(request(2, 10), 1)
        assert engine.version == 5

    with_engine(sampler, body)


def test_requests_before_the_first_weights_wait_for_them() -> None:
    async def body(engine: EmbeddedEngine) -> None:
        generating = asyncio.ensure_future(engine.generate(request(2, 3, seed=1)))
        await engine.swap(engine.stage(Model(2)))
        assert (await generating).versions.tolist() == [2, 2, 2]

    with_engine(Counting(2), body, version=-1)


def test_a_cancelled_request_frees_its_slot() -> None:
    sampler = Counting(1)
    sampler.free_running = False

    async def body(engine: EmbeddedEngine) -> None:
        first = asyncio.ensure_future(engine.generate(request(2, 60)))
        waiting = asyncio.ensure_future(engine.generate(request(2, 60)))
        await begun(sampler)
        first.cancel()
        waiting.cancel()
        await asyncio.gather(first, waiting, return_exceptions=True)
        sampler.decodes.release(1000)
        completion = await engine.generate(request(3, 5, seed=9))
        assert completion.tokens.tolist() == expected(request(3, 5), 9)

    with_engine(sampler, body)


def test_a_prompt_that_leaves_no_room_is_refused_with_the_lengths_and_the_binding() -> None:
    async def body(engine: EmbeddedEngine) -> None:
        for length in (16, 20):
            with pytest.raises(
                PromptTooLong, match=f"prompt of {length} tokens .* context of 16: raise train.row_length .and embedded.context"
            ):
                await engine.generate(request(length, 4))
        with pytest.raises(UserError, match="empty prompt"):
            await engine.generate(request(0, 4))
        assert len((await engine.generate(request(13, 9))).tokens) == 3

    with_engine(Counting(2, context=16), body)


def test_an_error_in_the_sampler_fails_all_who_wait_and_all_who_come() -> None:
    sampler = Counting(2)
    sampler.fails = MemoryError("no room on the device")

    async def body(engine: EmbeddedEngine) -> None:
        results = await asyncio.gather(*(engine.generate(request(2, 9)) for _ in range(5)), return_exceptions=True)
        assert [str(r) for r in results] == ["the embedded sampler failed: MemoryError: no room on the device"] * 5
        assert all(isinstance(r, EngineError) for r in results)
        for late in (engine.generate(request(2, 9)), engine.swap(engine.stage(Model(1)))):
            with pytest.raises(EngineError, match="no room"):
                await late

    with_engine(sampler, body)


def test_closing_answers_those_who_wait_and_may_be_done_twice() -> None:
    sampler = Counting(1)
    sampler.free_running = False

    async def body(engine: EmbeddedEngine) -> None:
        generating = asyncio.ensure_future(engine.generate(request(2, 60)))
        await begun(sampler)
        closing = asyncio.ensure_future(engine.close())
        with pytest.raises(EngineError, match="closed"):
            await generating
        sampler.decodes.release(1000)
        await closing
        await engine.close()

    with_engine(sampler, body)


def test_an_engine_that_was_not_started_says_so() -> None:
    async def run() -> None:
        engine = EmbeddedEngine(Counting(1))
        with pytest.raises(EngineError, match="not started"):
            await engine.generate(request(2, 2))
        await engine.close()

    asyncio.run(run())


def test_images_are_refused_where_the_sampler_does_not_see() -> None:
    images = Images(np.zeros((4, 6), np.float32), np.array([[1, 2, 2]], np.int32))

    async def body(engine: EmbeddedEngine) -> None:
        with pytest.raises(UserError, match=r"the prompt has images.*trains with images"):
            await engine.generate(replace(request(4, 2), images=images))

    with_engine(Counting(1), body)


def test_sizes_out_of_range_name_their_binding() -> None:
    with pytest.raises(ConfigError, match=r"embedded\.slots"):
        EmbeddedConfig(slots=0)
    with pytest.raises(ConfigError, match=r"embedded\.context"):
        EmbeddedConfig(context=-1)
