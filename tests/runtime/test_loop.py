"""Waiting from one thread for what another does."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import weakref

import pytest

from areal_x.runtime import background
from areal_x.runtime.loop import run, short_collections


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
