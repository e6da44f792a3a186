"""Waves of requests: which enter the engine together, and in which order, whatever the order in which they were made."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from areal_x.protocols.engine import Completion, Request, SamplingParams
from areal_x.rollout.pacing import WavePacing
from tests.rollout.fakes import until


class Together:
    """An engine that records each wave and answers when the test says so."""

    def __init__(self) -> None:
        self.waves: list[list[int]] = []
        self.futures: list[asyncio.Future[Completion]] = []

    def submit(self, requests):
        self.waves.append([request.seed for request in requests])
        self.futures = [asyncio.get_running_loop().create_future() for _ in requests]
        return self.futures

    def answer(self):
        for future in self.futures:
            if not future.done():
                future.set_result(Completion(np.ones(1, np.int32), np.zeros(1, np.float32), np.zeros(1, np.int32), "stop"))


def request(seed: int) -> Request:
    return Request(np.ones(2, np.int32), SamplingParams(), seed)


async def three_episodes(order: list[int]):
    """Three episodes that wait for their completions, asked for in this order."""
    engine = Together()
    pace = WavePacing(engine, lambda: None)
    pace.began(3)
    asking = []
    for i in order:
        pace.release()
        assert engine.waves == []  # not before all have asked
        asking.append(asyncio.create_task(pace.generate((0, i, 0), request(i))))
        await asyncio.sleep(0)
    pace.release()
    return engine, pace, asking


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_a_wave_is_sent_when_all_ask_and_in_the_order_of_keys(order: list[int]) -> None:
    async def check():
        engine, pace, asking = await three_episodes(order)
        assert engine.waves == [[0, 1, 2]]
        engine.answer()
        await asyncio.gather(*asking)
        for _ in asking[:-1]:
            pace.ended()
        again = asyncio.create_task(pace.generate((0, 1, 1), request(7)))
        await asyncio.sleep(0)
        pace.release()
        assert engine.waves[1:] == [[7]]
        engine.answer()
        await again

    asyncio.run(check())


def test_no_wave_follows_before_the_one_before_has_ended() -> None:
    async def check():
        engine, pace, asking = await three_episodes([0, 1, 2])
        engine.futures[0].set_result(Completion(np.ones(1, np.int32), np.zeros(1), np.zeros(1, np.int32), "stop"))
        await asking[0]
        again = asyncio.create_task(pace.generate((0, 0, 1), request(3)))
        await asyncio.sleep(0)
        pace.release()
        assert len(engine.waves) == 1
        engine.answer()
        await asyncio.gather(*asking)
        for _ in range(2):
            pace.ended()
        pace.release()
        assert engine.waves[1:] == [[3]]
        engine.answer()
        await again

    asyncio.run(check())


@pytest.mark.parametrize("sent", [False, True])
def test_an_episode_that_is_cancelled_holds_up_no_wave(sent: bool) -> None:
    async def check():
        engine = Together()
        pace = WavePacing(engine, lambda: None)
        pace.began(2)
        asking = [asyncio.create_task(pace.generate((0, i, 0), request(i))) for i in range(2 if sent else 1)]
        await asyncio.sleep(0)
        pace.release()
        assert len(engine.waves) == sent
        asking[0].cancel()
        await until(asking[0].done)
        await asyncio.sleep(0)
        pace.ended()
        if sent:
            assert engine.futures[0].cancelled()
            engine.answer()
            await asking[1]
        last = asyncio.create_task(pace.generate((0, 1, 1), request(5)))
        await asyncio.sleep(0)
        pace.release()
        assert engine.waves[-1] == [5]
        engine.answer()
        await last

    asyncio.run(check())
