"""One process of a gang on Ray: the actor around its object."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

from areal_x.cluster.gang import Make
from areal_x.cluster.surroundings import Surroundings
from areal_x.errors import UserError, sentence

PACKAGE = "areal-x"


class Raised(Exception):
    """An exception of a call, in a form that every process can read. is_mistake: it was a
    UserError."""

    def __init__(self, text: str, is_mistake: bool, traceback: str) -> None:
        super().__init__(text, is_mistake, traceback)
        self.text, self.is_mistake, self.traceback = text, is_mistake, traceback


@contextmanager
def reported() -> Iterator[None]:
    """Makes exceptions of the body readable for the driver, and logs them."""
    try:
        yield
    except Exception as error:
        written = traceback.format_exc()
        print(written, file=sys.stderr, flush=True)
        is_mistake = isinstance(error, UserError)
        text = sentence(error).strip()
        if not is_mistake:
            text = f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"
        raise Raised(text, is_mistake, written) from None


class Process:
    """The actor around a process's object."""

    def enter(self, surroundings: Surroundings, name: str) -> None:
        with reported():
            surroundings.enter(name)

    def make(self, make: Make, rank: int) -> None:
        with reported():
            self._object = make(rank)

    def node(self, expected: str) -> tuple[str, str]:
        """Returns the id and the address of its node. Raises: UserError unless the package has the
        expected version there."""
        import ray

        own = ray.get_runtime_context().get_node_id()
        address = next(n["NodeManagerAddress"] for n in ray.nodes() if n["NodeID"] == own)
        with reported():
            if (found := version(PACKAGE)) != expected:
                raise UserError(
                    f"the node {address} has {PACKAGE} {found}, the driver {expected}: install the"
                    " same version on all nodes"
                )
        return own, address

    def call(self, method: str, *arguments: Any) -> Any:
        with reported():
            return getattr(self._object, method)(*arguments)

    def stream(self, method: str, *arguments: Any) -> Iterator[Any]:
        with reported():
            yield from getattr(self._object, method)(*arguments)

    def exhaust(self, method: str, *arguments: Any) -> None:
        with reported():
            for _ in getattr(self._object, method)(*arguments):
                pass
