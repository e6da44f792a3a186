"""From scored groups to the packed rows of optimizer steps: rewards, advantages and weights, on the
host, in numpy.

groups ──split──▶ minibatches ──pack──▶ rows ──models──▶ log-probabilities, values
                                                                  │
batches ◀── weights × corrections ◀── advantages, returns ◀── per-token rewards
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from areal_x.algorithms.algorithm import Algorithm
from areal_x.algorithms.kl import k1
from areal_x.algorithms.parts import call_by_name, parameter_names
from areal_x.batching.packing import Packed, pack
from areal_x.batching.teachers import ONE, Reader, teacher_logprobs
from areal_x.errors import UserError, function_name
from areal_x.protocols.trainer import RestsOnHost, Scorer, Trainer
from areal_x.runtime import interrupts
from areal_x.types import NOT_THE_POLICY, Batch, Episode, Group, Trajectory


@dataclass(frozen=True)
class Models:
    """The models that compute a batch's log-probabilities and values; None if the algorithm does
    not need one."""

    policy: Trainer

    reference: Trainer | None = None
    """The reference or teacher, if the backend computes it."""

    critic: Trainer | None = None

    reference_servers: Scorer | None = None
    """The reference or teacher, if servers compute it."""

    teachers: Mapping[str, Trainer] = field(default_factory=dict)
    """Several teachers, by name: those that the backend computes."""

    teacher_servers: Mapping[str, Scorer] = field(default_factory=dict)
    """Those of several teachers that servers compute."""

    reader: Reader | None = None
    """Tokenises what only a teacher reads, if the algorithm has such a context."""

    @property
    def scorer(self) -> Scorer | None:
        """The reference or teacher, wherever it is computed."""
        return self.reference if self.reference_servers is None else self.reference_servers

    def taught_by(self, algorithm: Algorithm) -> Mapping[str, Scorer]:
        """Returns what scores the answers that are packed anew for it: several teachers by name, or
        one as ONE; nothing for an algorithm whose reference or teacher reads the batch itself."""
        if not algorithm.reads_tasks:
            return {}
        if "teachers" in algorithm.needs:
            return {**self.teachers, **self.teacher_servers}
        scorer = self.policy if "self" in algorithm.needs else self.scorer
        assert scorer is not None
        return {ONE: scorer}

    def trainers(self) -> dict[str, Trainer]:
        """Returns the models that the backend computes, by name."""
        found = {"policy": self.policy, "reference": self.reference, "critic": self.critic}
        found |= {f"teacher {name!r}": model for name, model in self.teachers.items()}
        return {name: model for name, model in found.items() if model is not None}

    def rest(self) -> None:
        """Moves the state of all trainers to the host (RestsOnHost)."""
        for name, trainer in self.trainers().items():
            resting(name, trainer).rest()

    def wake(self) -> None:
        for name, trainer in self.trainers().items():
            resting(name, trainer).wake()

    def device_bytes(self) -> int:
        return sum(resting(name, x).device_bytes() for name, x in self.trainers().items())

    def save(self, directory: Path) -> Callable[[], None] | None:
        """Begins to write the trainers' state for `--resume`; `trainer/` is a model directory.
        Returns a function that waits for the writes, or None (see Trainer.save_in_background)."""
        begun = [self.policy.save_in_background(directory / "trainer")]
        if self.critic is not None:
            begun.append(self.critic.save_in_background(directory / "critic"))
        waits = [wait for wait in begun if wait is not None]

        def wait_for_all() -> None:
            for wait in waits:
                wait()

        return wait_for_all if waits else None


def resting(name: str, trainer: Trainer) -> RestsOnHost:
    """Returns a trainer that can leave its devices. name: what it trains.

    Raises: UserError for one that cannot.
    """
    if isinstance(trainer, RestsOnHost):
        return trainer
    raise UserError(
        f"train.colocate = True needs trainers that leave their devices to the servers, and the {name}"
        f" of this backend ({type(trainer).__name__}) lacks the methods of"
        " areal_x.protocols.trainer.RestsOnHost: use train.backend = 'jax' or 'torch'"
    )


@dataclass(frozen=True)
class Minibatch:
    """The episodes of one optimizer step, and their trajectories as packed rows."""

    episodes: Sequence[Episode]

    groups: Sequence[Group]
    """For each episode, its group."""

    episode_of: Sequence[int]
    """For each trajectory, the index of its episode."""

    trajectories: Sequence[Trajectory]
    packed: Packed

    @property
    def tickets(self) -> list[int]:
        """For each episode, the ticket of its group."""
        return [group.ticket for group in self.groups]

    @property
    def greedy_rewards(self) -> list[float]:
        """For each episode, the reward of the greedy answer to its task; NaN if there is none."""
        return [
            np.nan if group.greedy_reward is None else group.greedy_reward for group in self.groups
        ]


def make_batches(
    groups: Sequence[Group],
    algorithm: Algorithm,
    row_length: int,
    models: Models,
    version: int = 0,
    minibatches: int = 1,
    share_prompts: bool = False,
    own_pass: bool = False,
) -> list[Batch]:
    """Turns groups into one batch of rows `[rows, row_length]` for each of `minibatches` optimizer
    steps: `pack_minibatches`, then `fill_batches`.

    A group is in one of the batches. Advantages are computed over all groups together; weights and
    corrections over each optimizer step alone.

    version, own_pass: see `fill_batches`. share_prompts: see `pack_minibatches`.

    Raises: UserError for a trajectory longer than a row, or an episode that is not a pair if the
    algorithm compares pairs.
    """
    parts = pack_minibatches(groups, algorithm, row_length, minibatches, share_prompts)
    return fill_batches(parts, algorithm, models, version, own_pass)


def pack_minibatches(
    groups: Sequence[Group],
    algorithm: Algorithm,
    row_length: int,
    minibatches: int = 1,
    share_prompts: bool = False,
) -> list[Minibatch]:
    """Divides groups among optimizer steps, and packs those of each into rows.

    share_prompts: the common prefix of a group's trajectories is stored once a row, beside as many
    of them as the row holds.

    Raises: as `make_batches`.
    """
    together = 2 if algorithm.pairs else 1
    return [
        pack_groups(groups[i::minibatches], row_length, together, share_prompts)
        for i in range(minibatches)
    ]


def fill_batches(
    parts: Sequence[Minibatch],
    algorithm: Algorithm,
    models: Models,
    version: int = 0,
    own_pass: bool = False,
) -> list[Batch]:
    """Returns the batches of packed trajectories with all that the algorithm needs.

    version: of the policy about to be trained. own_pass: proximal log-probabilities and corrections
    are left to `Algorithm.step_loss(own_pass=True)`, which computes them from the step's own forward
    pass; only where `Algorithm.uses_own_pass`.
    """
    batches = [add_model_outputs(part, algorithm, models, version, own_pass) for part in parts]
    if algorithm.advantages is not None:
        batches = add_advantages(batches, parts, algorithm)
        batches = [apply_credit(batch, part) for batch, part in zip(batches, parts, strict=True)]
    if algorithm.truncated == "mask":
        batches = [
            without_truncated(batch, part) for batch, part in zip(batches, parts, strict=True)
        ]
    return [
        add_weights(batch, part, algorithm, corrected=not own_pass)
        for batch, part in zip(batches, parts, strict=True)
    ]


def pack_groups(
    groups: Sequence[Group], row_length: int, together: int = 1, share_prompts: bool = False
) -> Minibatch:
    """Packs all scored episodes of the groups into rows; the `together` trajectories of an episode
    are adjacent."""
    episodes = [(episode, group) for group in groups for episode in group.scored]
    for episode, group in episodes:
        if together > 1 and len(episode.trajectories) != together:
            raise UserError(
                f"task {group.task.id!r} gave {len(episode.trajectories)} trajectories where the"
                f" algorithm compares {together}: it needs a workflow whose episodes are pairs,"
                " such as @preference_pairs()"
            )
    episode_of = [e for e, (episode, _) in enumerate(episodes) for _ in episode.trajectories]
    trajectories = [trajectory for episode, _ in episodes for trajectory in episode.trajectories]
    return Minibatch(
        episodes=[episode for episode, _ in episodes],
        groups=[group for _, group in episodes],
        episode_of=episode_of,
        trajectories=trajectories,
        packed=pack(
            trajectories,
            row_length,
            together=together,
            groups=[episodes[e][1].ticket for e in episode_of] if share_prompts else None,
        ),
    )


def add_model_outputs(
    part: Minibatch, algorithm: Algorithm, models: Models, version: int, own_pass: bool
) -> Batch:
    """Returns the batch with the tokens' ages and every log-probability and value that the algorithm reads.
    own_pass: without the proximal policy's, which the step computes."""
    interrupts.raise_if_interrupted()
    batch = part.packed.batch
    versions = np.asarray(batch.versions)
    ages = np.where(versions == NOT_THE_POLICY, 0, version - versions).astype(np.int32)
    batch = batch.replace(ages=ages)
    proximal = batch.behavior_logp
    if algorithm.proximal == "recompute":
        proximal = None if own_pass else models.policy.logprobs(batch)
    return batch.replace(
        proximal_logp=proximal,
        reference_logp=reference_logprobs(batch, part, algorithm, models),
        old_values=None if models.critic is None else models.critic.values(batch),
    )


