"""Requests of random lengths at all times, and what must be true of their answers, whatever becomes of servers meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np

from areal_x.protocols.engine import Completion, Engine, Request, SamplingParams
from tests.engines.conformance import TOLERANCE, expected_logprobs


class Load:
    """So many clients, each of which sends its next request as soon as it has the last one's answer. Made in the event loop."""

    def __init__(self, engine: Engine, clients: int, context: int = 256) -> None:
        self.engine, self.context = engine, context
        self.done: list[tuple[Request, Completion]] = []
        self._rng = np.random.default_rng(0)
        self._ended = False
        self._clients = [asyncio.create_task(self._ask()) for _ in range(clients)]

    async def _ask(self) -> None:
        while not self._ended:
            prompt = self._rng.integers(2, 44, self._rng.integers(1, 60)).astype(np.int32)
            request = Request(prompt, SamplingParams(max_tokens=int(self._rng.integers(1, 180))))
            self.done.append((request, await self.engine.generate(request)))

    async def more(self, answers: int) -> None:
        """Returns when so many more requests were answered."""
        before = len(self.done)
        await self.until(lambda: len(self.done) >= before + answers)

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            for client in self._clients:
                if client.done():
                    client.result()  # raises what a request met
            await asyncio.sleep(0.01)

    async def end(self) -> None:
        self._ended = True
        await asyncio.gather(*self._clients)

    def check(self, models: dict[int, Path], sample: int = 60) -> int:
        """Each answer is whole, and each token's log-probability, of a sample of answers, that of its own version's weights.
        Returns how many answers have tokens of several versions."""
        crossing = 0
        for request, completion in self.done:
            assert len(completion.tokens) == min(request.sampling.max_tokens, self.context - len(request.tokens))
            assert (np.diff(completion.versions) >= 0).all()
            crossing += len(set(completion.versions.tolist())) > 1
        print(f"{len(self.done)} requests, none lost, {crossing} of them across a swap")
        for request, completion in self._rng.permutation(np.asarray(self.done, object))[:sample]:
            for version in set(completion.versions.tolist()):
                mine = completion.versions == version
                expected = expected_logprobs(models[version], request, completion)
                np.testing.assert_allclose(completion.logprobs[mine], expected[mine], atol=TOLERANCE)
        return crossing
