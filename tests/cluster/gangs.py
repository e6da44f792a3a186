"""What happens to gangs of two processes, on the cluster of RAY_ADDRESS: `python -m tests.cluster.gangs` prints a line each."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from ray.exceptions import OutOfDiskError

from areal_x.cluster import on_ray
from areal_x.cluster.connection import connected
from areal_x.cluster.gang import Gang, PerNode, Room
from areal_x.cluster.surroundings import surroundings
from areal_x.errors import UserError
from areal_x.runtime.interrupts import deferred_interrupts
from areal_x.runtime.loop import result
from areal_x.types import Batch

SIZE = 2


class Object:
    """One process's. `meet` is collective: it waits for the others, who write a file."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def pid(self) -> int:
        return os.getpid()

    def thread(self) -> int:
        return threading.get_ident()

    def wait(self) -> None:
        threading.Event().wait()

    def raises(self, rank: int, kind: type[Exception]) -> None:
        if self.rank == rank:
            raise kind("too many numbers")
        self.wait()

    def raises_alone(self, rank: int) -> None:
        """The others have returned."""
        if self.rank == rank:
            raise ArithmeticError("too many numbers")

    def computes(self, rank: int, seconds: float) -> int:
        """So long in one process; it waits for nothing in the others."""
        began = time.process_time()
        while self.rank == rank and time.process_time() - began < seconds:
            pass
        return self.rank

    def all_raise(self) -> None:
        raise UserError(f"rank {self.rank} refuses")

    def ends(self, rank: int) -> None:
        """The others raise first, as those do whose connection is closed."""
        if self.rank == rank:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        raise ArithmeticError("connection closed by peer")

    def squared(self, factor: int, batch: Batch) -> int:
        return factor * self.rank + int(batch.tokens.sum())

    def numbers(self, count: int) -> Iterator[int]:
        yield from range(count)


@contextmanager
def gang_of(size: int = SIZE) -> Iterator[on_ray.RayGang]:
    gang = on_ray.RayGang("rank", size, Room(), partial(Object), surroundings(None))
    try:
        yield gang
    finally:
        gang.end()


def raised(call: Callable[[], Any]) -> str:
    try:
        return f"returned {call()}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def batch_of(count: int) -> PerNode:
    ones = np.ones((1, count), np.int32)
    return PerNode(dict.fromkeys(Nodes(), Batch(ones, ones, ones, ones)))


class Nodes(list[str]):
    """Every node that is there."""

    def __init__(self) -> None:
        import ray

        super().__init__(node["NodeID"] for node in ray.nodes() if node["Alive"])


def works(gang: Gang) -> str:
    found = gang.call("squared", 10, batch=batch_of(3)), gang.gather("squared", 10, batch=batch_of(100_000))
    return f"{found} {list(gang.stream('numbers', 5))} {gang.first('pid') != os.getpid()} {works_in_one_thread(gang)}"


def works_in_one_thread(gang: Gang) -> bool:
    """True if one thread makes all calls that all make: what is set for it, as OpenMP's number of threads, holds for the next
    call."""
    found = [gang.gather("thread"), gang.gather("thread")]
    gang.beside("pid")
    return found == 2 * found[:1] and gang.measured("thread")[0] == gang.gather("thread")[0] == found[0][0]


def larger_than_the_store(gang: on_ray.RayGang) -> str:
    """A batch of more bytes than the store of a node of tests.cluster.cluster, then one that has no room on disk either."""
    found = [raised(lambda count=count: gang.gather("squared", 10, batch=batch_of(count))) for count in (40_000_000, 100_000)]
    with patch("ray.put", side_effect=OutOfDiskError("no space left")):
        return f"{found} {raised(lambda: gang.gather('squared', 10, batch=batch_of(100_000)))}"


def gone_while_idle(rank: int) -> str:
    """The main thread waits for something else."""
    with gang_of() as gang, deferred_interrupts():
        os.kill(gang.gather("pid")[rank], signal.SIGKILL)
        return raised(lambda: result(Future()))


def another_version() -> str:
    found, on_ray.version = on_ray.version, lambda _: "0.0"  # type: ignore[assignment]
    try:
        with gang_of() as gang:
            return str(gang)
    except UserError as error:
        return str(error)
    finally:
        on_ray.version = found


def second_computes(gang: Gang) -> str:
    found, differ = gang.measured("computes", 1, 0.5)
    means = differ["ranks/cpu_seconds_min"] < 0.5 <= differ["ranks/cpu_seconds_max"] <= differ["ranks/seconds_max"] + 0.5
    return f"{found} {differ['ranks/slowest']} {means}"


def no_folder() -> str:
    with suppress(UserError):
        return str(on_ray.RayGang("rank", SIZE, Room(), partial(Object), surroundings(Path("/proc/nowhere"))))
    return raised(lambda: on_ray.RayGang("rank", 1, Room(), partial(Object), surroundings(Path("/proc/nowhere"))))


def main(*names: str) -> None:
    cases: dict[str, Callable[[], str]] = {
        "works": lambda: works(lasting()),
        "second computes": lambda: second_computes(lasting()),
        "second raises alone": lambda: raised(lambda: lasting().measured("raises_alone", 1)),  # which ends it
        "first gone while idle": lambda: gone_while_idle(0),
        "second gone while idle": lambda: gone_while_idle(1),
        "second raises": lambda: with_gang(lambda gang: raised(lambda: gang.call("raises", 1, ArithmeticError))),
        "first raises": lambda: with_gang(lambda gang: raised(lambda: gang.call("raises", 0, ArithmeticError))),
        "second refuses": lambda: with_gang(lambda gang: raised(lambda: gang.call("raises", 1, UserError))),
        "all refuse": lambda: with_gang(lambda gang: raised(lambda: gang.call("all_raise"))),
        "second ends": lambda: with_gang(lambda gang: raised(lambda: gang.call("ends", 1))),
        "first ends": lambda: with_gang(lambda gang: raised(lambda: gang.call("ends", 0))),
        "beside": lambda: with_gang(lambda gang: raised(lambda: gang.beside("ends", 1))),
        "another version": another_version,
        "no folder": no_folder,
        "larger than the store": lambda: with_gang(larger_than_the_store),
    }
    with connected(cpus=SIZE), ExitStack() as stack:
        lasting = cache(lambda: stack.enter_context(gang_of()))  # of the cases that leave it whole
        for name, case in cases.items():
            if not names or name in names:
                try:
                    found = case()
                except Exception as error:
                    found = f"{type(error).__name__}: {error}"
                print(f"{name}: {found}".replace("\n", " "), flush=True)
            if name == "second raises alone":
                stack.close()


def with_gang(do: Callable[[on_ray.RayGang], str]) -> str:
    with gang_of() as gang:
        return do(gang)


if __name__ == "__main__":
    main(*sys.argv[1:])