def reference_logprobs(
    batch: Batch, part: Minibatch, algorithm: Algorithm, models: Models
) -> np.ndarray | None:
    """Returns the log-probabilities of the reference or of whatever teaches in its place."""
    if teachers := models.taught_by(algorithm):
        sources = [(part.groups[e], part.episodes[e]) for e in part.episode_of]
        taught: np.ndarray = teacher_logprobs(
            part.packed, part.trajectories, sources, algorithm, teachers, models.reader
        )
        return taught
    if models.scorer is None:
        return None
    scored: np.ndarray = models.scorer.logprobs(batch)
    return scored


# ---- rewards


def token_rewards(batch: Batch, part: Minibatch, algorithm: Algorithm) -> list[np.ndarray]:
    """Per-token rewards of each trajectory: its own token rewards, plus the sequence's reward and
    its length's shaping on the last trained token, less β · k1 to the reference.

    The last trained token, not the last token: an episode that ends in a tool's output must not
    lose its reward. Without any trained token the reward is on the last one: it has no gradient,
    but a baseline of the group counts it.
    """
    lengths = np.array([trajectory.mask.sum() for trajectory in part.trajectories])
    shaped = np.zeros(len(lengths))
    if algorithm.shaping is not None:
        shaped = checked_array(
            algorithm.shaping(lengths), shaped.shape, "shaping", algorithm.shaping
        ).astype(np.float64)
    rewards = []
    for trajectory, e, extra in zip(part.trajectories, part.episode_of, shaped, strict=True):
        earned = (
            np.zeros(len(trajectory))
            if trajectory.token_rewards is None
            else trajectory.token_rewards.astype(np.float64)
        )
        reward = part.episodes[e].reward
        last = np.flatnonzero(trajectory.mask)[-1] if trajectory.mask.any() else -1
        earned[last] += reward + extra
        rewards.append(earned)
    if algorithm.reward_kl:
        kl = part.packed.gather(np.asarray(k1(batch.behavior_logp, batch.reference_logp)))
        rewards = [
            r - algorithm.reward_kl * np.where(t.mask, d, 0)
            for r, t, d in zip(rewards, part.trajectories, kl, strict=True)
        ]
    return rewards


