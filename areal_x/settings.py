"""The settings of a run, and the checks that they can work together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from areal_x.algorithms.algorithm import Algorithm
from areal_x.algorithms.recipes import grpo
from areal_x.algorithms.validation import validate_group_size
from areal_x.cluster.config import ClusterConfig
from areal_x.cluster.trainers import HERE, check_cluster
from areal_x.engines.embedded import EmbeddedConfig
from areal_x.engines.fleet.addresses import server_urls
from areal_x.engines.fleet.config import FleetConfig
from areal_x.engines.fleet.division import check_division
from areal_x.engines.fleet.speculation import check_run as check_speculation
from areal_x.engines.sampling_checks import check_distribution
from areal_x.engines.sglang.config import SGLangConfig
from areal_x.engines.sglang.config import check_run as check_sglang_run
from areal_x.engines.vllm.config import VLLMConfig
from areal_x.engines.vllm.transports import check_run
from areal_x.errors import ConfigError, at_least, one_of, positive, within
from areal_x.evaluation.evaluation_set import EvaluationSet, check_names
from areal_x.monitor.profiler import check_steps
from areal_x.monitor.trackers import PROJECT, TrackingConfig, check_loggers
from areal_x.protocols.backends import find_backend
from areal_x.protocols.speculation import Speculation
from areal_x.protocols.trainer_config import CriticConfig, TrainerConfig
from areal_x.protocols.workflow import Workflow, check_workflow
from areal_x.run.journal import JournalConfig
from areal_x.types import Task

ENGINES = ("embedded", "vllm", "sglang", "none")
# What names a model, or the servers that have it.
Named = str | Sequence[str] | Callable[[], str]


@dataclass(kw_only=True)
class Settings:
    """One training run."""

    dataset: Sequence[Task]
    """Tasks to train on, in an order that `seed` shuffles anew each epoch."""

    workflow: Workflow
    """Turns a task into scored trajectories."""

    held_out: Sequence[Task] = ()
    """Tasks that are evaluated greedily and never trained on."""

    evaluation: Workflow | None = None
    """Workflow that evaluates the held-out tasks; None uses `workflow`."""

    evaluations: Sequence[EvaluationSet] = ()
    """Named sets of tasks that are evaluated like the held-out tasks, each sampled or greedily, any
    number of times, with confidence intervals (docs/evaluation.md)."""

    algorithm: Algorithm = field(default_factory=grpo)
    """A recipe (docs/algorithms.md) or an Algorithm of your own."""

    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """Model, optimizer and parallelism."""

    critic: CriticConfig = field(default_factory=CriticConfig)
    """The critic of algorithms that need one."""

    reference: Named | None = None
    """Reference model of a KL penalty or of DPO; None uses the initial policy. A directory, a hub
    name, a function that creates one, or the address (or addresses) of vLLM or SGLang servers that
    have the model, as "http://127.0.0.1:8000". A server's key is in the variable named by
    vllm.key_variable or sglang.key_variable; servers score only what is sampled at temperature 1."""

    teacher: Named | None = None
    """The model to distill from, given like `reference`."""

    teachers: Mapping[str, Named] = field(default_factory=dict)
    """Several models to distill from, by the names that `multi_distill.weights` returns, each given like
    `reference`."""

    embedded: EmbeddedConfig = field(default_factory=EmbeddedConfig)
    """The embedded engine."""

    speculation: Speculation = field(default_factory=Speculation)
    """Tokens that the engine guesses ahead."""

    vllm: VLLMConfig = field(default_factory=VLLMConfig)
    """vLLM servers."""

    sglang: SGLangConfig = field(default_factory=SGLangConfig)
    """SGLang servers."""

    journal: JournalConfig = field(default_factory=JournalConfig)
    """The journal of trajectories."""

    placement: ClusterConfig = field(default_factory=ClusterConfig)
    """The nodes of the processes that train and of servers."""

    backend: str = "jax"
    """"jax", "torch", or the name of a third party's backend."""

    engine: str = "embedded"
    """"embedded" (the backend's sampler in this process), "vllm" or "sglang" (servers) or "none" (for
    workflows that train on existing answers)."""

    colocate: bool = False
    """True shares the accelerators between trainer and servers, which take turns: the servers release
    their memory while the trainer steps, and its state rests on the host while they generate
    (docs/colocate.md). With the engines "vllm" and "sglang"."""

    cluster: str = HERE
    """"here" trains in this process, "ray" in processes of a Ray cluster (docs/cluster.md)."""

    steps: int = 100
    """Steps of the ring; the weights are published after each."""

    groups_per_step: int = 16
    """Tasks per step."""

    group_size: int = 8
    """Attempts at each task."""

    minibatches: int = 1
    """Optimizer steps per step, each on its own share of the groups."""

    max_staleness: int = 2
    """Most versions by which a group may lag behind the weights it trains; 0 is synchronous,
    on-policy training."""

    window: int = 1
    """How many groups ahead of the oldest unfinished one a finished group may be consumed; 1 is
    strict order (docs/concepts.md)."""

    row_length: int = 1024
    """Tokens in a packed row, and the most that prompt and completion have together."""

    share_prompts: bool = False
    """Compute the tokens that trajectories of a group begin with in common (their prompt, the history
    of an agent's calls) once for as many of them as fit into a row; the gradient is the same
    (docs/concepts.md)."""

    deterministic: bool = False
    """True makes two runs of the same settings identical to the bit, asynchronous ones too:
    admission, sampling and publication then depend on counts and never on clocks, and the engine
    drains once per version (docs/concepts.md has the cost)."""

    longest_prompt: int | None = None
    """Tasks with longer prompts, in tokens, are skipped; None allows what the context leaves beside
    sampling.max_tokens, at least half of it. With the engine "none", prompt and answer count."""

    filtered_groups: int | None = None
    """The run ends after this many scored groups in a row that the algorithm's filters rejected;
    None allows as many as 64 steps have."""

    episode_seconds: float = 600.0
    """Time limit of an episode, in seconds."""

    evaluate_every: int = 0
    """Steps between evaluations; 0 evaluates at the start and at the end only."""

    checkpoint_every: int = 0
    """Steps between checkpoints; 0 saves one at the end only."""

    keep_checkpoints: int = 2
    """How many of the newest checkpoints to keep."""

    export_every: int = 0
    """Steps between exports of the model alone, without the optimizer's state, into exports/<step>
    of the run's directory, where all are kept; 0 exports none."""

    profile_steps: tuple[int, ...] = ()
    """Steps that the framework's profiler records, in all processes that train, into the run's
    directory (docs/monitoring.md)."""

    seed: int = 0
    """Seed of the order of tasks and of sampling."""

    name: str | None = None
    """Name of the run's directory in `runs`; None chooses one."""

    runs: str = "runs"
    """Folder that holds the runs."""

    loggers: tuple[str, ...] = ()
    """"wandb", "swanlab" and "trackio", in addition to metrics.jsonl and TensorBoard (always written)."""

    project: str = PROJECT
    """Project in which the loggers show the run."""

    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    """How the loggers show the run."""

    serving: bool = False
    """True if the model is served instead of trained (set by `areal-x serve`): any distribution may
    then be sampled."""

    def __post_init__(self) -> None:
        find_backend(self.backend)
        one_of("train.engine", self.engine, ENGINES)
        check_cluster(self.cluster, self.trainer.mesh.processes)
        check_loggers(self.loggers)
        self.tracking.check(self.loggers)
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
        for name in ("max_staleness", "evaluate_every", "checkpoint_every", "export_every"):
            at_least(f"train.{name}", getattr(self, name), 0)
        check_steps(self.profile_steps, self.steps, self.backend)
        within("train.minibatches", self.minibatches, 1, self.groups_per_step)
        if self.longest_prompt is not None:
            within("train.longest_prompt", self.longest_prompt, 1, self.row_length)
        if self.filtered_groups is not None:
            positive("train.filtered_groups", self.filtered_groups)
        validate_group_size(self.algorithm, self.group_size)
        for binding, given in self._named().items():
            server_urls(binding, given)
        if "teacher_logits" in self.algorithm.needs and server_urls("train.teacher", self.teacher):
            wanted = (
                "a directory or a hub name: no server returns the whole distribution, which"
                f" {self.algorithm.name} needs"
            )
            raise ConfigError("train.teacher", self.teacher, wanted)
        self._check_teachers()
        if self.algorithm.head != "policy" and self.engine != "none":
            raise ConfigError(
                "train.engine",
                self.engine,
                f"'none', because {self.algorithm.name} trains a model that generates no text",
            )
        if (
            self.engine == "none"
            and self.held_out
            and self.algorithm.needs & {"entropy", "teacher_logits"}
        ):
            wanted = (
                f"left out with the engine 'none', because only a training step computes what the"
                f" loss of {self.algorithm.name} needs"
            )
            raise ConfigError("train.held_out", f"{len(self.held_out)} tasks", wanted)
        if self.share_prompts and self.algorithm.pairs:
            wanted = (
                f"False with {self.algorithm.name}, which compares pairs that are adjacent in a row"
            )
            raise ConfigError("train.share_prompts", True, wanted)
        if self.trainer.replay_experts and self.vllm.pipeline > 1:
            wanted = (
                "1 with trainer.replay_experts: vLLM returns the experts of the last stage's layers"
                " alone"
            )
            raise ConfigError("vllm.pipeline", self.vllm.pipeline, wanted)
        if self.share_prompts and self.trainer.replay_experts:
            wanted = (
                "False with trainer.replay_experts, because the engine chose experts for the prompt"
                " of each attempt separately"
            )
            raise ConfigError("train.share_prompts", True, wanted)
        if self.trainer.replay_experts and self.engine != "vllm":
            wanted = f"False with the engine {self.engine!r}, which records no experts"
            raise ConfigError("trainer.replay_experts", True, wanted)
        # After the checks of values: while a file is looked at early, no workflow is built yet.
        check_workflow("train.workflow", self.workflow)
        if self.evaluation is not None:
            check_workflow("train.evaluation", self.evaluation)
        check_names(self.evaluations)
        if self.evaluations and self.engine == "none":
            names = [one.name for one in self.evaluations]
            wanted = "left out with the engine 'none', which attempts no task"
            raise ConfigError("train.evaluations", names, wanted)
        if not self.serving:
            check_distribution(self.workflow, self.engine, self.trainer.temperature)
            self._check_truncated()
        if self.deterministic:
            self._check_deterministic()
        if self.colocate:
            self._check_colocate()
        if self.engine == "vllm":
            check_run(self.vllm, self.backend, self.cluster == HERE, self.trainer.lora.served_rank)
        if self.engine == "sglang":
            sampling = self.workflow.sampling_params()
            check_sglang_run(self.sglang, self.cluster == HERE, self.placement.shards, sampling)
        self._check_speculation()
        if self.placement.shards:
            self._check_shards()
        for binding, context in (
            ("embedded.context", self.embedded.context),
            ("vllm.context", self.vllm.context),
            ("sglang.context", self.sglang.context),
        ):
            if context > self.row_length:
                wanted = (
                    f"at most train.row_length = {self.row_length}, because a sequence is never cut"
                    " to fit its row"
                )
                raise ConfigError(binding, context, wanted)

    def _check_teachers(self) -> None:
        algorithm = self.algorithm
        wanted = f"the model that {algorithm.name} distills from"
        teaches_itself = algorithm.teacher_context is not None
        if (
            algorithm.needs & {"teacher", "teacher_logits"}
            and self.teacher is None
            and not teaches_itself
        ):
            raise ConfigError("train.teacher", None, wanted)
        if "teachers" in algorithm.needs and not self.teachers:
            wanted = f"{{name: model}} of the models that {algorithm.name} distills from"
            raise ConfigError("train.teachers", dict(self.teachers), wanted)

    def _check_speculation(self) -> None:
        """Raises: ConfigError for guesses that the engine cannot make."""
        if self.speculation.active and self.engine == "none":
            wanted = "'none' with train.engine = 'none', which generates nothing"
            raise ConfigError("speculation.method", self.speculation.method, wanted)
        if self.fleet is not None:
            sampling = None if self.serving else self.workflow.sampling_params()
            check_speculation(
                self.speculation,
                self.fleet,
                sampling,
                experts=self.trainer.replay_experts,
                adapters=bool(self.trainer.lora.served_rank),
            )

    def _check_truncated(self) -> None:
        """Raises: ConfigError for what truncated sampling excludes: servers as the reference or
        teacher, and recorded experts."""
        sampling = self.workflow.sampling_params()
        if sampling is None or not sampling.truncates:
            return
        if self.trainer.replay_experts:
            wanted = (
                "False with sampling.top_p, top_k or min_p: vLLM records experts with its second"
                " model runner, and reports kept tokens with its first"
            )
            raise ConfigError("trainer.replay_experts", True, wanted)
        for binding, given in self._named().items():
            if server_urls(binding, given):
                wanted = (
                    "a model directory with sampling.top_p, top_k or min_p: a server scores tokens"
                    " among the whole vocabulary, and not among those that were kept"
                )
                raise ConfigError(binding, given, wanted)

    @property
    def fleet(self) -> FleetConfig | None:
        """The settings of the servers that generate; None for an engine without servers."""
        return {"vllm": self.vllm, "sglang": self.sglang}.get(self.engine)

    @property
    def starts_servers(self) -> bool:
        return self.fleet is not None and not self.fleet.urls

    @property
    def computes_beside_servers(self) -> bool:
        """True if servers that the run starts on this machine generate while the trainer
        computes."""
        return self.starts_servers and self.max_staleness > 0 and not self.colocate

    @property
    def places_servers(self) -> bool:
        """True if the run starts servers, on the nodes of a cluster."""
        return self.starts_servers and self.cluster != HERE

    @property
    def shards(self) -> int:
        """The number of processes that the rollout is divided among; 0 for none but the run's."""
        return self.placement.shards

    def _named(self) -> dict[str, Named | None]:
        """Returns every model that could score tokens, by its binding."""
        return {
            "train.reference": self.reference,
            "train.teacher": self.teacher,
            **{teacher_binding(name): given for name, given in self.teachers.items()},
        }

    def scorers(self) -> dict[str, Named | None]:
        """Returns the models that score tokens for the algorithm, as reference or teachers, by their
        bindings; None is the initial policy."""
        needs, named = self.algorithm.needs, self._named()
        for name in ("teacher", "reference"):
            if name in needs:
                return {f"train.{name}": named[f"train.{name}"]}
        if "teachers" in needs:
            return {binding: named[binding] for binding in map(teacher_binding, self.teachers)}
        return {}

    def scoring_urls(self) -> tuple[str, ...]:
        """Returns all servers that score in place of references or teachers that the algorithm
        needs; none if trainers score."""
        found = (server_urls(binding, given) for binding, given in self.scorers().items())
        return tuple(url for urls in found for url in urls)

    def temperature(self, workflow: Workflow) -> float:
        """Returns the policy's sampling temperature."""
        sampling = workflow.sampling_params()
        return self.trainer.temperature if sampling is None else sampling.temperature

    def _check_shards(self) -> None:
        shards, wanted = self.placement.shards, None
        if self.cluster == HERE:
            wanted = "0 with train.cluster = 'here': its shards are processes of a Ray cluster"
        elif self.engine != "vllm":
            wanted = f"0 with train.engine = {self.engine!r}: shards divide vLLM servers"
        elif self.workflow.open_ended:
            wanted = "0 with a workflow whose episodes are begun and ended from outside"
        elif any(one.workflow is not None or not one.is_greedy for one in self.evaluations):
            wanted = "0 with train.evaluations that sample or have a workflow of their own"
        if wanted is not None:
            raise ConfigError("cluster.shards", shards, wanted)
        check_division(self.vllm, shards)

    def _check_colocate(self) -> None:
        """Raises: ConfigError for what excludes turns of trainer and servers."""
        fleet, wanted = self.fleet, None
        if fleet is None:
            wanted = (
                f"False with train.engine = {self.engine!r}, which has no servers that could sleep"
                " (the embedded engine shares the trainer's devices as it is)"
            )
        elif fleet.urls:
            wanted = (
                f"False with {fleet.binding}.urls: only servers that the run starts are sure to share"
                " its accelerators, and to be used by nobody else"
            )
        elif self.cluster != HERE:
            wanted = (
                "False with train.cluster = 'ray', which places trainers and servers on accelerators"
                " of their own"
            )
        elif fleet.direct:
            wanted = (
                f"False with {fleet.binding}.transport = {fleet.transport!r}, which reads the"
                " trainer's devices while servers load: 'files' passes weights through the host"
            )
        elif self.serving:
            wanted = "False where a model is served instead of trained"
        if wanted is not None:
            raise ConfigError("train.colocate", True, wanted)

    def _check_deterministic(self) -> None:
        wanted = None
        if self.fleet is not None:
            wanted = (
                f"False with train.engine = {self.engine!r}, whose servers batch requests as they arrive, or"
                " train.engine = 'embedded'"
            )
        elif self.window > 1:
            wanted = (
                f"False with train.window = {self.window}, which consumes groups in the order in"
                " which they finish, or train.window = 1"
            )
        elif self.workflow.open_ended:
            wanted = "False with a workflow whose episodes are begun and ended from outside"
        if wanted is not None:
            raise ConfigError("train.deterministic", True, wanted)


def teacher_binding(name: str) -> str:
    """Returns where one of several teachers is given."""
    return f"train.teachers[{name!r}]"
