"""What one look at a run found: a line that a reader can act on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from areal_x.config.reader import Config
from areal_x.errors import UserError, described
from areal_x.protocols.engine import EngineError


@dataclass(frozen=True)
class Finding:
    """about: what was looked at. words: how it is, or what is wrong, why and what would work."""

    ok: bool
    about: str
    words: str

    def __str__(self) -> str:
        return f"{'ok     ' if self.ok else 'PROBLEM'}  {self.about}: {self.words}"


def finding(config: Config, about: str, look: Callable[[], str]) -> Finding:
    """What `look` says; what it raises is a problem, with the place of the binding that it speaks
    of."""
    try:
        return Finding(True, about, look())
    except UserError as error:
        return Finding(False, about, str(config.locate(error)))
    except EngineError as error:
        return Finding(False, about, str(error))
    except (
        Exception
    ) as error:  # of a dataset, a workflow, a model's files: code and data that are the user's own
        return Finding(False, about, described(error))
