"""Episodes between offer and answer: each is with one worker at a time, and answered once."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest

from areal_x.agents.board import AgentFailed, Board, WorkerLost, result_of
from areal_x.agents.gateway.work import WorkAnswer, WorkOver
from areal_x.agents.remote_agent import RemoteAgent, task_json
from areal_x.errors import ConfigError, TaskError
from areal_x.types import Task
from tests.agents.giving import TASKS
from tests.rollout.fakes import until


class OpenSession:
    """A session without a gateway."""

    def __init__(self, id="s"):
        self.id, self.key, self.closed = id, "key", 0

    def close(self):
        self.closed += 1


def board_test(work, **settings):
    async def main():
        await asyncio.wait_for(work(Board(**settings)), 30)

    asyncio.run(main())


async def offered(board, session=None):
    session = session or OpenSession()

    async def open_session():
        return session

    waiting = asyncio.create_task(board.lease_for(b"{}", open_session))
    await until(lambda: board._offers)
    return waiting, session


def test_an_episode_is_given_to_one_worker_and_the_next_waits_for_the_next():
    async def work(board):
        waiting, _ = await offered(board)
        first, second = await asyncio.gather(board.take("a", 10), board.take("b", 0.05))
        assert {first and first.lease, second and second.lease} == {"s", None}
        assert (await waiting).worker in ("a", "b")

    board_test(work)


def test_a_worker_that_waits_gets_what_is_offered_later_and_none_in_vain():
    async def work(board):
        early = [asyncio.create_task(board.take(name, 10)) for name in "abc"]
        await asyncio.sleep(0)
        leases = []
        for index in range(3):
            waiting, _ = await offered(board, OpenSession(f"s{index}"))
            leases.append(await waiting)
        assert sorted(one.lease for one in await asyncio.gather(*early)) == ["s0", "s1", "s2"]
        assert {lease.worker for lease in leases} == set("abc")

    board_test(work)


def test_the_first_answer_counts_and_no_later_one():
    async def work(board):
        waiting, session = await offered(board)
        await board.take("a", 10)
        lease = await waiting
        assert board.answer("s", WorkAnswer(result=1.0))
        assert not board.answer("s", WorkAnswer(result=2.0))
        assert not board.give_back("s")
        assert (await board.answer_to(session)).result == 1.0
        board.end(lease)
        assert not board.answer("s", WorkAnswer(result=3.0))
        assert session.closed == 1
        board.end(lease)  # twice does no harm

    board_test(work)


def test_a_silent_worker_is_lost_and_one_that_shows_signs_of_life_is_not():
    async def work(board):
        waiting, session = await offered(board)
        await board.take("a", 10)
        lease = await waiting
        begun = asyncio.get_running_loop().time()
        for _ in range(3):
            await asyncio.sleep(0.06)
            assert board.renew(["s", "other"]) == ["other"]
        with pytest.raises(WorkerLost, match="a has shown no sign of life") as lost:
            await board.answer_to(session)
        assert lost.value.died
        assert asyncio.get_running_loop().time() - begun >= 0.28
        board.end(lease)
        assert board.renew(["s"]) == ["s"]
        assert not board.answer("s", WorkAnswer(result=1.0))  # too late: another may have it

    board_test(work, lease_seconds=0.1)


def test_a_worker_that_disconnects_while_it_is_given_an_episode_leaves_it_for_the_next():
    async def work(board):
        gate = asyncio.Event()

        async def slow():
            await gate.wait()
            return OpenSession()

        waiting = asyncio.create_task(board.lease_for(b"{}", slow))
        gone = asyncio.create_task(board.take("gone", 10))
        await until(lambda: not board._offers and not gone.done() and waiting)
        await asyncio.sleep(0.01)
        gone.cancel()
        await asyncio.wait([gone])
        gate.set()
        assert (await board.take("next", 10)).lease == "s"
        assert (await waiting).worker == "next"

    board_test(work)


def test_an_episode_that_nobody_waits_for_any_more_is_given_to_nobody():
    async def work(board):
        waiting, session = await offered(board)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert await board.take("a", 0) is None
        assert not board._offers
        waiting, session = await offered(board)
        await board.take("a", 10)
        waiting.cancel()  # in the moment in which it is taken
        await asyncio.wait([waiting])
        assert session.closed == 1
        assert board.renew(["s"]) == ["s"]

    board_test(work)


def test_the_end_of_the_run_reaches_workers_that_wait():
    async def work(board):
        polling = asyncio.create_task(board.take("a", 60))
        await asyncio.sleep(0)
        board.close()
        for poll in (polling, board.take("b", 60)):
            with pytest.raises(WorkOver):
                await poll

    board_test(work)


@pytest.mark.parametrize("task", [Task("t", "1+1=", {1, 2}), Task("t", "1+1=", None, {"image": object()})])
def test_a_task_that_json_cannot_hold_fails_alone_with_the_reason(task):
    with pytest.raises(TaskError, match="task t cannot be sent to a worker"):
        task_json(task, True)


def test_answers_stay_in_the_run_if_it_is_told_so():
    assert json.loads(task_json(TASKS[0], True))["answer"] == "1"
    assert json.loads(task_json(TASKS[0], False))["answer"] is None
    assert json.loads(task_json(Task("t", "1+1=", {1, 2}), False))["answer"] is None


def test_what_a_program_printed_counts_unless_its_session_was_given_rewards():
    def session(**rewards):
        return SimpleNamespace(state=SimpleNamespace(rewards=rewards))

    assert result_of(WorkAnswer(printed="42"), session()) == "42"
    assert result_of(WorkAnswer(printed="42"), session(call=1.0)) is None
    assert result_of(WorkAnswer(result="42"), session(call=1.0)) == "42"
    with pytest.raises(AgentFailed, match=r"^no �page$"):  # no command for a terminal
        result_of(WorkAnswer(error="no \x1bpage"), session())


@pytest.mark.parametrize("settings", [{"lease_seconds": 0.0}, {"attempts": 0}])
def test_settings_that_could_give_nobody_an_episode_are_refused(settings):
    with pytest.raises(ConfigError):
        RemoteAgent(**settings)
