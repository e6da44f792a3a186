"""Images that many ask for at once are read once."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from areal_x.hf.image_cache import ReadOnce
from areal_x.types import Images


class Reader:
    """Counts what it reads, and reads when it is let."""

    def __init__(self) -> None:
        self.read: list[tuple[str, ...]] = []
        self.may = threading.Event()

    def __call__(self, directory: str, urls: tuple[str, ...]) -> Images:
        self.read.append(urls)
        assert self.may.wait(10)
        if urls == ("bad",):
            raise ValueError("bad")
        return Images(np.zeros((1, 2), np.float32), np.ones((1, 3), np.int32))


def test_a_group_that_asks_at_once_shares_one_copy() -> None:
    reader = Reader()
    once = ReadOnce(reader, kept=1)  # fewer than groups that begin
    with ThreadPoolExecutor(9) as threads:
        asked = [threads.submit(once, "model", ("a",)) for _ in range(8)]
        others = threads.submit(once, "model", ("b",))
        reader.may.set()
        found = [x.result() for x in asked]
    assert all(x is found[0] for x in found)
    assert others.result() is not found[0]
    assert sorted(reader.read) == [("a",), ("b",)]


def test_images_that_somebody_holds_are_not_read_again_and_others_are_forgotten() -> None:
    reader = Reader()
    reader.may.set()
    once = ReadOnce(reader, kept=2)
    first = once("model", ("a",))
    for url in ("b", "c", "d"):
        once("model", (url,))
    assert once("model", ("a",)) is first
    gc.collect()
    once("model", ("b",))
    assert reader.read == [("a",), ("b",), ("c",), ("d",), ("b",)]


def test_what_cannot_be_read_raises_for_each_who_asks() -> None:
    reader = Reader()
    reader.may.set()
    once = ReadOnce(reader, kept=2)
    for _ in range(2):
        with pytest.raises(ValueError, match="bad"):
            once("model", ("bad",))
    assert len(reader.read) == 2
