"""Errors of calls on Ray, in forms that every process can read."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from areal_x.errors import UserError, sentence


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


@dataclass(frozen=True)
class Failure:
    """A process of the gang that ended or failed."""

    rank: int

    text: str

    died: bool

    is_mistake: bool = False
    """True if its call raised a UserError."""

    traceback: str = ""


def failure_of(rank: int, error: BaseException) -> Failure:
    """Describes the error of a call of Ray."""
    import ray

    if not isinstance(error, ray.exceptions.RayTaskError):
        lines = str(error).strip().splitlines() or [type(error).__name__]
        # In the creation of the actor the last line is the exception.
        reason = lines[-1] if "creation task" in lines[0] else lines[0]
        return Failure(rank, reason, died=True)
    raised = error.cause
    if not isinstance(raised, Raised):  # the call's arguments could not be read
        return Failure(rank, f"{type(raised).__name__}: {raised}", False, traceback=str(error))
    return Failure(rank, raised.text, False, raised.is_mistake, raised.traceback)
