"""Waiting from one thread for what another does."""

from __future__ import annotations

import gc
import weakref

from areal_x.runtime.loop import short_collections


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
