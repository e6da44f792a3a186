"""What a shard reports to the driver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from areal_x.rollout.episodes import EpisodeCounts
from areal_x.runtime.distinct_images import DistinctImages, images_of
from areal_x.types import Episode, Images


@dataclass(frozen=True)
class Opened:
    """A shard whose servers are up."""

    concurrency: int
    """Number of requests worth keeping in flight."""

    context: int
    """Maximum length of a sequence in tokens."""


@dataclass(frozen=True)
class Finished:
    """The episodes of a group. It travels with one copy of images that several of them have."""

    ticket: int

    episodes: tuple[Episode, ...]

    greedy_reward: float | None

    def __getstate__(self) -> dict[str, Any]:
        distinct = DistinctImages()
        shown = [t.images for episode in self.episodes for t in episode.trajectories]
        numbers = [None if images is None else distinct.add(images) for images in shown]
        if not distinct.images:
            return self.__dict__
        blind = with_images(self.episodes, [None] * len(shown))
        return {**self.__dict__, "episodes": blind, "images": (distinct.images, numbers)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        if "images" in state:
            state["episodes"] = with_images(state["episodes"], images_of(*state.pop("images")))
        self.__dict__.update(state)


def with_images(
    episodes: Sequence[Episode], images: Sequence[Images | None]
) -> tuple[Episode, ...]:
    """Returns the episodes with these images, one for each of their trajectories."""
    left = iter(images)
    return tuple(
        replace(
            episode,
            trajectories=tuple(replace(t, images=next(left)) for t in episode.trajectories),
        )
        for episode in episodes
    )


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
