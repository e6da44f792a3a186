"""The trainer's contract: numpy in, numpy out, whatever the backend.

A backend is a module found through the entry-point group `areal_x.backends`; it offers
`create_trainer(config)`. Configs are plain frozen dataclasses, read the same way by every backend.
What a backend cannot do it refuses at construction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol

import gin
import numpy as np
from jaxtyping import Float32

from areal_x.errors import ConfigError, UserError, at_least, one_of, positive, within
from areal_x.protocols.loss import Loss
from areal_x.protocols.sampler import Sampler
from areal_x.run.checkpoint import Wait
from areal_x.runtime.interrupts import check
from areal_x.types import Array, Batch, Divergence, Policy


@gin.configurable("optimizer")
@dataclass(frozen=True)
class OptimizerConfig:
    """Global-norm clipping, the optimizer, decoupled weight decay on matrices only; linear warm-up,
    then constant or cosine.

    name: "adamw"; "adafactor" (factored second moments with the decay 1 - t^-0.8, no momentum, no
    scaling by the parameter; each matrix's update clipped to a root mean square of 1; beta1, beta2
    and eps unused); or "muon" (momentum of 0.95, orthogonalised, for each matrix of a layer, and
    AdamW for all else). Updates of all three are of about one size, so they take the same learning
    rates. moments: the type, "fp32" or "bf16", in which moments are kept between steps; what is
    computed from them is in fp32. schedule_steps: length of the cosine in optimizer steps, warm-up
    included (unused when constant). final_ratio: the share of `learning_rate` that the cosine ends
    at. clip_norm: 0 turns clipping off.
    """

    name: str = "adamw"
    learning_rate: float = 1e-6
    beta1: float = 0.9
    beta2: float = 0.98
    eps: float = 1e-8
    weight_decay: float = 0.01
    warmup_steps: int = 0
    schedule: str = "constant"
    schedule_steps: int = 0
    final_ratio: float = 0.1
    clip_norm: float = 1.0
    moments: str = "fp32"

    def __post_init__(self) -> None:
        one_of("optimizer.name", self.name, ("adamw", "adafactor", "muon"))
        positive("optimizer.learning_rate", self.learning_rate)
        within("optimizer.beta1", self.beta1, 0, 1)
        within("optimizer.beta2", self.beta2, 0, 1)
        within("optimizer.final_ratio", self.final_ratio, 0, 1)
        one_of("optimizer.schedule", self.schedule, ("constant", "cosine"))
        if self.schedule == "cosine" and self.schedule_steps <= self.warmup_steps:
            raise ConfigError(
                "optimizer.schedule_steps",
                self.schedule_steps,
                f"more than the {self.warmup_steps} warm-up steps",
            )
        one_of("optimizer.moments", self.moments, ("fp32", "bf16"))
        if self.moments == "bf16" and self.name == "adafactor":
            wanted = (
                "'fp32' with optimizer.name = 'adafactor', whose factored moments are small and"
                " change too little for bf16"
            )
            raise ConfigError("optimizer.moments", self.moments, wanted)
        for beta in ("beta1", "beta2"):
            # A bf16 number has 8 bits: what would fall by less than a 256th of itself is rounded
            # back and never falls.
            if self.moments == "bf16" and 1 - getattr(self, beta) <= 2**-8:
                raise ConfigError(
                    f"optimizer.{beta}",
                    getattr(self, beta),
                    "at most 0.996 with optimizer.moments = 'bf16'",
                )

    def check_state(self, directory: Path, state: Mapping[str, Any], backend: str) -> None:
        """Raises: UserError for a saved trainer's state (its trainer.json) that another optimizer
        left, or another backend in a form of its own."""
        saved = state.get("optimizer", "adamw")
        if saved != self.name:
            raise UserError(
                f"{directory} holds the state of {saved}, with which optimizer.name = {self.name!r}"
                f" cannot go on: set optimizer.name = {saved!r}, or begin anew from its weights"
                f" with model.path = {str(directory)!r}"
            )
        if state.get("backend", backend) != backend:
            raise UserError(
                f"{directory} holds the state of {saved} as the {state['backend']} backend alone"
                f" keeps it, and {backend} cannot go on with it: set train.backend ="
                f" {state['backend']!r}, or begin anew from its weights with model.path ="
                f" {str(directory)!r}"
            )

    def learning_rate_at(self, step: Array) -> Array:
        """The learning rate of optimizer step `step` (0 is the first), written once for every
        backend's arrays."""
        from array_api_compat import array_namespace

        xp = array_namespace(step)
        warmup = xp.minimum((step + 1.0) / max(self.warmup_steps, 1), xp.ones_like(step))
        if self.schedule == "constant":
            return self.learning_rate * warmup
        done = (step - self.warmup_steps) / (self.schedule_steps - self.warmup_steps)
        done = xp.clip(done, 0.0, 1.0)
        cosine = 0.5 * (1.0 + xp.cos(np.pi * done))
        return self.learning_rate * warmup * (self.final_ratio + (1.0 - self.final_ratio) * cosine)