def episode_rewards(part: Minibatch, rewards: Sequence[np.ndarray]) -> np.ndarray:
    """Total reward of each episode: the mean over its trajectories, which share its reward, or
    without a trajectory its reward alone.

    An episode without a trained token was scored all the same, so the others of its group are
    compared with it.
    """
    totals = np.array([episode.reward for episode in part.episodes], np.float64)
    episode_of = np.asarray(part.episode_of, np.int64)
    count = np.bincount(episode_of, minlength=len(totals))
    sums = np.bincount(episode_of, [r.sum() for r in rewards], len(totals))
    has_any = count > 0
    return np.where(has_any, sums / np.maximum(count, 1), totals)


# ---- advantages


def add_advantages(
    batches: Sequence[Batch], parts: Sequence[Minibatch], algorithm: Algorithm
) -> list[Batch]:
    """Adds the advantages, computed over all minibatches together, and the returns if the algorithm
    computes any."""
    function = algorithm.advantages
    assert function is not None
    rewards = [
        token_rewards(batch, part, algorithm) for batch, part in zip(batches, parts, strict=True)
    ]
    if "mask" in parameter_names(function):
        bootstraps = algorithm.truncated == "bootstrap"
        return add_token_advantages(function, batches, parts, rewards, bootstraps)
    return add_episode_advantages(function, batches, parts, rewards)


