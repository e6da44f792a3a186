"""The embedded engine: a backend's own batched sampler behind the engine contract, in this process.

    generate() ──▶ waiting ──fill──▶ slots ──decode──▶ slots … ──finished──▶ the awaiting coroutine

`SlotScheduler` is the whole scheduling as a state machine without thread or device: which request
waits, which holds a slot, and the tokens of each so far. `EmbeddedEngine` drives it from one worker
thread, the only one that touches the sampler.
"""

from __future__ import annotations

import asyncio
import threading
import time
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import gin
import numpy as np

from areal_x.errors import UserError, at_least, positive
from areal_x.protocols.engine import (
    Completion,
    Engine,
    EngineError,
    Request,
    Staged,
    max_new_tokens,
)
from areal_x.protocols.sampler import AdaptedSampler, Decoded, Sampler, SlotRequest
from areal_x.protocols.speculation import Guesses
from areal_x.runtime import background, timeline
from areal_x.runtime.waits import waiting
from areal_x.types import Kept

DECODE_STEPS = 64
NO_IMAGES = (
    "which the embedded engine supports for models that the backend trains with images: train one of"
    " those (docs/images.md; Qwen3.5 with train.backend = 'torch')"
)
# `decode` returns early once 1/8 of the slots are free for waiting requests: a refill costs about as
# much as a step.
REFILL_SHARE = 8


@gin.configurable("embedded")
@dataclass(frozen=True)
class EmbeddedConfig:
    """The size of the embedded engine."""

    slots: int = 64
    """Number of sequences decoded at once."""
    context: int = 0
    """Maximum length of prompt and completion together, in tokens; 0 takes train.row_length."""

    def __post_init__(self) -> None:
        positive("embedded.slots", self.slots)
        at_least("embedded.context", self.context, 0)


@dataclass
class RunningRequest:
    """A request and what has been generated for it so far."""

    ticket: int
    request: Request
    seed: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)

    def slot_request(self, slot: int) -> SlotRequest:
        so_far = np.concatenate([self.request.tokens, np.asarray(self.tokens, np.int32)]).astype(
            np.int32
        )
        return SlotRequest(
            slot=slot,
            tokens=so_far,
            generated=len(self.tokens),
            sampling=self.request.sampling,
            seed=self.seed,
            images=self.request.images,
            adapter=self.request.adapter,
        )

    def completion(self) -> Completion:
        stopped = bool(self.tokens) and self.tokens[-1] in self.request.sampling.stop_token_ids
        return Completion(
            tokens=np.asarray(self.tokens, np.int32),
            logprobs=np.asarray(self.logprobs, np.float32),
            versions=np.asarray(self.versions, np.int32),
            finish_reason="stop" if stopped else "length",
            kept=Kept.joined(self.kept) if self.kept else None,
        )


class SlotScheduler:
    """Decides which requests hold slots, and records the tokens of each. Knows no clock, thread or
    sampler.

    A ticket names a request from `submit` to its completion or cancellation. Waiting requests get
    slots in order of arrival, the lowest slot first: given the same requests, an idle engine
    computes the same tokens whatever it did before.
    """

    def __init__(self, slots: int) -> None:
        self.free = list(range(slots))
        self.waiting: dict[int, RunningRequest] = {}
        self.running: dict[int, RunningRequest] = {}  # by slot
        self._tickets = 0

    def submit(self, request: Request, seed: int | None = None) -> int:
        ticket = self._tickets
        self._tickets += 1
        self.waiting[ticket] = RunningRequest(ticket, request, ticket if seed is None else seed)
        return ticket

    def admit(self) -> list[SlotRequest]:
        """Moves waiting requests into free slots and returns what is to be filled."""
        admitted = []
        for ticket in list(self.waiting)[: len(self.free)]:
            slot = self.free.pop(0)
            self.running[slot] = self.waiting.pop(ticket)
            admitted.append(self.running[slot].slot_request(slot))
        return admitted

    def refill(self) -> list[SlotRequest]:
        """Returns all running requests, with prompt and generated tokens, whose caches must be
        recomputed under new weights."""
        return [running.slot_request(slot) for slot, running in self.running.items()]

    def record(self, decoded: Decoded, version: int) -> list[tuple[int, Completion]]:
        """Appends what `version` decoded. Returns the tickets that finished, with their
        completions; their slots are free again."""
        done = []
        for slot, running in list(self.running.items()):
            count = int(decoded.counts[slot])
            running.tokens += decoded.tokens[slot, :count].tolist()
            running.logprobs += decoded.logprobs[slot, :count].tolist()
            running.versions += [version] * count
            if slot in decoded.kept:
                running.kept.append(decoded.kept[slot])
            elif count and running.request.sampling.truncates:
                raise UserError(
                    "the backend's sampler did not report what top_p, top_k and min_p kept"
                    " (areal_x.protocols.sampler.Decoded), as training needs"
                )
            if decoded.finished[slot]:
                done.append((running.ticket, self.running.pop(slot).completion()))
                insort(self.free, slot)
        return done

    def cancel(self, ticket: int) -> int | None:
        """Discards a request. Returns the slot to be freed, or None if it held none."""
        self.waiting.pop(ticket, None)
        slot = next((s for s, running in self.running.items() if running.ticket == ticket), None)
        if slot is not None:
            del self.running[slot]
            insort(self.free, slot)
        return slot

    def clear(self) -> None:
        """Discards all waiting and running requests."""
        self.free = sorted([*self.free, *self.running])
        self.waiting, self.running = {}, {}


