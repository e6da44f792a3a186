"""What a shard reports to the driver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from areal_x.rollout.episodes import EpisodeCounts
from areal_x.types import Episode


@dataclass(frozen=True)
class Opened:
    """A shard whose servers are up."""

    concurrency: int
    """Number of requests worth keeping in flight."""

    context: int
    """Maximum length of a sequence in tokens."""


@dataclass(frozen=True)
class Finished:
    """The episodes of a group."""

    ticket: int

    episodes: tuple[Episode, ...]

    greedy_reward: float | None


@dataclass(frozen=True)
class News:
    """What has happened in a shard since the last news, and its state."""

    finished: Sequence[Finished]

    received: int
    """Groups that it was given since it was opened."""

    wanted: int
    """Engine slots that their episodes hold or wait for."""

    concurrency: int

    counts: EpisodeCounts
    """Since it was opened."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    """The last ones of the engine's `balance`."""

    messages: Sequence[str] = ()
    """For the user."""

    doing: str = ""
    """What the oldest group waits for."""

    lost: str = ""
    """Why its engine can go on no more; the shard is of no use then."""

    mistake: str = ""
    """A UserError that ends the run."""
