"""A service on several hosts: where calls run, and what becomes of those of a host that is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_x.rewards.pool import RewardPool, SpreadPool
from areal_x.runtime.hosts import Host, Services, Spread
from areal_x.sandbox.pool import Sandbox, SandboxLimits, SpreadSandbox
from areal_x.types import Failed, Scored, Task
from tests.rewards import reward_functions as rewards


class Counting:
    """A service whose calls end when they are told to."""

    def __init__(self) -> None:
        self.running: list[asyncio.Future[str]] = []
        self.most = 0
        self.closed = 0

    async def work(self, text: str) -> str:
        ending: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.running.append(ending)
        self.most = max(self.most, len(self.running))
        try:
            return f"{text} {await ending}"
        finally:
            self.running.remove(ending)

    async def close(self) -> None:
        self.closed += 1


class FakeHost:
    """A host on this event loop; `go` ends it in the middle of its calls."""

    node = "a node"

    def __init__(self) -> None:
        self.service: Counting | None = None
        self.calls: list[Future[Any]] = []
        self.gone = False

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        if self.gone:
            answer.set_exception(ConnectionError("its host is gone"))
        elif method == "close":
            assert self.service is not None
            answer.set_result(None)
            self.service.closed += 1
        else:
            _, make, name, own = arguments
            self.service = self.service or make()
            self.calls.append(answer)
            task = asyncio.ensure_future(getattr(self.service, name)(*own))
            task.add_done_callback(lambda done: answer.done() or done.cancelled() or answer.set_result(done.result()))
        return answer

    def go(self) -> None:
        self.gone = True
        for answer in self.calls:
            if not answer.done():
                answer.set_exception(ConnectionError("its host is gone"))


class FakeHosts:
    def __init__(self, *hosts: FakeHost) -> None:
        self.hosts = list(hosts)

    def there(self) -> Sequence[Host]:
        return tuple(self.hosts)

    def lost(self, host: Host) -> None:
        if host in self.hosts:
            self.hosts.remove(host)  # type: ignore[arg-type]


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0)


async def end_one(service: Counting, text: str) -> None:
    """Ends the oldest call of a service, as soon as it has one."""
    await until(lambda: any(not call.done() for call in service.running))
    next(call for call in service.running if not call.done()).set_result(text)


def services(own: Counting, hosts: Sequence[FakeHost]) -> list[Counting]:
    return [own, *(host.service for host in hosts if host.service is not None)]


@given(hosts=st.integers(0, 3), calls=st.integers(1, 3), count=st.integers(0, 12), order=st.randoms(use_true_random=False))
def test_every_call_runs_once_and_no_place_has_more_than_its_share(hosts, calls, count, order):
    async def run() -> None:
        own, others = Counting(), [FakeHost() for _ in range(hosts)]
        spread = Spread(own, Counting, calls, FakeHosts(*others), "test")
        tasks = [asyncio.ensure_future(spread.call("work", str(i))) for i in range(count)]
        for _ in range(count):
            busy = min(sum(not task.done() for task in tasks), calls * (hosts + 1))
            await until(lambda busy=busy: sum(len(s.running) for s in services(own, others)) == busy)
            ending = order.choice([x for s in services(own, others) for x in s.running])
            ending.set_result("done")
            await until(ending.done)
            left = sum(not task.done() for task in tasks)
            await until(lambda left=left: sum(not task.done() for task in tasks) < left)
        assert sorted(await asyncio.gather(*tasks)) == sorted(f"{i} done" for i in range(count))
        assert max(s.most for s in services(own, others)) <= calls
        await spread.close()
        assert [s.closed for s in services(own, others)] == [1] * len(services(own, others))

    asyncio.run(run())


def test_calls_go_to_the_least_busy_place_and_to_another_node_first() -> None:
    async def run() -> None:
        own, one, two = Counting(), FakeHost(), FakeHost()
        others = [one, two]
        spread = Spread(own, Counting, 2, FakeHosts(*others), "test")
        tasks = [asyncio.ensure_future(spread.call("work", str(i))) for i in range(5)]
        await until(lambda: sum(len(s.running) for s in services(own, others)) == 5)
        assert one.service is not None
        assert two.service is not None
        assert (len(one.service.running), len(two.service.running), len(own.running)) == (2, 2, 1)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())


def test_what_a_lost_host_was_running_runs_elsewhere() -> None:
    async def run() -> None:
        own, host = Counting(), FakeHost()
        hosts = FakeHosts(host)
        spread = Spread(own, Counting, 2, hosts, "test")
        tasks = [asyncio.ensure_future(spread.call("work", str(i))) for i in range(4)]
        await until(lambda: len(own.running) == 2 and host.service is not None and len(host.service.running) == 2)
        host.go()
        for _ in range(4):
            await end_one(own, "here")
        assert sorted(await asyncio.gather(*tasks)) == [f"{i} here" for i in range(4)]
        assert own.most == 2
        assert hosts.there() == ()

    asyncio.run(run())


def test_a_cancelled_call_keeps_its_place_on_its_host_until_it_has_ended_there() -> None:
    async def run() -> None:
        own, host = Counting(), FakeHost()
        spread = Spread(own, Counting, 1, FakeHosts(host), "test")
        first = asyncio.ensure_future(spread.call("work", "first"))
        await until(lambda: host.service is not None and host.service.running)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        second = asyncio.ensure_future(spread.call("work", "second"))
        await until(lambda: own.running)  # the host is still busy
        assert host.service is not None
        host.service.running[0].set_result("late")
        await until(lambda: not host.service.running)
        third = asyncio.ensure_future(spread.call("work", "third"))
        await until(lambda: host.service.running)
        host.service.running[0].set_result("done")
        own.running[0].set_result("done")
        assert await asyncio.gather(second, third) == ["second done", "third done"]

    asyncio.run(run())


@given(cancelled=st.sets(st.integers(0, 5)))
def test_calls_that_are_cancelled_while_they_wait_take_no_place(cancelled):
    async def run() -> None:
        own = Counting()
        spread = Spread(own, Counting, 1, FakeHosts(), "test")
        tasks = [asyncio.ensure_future(spread.call("work", str(i))) for i in range(6)]
        await until(lambda: own.running)
        for i in cancelled:
            tasks[i].cancel()
        for _ in range(6 - len(cancelled)):
            await end_one(own, "done")
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [i for i, x in enumerate(results) if isinstance(x, asyncio.CancelledError)] == sorted(cancelled)
        assert [x for x in results if isinstance(x, str)] == [f"{i} done" for i in range(6) if i not in cancelled]

    asyncio.run(run())


class LocalHost:
    """Services of this process, called from a thread, as an actor's are."""

    node = "a node"

    def __init__(self) -> None:
        self.services = Services()
        self.called: list[str] = []

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        self.called.append(method)
        loop = asyncio.get_running_loop()
        answer: Future[Any] = Future()
        run = loop.run_in_executor(None, partial(getattr(self.services, method), *arguments))
        run.add_done_callback(
            lambda done: answer.set_exception(e) if (e := done.exception()) else answer.set_result(done.result())
        )
        return answer