def add_episode_advantages(
    function: Callable[..., Any],
    batches: Sequence[Batch],
    parts: Sequence[Minibatch],
    rewards: Sequence[Sequence[np.ndarray]],
) -> list[Batch]:
    """Adds one advantage an episode, the same for all its tokens."""
    totals = [episode_rewards(part, own) for part, own in zip(parts, rewards, strict=True)]
    lengths = [
        np.bincount(
            np.asarray(part.episode_of, np.int64),
            [t.mask.sum() for t in part.trajectories],
            len(part.episodes),
        )
        for part in parts
    ]
    available = {
        "rewards": np.concatenate(totals),
        "groups": np.concatenate([np.asarray(part.tickets, np.int64) for part in parts]),
        "lengths": np.concatenate(lengths),
        "greedy_rewards": np.concatenate(
            [np.asarray(part.greedy_rewards, np.float64) for part in parts]
        ),
    }
    result = checked_array(
        call_by_name(function, available), available["rewards"].shape, "advantages", function
    )
    of_parts = np.split(result, np.cumsum([len(part.episodes) for part in parts])[:-1])
    return [
        batch.replace(
            advantages=part.packed.spread(advantages[np.asarray(part.episode_of, np.int64)])
        )
        for batch, part, advantages in zip(batches, parts, of_parts, strict=True)
    ]


def add_token_advantages(
    function: Callable[..., Any],
    batches: Sequence[Batch],
    parts: Sequence[Minibatch],
    rewards: Sequence[Sequence[np.ndarray]],
    bootstraps: bool = False,
) -> list[Batch]:
    """Adds one advantage a token, and the returns if the function computes them. bootstraps: the
    function is told which sequences were truncated."""
    trajectories = [trajectory for part in parts for trajectory in part.trajectories]
    # An episode without a trajectory is a row of one token that is not trained on.
    bare = [
        (part.episodes[e].reward, part.tickets[e])
        for part in parts
        for e in episodes_without_trajectory(part)
    ]
    one_token = [np.zeros(1)] * len(bare)
    available = {
        "rewards": _rectangle(
            [*(r for own in rewards for r in own), *(np.array([reward]) for reward, _ in bare)],
            np.float64,
        ),
        "mask": _rectangle([*(t.mask for t in trajectories), *one_token], np.bool_),
        "groups": np.asarray(
            [part.tickets[e] for part in parts for e in part.episode_of]
            + [ticket for _, ticket in bare],
            np.int64,
        ),
    }
    if bootstraps:
        ended = [False] * len(bare)
        available["truncated"] = np.array([*map(is_truncated, trajectories), *ended], np.bool_)
    if batches[0].old_values is not None:
        values = [
            v
            for batch, part in zip(batches, parts, strict=True)
            for v in part.packed.gather(np.asarray(batch.old_values))
        ]
        available["values"] = _rectangle([*values, *one_token], np.float64)
    result = call_by_name(function, available)
    computed = {
        name: checked_array(x, available["rewards"].shape, name, function)
        for name, x in zip(
            ("advantages", "returns"),
            result if isinstance(result, tuple) else (result,),
            strict=False,
        )
    }
    filled, first = [], 0
    for batch, part in zip(batches, parts, strict=True):
        rows = range(first, first + len(part.trajectories))
        first = rows.stop
        arrays = {
            name: part.packed.spread_tokens(
                [np.asarray(x)[r, : len(trajectories[r])] for r in rows]
            )
            for name, x in computed.items()
        }
        filled.append(batch.replace(**arrays))
    return filled


