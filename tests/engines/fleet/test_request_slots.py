"""Who gets a slot where there are fewer than requests."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_x.engines.fleet.request_slots import RequestSlots
from tests.rollout.fakes import until

EVENTS = st.lists(st.tuples(st.sampled_from(["ask", "ask", "end", "cancel"]), st.integers(0, 30)), max_size=60)


@given(st.integers(1, 4), EVENTS)
def test_no_more_requests_than_slots_are_in_flight_and_none_is_overtaken_by_as_many(
    limit: int, events: Sequence[tuple[str, int]]
) -> None:
    async def main() -> None:
        slots = RequestSlots(limit)
        in_flight: dict[int, asyncio.Event] = {}
        asked: list[int] = []  # that wait, the oldest first
        overtaken: dict[int, int] = {}
        tasks: dict[int, asyncio.Task[None]] = {}

        async def request(number: int, server: str) -> None:
            asked.append(number)
            async with slots.of(server):
                for older in asked[: asked.index(number)]:
                    overtaken[older] = overtaken.get(older, 0) + 1
                asked.remove(number)
                in_flight[number] = asyncio.Event()
                assert len(in_flight) <= limit
                try:
                    await in_flight[number].wait()
                finally:
                    del in_flight[number]

        async def settle() -> None:
            for _ in range(4):
                await asyncio.sleep(0)
            assert len(in_flight) == min(limit, len(in_flight) + len(asked))  # no slot is free while a request waits

        for number, (event, value) in enumerate(events):
            if event == "ask":
                tasks[number] = asyncio.create_task(request(number, f"server {value % 3}"))
            elif event == "end" and in_flight:
                in_flight[sorted(in_flight)[value % len(in_flight)]].set()
            elif event == "cancel" and (there := [*in_flight, *asked]):
                chosen = there[value % len(there)]
                tasks[chosen].cancel()
                if chosen in asked:
                    asked.remove(chosen)
            await settle()
        while in_flight or asked:
            for event_of in in_flight.values():
                event_of.set()
            await settle()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        assert all(count < limit for count in overtaken.values())

    asyncio.run(main())


def test_a_slot_goes_to_a_request_of_the_same_server_and_without_one_to_the_oldest() -> None:
    async def main() -> list[str]:
        slots, order = RequestSlots(3), list[str]()
        ends = {name: asyncio.Event() for name in ("a1", "b1", "c1", "d1", "b2", "d2", "a2", "a3")}

        async def request(name: str) -> None:
            async with slots.of(name[0]):
                order.append(name)
                await ends[name].wait()

        tasks = [asyncio.create_task(request(name)) for name in ends]
        await until(lambda: len(order) == 3)
        for name in ("b1", "a1", "c1", "d1", "b2", "d2", "a2", "a3"):  # a2 came after three others: too late to pass d1
            ends[name].set()
            await until(lambda name=name: tasks[list(ends).index(name)].done())
        return order

    assert asyncio.run(main()) == ["a1", "b1", "c1", "b2", "d1", "d2", "a2", "a3"]


def test_a_request_that_is_cancelled_just_as_it_gets_a_slot_gives_it_on() -> None:
    async def main() -> None:
        slots = RequestSlots(1)
        await slots.acquire("a")
        first, second = (asyncio.create_task(slots.acquire("b")) for _ in range(2))
        await asyncio.sleep(0)
        slots.release("a")
        first.cancel()
        await asyncio.wait_for(second, 60)
        assert first.cancelled()

    asyncio.run(main())


@pytest.mark.parametrize("cancels_first", [True, False])
def test_a_slot_that_is_free_when_its_next_request_is_cancelled_goes_to_the_one_after(cancels_first: bool) -> None:
    """Both happen in one iteration of the loop, before the cancelled request runs again."""

    async def run() -> None:
        slots = RequestSlots(1)
        await slots.acquire("a")
        second, third = (asyncio.create_task(slots.acquire("a")) for _ in range(2))
        await asyncio.sleep(0)
        steps = [second.cancel, lambda: slots.release("a")]
        for step in steps if cancels_first else reversed(steps):
            step()
        await asyncio.wait_for(third, 30)
        assert second.cancelled() or (await asyncio.gather(second, return_exceptions=True))
        fourth = asyncio.create_task(slots.acquire("a"))
        await asyncio.sleep(0)
        assert not fourth.done()  # there is one slot
        slots.release("a")
        await asyncio.wait_for(fourth, 30)

    asyncio.run(run())
