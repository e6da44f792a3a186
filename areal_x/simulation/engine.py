"""A fake engine with the timing of servers: a model of continuous batching on a virtual clock.

A server serves its running requests at equal rates. `work` counts the tokens that it has generated
for each of them since it started: a request of N tokens that begins at work w ends at w + N,
whichever requests begin and end meanwhile. So a server needs one timer, for the request that ends
next.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from statistics import NormalDist
from typing import Any

import numpy as np
from jaxtyping import Int32

from areal_x.errors import at_least, positive
from areal_x.protocols.engine import Completion, Engine, Request, Staged, max_new_tokens
from areal_x.simulation.balance import LeastLoaded

ROUNDING_TOKENS = 1e-3  # a request with no more than this left is done: the clock is rounded
VOCABULARY = 1000

Length = Callable[[int], int]  # length of a completion in tokens, from its request's seed


@dataclass(frozen=True)
class Speed:
    """The speed of one server."""

    prefill: float
    """Prompt tokens per second; nothing is decoded meanwhile."""

    decode: Callable[[int], float]
    """New tokens per second, of all requests together, as a function of their number."""

    swap_seconds: float = 0.0
    """Pause for new weights. Afterwards the server also recomputes the caches of the running
    requests, at the speed of prefill."""

    def __post_init__(self) -> None:
        positive("speed.prefill", self.prefill)
        at_least("speed.swap_seconds", self.swap_seconds, 0)


def fixed(length: int) -> Length:
    """Every completion has this length."""
    return lambda seed: length


def lognormal(mean: float, sigma: float, most: int) -> Length:
    """A long-tailed distribution: exp of a normal variable of standard deviation `sigma`, with this
    mean before it is clipped to 1 … `most` tokens."""
    positive("lognormal.mean", mean)
    at_least("lognormal.sigma", sigma, 0)
    middle, normal = math.log(mean) - sigma**2 / 2, NormalDist()

    def length(seed: int) -> int:
        return max(1, min(most, round(math.exp(middle + sigma * normal.inv_cdf(uniform(seed))))))

    return length


def uniform(seed: int) -> float:
    """A pseudo-random number in (0, 1), by the mixer of splitmix64: creating a numpy generator takes
    ten times as long."""
    x = (seed + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return ((x ^ (x >> 31)) + 0.5) / 2**64


@dataclass
class _Job:
    prompt: int
    length: int
    done: asyncio.Future[Int32[np.ndarray, " N"]]  # the version of each token
    began: float = math.nan  # the server's work at that time; NaN while it waits

    @property
    def is_running(self) -> bool:
        return not math.isnan(self.began)


class FakeEngine(Engine):
    """`servers` simulated servers of up to `concurrency` running requests each.

    Each request goes to the server with the fewest, and waits there while `concurrency` are
    running. Token ids are made up, and log-probabilities are -1. The version of a token is the one
    that its server had when the token was finished, also across a swap.

    length: length of a completion as a function of its request's seed, cut to what the request and
    `context` allow.
    """

    def __init__(
        self,
        speed: Speed,
        *,
        servers: int = 1,
        concurrency: int = 64,
        context: int = 2**20,
        length: Length | None = None,
    ) -> None:
        positive("servers", servers)
        positive("concurrency", concurrency)
        self.speed, self.context = speed, context
        self.slots = concurrency  # per server
        self.concurrency = servers * concurrency
        self.version = -1
        self.length = length or lognormal(500, 1.0, 4000)
        # tokens per second of each of n requests
        rates = [math.inf, *(speed.decode(n) / n for n in range(1, concurrency + 1))]
        self._servers = [_Server(speed, rates) for _ in range(servers)]
        self._router = LeastLoaded(servers)

    async def start(self) -> None: ...

    async def generate(self, request: Request) -> Completion:
        seed = request.seed or 0
        most = max_new_tokens(request, self.context, "FakeEngine.context")
        length = min(self.length(seed), most)
        index = self._router.acquire()
        job = _Job(len(request.tokens), length, asyncio.get_running_loop().create_future())
        self._servers[index].add(job)
        try:
            versions = await job.done
        except asyncio.CancelledError:
            self._servers[index].remove(job)
            raise
        finally:
            self._router.release(index)
        tokens = (np.arange(seed, seed + length) % VOCABULARY).astype(np.int32)
        return Completion(
            tokens,
            np.full(length, -1, np.float32),
            versions,
            "length" if length == most else "stop",
        )

    def stage(self, trainer: Any, version: int | None = None) -> Staged:
        return Staged(int(trainer.version) if version is None else version)

    async def swap(self, staged: Staged) -> float:
        for server in self._servers:
            server.swap(staged.version)
        await asyncio.sleep(self.speed.swap_seconds)
        self.version = staged.version
        return self.speed.swap_seconds

    async def close(self) -> None: ...

    def used(self) -> float:
        """Time so far in seconds that requests occupied slots, summed over all slots."""
        for server in self._servers:
            server.advance()
        return sum(server.used for server in self._servers)


@dataclass
class _Server:
    speed: Speed
    rates: list[float]
    """Tokens per second of each request, by the number of running requests."""

    work: float = 0.0
    at: float = 0.0
    """The time up to which `work` and `used` are counted."""

    busy: float = 0.0
    """Until then it decodes nothing, because it reads prompts or loads weights."""

    used: float = 0.0
    running: int = 0
    tokens: float = 0.0
    """Prompt tokens of the running requests minus the work at which each began: their caches have
    running · work + tokens tokens."""

    swaps: list[tuple[float, int]] = field(default_factory=list)
    """(work, version) of each swap."""

    ends: list[tuple[float, int, _Job]] = field(default_factory=list)
    """A heap of (work at the end, sequence number, request), cancelled requests included."""

    waiting: deque[_Job] = field(default_factory=deque)
    timer: asyncio.TimerHandle | None = None
    admitted: int = 0

    def add(self, job: _Job) -> None:
        self.advance()
        if self.running == len(self.rates) - 1:
            self.waiting.append(job)
        else:
            self._begin(job)
            self._set_timer()

    def remove(self, job: _Job) -> None:
        self.advance()
        if job.is_running:
            self._end(job)
            self._fill()
        else:
            self.waiting.remove(job)

    def swap(self, version: int) -> None:
        self.advance()
        self.swaps.append((self.work, version))
        self.busy = max(self.busy, self.at) + self.speed.swap_seconds
        self.busy += (self.running * self.work + self.tokens) / self.speed.prefill
        self._set_timer()

    def advance(self) -> None:
        """Counts the work since the last call. Must be called before anything changes."""
        now = asyncio.get_running_loop().time()
        if self.running:
            self.used += self.running * (now - self.at)
            self.work += max(0.0, now - max(self.at, self.busy)) * self.rates[self.running]
        self.at = now

    def _begin(self, job: _Job) -> None:
        job.began = self.work
        self.busy = max(self.busy, self.at) + job.prompt / self.speed.prefill
        self.running += 1
        self.tokens += job.prompt - self.work
        self.admitted += 1
        heappush(self.ends, (self.work + job.length, self.admitted, job))

    def _end(self, job: _Job) -> None:
        self.running -= 1
        self.tokens -= job.prompt - job.began

    def _fill(self) -> None:
        while self.waiting and self.running < len(self.rates) - 1:
            self._begin(self.waiting.popleft())
        self._set_timer()

    def _fire(self) -> None:
        self.timer = None
        self.advance()
        while self.ends and (
            self.ends[0][2].done.done() or self.ends[0][0] <= self.work + ROUNDING_TOKENS
        ):
            job = heappop(self.ends)[2]
            if not job.done.done():  # else it was cancelled and removed
                self._end(job)
                job.done.set_result(self._versions(job))
        self._fill()

    def _set_timer(self) -> None:
        """Makes sure that a timer fires no later than the next request ends. One that fires too
        early costs little, so only one that is too late is replaced."""
        while self.ends and self.ends[0][2].done.done():
            heappop(self.ends)
        if not self.ends:
            return
        seconds = max(0.0, self.ends[0][0] - self.work) / self.rates[self.running]
        when = max(self.busy, self.at) + seconds
        if self.timer is not None and self.timer.when() > when:
            self.timer.cancel()
            self.timer = None
        if self.timer is None:
            self.timer = asyncio.get_running_loop().call_at(when, self._fire)

    def _versions(self, job: _Job) -> Int32[np.ndarray, " N"]:
        """The version of each token, at its end: a token that a swap interrupts is generated again
        with the new weights."""
        versions = np.full(job.length, -1, np.int32)
        end = job.length
        for work, version in reversed(self.swaps):
            begin = max(0, math.floor(work - job.began + ROUNDING_TOKENS))
            versions[begin:end] = version
            end = min(begin, end)
            if end == 0:
                break
        return versions