@gin.configurable("mesh")
@dataclass(frozen=True)
class MeshConfig:
    """How the devices are divided, each number a factor of how many there are.

    data: copies of the model, each with rows of its own; -1 takes every device that is left. fsdp:
    rows too, with parameters and moments split, and gathered layer by layer. expert: rows too, with
    the experts of a mixture split. context: parts of every row. tensor: heads, the width of the MLP
    and the vocabulary. processes: how many train one model together, on the devices of all of them;
    the same command starts each (see docs/jax.md). With torch each has one device; torchrun starts
    them, or, all on one machine, the first starts the others.
    """

    data: int = -1
    fsdp: int = 1
    expert: int = 1
    context: int = 1
    tensor: int = 1
    processes: int = 1

    def __post_init__(self) -> None:
        if self.data != -1:
            positive("mesh.data", self.data)
        for axis in ("fsdp", "expert", "context", "tensor", "processes"):
            positive(f"mesh.{axis}", getattr(self, axis))

    def within_one_process(self) -> MeshConfig:
        """For a model that one process computes alone: all of its devices, where this mesh has more
        than those."""
        if self.processes == 1:
            return self
        return MeshConfig(data=-1, fsdp=1, expert=1, context=1, tensor=1, processes=1)


@gin.configurable("model")
@dataclass(frozen=True)
class ModelConfig:
    """Which model is trained.

    path: a Hugging Face directory (config.json, safetensors, tokenizer), a hub name, or a function
    that makes a directory when the run starts and returns its name (in gin `@name`, without
    parentheses). attention: how it is computed: "auto" is what is best for the device and the
    length; other names are a backend's own.
    """

    path: str | Callable[[], str] = "Qwen/Qwen2-1.5B-Instruct"
    attention: str = "auto"


@gin.configurable("lora")
@dataclass(frozen=True)
class LoRAConfig:
    """Low-rank adapters: kernels stay as they are, and x @ A @ B · alpha / rank is learnt beside
    them (arXiv 2106.09685).

    rank: columns of A and rows of B; 0 trains the whole model. alpha: with which the best learning
    rate hardly depends on the rank; that is about ten times the whole model's
    (thinkingmachines.ai/blog/lora). targets: the names, at Hugging Face, of the kernels that have
    adapters; experts and routers can have none. A critic has adapters of its own as the policy has;
    its score is trained in full. A reference is the model without.
    """

    rank: int = 0
    alpha: float = 32.0
    targets: tuple[str, ...] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )

    def __post_init__(self) -> None:
        at_least("lora.rank", self.rank, 0)
        positive("lora.alpha", self.alpha)
        if not self.targets or len(set(self.targets)) != len(self.targets):
            raise ConfigError("lora.targets", self.targets, "names of kernels, each once")

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


HEADS = ("policy", "value", "reward")


OF_RUN = [
    "head",
    "entropy",
    "teacher",
    "divergence",
    "frozen",
    "share_prompts",
    "deterministic",
    "row_length",
]


