"""The result of one check: a line that a reader can act on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from areal_x.config.reader import Config
from areal_x.errors import UserError, described
from areal_x.protocols.engine import EngineError


@dataclass(frozen=True)
class Finding:
    ok: bool

    subject: str
    """The part of the run that was checked."""

    message: str
    """Its state, or what is wrong, why, and what would work."""

    def __str__(self) -> str:
        return f"{'ok     ' if self.ok else 'PROBLEM'}  {self.subject}: {self.message}"


def run_check(config: Config, subject: str, check: Callable[[], str]) -> Finding:
    """Runs a check, which returns a sentence. An error is a problem, reported with the file and
    line of the binding that it names."""
    try:
        return Finding(True, subject, check())
    except UserError as error:
        return Finding(False, subject, str(config.locate(error)))
    except EngineError as error:
        return Finding(False, subject, str(error))
    # The user's own code and data, such as a dataset or a workflow, may raise anything.
    except Exception as error:
        return Finding(False, subject, described(error))
