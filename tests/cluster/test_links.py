"""The links between processes, here between threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Listener
from queue import Queue
from typing import Any

import numpy as np
import pytest

from areal_x.cluster import links
from areal_x.cluster.links import Follower, Leader, accept, difference, meet, own_address, send
from areal_x.errors import UserError
from areal_x.runtime import interrupts
from areal_x.runtime.interrupts import deferred_interrupts


@dataclass
class Threads:
    """A process group whose processes are threads."""

    rank: int
    size: int
    said: Queue[bytes] = field(default_factory=Queue)

    def broadcast(self, data: bytes) -> bytes:
        if self.rank:
            return self.said.get(timeout=60)
        for _ in range(self.size - 1):
            self.said.put(data)
        return data


def linked(config: Callable[[int], str] = lambda rank: "") -> tuple[Leader, Follower]:
    first = Threads(0, 2)
    second = Threads(1, 2, first.said)
    with ThreadPoolExecutor(2) as pool:
        ends: Any = [pool.submit(meet, group, config(group.rank)) for group in (first, second)]
    return ends[0].result(), ends[1].result()


def end(leader: Leader, follower: Follower, error: str | None = None) -> None:
    """As when the follower's process goes after the leader said that it is over."""
    closing = threading.Thread(target=leader.close, args=(error,))
    closing.start()
    with pytest.raises(UserError, match=f"^process 0 ended: {error}$") if error else nullcontext():
        while follower.receive() is not None:
            pass
    follower._link.close()
    closing.join(timeout=60)


def test_what_one_is_told_is_what_the_other_said_and_the_call_ends_when_both_are_through() -> None:
    leader, follower = linked()
    arrays = {"mask": np.array([[True, False]]), "logp": np.array([[0.1, -np.inf]], np.float32)}
    through = threading.Event()

    def follow() -> None:
        message, got = follower.receive()
        assert message == {"method": "update", "call": 1}
        assert got.keys() == arrays.keys()
        for name, x in arrays.items():
            np.testing.assert_array_equal(got[name], x, strict=True)
        through.set()
        follower.answer(message["call"])

    with ThreadPoolExecutor(1) as pool, follower:
        following = pool.submit(follow)
        with leader.together({"method": "update"}, arrays):
            pass
        assert through.is_set()
        following.result()
        assert leader.agree(lambda: "/models/one") == follower.agree(lambda: "never asked")
        end(leader, follower)


def test_a_call_that_failed_elsewhere_says_where_and_why() -> None:
    leader, follower = linked()
    with follower:
        told = pytest.raises(UserError, match=r"^process 1 ended: the model is not here$")
        with told, leader.together({"method": "restore"}):
            follower.answer(1, "the model is not here")
        with pytest.raises(UserError, match="the model is not here"), leader.together({"method": "update"}):
            pytest.fail("nothing is done together any more")
        end(leader, follower, "it is over")


def test_nobody_leaves_before_process_0_is_done() -> None:
    leader, follower = linked()
    left = threading.Event()

    def follow() -> None:
        with follower:
            assert "done" in follower.receive()[0]
        left.set()

    with ThreadPoolExecutor(2) as pool:
        following = pool.submit(follow)
        leader.done()
        assert not left.wait(timeout=0.5)
        closing = pool.submit(leader.close)
        following.result(timeout=60)
        follower._link.close()
        closing.result(timeout=60)


def test_a_signal_ends_a_follower_although_calls_keep_coming(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "SECONDS_TO_FOLLOW", 0.0)
    leader, follower = linked()
    leader.done()  # a message that waits
    with deferred_interrupts():
        interrupts.request_stop()
        with pytest.raises(KeyboardInterrupt):
            follower.receive()
    end(leader, follower)


def test_process_0_has_time_to_end_a_signalled_follower_in_order() -> None:
    leader, follower = linked()
    leader.done()
    received: list[Any] = []

    def receive() -> None:
        with deferred_interrupts():
            interrupts.request_stop()
            received.append(follower.receive())

    with pytest.raises(KeyboardInterrupt):  # as the context ends
        receive()
    assert len(received) == 1
    end(leader, follower)


def test_an_error_of_this_process_is_told_as_it_is() -> None:
    leader, follower = linked()
    with follower:
        with pytest.raises(UserError, match=r"^no such token$"), leader.together({"method": "update"}):
            raise UserError("no such token")
        end(leader, follower, "no such token")


def test_processes_with_other_configs_do_not_begin() -> None:
    with pytest.raises(UserError, match=r"process 1 .*'train\.steps = 3' where process 0 has 'train\.steps = 2'"):
        linked(lambda rank: f"train.seed = 1\ntrain.steps = {rank + 2}\n")
    assert difference(1, "train.seed = 1", "train.seed = 1") == ""


def test_who_does_not_know_the_key_is_passed_over() -> None:
    with Listener(("127.0.0.1", 0), authkey=b"right") as listener, ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(accept, listener, 1)
        with pytest.raises(AuthenticationError):
            Client(listener.address, authkey=b"wrong")
        with Client(listener.address, authkey=b"right") as link:
            send(link, {"rank": 1, "config": "its own"})
            links, configs = accepted.result(timeout=60)
        assert configs == {1: "its own"}
        links[1].close()


def test_processes_of_one_host_meet_where_no_other_can_look() -> None:
    assert own_address("127.0.0.1") == own_address("localhost") == "127.0.0.1"