@gin.configurable("trainer", denylist=OF_RUN)
@dataclass(frozen=True)
class TrainerConfig:
    """Everything a backend needs to build a trainer.

    precision: "fp32", "bf16" (bf16 compute over fp32 master weights) or "auto" (fp32 on CPU, else
    bf16). micro_batch_rows: rows computed at once on one device; the rest of a batch is
    accumulated. head_chunk: as many logits exist at once on a device as this many positions have; 0
    chooses by the size of the vocabulary. temperature: what the policy is sampled at;
    log-probabilities are of softmax(logits / temperature). head: what the model says of each token:
    "policy" a distribution over the vocabulary, "value" (a critic) what reward is to be expected
    before it, "reward" (a reward model) how good the sequence is up to it. The run chooses it.
    entropy: whether the loss is given the entropy of the full distribution, which costs another
    look at all logits. teacher: the directory of a frozen model with the same vocabulary.
    divergence: of the student's and the teacher's logits, both divided by the temperature, which
    the loss is given at each token. The two come together; the run chooses them. frozen: a model
    that is only asked, as a reference is: weights in the compute precision, no moments, no `update`
    or `save`. share_prompts: whether batches have prefix_ids. deterministic: whether equal steps
    give equal bits. row_length: tokens of a row, the longest sequence; 0: not known beforehand. The
    run chooses the three. remat: what the backward pass computes again instead of keeping it:
    "layers" all of a layer; "products" all but products with kernels, which is faster and takes
    more memory; "auto" the one that fits. compile: whether torch compiles each decoder block, one
    program for all lengths of a row; JAX always compiles everything. offload: whether parameters,
    gradients and moments lie on the host, where the optimizer steps, and each decoder block is on
    the device only while it is computed, with torch: slower, for models that do not fit. On a CPU
    all is there anyway. balance: how strongly the experts of a mixture are pushed to be chosen
    alike: times the metric expert_imbalance, experts · Σ share · probability (arXiv 2101.03961, eq.
    4, the mean over layers), added to the loss. checkpoint: how a run's checkpoints are written:
    "portable" as Hugging Face stores tensors, so that any backend goes on from them; "sharded" by
    each device its own part, while the run goes on: quicker for large models, and for this backend
    alone, on any mesh. Either is read whatever this says. replay_experts: compute each token of a
    mixture by those experts that the engine chose when it drew it, so that both are the same
    function (arXiv 2510.11370); the vLLM servers then record them.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    precision: str = "auto"
    micro_batch_rows: int = 8
    head_chunk: int = 0
    temperature: float = 1.0
    seed: int = 0
    head: str = "policy"
    entropy: bool = False
    teacher: str | None = None
    divergence: Divergence | None = None
    frozen: bool = False
    share_prompts: bool = False
    deterministic: bool = False
    row_length: int = 0
    remat: str = "auto"
    compile: bool = False
    offload: bool = False
    balance: float = 0.0
    checkpoint: str = "portable"
    replay_experts: bool = False

    def __post_init__(self) -> None:
        one_of("trainer.checkpoint", self.checkpoint, ("portable", "sharded"))
        if self.checkpoint == "sharded" and self.lora.rank:
            raise ConfigError(
                "trainer.checkpoint", "sharded", "'portable' with adapters, which are small"
            )
        one_of("trainer.remat", self.remat, ("auto", "layers", "products"))
        at_least("trainer.balance", self.balance, 0)
        one_of("trainer.precision", self.precision, ("auto", "fp32", "bf16"))
        one_of("trainer.head", self.head, HEADS)
        positive("trainer.micro_batch_rows", self.micro_batch_rows)
        at_least("trainer.head_chunk", self.head_chunk, 0)
        positive("trainer.temperature", self.temperature)
        if self.entropy and self.head != "policy":
            raise ConfigError(
                "trainer.entropy",
                True,
                f"False with the head {self.head!r}, which says no distribution",
            )
        if self.frozen and self.lora.rank:
            raise ConfigError(
                "lora.rank", self.lora.rank, "0 for a frozen model, which learns nothing"
            )
        if (self.teacher is None) != (self.divergence is None):
            raise ConfigError(
                "trainer.divergence",
                self.divergence,
                f"given exactly with a teacher (which is {self.teacher!r})",
            )
        if self.teacher is not None and self.head != "policy":
            raise ConfigError(
                "trainer.teacher",
                self.teacher,
                f"None with the head {self.head!r}, which says no distribution",
            )


@gin.configurable("critic")
@dataclass(frozen=True)
class CriticConfig:
    """The critic of algorithms that need one: a second trainer, with everything else as `trainer`
    says.

    learning_rate: of the critic. path: the model that it starts as, by default the policy's.
    """

    learning_rate: float = 1e-5
    path: str | Callable[[], str] | None = None

    def __post_init__(self) -> None:
        positive("critic.learning_rate", self.learning_rate)


def computed_bytes(config: TrainerConfig, on_cpu: bool) -> int:
    """Of a number in the precision that products are computed in, and weights published in."""
    return {"fp32": 4, "bf16": 2}.get(config.precision, 4 if on_cpu else 2)


@dataclass(frozen=True)
class Devices:
    """What a backend found to compute on: `kind` ("cpu", "gpu", "cuda" …), how many, and the bytes
    of one, None where it does not tell.

    A backend may offer `check(config: TrainerConfig) -> Devices` beside `create_trainer`: of a
    config whose model.path is a directory with at least config.json. It raises what the trainer's
    construction would for this model, mesh and devices, and loads nothing.
    """

    kind: str
    count: int
    memory: int | None = None


class Differentiate(Protocol):
    """What `areal_x.check` finds as `differentiate` of a backend's module, if it offers that."""

    def __call__(self, loss: Loss, policy: Policy, batch: Batch) -> tuple[np.ndarray, Policy]:
        """The terms of a loss, and the gradient of `sum(batch.weights * terms)` by each array of
        `policy`: taken as `update` takes it, of arrays of numpy.

        Raises: what the loss raises; UserError as `areal_x.protocols.loss.evaluate`."""
        ...


def is_largest(metric: str) -> bool:
    """Whether of a loss's metric the largest over the masked tokens (at least 0) is wanted and not
    the mean: where its name, after any "/", begins with largest_."""
    return metric.rpartition("/")[2].startswith("largest_")


