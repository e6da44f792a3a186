"""The nouns of the ring: the data that flows from the dataset to the trainer.

All arrays of a `Trajectory` have one length T, and position t of each is about token t itself: its
log-probability, the version that sampled it, whether it is trained on. Nothing is rolled or shifted
outside a model's own head.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32, Int16, Int32

from areal_x.errors import UserError, function_name, in_brief

Array = Any  # a numpy, jax or torch array: the algorithms are written for all three
# A function of a student's and a teacher's logits [..., vocabulary] that returns [...].
Divergence = Callable[[Array, Array], Array]

IMAGES = ("patches", "grids", "image_segments")  # the fields of a batch about images
NOT_THE_POLICY = -1  # version of a token that no policy sampled: a prompt, a tool's output
NOT_RECORDED = -1  # in place of an expert that the engine did not record

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Task:
    """One item of a dataset."""

    id: str

    prompt: str | Sequence[Message]
    """Chat messages (a list of {"role", "content"}) or plain text."""

    answer: Any = None
    """Whatever the reward compares with; None if it needs nothing."""

    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Images:
    """The images of one sequence, in the order of their tokens, as Hugging Face's processors return
    them."""

    patches: Float32[np.ndarray, "patches features"]
    """The pixels of all images, patch after patch (a processor's `pixel_values`)."""

    grids: Int32[np.ndarray, "images 3"]
    """Frames, rows and columns of patches of each image (`image_grid_thw`)."""

    def __post_init__(self) -> None:
        wanted = int(np.prod(self.grids, axis=1).sum())
        if len(self.patches) != wanted:
            raise ValueError(
                f"{len(self.grids)} images whose grids have {wanted} patches came with"
                f" {len(self.patches)}"
            )


@dataclass(frozen=True)
class Kept:
    """The tokens that truncated sampling (top-p, top-k, min-p) left to choose from, at each of T
    positions."""

    counts: Int32[np.ndarray, " T"]
    """How many at each position; 0 if nothing was left out there, or nothing was sampled."""

    ids: Int32[np.ndarray, " ids"]
    """Their ids, those of one position after those of another, each once."""

    def __post_init__(self) -> None:
        wanted = int(self.counts.sum())
        if len(self.ids) != wanted:
            raise ValueError(f"{len(self.ids)} kept ids came with counts of {wanted}")

    def __len__(self) -> int:
        return len(self.counts)

    @staticmethod
    def everything(length: int) -> Kept:
        """Returns `length` positions at which nothing was left out."""
        return Kept(np.zeros(length, np.int32), np.zeros(0, np.int32))

    @staticmethod
    def joined(parts: Sequence[Kept]) -> Kept:
        """Returns the positions of all parts, one after another."""
        return Kept(
            np.concatenate([part.counts for part in parts]),
            np.concatenate([part.ids for part in parts]),
        )

    def contain(self, tokens: Int32[np.ndarray, " T"]) -> bool:
        """True if each token was one of those kept at its position."""
        found = np.repeat(np.arange(len(self)), self.counts)[
            self.ids == np.repeat(tokens, self.counts)
        ]
        return bool(np.isin(np.flatnonzero(self.counts), found).all())


@dataclass(frozen=True)
class Trajectory:
    """One token sequence to train on. All arrays have one length T."""

    tokens: Int32[np.ndarray, " T"]
    """Token ids."""

    mask: Bool[np.ndarray, " T"]
    """True for tokens that the policy sampled and that are trained on."""

    logprobs: Float32[np.ndarray, " T"]
    """Log-probability of the token under the distribution that it was sampled from; 0 if the policy
    did not sample it."""

    versions: Int32[np.ndarray, " T"]
    """The policy version that sampled the token; -1 if none did."""

    reward: float | None = None
    """Reward of the whole sequence."""

    token_rewards: Float32[np.ndarray, " T"] | None = None
    """Rewards per token, added to `reward` if the algorithm uses per-token rewards."""

    finish_reason: str = "stop"

    experts: Int16[np.ndarray, "T layers per_token"] | None = None
    """For a mixture of experts: the experts that the engine routed each token to; -1 if it recorded
    none."""

    images: Images | None = None
    """The images that tokens outside the mask stand for."""

    credit: Float32[np.ndarray, " T"] | None = None
    """Factors on the tokens' advantages; None is 1 for all."""

    kept: Kept | None = None
    """What truncated sampling left to choose from at each token; None if nothing was left out.
    Log-probabilities are then of the distribution over these tokens alone, here and in a
    trainer."""

    def __post_init__(self) -> None:
        optional = [
            name for name in ("experts", "credit", "kept") if getattr(self, name) is not None
        ]
        arrays = ("tokens", "mask", "logprobs", "versions", *optional)
        lengths = {name: len(getattr(self, name)) for name in arrays}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"a trajectory's arrays must have one length, got {lengths}")
        if self.kept is not None and not self.kept.contain(self.tokens):
            raise ValueError("a sampled token is not among those that its sampling kept")

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
        kept: Kept | None = None,
    ) -> Trajectory:
        """Returns the trajectory of a prompt of P tokens and N sampled tokens, which are trained on.
        images: those of the prompt. kept: of the sampled tokens."""
        context = len(prompt)
        length = context + len(tokens)
        ids = np.empty(length, np.int32)
        ids[:context] = prompt
        ids[context:] = tokens
        mask = np.ones(length, np.bool_)
        mask[:context] = False
        logp = np.zeros(length, np.float32)
        logp[context:] = logprobs
        version = np.full(length, NOT_THE_POLICY, np.int32)
        version[context:] = versions
        return Trajectory(
            tokens=ids,
            mask=mask,
            logprobs=logp,
            versions=version,
            reward=reward,
            finish_reason=finish_reason,
            experts=experts,
            images=images,
            kept=None if kept is None else Kept.joined([Kept.everything(context), kept]),
        )


