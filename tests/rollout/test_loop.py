"""Waiting from one thread for what another does."""

from __future__ import annotations

import gc
import signal
import weakref

import pytest

from areal_x.rollout.loop import interrupts_noted, short_collections


class Thing:
    pass


def interrupted_in_a_callback() -> None:
    """Whatever is raised there is printed and forgotten."""
    thing = Thing()
    gone = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGINT))
    del thing
    assert gone() is None


def test_an_interrupt_that_comes_within_a_callback_of_the_interpreters_is_not_lost() -> None:
    before = signal.getsignal(signal.SIGINT)
    with interrupts_noted() as check:
        check()
        interrupted_in_a_callback()
        with pytest.raises(KeyboardInterrupt):
            check()
        with interrupts_noted() as inner, pytest.raises(KeyboardInterrupt):
            inner()
        noted = signal.getsignal(signal.SIGINT)
        noted.came = False  # type: ignore[union-attr]
    assert signal.getsignal(signal.SIGINT) is before is signal.default_int_handler


def test_an_interrupt_that_nobody_asked_for_is_raised_at_the_end() -> None:
    with pytest.raises(KeyboardInterrupt), interrupts_noted():
        interrupted_in_a_callback()


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
