"""Functions that block run beside the loop, one after the other, and keep nothing from ending."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest

from areal_x.runtime.thread import OneThread, in_thread


def test_the_loop_goes_on_while_a_function_blocks():
    async def run():
        release = threading.Event()
        blocked = asyncio.create_task(in_thread(release.wait))
        await asyncio.sleep(0)
        release.set()  # by the loop: it would never come if the loop stood still
        return await blocked

    assert asyncio.run(run()) is True


def test_all_functions_of_one_thread_run_in_it_in_their_order():
    async def run():
        thread, order = OneThread(), []
        names = await asyncio.gather(*(thread.run(lambda n=n: (order.append(n), threading.get_ident())[1]) for n in range(20)))
        thread.close()
        thread.close()
        return set(names), order

    names, order = asyncio.run(run())
    assert len(names) == 1
    assert names != {threading.get_ident()}
    assert order == list(range(20))


def test_errors_and_arguments_arrive():
    def divide(x, *, by):
        return x / by

    assert asyncio.run(in_thread(divide, 6, by=3)) == 2
    with pytest.raises(ZeroDivisionError):
        asyncio.run(in_thread(divide, 6, by=0))
    with pytest.raises(RuntimeError, match="StopIteration"):
        asyncio.run(in_thread(next, iter(())))


def test_context_variables_are_the_callers():
    variable = contextvars.ContextVar("variable")

    async def run():
        variable.set("here")
        return await in_thread(variable.get)

    assert asyncio.run(run()) == "here"


def test_a_cancelled_call_is_forgotten_and_the_next_waits_for_its_end():
    async def run():
        thread, release, began = OneThread(), threading.Event(), threading.Event()

        def blocks():
            began.set()
            release.wait()
            return "unheard"

        waiting = asyncio.create_task(thread.run(blocks))
        while not began.is_set():
            await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        after = asyncio.create_task(thread.run(lambda: "next"))
        release.set()
        answer = await after
        thread.close()
        return answer

    assert asyncio.run(run()) == "next"


def test_what_is_told_is_done_though_nobody_waits_and_its_errors_are_nobodys():
    done = threading.Event()

    async def run():
        thread = OneThread()
        thread.run_unobserved(lambda: 1 / 0)
        thread.run_unobserved(done.set)
        thread.close()

    asyncio.run(run())
    assert done.wait(60)


def test_nothing_is_held_when_all_is_done():
    class Thing:
        def call(self):
            return None

    async def run():
        thread, thing = OneThread(), Thing()
        await thread.run(thing.call)
        await thread.run(int)
        reference = weakref.ref(thing)
        del thing
        gc.collect()
        alive = reference() is not None
        thread.close()
        return alive

    assert not asyncio.run(run())


def test_a_function_that_never_returns_keeps_no_process_from_ending():
    script = (
        "import asyncio, threading\n"
        "from areal_x.runtime.thread import in_thread\n"
        "async def run():\n"
        "    began = threading.Event()\n"
        "    task = asyncio.create_task(in_thread(lambda: (began.set(), threading.Event().wait())))\n"
        "    while not began.is_set(): await asyncio.sleep(0)\n"
        "asyncio.run(run())\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parents[2], check=True, timeout=60)
