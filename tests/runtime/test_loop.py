"""Waiting from one thread for what another does."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import weakref

import pytest

from areal_x.runtime import background, loop
from areal_x.runtime.loop import collect, new_loop, run, short_collections


class Thing:
    pass


def test_collections_leave_alone_what_was_there_and_collect_it_afterwards() -> None:
    def ring() -> weakref.ref[Thing]:
        thing = Thing()
        thing.itself = thing  # type: ignore[attr-defined]
        return weakref.ref(thing)

    gc.disable()
    try:
        before = ring()
        kept = Thing()
        kept.itself = kept  # type: ignore[attr-defined]
        old = weakref.ref(kept)
        with short_collections():
            assert before() is None
            del kept
            young = ring()
            gc.collect()
            assert young() is None
            assert old() is not None
        gc.collect()
        assert old() is None
    finally:
        gc.enable()


def test_old_garbage_is_left_to_a_moment_that_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    def old_garbage() -> weakref.ref[Thing]:
        thing = Thing()
        thing.itself = thing  # type: ignore[attr-defined]
        gc.collect(1)  # it survives, and so is among the old
        return weakref.ref(thing)

    before = gc.get_threshold()
    with short_collections():
        assert gc.get_threshold() == (*before[:2], loop.OLD)
        monkeypatch.setattr(loop, "_collected_at", float("-inf"))
        first = old_garbage()
        gc.collect(1)
        assert first() is not None
        collect()
        assert first() is None
        second = old_garbage()
        collect()
        assert second() is not None  # it was collected a moment ago
        monkeypatch.setattr(loop, "COLLECT_SECONDS", 0.0)
        collect()
        assert second() is None
    assert gc.get_threshold() == before


def test_an_interrupt_right_after_the_threads_start_ends_the_thread_too(monkeypatch: pytest.MonkeyPatch) -> None:
    start = background.thread

    def started_and_interrupted(*arguments: object, **named: object) -> threading.Thread:
        thread = start(*arguments, **named)  # type: ignore[arg-type]
        os.kill(os.getpid(), signal.SIGINT)
        return thread

    monkeypatch.setattr(background, "thread", started_and_interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(asyncio.Event().wait(), "interrupted")
    assert "interrupted" not in [thread.name for thread in threading.enumerate()]


def test_a_loop_is_asyncios_own_whatever_a_library_has_set():
    uvloop = pytest.importorskip("uvloop")
    before = asyncio.get_event_loop_policy()
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    try:
        made = new_loop()
    finally:
        asyncio.set_event_loop_policy(before)
    assert isinstance(made, asyncio.SelectorEventLoop)
    made.close()
