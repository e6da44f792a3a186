"""Leaves what stays until the end, modules and compiled programs, out of the collections of garbage.

With jax, torch and transformers imported a full collection traverses over a million objects, 0.4 s, and each run begins with
one: a third of the time of the tests that train. A run ends by returning all objects to the collections (areal_x.runtime.loop),
so they are left out again after each test. Its garbage among them is collected at the end of the module.
"""

from __future__ import annotations

import gc

import pytest

_returned = False  # whether a test of this module returned all objects to the collections
_unfreeze = gc.unfreeze


def unfreeze() -> None:
    """gc.unfreeze, with a note: to count the objects that are left out, as gc offers, takes as long as to collect them."""
    global _returned
    _returned = True
    _unfreeze()


def pytest_configure() -> None:
    gc.unfreeze = unfreeze
    gc.disable()  # else half the time of the collection of tests is that of garbage, of which modules make none


def pytest_collection_finish() -> None:
    gc.enable()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """After the fixtures' ends."""
    global _returned
    if nextitem is not None and nextitem.path != item.path:
        if _returned:
            _unfreeze()
        gc.collect()
        _returned = False
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze = _unfreeze
    gc.unfreeze()  # libraries report what is left at the end of Python