@pytest.mark.slow
def test_rewards_of_another_host_are_those_of_this_one() -> None:
    async def run() -> None:
        host, pool = LocalHost(), RewardPool(rewards.length, workers=1)
        spread = SpreadPool(pool, FakeHosts(host))  # type: ignore[arg-type]
        task = Task("t", "p")
        try:
            outcomes = await asyncio.gather(*(spread.score(task, "x" * n) for n in range(6)))
            assert [o.reward for o in outcomes if isinstance(o, Scored)] == [float(n) for n in range(6)]
            assert host.called.count("run") >= 1
            assert pool._all  # both scored
            held = Task("held", "p", metadata={"socket": asyncio.get_running_loop()})
            assert isinstance(await spread.score(held, ""), Failed)
        finally:
            await spread.close()
        assert host.called[-1] == "close"
        assert not host.services._made
        assert not pool._all

    asyncio.run(run())


@pytest.mark.slow
def test_programs_run_in_the_sandbox_of_another_host() -> None:
    async def run() -> None:
        host = LocalHost()
        sandbox = SpreadSandbox(Sandbox(SandboxLimits(seconds=30, cpu_seconds=30), 1, echo_last=True), FakeHosts(host))  # type: ignore[arg-type]
        try:
            results = await asyncio.gather(*(sandbox.run(f"{n} * 2") for n in range(4)))
            assert [result.output.strip() for result in results] == ["0", "2", "4", "6"]
            assert "run" in host.called
        finally:
            await sandbox.close()

    asyncio.run(run())