@dataclass(frozen=True)
class Scored:
    """The episode ended and was scored."""

    reward: float

    details: Mapping[str, float] = field(default_factory=dict)
    """The verifier's own numbers, by name."""


@dataclass(frozen=True)
class Failed:
    """The episode raised an exception. It is counted and shown, never a silent zero and never
    trained on."""

    error: str

    traceback: str = field(default="", compare=False)
    """Kept for the first few different errors of a run, "" for the others."""


@dataclass(frozen=True)
class TimedOut:
    """The episode, or its reward function, was ended after this many seconds."""

    seconds: float


Outcome = Scored | Failed | TimedOut


@dataclass(frozen=True)
class Episode:
    """One attempt at a task: its outcome, and its trajectories if it was scored."""

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
    """The episodes of one task, which are compared with each other."""

    task: Task

    ticket: int
    """Number in the order of admission, unique in a run."""

    admitted_version: int
    """The engines' policy version at admission."""

    episodes: tuple[Episode, ...] = ()

    greedy_reward: float | None = None
    """Reward of a greedy answer to the same task, if the algorithm compares with it."""

    @property
    def scored(self) -> tuple[Episode, ...]:
        """The episodes that were scored."""
        return tuple(e for e in self.episodes if isinstance(e.outcome, Scored))

    @property
    def rewards(self) -> list[float]:
        """The rewards of the scored episodes."""
        return [e.outcome.reward for e in self.episodes if isinstance(e.outcome, Scored)]


