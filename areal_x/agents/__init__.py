"""Agents: programs that train through an OpenAI- or Anthropic-shaped API, conversations of several
turns, tools.

`from areal_x.agents import session` is all that a program outside of a run needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal_x.agents.client import Session, SessionError, session

__all__ = ["Session", "SessionError", "session"]


def __getattr__(name: str) -> Any:
    """The client's names, imported when they are first used: an episode's guard lives in this
    package and must start fast."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from areal_x.agents import client

    return getattr(client, name)
