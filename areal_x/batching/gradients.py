"""What a step of an algorithm would do to each token, without a model: algorithms compared by their
gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from jaxtyping import Float

from areal_x.algorithms.algorithm import Algorithm
from areal_x.batching.batch import Models, fill_batches, pack_groups
from areal_x.errors import UserError
from areal_x.protocols.backends import load_backend
from areal_x.protocols.trainer import Trainer
from areal_x.types import NOT_THE_POLICY, Batch, Group, Policy

GIVEN = ("greedy",)  # what an algorithm may need that the groups have


@dataclass(frozen=True)
class GivenPolicy:
    """Stands in for a trainer whose log-probabilities are known."""

    logp: np.ndarray

    def logprobs(self, batch: Batch) -> np.ndarray:
        return self.logp


def token_gradients(
    algorithm: Algorithm,
    groups: Sequence[Group],
    logprobs: Sequence[Float[np.ndarray, " T"]] | None = None,
    *,
    version: int | None = None,
    backend: str = "jax",
) -> list[Float[np.ndarray, " T"]]:
    """Returns how strongly a step on these groups would push the log-probability of each token: minus
    the derivative of the algorithm's loss with respect to it, with all that its weighting,
    advantages, corrections and clipping make of it. Positive: the token becomes more likely. 0 where
    nothing is trained.

    Args:
        algorithm: Its filters are not applied: groups that they reject count as the others.
        groups: As a `Turn` or a journal has them.
        logprobs: The trained policy's log-probabilities of each trajectory's tokens. By default those
            that the tokens were sampled with: the gradient of a policy that is not stale.
        version: The trained policy's version, for what depends on the ages of tokens; by default the
            newest token's.
        backend: The backend that differentiates.

    Returns: an array for each trajectory of the groups' scored episodes, in their order.

    Raises: UserError for an algorithm that needs a model beside the policy, or its entropy, and if
    the log-probabilities are not those of the trajectories.
    """
    if missing := sorted(algorithm.needs.difference(GIVEN)):
        raise UserError(
            f"the gradient of {algorithm.name} depends on more than log-probabilities and rewards: it"
            f" needs {', '.join(missing)}"
        )
    trajectories = [t for group in groups for e in group.scored for t in e.trajectories]
    if not trajectories:
        raise UserError("the groups have no scored episode with a trajectory")
    known = [t.logprobs for t in trajectories] if logprobs is None else list(logprobs)
    if [len(x) for x in known] != [len(t) for t in trajectories]:
        raise UserError(
            f"logprobs must be {len(trajectories)} arrays, of as many numbers as the trajectories have"
            f" tokens: {', '.join(str(len(t)) for t in trajectories[:5])} …"
        )
    together = 2 if algorithm.pairs else 1
    longest = max(map(len, trajectories))
    part = pack_groups(groups, together * longest, together)
    logp = part.packed.spread_tokens([np.asarray(x, np.float32) for x in known])
    if version is None:
        version = max(int(t.versions.max(initial=NOT_THE_POLICY)) for t in trajectories)
    models = Models(policy=cast(Trainer, GivenPolicy(logp)))  # no other method is called
    own_pass = algorithm.uses_own_pass()
    (batch,) = fill_batches([part], algorithm, models, version, own_pass)
    loss: Any = algorithm.step_loss(own_pass)
    _, gradient = load_backend(backend).differentiate(loss, Policy(logp=logp), batch)
    return [0 - x for x in part.packed.gather(np.asarray(gradient.logp))]