@dataclass(frozen=True)
class Batch:
    """Packed rows `[rows, length]`, each of which may contain many sequences.

    Fields that an algorithm does not need are None. The arrays are numpy, jax or torch arrays, of
    shape `[rows, length]` unless stated.
    """

    tokens: Array
    """Token ids."""

    segment_ids: Array
    """1, 2, … for the sequences of a row; 0 for padding. A token that several share has the id of the
    one that trains it, or else of the first."""

    positions: Array
    """Position within the sequence."""

    mask: Array
    """True for tokens that are trained on."""

    behavior_logp: Array | None = None
    """Log-probability under the policy that sampled the token."""

    proximal_logp: Array | None = None
    """Log-probability under the policy to which the update is anchored; None if the loss takes it
    from its own forward pass."""

    reference_logp: Array | None = None
    """Log-probability under the frozen reference."""

    versions: Array | None = None
    """The policy version that sampled the token; -1 if none did."""

    ages: Array | None = None
    """How many versions the token's is behind the trained one."""

    advantages: Array | None = None

    returns: Array | None = None
    """Targets of the critic."""

    old_values: Array | None = None
    """The critic's values before the step."""

    weights: Array | None = None
    """Weight of each term in `sum(weights * terms)`."""

    experts: Array | None = None
    """`[rows, length, layers, per_token]`, see `Trajectory`."""

    kept: Array | None = None
    """`[rows, most, 2]`: what truncated sampling left to choose from, as pairs of a token's index
    in the row and an id; −1 for padding. A token without a pair was sampled from the whole
    vocabulary; for one with pairs, every log-probability and entropy is of the softmax over its
    ids alone. None if no token has any."""

    parents: Array | None = None
    """Index in the row of the token before, in the sequences that a token is part of; −1 for their
    first token. Sequences that begin alike may share these tokens, of which there is one copy
    (areal_x.batching.sharing): a row is a number of tries, in preorder, and a token attends to its
    ancestors. None if no rows share any: each segment is then one sequence."""

    patches: Array | None = None
    """`[rows, patches, features]`: the images of each row, in the order of their tokens (see
    `Images`). None, as the next two, if no row has an image."""

    grids: Array | None = None
    """`[rows, images, 3]`: the grids of these images."""

    image_segments: Array | None = None
    """`[rows, images]`: the segment of each image; 0 for padding."""

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
        """Returns the batch with `function` applied to each array that is not None."""
        present = {f.name: getattr(self, f.name) for f in fields(self)}
        return Batch(**{name: None if x is None else function(x) for name, x in present.items()})


@dataclass(frozen=True)
class Policy:
    """The outputs of the trainer's forward pass for a loss, each `[rows, length]`; position t is
    about token t."""

    logp: Array = None
    """Log-probability of the token; None from a critic or a reward model."""

    entropy: Array | None = None
    """Entropy, in nats, of the distribution that the token was sampled from (over the kept tokens,
    if sampling was truncated), if the algorithm needs it."""

    values: Array | None = None
    """Values of a critic or a reward model, their only output."""

    divergence: Array | None = None
    """Divergence between this policy's and the teacher's distribution over the whole vocabulary,
    also where sampling was truncated; 0 at a segment's first token and at padding."""


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


# How JAX and PyTorch refuse to give numpy an array whose gradient they follow.
OF_NUMPY = re.compile("TracerArrayConversionError|call numpy\\(\\) on Tensor that requires grad")


def usual_mistake(error: Exception, policy: Policy, batch: Batch) -> str | None:
    """Returns what is wrong with a loss that raised this; None for an error that says it itself."""
    if OF_NUMPY.search(f"{type(error).__name__}: {error}"):
        return (
            "calls numpy, through which no gradient goes: take the functions of"
            " xp = array_namespace(policy.logp), from array_api_compat"
        )
    if "NoneType" in str(error):
        there = [
            f"{noun}.{f.name}"
            for noun, of in (("policy", policy), ("batch", batch))
            for f in fields(of)
            if getattr(of, f.name) is not None
        ]
        return (
            f"reads an array that this algorithm does not provide ({error}). There are:"
            f" {', '.join(there)}; docs/extending.md (a loss) tells what provides others"
        )
    return None


def evaluate_loss(loss: Loss, policy: Policy, batch: Batch) -> LossTerms:
    """Runs a loss, checks what it returned, and returns its terms and metrics.

    Raises: UserError unless it returns one term per token, `[rows, length]`, and a dict of arrays, and
    for a loss that calls numpy, or reads an array that is not there; whatever else the loss raises.
    """
    name = function_name(loss)
    try:
        returned = loss(policy, batch)
    except UserError:
        raise
    except Exception as error:
        if (why := usual_mistake(error, policy, batch)) is None:
            raise
        raise UserError(f"the loss {name} {why}") from error
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
