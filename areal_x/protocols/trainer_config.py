"""The configuration of a trainer: frozen dataclasses that every backend reads the same way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gin
import numpy as np

from areal_x.errors import ConfigError, UserError, at_least, one_of, positive, within
from areal_x.types import Array, Divergence


@gin.configurable("optimizer")
@dataclass(frozen=True)
class OptimizerConfig:
    """Clipping by global norm, then the optimizer with decoupled weight decay on matrices only.

    The learning rate warms up linearly and then stays constant or follows a cosine. Updates of all
    three optimizers have about the same size, so they use the same learning rates.
    """

    name: str = "adamw"
    """"adamw"; "adafactor" (factored second moments with decay 1 - t^-0.8, no momentum, no scaling
    by the parameter's size, each matrix's update clipped to a root mean square of 1; beta1, beta2
    and eps are unused); or "muon" (orthogonalised momentum of 0.95 for each matrix of a layer, AdamW
    for everything else)."""

    learning_rate: float = 1e-6
    """Peak learning rate."""

    beta1: float = 0.9
    """Decay of the first moment."""

    beta2: float = 0.98
    """Decay of the second moment."""

    eps: float = 1e-8
    """Added to the root of the second moment."""

    weight_decay: float = 0.01
    """Decoupled weight decay, times the learning rate; matrices only."""

    warmup_steps: int = 0
    """Optimizer steps of linear warm-up."""

    schedule: str = "constant"
    """"constant" or "cosine", after the warm-up."""

    schedule_steps: int = 0
    """Length of the cosine in optimizer steps, warm-up included; unused with "constant"."""

    final_ratio: float = 0.1
    """Fraction of `learning_rate` at which the cosine ends."""

    clip_norm: float = 1.0
    """Global gradient norm above which gradients are scaled down; 0 turns clipping off."""

    moments: str = "fp32"
    """Precision in which moments are stored between steps, "fp32" or "bf16"; updates are computed
    in fp32 either way."""

    def __post_init__(self) -> None:
        one_of("optimizer.name", self.name, ("adamw", "adafactor", "muon"))
        positive("optimizer.learning_rate", self.learning_rate)
        within("optimizer.beta1", self.beta1, 0, 1)
        within("optimizer.beta2", self.beta2, 0, 1)
        within("optimizer.final_ratio", self.final_ratio, 0, 1)
        one_of("optimizer.schedule", self.schedule, ("constant", "cosine"))
        if self.schedule == "cosine" and self.schedule_steps <= self.warmup_steps:
            wanted = f"more than the {self.warmup_steps} warm-up steps"
            raise ConfigError("optimizer.schedule_steps", self.schedule_steps, wanted)
        one_of("optimizer.moments", self.moments, ("fp32", "bf16"))
        if self.moments == "bf16" and self.name == "adafactor":
            wanted = (
                "'fp32' with optimizer.name = 'adafactor', whose factored moments are small and"
                " change too little for bf16"
            )
            raise ConfigError("optimizer.moments", self.moments, wanted)
        for name, beta in (("beta1", self.beta1), ("beta2", self.beta2)):
            # A bf16 number has 8 significant bits: a decrease by less than a 256th of the value is
            # rounded away, so the moment would never fall.
            if self.moments == "bf16" and 1 - beta <= 2**-8:
                wanted = "at most 0.996 with optimizer.moments = 'bf16'"
                raise ConfigError(f"optimizer.{name}", beta, wanted)

    def check_same_moments(self, other: OptimizerConfig) -> None:
        """Raises: ValueError if the other config's moments are not of this one's kind."""
        for name in ("name", "moments"):
            if getattr(self, name) != getattr(other, name):
                raise ValueError(
                    f"the moments are those of optimizer.{name} = {getattr(self, name)!r}: a step"
                    f" cannot continue from them with {getattr(other, name)!r}"
                )

    def check_state(self, directory: Path, state: Mapping[str, Any], backend: str) -> None:
        """Checks that this optimizer can continue from a saved trainer's state (its trainer.json).

        Raises: UserError if another optimizer wrote the state, or another backend in a form that
        only that backend reads.
        """
        saved = state.get("optimizer", "adamw")
        if saved != self.name:
            raise UserError(
                f"{directory} holds the state of {saved}, from which optimizer.name ="
                f" {self.name!r} cannot continue: set optimizer.name = {saved!r}, or start a new"
                f" run from its weights with model.path = {str(directory)!r}"
            )
        if state.get("backend", backend) != backend:
            raise UserError(
                f"{directory} holds the state of {saved} in a form that only the"
                f" {state['backend']} backend reads, so {backend} cannot continue from it: set"
                f" train.backend = {state['backend']!r}, or start a new run from its weights with"
                f" model.path = {str(directory)!r}"
            )

    def learning_rate_at(self, step: Array) -> Array:
        """Returns the learning rate of optimizer step `step` (0 is the first), for the arrays of
        any backend."""
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
    """Division of devices among the kinds of parallelism; the product is the device count."""

    data: int = -1
    """Replicas of the model, each with its own rows; -1 uses all remaining devices."""

    fsdp: int = 1
    """Shards of rows, parameters and moments; parameters are gathered layer by layer."""

    expert: int = 1
    """Shards of rows, with the experts of a mixture divided among them."""

    context: int = 1
    """Shards of every row along its length."""

    tensor: int = 1
    """Shards of attention heads, MLP width and vocabulary."""

    sequence: bool = False
    """Divide each row's tokens among the shards of `tensor` where heads and widths are not divided
    (torch): between attention and MLPs a device has a part of them in place of all."""

    stage: int = 1
    """Groups of consecutive layers, through which rows go in turns (pipeline parallelism)."""

    stage_chunks: int = 1
    """Groups that each stage has: rows go through all stages so many times (torch: interleaved 1F1B).
    Stages wait so many times less for their first and last rows, and send so many times more."""

    processes: int = 1
    """Processes that train one model together on all their devices, with train.cluster = 'ray'
    (docs/cluster.md). With torch each process has one device, with JAX all of its node."""

    def __post_init__(self) -> None:
        if self.data != -1:
            positive("mesh.data", self.data)
        for axis in ("fsdp", "expert", "context", "tensor", "stage", "stage_chunks", "processes"):
            positive(f"mesh.{axis}", getattr(self, axis))
        if self.stage_chunks > 1 and self.stage == 1:
            wanted = "1 with mesh.stage = 1, where rows wait for no other stage"
            raise ConfigError("mesh.stage_chunks", self.stage_chunks, wanted)
        if self.sequence and self.tensor == 1:
            wanted = "False with mesh.tensor = 1, among whose shards it divides tokens"
            raise ConfigError("mesh.sequence", True, wanted)

    def within_one_process(self) -> MeshConfig:
        """Returns the mesh of a model that one process computes alone: on all of its devices if
        this mesh spans several processes, else unchanged."""
        if self.processes == 1:
            return self
        return MeshConfig(data=-1)


@gin.configurable("model")
@dataclass(frozen=True)
class ModelConfig:
    """The model to train."""

    path: str | Callable[[], str] = "Qwen/Qwen2-1.5B-Instruct"
    """A Hugging Face directory (config.json, safetensors, tokenizer), a hub name, or a function that
    creates a directory when the run starts and returns its name (in gin `@name`, without
    parentheses)."""

    attention: str = "auto"
    """Attention implementation: "auto" picks the best for the device and length; other names are
    specific to a backend."""


EXPERTS = "experts."  # how the names of stacked kernels of experts begin, in `lora.targets`


@gin.configurable("lora")
@dataclass(frozen=True)
class LoRAConfig:
    """Low-rank adapters: kernels stay frozen and x @ A @ B * alpha / rank is trained beside them
    (arXiv 2106.09685).

    A critic gets adapters of its own; its score head is trained in full. A reference is the model
    without adapters.
    """

    rank: int = 0
    """Columns of A and rows of B; 0 trains the full model."""

    alpha: float = 32.0
    """Scale of the adapters, divided by the rank, so that the best learning rate hardly depends on
    the rank; it is about ten times that of full training (thinkingmachines.ai/blog/lora)."""

    targets: tuple[str, ...] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    """Hugging Face names of the kernels that get adapters. A mixture's experts are stacked in the
    parameters "experts.gate_up_proj" and "experts.down_proj": each expert gets an adapter of its
    own. Routers cannot."""

    def __post_init__(self) -> None:
        at_least("lora.rank", self.rank, 0)
        positive("lora.alpha", self.alpha)
        if not self.targets or len(set(self.targets)) != len(self.targets):
            raise ConfigError("lora.targets", self.targets, "names of kernels, each once")

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @property
    def served_rank(self) -> int:
        """Rank of the adapters that servers load; 0 if whole weights are published: without
        adapters, or with adapters of experts, which are merged into them."""
        of_experts = any(target.startswith(EXPERTS) for target in self.targets)
        return 0 if of_experts else self.rank


HEADS = ("policy", "value", "reward")


# Parameters of TrainerConfig that the run sets and a gin file cannot.
SET_BY_THE_RUN = [
    "head",
    "entropy",
    "teacher",
    "divergence",
    "frozen",
    "share_prompts",
    "deterministic",
    "rests",
    "row_length",
]


@gin.configurable("trainer", denylist=SET_BY_THE_RUN)
@dataclass(frozen=True)
class TrainerConfig:
    """Everything a backend needs to build a trainer."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """The model to train."""

    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Optimizer and learning-rate schedule."""

    mesh: MeshConfig = field(default_factory=MeshConfig)
    """How the devices are divided."""

    lora: LoRAConfig = field(default_factory=LoRAConfig)
    """Low-rank adapters."""

    precision: str = "auto"
    """"fp32", "bf16" (bf16 compute over fp32 master weights), "auto" (fp32 on CPU, else bf16) or
    "fp8": like "bf16", but the numbers of products with kernels of decoder blocks are rounded to e4m3
    in blocks, in both passes, as DeepSeek-V3 trains (arXiv 2412.19437)."""

    micro_batch_rows: int = 8
    """Rows computed at once on one device; gradients of the others are accumulated."""

    head_chunk: int = 0
    """Positions whose logits exist at once on a device; 0 chooses by vocabulary size."""

    temperature: float = 1.0
    """Sampling temperature of the policy: log-probabilities are of softmax(logits / temperature)."""

    seed: int = 0
    """Seed of everything random in the trainer."""

    head: str = "policy"
    """What the model outputs for each token: "policy", a distribution over the vocabulary; "value",
    the expected reward (a critic); "reward", the score of the sequence so far (a reward model)."""

    entropy: bool = False
    """True passes the loss the entropy of the full distribution, at the cost of a second pass over
    all logits."""

    teacher: str | None = None
    """Directory of a frozen model with the same vocabulary; given together with `divergence`."""

    divergence: Divergence | None = None
    """Divergence of the student's and the teacher's logits, both divided by the temperature, passed
    to the loss for each token; given together with `teacher`."""

    frozen: bool = False
    """Inference only (a reference model): weights in the compute precision, no optimizer state, no
    `update` or `save`."""

    share_prompts: bool = False
    """True if batches have `parents`."""

    deterministic: bool = False
    """True if identical steps must give identical bits."""

    rests: bool = False
    """True if the state leaves the devices between steps (RestsOnHost)."""

    row_length: int = 0
    """Tokens of a row and of the longest sequence; 0 if unknown at construction."""

    remat: str = "auto"
    """What the backward pass recomputes instead of storing: "layers", everything in a layer;
    "attention", everything but attention (for long sequences nearly as fast as "products", a quarter
    of its memory); "products", everything but products with kernels and attention; "auto", the
    fastest that fits."""

    compile: bool = False
    """Compile each decoder block with torch.compile, one program for all row lengths; JAX always
    compiles."""

    offload: bool = False
    """Keep parameters, gradients and moments in host memory, where the optimizer steps, and move
    each decoder block to the device only while it is computed (torch only): slower, for models that
    do not fit."""

    balance: float = 0.0
    """Weight of the load-balancing loss of a mixture of experts, added to the loss: times the metric
    expert_imbalance, experts * sum(share * probability) (arXiv 2101.03961, eq. 4, averaged over
    layers)."""

    balance_rate: float = 0.0
    """Step of the bias that a mixture's routers choose experts by (e_score_correction_bias of
    DeepSeek-V3, GLM-4.5 …): each optimizer step adds it for an expert that fewer of the step's
    trained tokens went through than the mean of its layer's, and subtracts it for one that more
    went through (auxiliary-loss-free balancing, arXiv 2408.15664; 0.001 in DeepSeek-V3's
    pretraining). 0 leaves the biases as they were loaded."""

    checkpoint: str = "portable"
    """Form of a run's checkpoints: "portable", as Hugging Face stores tensors, readable by every
    backend; "sharded", each device's own part, written while the run continues: faster for large
    models, readable by this backend only, on any mesh. Both are read whatever this is."""

    replay_experts: bool = False
    """Route each token of a mixture to the experts that the engine chose when sampling it, so that
    trainer and engine compute the same function (arXiv 2510.11370); vLLM servers then record
    them."""

    def __post_init__(self) -> None:
        one_of("trainer.checkpoint", self.checkpoint, ("portable", "sharded"))
        if self.checkpoint == "sharded" and self.lora.rank:
            wanted = "'portable' with adapters, which are small"
            raise ConfigError("trainer.checkpoint", "sharded", wanted)
        one_of("trainer.remat", self.remat, ("auto", "layers", "attention", "products"))
        at_least("trainer.balance", self.balance, 0)
        at_least("trainer.balance_rate", self.balance_rate, 0)
        if self.balance_rate and self.lora.rank:
            wanted = "0 with lora.rank, as adapters leave routers and their biases as they are"
            raise ConfigError("trainer.balance_rate", self.balance_rate, wanted)
        one_of("trainer.precision", self.precision, ("auto", "fp32", "bf16", "fp8"))
        one_of("trainer.head", self.head, HEADS)
        positive("trainer.micro_batch_rows", self.micro_batch_rows)
        at_least("trainer.head_chunk", self.head_chunk, 0)
        positive("trainer.temperature", self.temperature)
        no_distribution = f"with the head {self.head!r}, which gives no distribution"
        if self.entropy and self.head != "policy":
            raise ConfigError("trainer.entropy", True, f"False {no_distribution}")
        if self.frozen and self.lora.rank:
            wanted = "0 for a frozen model, which is not trained"
            raise ConfigError("lora.rank", self.lora.rank, wanted)
        if (self.teacher is None) != (self.divergence is None):
            wanted = f"given exactly if there is a teacher (which is {self.teacher!r})"
            raise ConfigError("trainer.divergence", self.divergence, wanted)
        if self.teacher is not None and self.head != "policy":
            raise ConfigError("trainer.teacher", self.teacher, f"None {no_distribution}")


@gin.configurable("critic")
@dataclass(frozen=True)
class CriticConfig:
    """The critic of algorithms that need one: a second trainer, otherwise configured like
    `trainer`."""

    learning_rate: float = 1e-5
    """Peak learning rate of the critic."""

    path: str | Callable[[], str] | None = None
    """Model the critic starts from; None starts from the policy's."""

    def __post_init__(self) -> None:
        positive("critic.learning_rate", self.learning_rate)


def bytes_per_parameter(config: TrainerConfig, on_cpu: bool) -> int:
    """Bytes per parameter in the compute precision, in which weights are also published."""
    return {"fp32": 4, "bf16": 2, "fp8": 2}.get(config.precision, 4 if on_cpu else 2)