def episodes_without_trajectory(part: Minibatch) -> list[int]:
    return sorted(set(range(len(part.episodes))) - set(part.episode_of))


def apply_credit(batch: Batch, part: Minibatch) -> Batch:
    """Multiplies each token's advantage by its trajectory's credit for it. Returns, the critic's
    targets, do not change."""
    if all(trajectory.credit is None for trajectory in part.trajectories):
        return batch
    credit = [
        np.ones(len(t), np.float32) if t.credit is None else t.credit for t in part.trajectories
    ]
    return batch.replace(advantages=batch.advantages * part.packed.spread_tokens(credit))


def is_truncated(trajectory: Trajectory) -> bool:
    """True for a trajectory that reached the token limit."""
    return trajectory.finish_reason == "length"


def without_truncated(batch: Batch, part: Minibatch) -> Batch:
    """Leaves the tokens of truncated trajectories out of what is trained on, and so out of the
    weights' denominators."""
    ended = part.packed.spread(np.array([not is_truncated(t) for t in part.trajectories]))
    return batch.replace(mask=batch.mask & (ended > 0))


# ---- weights


def add_weights(
    batch: Batch, part: Minibatch, algorithm: Algorithm, corrected: bool = True
) -> Batch:
    """Adds the weight of each token's term: weighting × corrections. Corrections do not change the
    weighting's denominators. corrected: False leaves the corrections to the loss."""
    groups_of_segments = np.zeros((batch.shape[0], batch.shape[1] + 1), np.int64)
    groups_of_segments[part.packed.places.rows, part.packed.places.segments] = [
        part.tickets[e] for e in part.episode_of
    ]
    available = {
        "mask": batch.mask,
        "segment_ids": batch.segment_ids,
        "groups_of_segments": groups_of_segments,
    }
    weights = checked_array(
        call_by_name(algorithm.weighting, available),
        batch.shape,
        "weighting",
        algorithm.weighting,
    )
    if corrected:
        weights = corrected_weights(batch, weights, algorithm)
    return batch.replace(weights=weights.astype(np.float32))


def corrected_weights(batch: Batch, weights: np.ndarray, algorithm: Algorithm) -> np.ndarray:
    """Returns weights × corrections, unless the corrections are for an interpolated policy."""
    if algorithm.corrections is None or algorithm.proximal == "interpolate":
        return weights
    log_ratio = np.where(
        batch.mask, np.asarray(batch.proximal_logp) - np.asarray(batch.behavior_logp), 0
    )
    factors = algorithm.corrections(log_ratio, batch.mask, batch.segment_ids)
    corrected: np.ndarray = weights * checked_array(
        factors, batch.shape, "corrections", algorithm.corrections
    )
    return corrected


def checked_array(
    result: Any, shape: tuple[int, ...], part: str, function: Callable[..., Any]
) -> np.ndarray:
    """Returns the result of a part of an algorithm as an array. Raises: UserError if it has the
    wrong shape."""
    array = result if isinstance(result, np.ndarray) else np.asarray(result)
    if array.shape != shape:
        raise UserError(
            f"{function_name(function)} returned {part} of shape {list(array.shape)}: it must be"
            f" {list(shape)}"
        )
    return array


def staleness(groups: Sequence[Group], version: int) -> list[int]:
    """Age in versions of each group when version `version` is about to be trained: at most the
    queue's bound."""
    return [version - group.admitted_version for group in groups]


def _rectangle(rows: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
    """`[S, T]` with T the greatest length; shorter rows are padded with zeros."""
    out = np.zeros((len(rows), max(map(len, rows), default=0)), dtype)
    for row, x in zip(out, rows, strict=True):
        row[: len(x)] = x
    return out
