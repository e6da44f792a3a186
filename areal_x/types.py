"""The nouns of the ring: what flows from the dataset to the trainer.

Every array of a `Trajectory` has one length T and position t of each speaks of token t itself: its
log-probability, the version that produced it, whether it is trained on. Nothing is rolled or
shifted outside a model's own head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32, Int16, Int32

from areal_x.errors import UserError, function_name, in_brief

Array = Any  # a numpy, jax or torch array: the algorithms are written for all three
# of a student's and a teacher's logits [..., vocabulary], giving [...]
Divergence = Callable[[Array, Array], Array]

IMAGES = ("patches", "grids", "image_segments")  # what a batch says of them
NOT_THE_POLICY = -1  # the version of a token that no policy produced: a prompt, a tool's output
NOT_RECORDED = -1  # in place of an expert that no engine said

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Task:
    """One item of a dataset.

    prompt: chat messages (a list of {"role", "content"}) or plain text.
    answer: whatever the reward compares with; None where the reward needs nothing.
    """

    id: str
    prompt: str | Sequence[Message]
    answer: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Images:
    """The images of one sequence, in the order in which its tokens speak of them, as Hugging Face's
    processors give them.

    patches: the pixels of all of them, patch after patch (a processor's `pixel_values`). grids: how
    many frames, rows and columns of patches each has (its `image_grid_thw`).
    """

    patches: Float32[np.ndarray, "patches features"]
    grids: Int32[np.ndarray, "images 3"]

    def __post_init__(self) -> None:
        wanted = int(np.prod(self.grids, axis=1).sum())
        if len(self.patches) != wanted:
            raise ValueError(
                f"{len(self.grids)} images whose grids have {wanted} patches came with"
                f" {len(self.patches)}"
            )


@dataclass(frozen=True)
class Trajectory:
    """One token sequence to learn from, all arrays of one length T.

    tokens: ids. mask: produced by the policy and to be trained on. logprobs: log-probability of
    this very token under the distribution it was sampled from (0 where the policy did not produce
    it). versions: the policy version that produced it (-1 where none did). reward: of the whole
    sequence. token_rewards: added to it where the algorithm uses per-token rewards. experts: of a
    mixture, those that the engine sent each token through in each layer (-1 where it recorded
    none). images: those that tokens outside the mask stand for, of a model that sees. credit: what
    each token's advantage counts, multiplied onto it; None is 1 for all.
    """

    tokens: Int32[np.ndarray, " T"]
    mask: Bool[np.ndarray, " T"]
    logprobs: Float32[np.ndarray, " T"]
    versions: Int32[np.ndarray, " T"]
    reward: float | None = None
    token_rewards: Float32[np.ndarray, " T"] | None = None
    finish_reason: str = "stop"
    experts: Int16[np.ndarray, "T layers per_token"] | None = None
    images: Images | None = None
    credit: Float32[np.ndarray, " T"] | None = None

    def __post_init__(self) -> None:
        optional = [name for name in ("experts", "credit") if getattr(self, name) is not None]
        arrays = ("tokens", "mask", "logprobs", "versions", *optional)
        lengths = {name: len(getattr(self, name)) for name in arrays}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"a trajectory's arrays must have one length, got {lengths}")

    def __len__(self) -> int:
        return len(self.tokens)

    @staticmethod
    def from_completion(
        prompt: Int32[np.ndarray, " P"],
        tokens: Int32[np.ndarray, " N"],
        logprobs: Float32[np.ndarray, " N"],
        versions: Int32[np.ndarray, " N"],
        reward: float | None = None,
        finish_reason: str = "stop",
        experts: Int16[np.ndarray, "P+N layers per_token"] | None = None,
        images: Images | None = None,
    ) -> Trajectory:
        """A prompt of P tokens that is context, then N generated tokens that are trained on.
        images: of the prompt."""
        context, length = len(prompt), len(prompt) + len(tokens)
        ids, mask = np.empty(length, np.int32), np.ones(length, np.bool_)
        ids[:context], ids[context:] = prompt, tokens
        mask[:context] = False
        logp, version = np.zeros(length, np.float32), np.full(length, NOT_THE_POLICY, np.int32)
        logp[context:], version[context:] = logprobs, versions
        return Trajectory(ids, mask, logp, version, reward, None, finish_reason, experts, images)


@dataclass(frozen=True)
class Scored:
    """The episode ended and was judged. details: the verifier's own numbers, by name."""

    reward: float
    details: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Failed:
    """The episode raised: data to count and show, never a silent zero and never trained on.

    traceback: kept for the first few different errors of a run, "" for others.
    """

    error: str
    traceback: str = field(default="", compare=False)


@dataclass(frozen=True)
class TimedOut:
    """The episode, or its reward, was ended after this many seconds."""

    seconds: float


Outcome = Scored | Failed | TimedOut


@dataclass(frozen=True)
class Episode:
    """One attempt at a task: what became of it, and what there is to learn from (nothing unless it
    was scored)."""

    outcome: Outcome
    trajectories: tuple[Trajectory, ...] = ()

    @property
    def reward(self) -> float:
        """The reward of a scored episode. Raises: ValueError for one that failed or timed out."""
        if not isinstance(self.outcome, Scored):
            raise ValueError(f"an episode has a reward only if it was scored, not {self.outcome}")
        return self.outcome.reward


@dataclass(frozen=True)
class Group:
    """The episodes of one task that are compared with each other.

    ticket: the order of admission, unique in a run. admitted_version: the version that engines held
    at admission. greedy_reward: of a greedy answer to the same task, where the algorithm compares
    with it.
    """

    task: Task
    ticket: int
    admitted_version: int
    episodes: tuple[Episode, ...] = ()
    greedy_reward: float | None = None

    @property
    def scored(self) -> tuple[Episode, ...]:
        return tuple(e for e in self.episodes if isinstance(e.outcome, Scored))

    @property
    def rewards(self) -> list[float]:
        return [e.outcome.reward for e in self.episodes if isinstance(e.outcome, Scored)]


@dataclass(frozen=True)
class Batch:
    """Packed rows `[rows, length]`; a row may hold many sequences. What an algorithm does not need
    is None.

    segment_ids: 0 is padding, 1.. the sequences of that row. positions: within the sequence. mask:
    trained on. behavior_logp, proximal_logp, reference_logp: log-probability of each token under
    the policy that sampled it, the policy the update is anchored to, and the frozen reference.
    ages: how many versions older than the trained one the token's is. weights: what each term
    counts in `sum(weights * terms)`. experts: `[rows, length, layers, per_token]`, see Trajectory.
    prefix_ids: the earlier segment of its row that a token attends to beside its own, 0 for none: a
    prompt that answers share, after which their positions count on and of which no token is trained
    on (areal_x.batching.sharing). patches `[rows, patches, features]`, grids `[rows, images, 3]`,
    image_segments `[rows, images]`: the images of each row, one after the other as their tokens
    stand in it (see `Images`), and whose each is; 0 is padding. None where no row has an image. The
    same dataclass holds numpy, jax or torch arrays.
    """

    tokens: Array
    segment_ids: Array
    positions: Array
    mask: Array
    behavior_logp: Array | None = None
    proximal_logp: Array | None = None
    reference_logp: Array | None = None
    versions: Array | None = None
    ages: Array | None = None
    advantages: Array | None = None
    returns: Array | None = None
    old_values: Array | None = None
    weights: Array | None = None
    experts: Array | None = None
    prefix_ids: Array | None = None
    patches: Array | None = None
    grids: Array | None = None
    image_segments: Array | None = None

    @property
    def has_images(self) -> bool:
        return self.patches is not None

    @property
    def shape(self) -> tuple[int, int]:
        rows, length = self.tokens.shape
        return rows, length

    def replace(self, **changes: Any) -> Batch:
        return replace(self, **changes)

    def map(self, function: Any) -> Batch:
        """The same batch with `function` applied to each array that is there."""
        present = {f.name: getattr(self, f.name) for f in fields(self)}
        return Batch(**{name: None if x is None else function(x) for name, x in present.items()})


@dataclass(frozen=True)
class Policy:
    """What the trainer's forward pass gives a loss, each `[rows, length]`, position t about token
    t.

    logp: log-probability of the token. entropy: of the distribution it was drawn from, in nats,
    where the algorithm needs it. values: of a critic or a reward model, which gives nothing else.
    divergence: between this policy's distribution and the teacher's over the whole vocabulary where
    the token was drawn, 0 at a segment's first token and at padding.
    """

    logp: Array = None
    entropy: Array | None = None
    values: Array | None = None
    divergence: Array | None = None


@dataclass(frozen=True)
class Turn:
    """One step of the ring: the metrics it wrote, the groups it consumed and the batches it trained
    on, one per optimizer step.

    The turn before the first step (the evaluation of the initial model) has neither groups nor
    batches.
    """

    metrics: dict[str, float]
    groups: Sequence[Group] = ()
    batches: Sequence[Batch] = ()

    @property
    def batch(self) -> Batch | None:
        """The first batch."""
        return self.batches[0] if self.batches else None


LossTerms = tuple[Array, dict[str, Array]]
Loss = Callable[[Policy, Batch], LossTerms]


def evaluate_loss(loss: Loss, policy: Policy, batch: Batch) -> LossTerms:
    """Returns the terms and metrics of a loss that anybody may have written.

    Raises: UserError unless it returns one term per token, `[rows, length]`, and a dict of arrays.
    """
    returned, name = loss(policy, batch), function_name(loss)
    wanted = f"an array {list(batch.mask.shape)}"
    if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], dict)):
        raise UserError(
            f"the loss {name} returned {in_brief(returned)}: it must return (terms, metrics), where"
            " metrics is a dict"
        )
    terms, metrics = returned
    if (found := in_brief(terms)) != wanted:
        raise UserError(
            f"the loss {name} returned {found} as its terms: it must return one per token, {wanted}"
        )
    for key, x in metrics.items():
        if (found := in_brief(x)) not in (wanted, "an array []"):
            raise UserError(
                f"the loss {name} returned {found} as its metric {key!r}: it must return one per"
                f" token, {wanted}"
            )
    return terms, metrics
