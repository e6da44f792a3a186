"""Images that were read are read once for all who ask: the episodes of a group begin at the same time, each
on a thread of its own, and hold one copy of their prompt's images."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from weakref import WeakValueDictionary

from areal_x.types import Images

Key = tuple[str, tuple[str, ...]]
"""A model's directory and the URLs of images."""


class ReadOnce:
    """Calls `read` once for a key, however many threads ask for it at the same time, and again only if the
    key is not among the last `kept` and nobody holds its images any more. An error is raised for each
    who asks, and not kept."""

    def __init__(self, read: Callable[[str, tuple[str, ...]], Images], kept: int) -> None:
        self._read, self._kept = read, kept
        self._last: OrderedDict[Key, Images] = OrderedDict()
        self._held: WeakValueDictionary[Key, Images] = WeakValueDictionary()
        self._turns: WeakValueDictionary[Key, Lock] = WeakValueDictionary()  # while any thread asks
        self._lock = Lock()

    def __call__(self, directory: str, urls: tuple[str, ...]) -> Images:
        key = directory, urls
        with self._lock:
            turn = self._turns.setdefault(key, Lock())
        with turn:
            images = self._held.get(key)
            if images is None:
                images = self._read(directory, urls)
            with self._lock:
                self._held[key] = self._last[key] = images
                self._last.move_to_end(key)
                while len(self._last) > self._kept:
                    self._last.popitem(last=False)
            return images
