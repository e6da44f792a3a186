"""What a run is made of, and which of it cannot work together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from areal_x.algorithms.algorithm import Algorithm
from areal_x.algorithms.recipes import grpo
from areal_x.algorithms.validation import validate_group_size
from areal_x.engines.embedded import EmbeddedConfig
from areal_x.engines.sampling_checks import check_distribution
from areal_x.engines.vllm.config import VLLMConfig
from areal_x.engines.vllm.gpu_transfer import check_run
from areal_x.engines.vllm.scorer import server_urls
from areal_x.errors import ConfigError, at_least, one_of, positive, within
from areal_x.monitor.trackers import PROJECT, check_loggers
from areal_x.protocols.backends import find_backend
from areal_x.protocols.trainer_config import CriticConfig, TrainerConfig
from areal_x.protocols.workflow import Workflow
from areal_x.run.journal import JournalConfig
from areal_x.types import Task

ENGINES = ("embedded", "vllm", "none")


@dataclass(kw_only=True)
class Settings:
    """One run.

    dataset: the tasks, in an order that `seed` shuffles anew each epoch. held_out: judged greedily,
    never trained on. workflow: turns a task into scored trajectories. evaluation: how held-out
    tasks are judged, where the workflow cannot. algorithm: a recipe (areal_x.algorithms.recipes).
    trainer, critic, embedded, vllm, journal: settings of the parts, each configurable under its own
    name. reference: the model that a KL penalty or DPO holds on to, by default the initial one.
    teacher: whom distillation learns from. Both are a directory, a hub name, a function that makes
    one, or the address of a vLLM server that has the model (or a list of several), as
    "http://127.0.0.1:8000"; its key is in the variable that vllm.key_variable names, and it scores
    what is sampled at temperature 1 alone. backend: "jax" or "torch". engine: "embedded" (the
    backend's sampler, in this process), "vllm" (servers) or "none" (for workflows that learn from
    what is written). steps: turns of the ring, after each of which the weights are published.
    groups_per_step: tasks in one. group_size: attempts at each task. minibatches: optimizer steps
    that share them, each with a part of the groups. max_staleness: how many versions old a group
    may be when it is trained on; 0 is synchronous, on-policy training. window: how many groups
    ahead of the oldest a finished one may be consumed; 1 is strict order (see TrajectoryQueue).
    row_length: tokens in a packed row, and the longest prompt and completion together.
    share_prompts: the trainer computes what the attempts at a task begin with once for as many of
    them as fit into a row; what is learnt is the same. deterministic: whether two runs of the same
    settings end in the same bits, asynchronous ones too. Admission, sampling and publication then
    depend on counts and never on clocks; the engine drains once a version (docs/concepts.md has the
    cost). longest_prompt: in tokens; tasks with longer ones are left out. By default what the
    context leaves beside an answer of sampling.max_tokens, at least half of it. With answers that
    are written (the engine "none"), prompt and answer count. filtered_groups: after so many scored
    groups in a row that the algorithm's filters gave back the run ends; by default as many as 64
    steps have. episode_seconds: longest time an episode may take. evaluate_every, checkpoint_every:
    in steps; 0 is at the end only (evaluation also at the start). keep_checkpoints: how many of the
    newest stay. name: the directory below `runs`. loggers: "wandb" and "trackio", beside
    metrics.jsonl and TensorBoard (always written). project: that they show the run in. serving:
    whether the model is served and not trained (`areal_x.serve` sets it), so that any distribution
    may be sampled.
    """

    dataset: Sequence[Task]
    workflow: Workflow
    held_out: Sequence[Task] = ()
    evaluation: Workflow | None = None
    algorithm: Algorithm = field(default_factory=grpo)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    reference: str | Sequence[str] | Callable[[], str] | None = None
    teacher: str | Sequence[str] | Callable[[], str] | None = None
    embedded: EmbeddedConfig = field(default_factory=EmbeddedConfig)
    vllm: VLLMConfig = field(default_factory=VLLMConfig)
    journal: JournalConfig = field(default_factory=JournalConfig)
    backend: str = "jax"
    engine: str = "embedded"
    steps: int = 100
    groups_per_step: int = 16
    group_size: int = 8
    minibatches: int = 1
    max_staleness: int = 2
    window: int = 1
    row_length: int = 1024
    share_prompts: bool = False
    deterministic: bool = False
    longest_prompt: int | None = None
    filtered_groups: int | None = None
    episode_seconds: float = 600.0
    evaluate_every: int = 0
    checkpoint_every: int = 0
    keep_checkpoints: int = 2
    seed: int = 0
    name: str | None = None
    runs: str = "runs"
    loggers: tuple[str, ...] = ()
    project: str = PROJECT
    serving: bool = False

    def __post_init__(self) -> None:
        find_backend(self.backend)
        one_of("train.engine", self.engine, ENGINES)
        check_loggers(self.loggers)
        sizes = (
            "steps",
            "groups_per_step",
            "group_size",
            "minibatches",
            "window",
            "row_length",
            "episode_seconds",
        )
        for name in (*sizes, "keep_checkpoints"):
            positive(f"train.{name}", getattr(self, name))
        for name in ("max_staleness", "evaluate_every", "checkpoint_every"):
            at_least(f"train.{name}", getattr(self, name), 0)
        within("train.minibatches", self.minibatches, 1, self.groups_per_step)
        if self.longest_prompt is not None:
            within("train.longest_prompt", self.longest_prompt, 1, self.row_length)
        if self.filtered_groups is not None:
            positive("train.filtered_groups", self.filtered_groups)
        validate_group_size(self.algorithm, self.group_size)
        for name in ("reference", "teacher"):
            server_urls(f"train.{name}", getattr(self, name))
        if "teacher_logits" in self.algorithm.needs and server_urls("train.teacher", self.teacher):
            wanted = (
                "a directory or a hub name: no server gives the whole distribution, from which"
                f" {self.algorithm.name} learns"
            )
            raise ConfigError("train.teacher", self.teacher, wanted)
        if self.algorithm.needs & {"teacher", "teacher_logits"} and self.teacher is None:
            raise ConfigError(
                "train.teacher", None, f"the model that {self.algorithm.name} learns from"
            )
        if self.algorithm.head != "policy" and self.engine != "none":
            raise ConfigError(
                "train.engine",
                self.engine,
                f"'none', as {self.algorithm.name} trains a model that says nothing",
            )
        if (
            self.engine == "none"
            and self.held_out
            and self.algorithm.needs & {"entropy", "teacher_logits"}
        ):
            wanted = (
                f"left out with the engine 'none', as only a step gives {self.algorithm.name} what"
                " its loss reads"
            )
            raise ConfigError("train.held_out", f"{len(self.held_out)} tasks", wanted)
        if self.share_prompts and self.algorithm.pairs:
            wanted = f"False with {self.algorithm.name}, which compares pairs that lie side by side"
            raise ConfigError("train.share_prompts", True, wanted)
        if self.share_prompts and self.trainer.replay_experts:
            wanted = (
                "False with trainer.replay_experts, as the engine chose experts for each attempt's"
                " prompt anew"
            )
            raise ConfigError("train.share_prompts", True, wanted)
        if self.trainer.replay_experts and self.engine != "vllm":
            wanted = f"False with the engine {self.engine!r}, which records no experts"
            raise ConfigError("trainer.replay_experts", True, wanted)
        if not self.serving:
            check_distribution(self.workflow, self.engine, self.trainer.temperature)
        if self.deterministic:
            self._check_deterministic()
        if self.engine == "vllm":
            check_run(self.vllm, self.backend, self.trainer.mesh.processes, self.trainer.lora.rank)
        for binding, context in (
            ("embedded.context", self.embedded.context),
            ("vllm.context", self.vllm.context),
        ):
            if context > self.row_length:
                wanted = (
                    f"at most train.row_length = {self.row_length}, as a sequence is never cut to"
                    " fit its row"
                )
                raise ConfigError(binding, context, wanted)

    @property
    def computes_beside_servers(self) -> bool:
        """True if servers that the run starts on this machine generate while the trainer
        computes."""
        return self.engine == "vllm" and self.max_staleness > 0 and not self.vllm.urls

    def _check_deterministic(self) -> None:
        wanted = None
        if self.engine == "vllm":
            wanted = (
                "False with train.engine = 'vllm', whose servers batch requests as they arrive:"
                " 'embedded' does not"
            )
        elif self.window > 1:
            wanted = (
                f"False with train.window = {self.window}, which lets whichever group finishes"
                " first go first: set it to 1"
            )
        elif getattr(self.workflow, "open_ended", False):
            wanted = "False with a workflow whose episodes others begin and end"
        if wanted is not None:
            raise ConfigError("train.deterministic", True, wanted)
