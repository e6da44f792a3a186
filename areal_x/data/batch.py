"""From scored groups to the packed rows of one optimizer step: advantages and weights, on the host, in numpy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from areal_x.algorithms.recipes import Algorithm
from areal_x.data.packing import pack
from areal_x.types import Batch, Group


def make_batch(groups: Sequence[Group], algorithm: Algorithm, row_length: int, rows_multiple: int = 1) -> Batch:
    """The rows `[rows, row_length]` of all scored episodes, with each token's advantage and weight.

    An episode's advantage, from its reward among its group's, is that of all its trajectories' tokens. An algorithm that judges
    nothing (advantages None) gets rows without advantages. proximal_logp is behavior_logp until the trainer recomputes it.
    Raises: UserError for a trajectory longer than a row.
    """
    episodes = [(episode, group.ticket) for group in groups for episode in group.scored]
    trajectories = [(trajectory, e) for e, (episode, _) in enumerate(episodes) for trajectory in episode.trajectories]
    packed = pack([trajectory for trajectory, _ in trajectories], row_length, rows_multiple)
    batch = packed.batch
    advantages = None
    if algorithm.advantages is not None:
        rewards = np.array([reward for group in groups for reward in group.rewards], np.float64)
        tickets = np.array([ticket for _, ticket in episodes], np.int64)
        of_episode = algorithm.advantages(rewards, tickets)
        advantages = packed.spread(of_episode[[e for _, e in trajectories]])
    weights = algorithm.weighting(batch.mask, batch.segment_ids)
    return batch.replace(proximal_logp=batch.behavior_logp, advantages=advantages, weights=np.asarray(weights, np.float32))


def staleness(groups: Sequence[Group], version: int) -> list[int]:
    """How many versions old each group is when version `version` is about to be trained: at most the queue's bound."""
    return [version - group.admitted_version for group in groups]