@dataclass(frozen=True, kw_only=True)
class StagedSnapshot(Staged):
    """A trainer's snapshot of its policy."""

    snapshot: Any


@dataclass(frozen=True)
class AdapterChange:
    """An adapter that comes or, with None, goes."""

    name: str
    adapter: Any


class EmbeddedEngine(Engine):
    """Continuous batching over a backend's sampler.

    One thread loops: swap weights if requested, drop cancelled requests, fill free slots, decode;
    it sleeps if there is nothing to do. The first `swap` brings the first weights; requests made
    before it wait for them.
    """

    def __init__(self, sampler: Sampler, decode_steps: int = DECODE_STEPS) -> None:
        """decode_steps: tokens that a slot may grow by before the worker looks for new requests,
        cancellations and swaps."""
        self.concurrency = sampler.slots
        self.context = sampler.context
        self.version = -1
        self._guesses = Guesses()  # since the last `balance`
        self._sampler, self._decode_steps = sampler, decode_steps
        self._slots = SlotScheduler(sampler.slots)
        self._futures: dict[int, asyncio.Future[Completion]] = {}
        self._cancelled: list[int] = []
        self._swaps: list[tuple[StagedSnapshot | AdapterChange, asyncio.Future[float]]] = []
        self._error: EngineError | None = None
        self._closed = False
        # Guards everything above; the worker holds it except while it computes.
        self._changed = threading.Condition()
        self._waking = False  # used on the event loop only
        self._worker: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(self) -> None:
        if self._worker is None:
            self._loop = asyncio.get_running_loop()
            what = "the embedded engine's thread"
            self._worker = background.thread(
                self._work, what=what, failed=self._broken, name="embedded-engine"
            )

    async def generate(self, request: Request) -> Completion:
        return await self.submit([request])[0]

    def submit(self, requests: Sequence[Request]) -> list[asyncio.Future[Completion]]:
        """Starts requests together, so that the worker admits them together, and returns their
        completions in this order. Cancelling one drops its request; one that cannot be continued
        gets its UserError."""
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[Completion]] = [loop.create_future() for _ in requests]
        with self._changed:
            self._check()
            for request, future in zip(requests, futures, strict=True):
                try:
                    ticket = self._slots.submit(self._fit(request), request.seed)
                except UserError as error:
                    future.set_exception(error)
                    continue
                self._futures[ticket] = future
                future.add_done_callback(partial(self._forget, ticket))
        self._wake_later()
        return futures

    def _fit(self, request: Request) -> Request:
        """Returns the request with max_tokens cut to what the context leaves. Raises UserError for
        a request that no sampler could continue."""
        if request.images is not None and not self._sampler.supports_images:
            raise UserError(f"the prompt has images, {NO_IMAGES}")
        limit = max_new_tokens(
            request, self.context, "train.row_length (and embedded.context, where it is set)"
        )
        return replace(request, sampling=replace(request.sampling, max_tokens=limit))

    def _forget(self, ticket: int, future: asyncio.Future[Completion]) -> None:
        """Drops a request whose caller was cancelled."""
        if future.cancelled():
            with self._changed:
                self._futures.pop(ticket, None)
                self._cancelled.append(ticket)
                self._changed.notify()

    def _wake_later(self) -> None:
        """Wakes the worker after this iteration of the event loop, so that requests made together
        are filled together."""
        if not self._waking:
            self._waking = True
            asyncio.get_running_loop().call_soon(self._wake)

    def _wake(self) -> None:
        self._waking = False
        with self._changed:
            self._changed.notify()

    def stage(self, trainer: Any, version: int | None = None) -> StagedSnapshot:
        return StagedSnapshot(
            snapshot=trainer.snapshot(),
            version=trainer.version if version is None else version,
        )

    async def put_adapter(self, name: str, adapter: Any) -> None:
        """Adds an adapter for requests (`AdapterBank.adapter`); with None forgets one, which no request
        has. The sampler is an `AdaptedSampler`."""
        future = self._queue(AdapterChange(name, adapter))
        await future

    async def swap(self, staged: StagedSnapshot) -> float:
        future = self._queue(staged)
        return await future

    def _queue(self, staged: StagedSnapshot | AdapterChange) -> asyncio.Future[float]:
        """Lets the worker load this next. Returns the seconds that it took."""
        future: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        with self._changed:
            self._check()
            self._swaps.append((staged, future))
            self._changed.notify()
        return future

    def balance(self, trainer_idle: float, rollout_idle: float) -> dict[str, float]:
        with self._changed:
            guesses, self._guesses = self._guesses, Guesses()
        return guesses.metrics

    async def close(self) -> None:
        with self._changed:
            self._closed = True
            self._fail(EngineError("the engine was closed"))
            self._changed.notify()
        if self._worker is not None:
            with waiting("the rollout", "the embedded engine to end"):
                await asyncio.to_thread(self._worker.join)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._worker is None:
            raise EngineError("the engine was not started: await engine.start() first")

    # The methods below run on the worker's thread.

    def _work(self) -> None:
        while True:
            with self._changed:
                with waiting("the embedded engine", "requests", idle=True):
                    self._changed.wait_for(self._has_work)
                if self._closed:
                    return
                swap = self._swaps.pop(0) if self._swaps else None
                freed = [
                    slot
                    for ticket in self._cancelled
                    if (slot := self._slots.cancel(ticket)) is not None
                ]
                self._cancelled.clear()
                # A swap recomputes the caches of all running requests: admitting after it computes
                # each cache once.
                admitted = [] if swap is not None else self._slots.admit()
                running, more = bool(self._slots.running), bool(self._slots.waiting)
            try:
                with waiting(
                    "the embedded engine",
                    "its sampler",
                    f"{len(self._slots.running)} sequences run",
                ):
                    if freed:
                        self._sampler.free(freed)
                    if swap is not None:
                        self._load(*swap)
                        continue
                    if admitted:
                        self._sampler.fill(admitted)
                    if running:
                        self._decode(
                            max(1, self.concurrency // REFILL_SHARE) if more else self.concurrency
                        )
            except Exception as error:
                failure = EngineError(
                    f"the embedded sampler failed: {type(error).__name__}: {error}"
                )
                failure.__cause__ = error
                with self._changed:
                    if swap is not None:
                        self._resolve([(swap[1], failure)])
                    self._fail(failure)
                return

    def _has_work(self) -> bool:
        wanted = self._closed or bool(self._swaps or self._cancelled)
        return wanted or (self.version >= 0 and bool(self._slots.waiting or self._slots.running))

    def _load(self, staged: StagedSnapshot | AdapterChange, future: asyncio.Future[float]) -> None:
        started = time.perf_counter()
        if isinstance(staged, AdapterChange):
            sampler = cast(AdaptedSampler, self._sampler)
            if staged.adapter is None:
                sampler.remove_adapter(staged.name)
            else:
                sampler.put_adapter(staged.name, staged.adapter)
            self._resolve([(future, time.perf_counter() - started)])
            return
        with timeline.span("pause", version=staged.version):
            self._sampler.load(staged.snapshot)
            live = self._slots.refill()  # only this thread changes the running requests
            if live:
                self._sampler.fill(live)
        self.version = staged.version
        self._resolve([(future, time.perf_counter() - started)])

    def _decode(self, until_free: int) -> None:
        decoded = self._sampler.decode(self._decode_steps, until_free)
        with self._changed:
            done = self._slots.record(decoded, self.version)
            self._guesses += decoded.guesses
            answers = [(self._futures.pop(ticket, None), completion) for ticket, completion in done]
        self._resolve(answers)

    def _broken(self, error: BaseException) -> None:
        failure = EngineError(f"{error}")
        failure.__cause__ = error
        with self._changed:
            self._fail(failure)

    def _fail(self, error: EngineError) -> None:
        """Makes every pending and every later call raise the error."""
        self._error = self._error or error
        waiting: list[asyncio.Future[Any]] = [
            *self._futures.values(),
            *(future for _, future in self._swaps),
        ]
        self._resolve([(future, self._error) for future in waiting])
        self._futures.clear()
        self._swaps.clear()
        self._slots.clear()

    def _resolve(self, answers: Sequence[tuple[asyncio.Future[Any] | None, Any]]) -> None:
        """Resolves futures on the event loop in one call, except those whose coroutine was
        cancelled meanwhile."""

        def resolve() -> None:
            for future, result in answers:
                if future is None or future.done():
                    continue
                if isinstance(result, Exception):
                    future.set_exception(result)
                else:
                    future.set_result(result)

        if answers and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(resolve)