class Scorer(Protocol):
    """What says how likely given tokens are: all that a reference or a teacher does. A trainer, or
    a server."""

    def logprobs(self, batch: Batch) -> Float32[np.ndarray, "rows length"]:
        """Log-probability of each token given those before it in its segment, and those of the
        prompt that this shares with others (`Batch.prefix_ids`); 0 for a segment's first token and
        for padding. Of a trainer: under the current policy, and only with the head "policy"."""
        ...


class Trainer(Scorer, Protocol):
    """What every backend's trainer does. `version` counts its optimizer steps.

    One on a CPU may have `threads: int | None`, which the ring then sets between steps
    (areal_x.runtime.cores): how many share an operation, None where that is not this process's to
    say.
    """

    version: int

    def values(self, batch: Batch) -> Float32[np.ndarray, "rows length"]:
        """With the head "value": of each token, the reward expected once those before it in its
        segment are there, and 0 for a segment's first token. With "reward": how good its segment is
        up to and with it. 0 for padding.

        One number from the last hidden state by a linear layer without bias, Hugging Face's `score`
        of a sequence classifier with one label; 0 where the model's directory has none.
        """
        ...

    def update(self, batch: Batch, loss: Loss) -> dict[str, float]:
        """Exactly one optimizer step on `sum(batch.weights * terms)`, in any number of
        micro-batches; version += 1.

        A step whose loss or gradient norm is not finite changes neither weights nor moments, and
        says skipped = 1.

        The loss is given what the head says: logp (and entropy, and the divergence from a teacher,
        if asked for), or values alone. Returns loss, grad_norm (before clipping), learning_rate,
        skipped, and each of the loss's metrics as its mean over masked tokens, or, where its name
        says so (`is_largest`), as the largest.
        """
        ...

    def weights(self) -> Iterator[tuple[str, np.ndarray]]:
        """The policy's tensors under their Hugging Face names, one at a time; adapters are merged
        into them.

        A backend whose entry point lists "nccl" or "handles" in TRANSPORTS has a trainer with
        `device_weights` too: the same as tensors of torch, on the device.
        """
        ...

    def adapter(self) -> Iterator[tuple[str, np.ndarray]]:
        """With adapters alone: their tensors under PEFT's names."""
        ...

    def save(self, directory: Path | None) -> None:
        """A Hugging Face model directory, or an adapter's in PEFT's form, that also holds the
        optimizer's moments and the version. None writes nothing: so a process helps another, with
        which it shares the model, to gather it."""
        ...

    def save_in_background(self, directory: Path) -> Wait | None:
        """Begins to save the state, as trainer.checkpoint says, and returns as soon as it may
        change again: what it returns waits until all is on disk, and None says that it is. Every
        process that shares the model writes its own part."""
        ...

    def restore(self, directory: Path) -> None:
        """The exact state that `save` wrote, by this backend or another."""
        ...

    def snapshot(self) -> Any:
        """A copy of the policy on its devices, in the compute precision, for this backend's own
        sampler."""
        ...

    def sampler(self, slots: int, context: int) -> Sampler:
        """The backend's batched sampler for sequences of up to `context` tokens."""
        ...


def recorded_experts(
    batch: Batch, directory: Path, layers: int, per_token: int, count: int
) -> np.ndarray:
    """The experts that the engine recorded, [rows, length, layers, per_token], for a model of
    `count` of them.

    Raises: UserError where it recorded none, or another model's.
    """
    experts = batch.experts
    if experts is None:
        raise UserError(
            "trainer.replay_experts needs trajectories whose experts the engine recorded: these"
            " have none"
        )
    if experts.shape[2:] != (layers, per_token) or experts.max() >= count:
        raise UserError(
            f"the recorded experts are {experts.shape[2:]} numbers a token up to {experts.max()},"
            f" but {directory} has {count} experts and chooses {per_token} in each of {layers}"
            " layers: the engine runs another model"
        )
    return np.asarray(experts)


def create_trainer(backend: str, config: TrainerConfig) -> Trainer:
    """The trainer of an installed backend ("jax", "torch", or any that a third party registers).

    Raises: ConfigError that lists the installed backends when `backend` is not one of them.
    """
    check()
    trainer: Trainer = find_backend(backend).load().create_trainer(config)
    check()
    return trainer


def find_backend(backend: str) -> Any:
    """The backend's entry point, without importing the backend."""
    installed = {e.name: e for e in entry_points(group="areal_x.backends")}
    if backend not in installed:
        known = {"jax": "pip install -e backends/jax", "torch": "pip install -e backends/torch"}
        hint = f" ({known[backend]} adds it)" if backend in known else ""
        wanted = f"one of the installed backends: {', '.join(sorted(installed)) or 'none'}{hint}"
        raise ConfigError("train.backend", backend, wanted)
    return installed[backend]
