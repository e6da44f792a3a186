"""From settings to the parts of a run: models, engine, rollout, and what records them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import gin

from areal_x.batching.batch import Minibatch, Models
from areal_x.batching.step_outputs import OutputCollector, StepOutputs
from areal_x.cluster import trainers
from areal_x.cluster.ganged import GangTrainer
from areal_x.config.writer import read_settings
from areal_x.engines.embedded import EmbeddedEngine
from areal_x.engines.fleet.config import FleetConfig, default_threads
from areal_x.engines.fleet.speculation import check_draft
from areal_x.engines.none import NoEngine
from areal_x.engines.sampling_checks import may_truncate
from areal_x.engines.sglang.installed import installed
from areal_x.engines.vllm.installed import is_cpu_build
from areal_x.errors import UserError
from areal_x.hf.model_dir import resolve, write_whole
from areal_x.hf.tokenizer import load_tokenizer
from areal_x.models import ModelFactory
from areal_x.monitor import trackers
from areal_x.monitor.metrics import MetricsWriter
from areal_x.monitor.profiler import Profiler
from areal_x.monitor.step_recorder import StepRecorder
from areal_x.monitor.token_records import recorded_tickets, token_records
from areal_x.protocols.engine import Engine
from areal_x.protocols.trainer import Trainer
from areal_x.protocols.workflow import Workflow
from areal_x.rollout.episodes import EpisodeSettings
from areal_x.rollout.queue import TrajectoryQueue
from areal_x.rollout.rollout import Rollout
from areal_x.rollout.runner import MakeEpisodes, Runner
from areal_x.run import checkpoint, resuming
from areal_x.run.journal import Journal, Resumed
from areal_x.runtime import cores, timeline
from areal_x.runtime.hosts import Hosts
from areal_x.runtime.loop import short_collections
from areal_x.runtime.shared_folder import marked
from areal_x.runtime.waits import waiting, watching
from areal_x.tasks.screening import scan_dataset
from areal_x.tasks.stream import TaskStream
from areal_x.types import Batch, Loss

if TYPE_CHECKING:
    from areal_x.engines.fleet.server import Starter
    from areal_x.shards.on_ray import Sharded

EXPORTS = "exports"
Message = Callable[[str], None]
C = TypeVar("C", bound=FleetConfig)


@dataclass(frozen=True)
class Parts:
    """The parts of a run that has begun."""

    run: Path
    start: resuming.Start
    models: Models
    loss: Loss
    rollout: Rollout
    journal: Journal
    metrics: MetricsWriter
    recorder: StepRecorder
    spans: timeline.Recorder
    saver: checkpoint.Saver
    stream_identity: dict[str, Any]
    token_share: float

    source: Path
    """The model that the run began with, whose config and tokenizer exports copy."""

    head: str
    """The policy's head."""

    evaluations: Mapping[str, Workflow]
    """The workflow of each named evaluation set."""

    def record(self, row: Mapping[str, float]) -> None:
        """Writes a step's metrics and, now and then, the timeline."""
        self.metrics.write(row)
        self.spans.renew(self.run)

    def collector(self, batches: Sequence[Batch], packed: Sequence[Minibatch]) -> OutputCollector:
        """Returns what copies the policy's outputs of a step's optimizer steps."""
        recorded = [bool(recorded_tickets(part, self.token_share)) for part in packed]
        return OutputCollector(self.models.policy, batches, recorded)

    def record_tokens(
        self,
        step: int,
        batches: Sequence[Batch],
        packed: Sequence[Minibatch],
        outputs: Sequence[StepOutputs],
    ) -> None:
        """Records what a step made of the tokens of some groups, for the lab."""
        self.journal.trained(step, token_records(batches, packed, outputs, self.token_share))

    def save(self, step: int) -> None:
        """Saves a checkpoint, and prunes the journal of what no checkpoint needs any more."""
        with timeline.span("checkpoint", step=step):
            self.journal.sync()  # the groups that the checkpoint was trained on
            state = {"rollout": self.rollout.state(), "drawn_from": self.stream_identity}
            self.saver.save(step, self.models.save, state)
            self.journal.prune(min(checkpoint.steps(self.run), default=0), step)
        self.spans.write(self.run)

    def export(self, step: int) -> None:
        """Writes the policy as a plain Hugging Face model, with adapters merged into it.

        Raises: UserError if the disk is full.
        """
        directory = self.run / EXPORTS / str(step)
        span = timeline.span("checkpoint", step=step)
        with span, waiting("the run", f"the export of step {step} to be written"):
            try:
                write_whole(directory, self.source, self.models.policy.weights(), head=self.head)
            except Exception as error:
                if not checkpoint.is_disk_full(error):
                    raise
                raise UserError(
                    f"the disk of {directory} is full: make room and continue with --resume"
                ) from error


class Factory(ModelFactory):
    """Builds the parts of a run from its settings."""

    @contextmanager
    def parts(
        self, run: Path, resume: bool, message: Message, starter: Starter | None = None
    ) -> Iterator[Parts]:
        """Builds everything, restores the newest checkpoint of a resumed run and starts the
        rollout; closes all of it at the end. starter: starts the servers, by default the run's
        own."""
        start = resuming.BEGINNING
        if resume:
            start = resuming.find_start(run, self.dataset, self.seed, message)
        directory = resolve(self.trainer.model.path)
        tokenizer = load_tokenizer(directory)
        workflow = self.workflow.computed_by(self.backend).setup(tokenizer)

        def set_up(own: Workflow) -> Workflow:
            return own.computed_by(self.backend).setup(tokenizer)

        evaluation = None  # the rollout's own workflow
        if self.evaluation is not None:
            evaluation = set_up(self.evaluation)
        owned = {one.name: set_up(one.workflow) for one in self.evaluations if one.workflow}
        losses_of = self.losses()
        if reason := self.algorithm.extra_pass(self.minibatches):
            message(
                f"log-probabilities take a forward pass of their own before each step: {reason}"
            )

        with ExitStack() as stack:
            models = stack.enter_context(self.models(directory, workflow, losses_of, run / "logs"))
            restore(models, start, message)
            starter = starter or stack.enter_context(self.server_starter())
            hosts = stack.enter_context(self.hosts(run / "logs", message))
            if hosts is not None:
                workflow = workflow.on_hosts(hosts)
                evaluation = evaluation and evaluation.on_hosts(hosts)
                owned = {name: own.on_hosts(hosts) for name, own in owned.items()}
            sharded = stack.enter_context(
                self.sharded(directory, models.policy, workflow, run / "logs", message)
            )
            engine = (
                self.create_engine(directory, models.policy, workflow, run, message, starter)
                if sharded is None
                else sharded.engine
            )
            journal = stack.enter_context(Journal(run, self.journal.keep_steps))
            rollout = stack.enter_context(
                self.create_rollout(
                    engine,
                    workflow,
                    evaluation and evaluation.greedy(),
                    journal,
                    tokenizer,
                    message,
                    episodes=None if sharded is None else sharded.episodes,
                    models=models,
                    owned=list(owned.values()),
                )
            )
            starting = (
                trackers.start(name, run, self.project, read_settings(run), self.tracking)
                for name in self.loggers
            )
            metrics = stack.enter_context(
                MetricsWriter(run, starting, resumed_at=start.step if resume else None)
            )
            saver = stack.enter_context(checkpoint.Saver(run, self.keep_checkpoints, message))
            spans = stack.enter_context(timeline.recording(run))
            if isinstance(models.policy, GangTrainer):
                spans.sources.append(models.policy.calls)
            if sharded is not None:
                spans.sources.append(sharded.engine.spans)
            threads = stack.enter_context(self.create_threads(models.policy))
            profiler = stack.enter_context(
                Profiler(run, self.profile_steps, self.backend, models.policy, message)
            )
            recorder = StepRecorder(rollout.stats, spans, threads, self.share_prompts, profiler)
            stack.enter_context(watching(message, run / "logs", lambda: recorder.step_seconds))
            stack.enter_context(short_collections())
            rollout.start(self.resumed(start, journal) if resume else None)
            yield Parts(
                run=run,
                start=start,
                models=models,
                loss=losses_of["policy"],
                rollout=rollout,
                journal=journal,
                metrics=metrics,
                recorder=recorder,
                spans=spans,
                saver=saver,
                stream_identity=resuming.stream_identity(self.dataset, self.seed),
                token_share=self.journal.token_share,
                source=directory,
                head=self.algorithm.head,
                evaluations={
                    one.name: chosen.greedy() if one.is_greedy else chosen
                    for one in self.evaluations
                    for chosen in (owned.get(one.name, evaluation or workflow),)
                },
            )

    def resumed(self, start: resuming.Start, journal: Journal) -> Resumed | None:
        """Returns where the rollout of a resumed run continues."""
        task_at = TaskStream(self.dataset, self.seed).task_at
        return start.rollout(journal, task_at, self.groups_per_step, self.deterministic)

    @contextmanager
    def server_starter(self) -> Iterator[Starter | None]:
        """Returns what starts the servers of the run on the nodes of its cluster, until the body
        ends; None if none is started there, or shards start them. Needs the connection that `models`
        keeps."""
        if not self.places_servers or self.shards or self.fleet is None:
            yield None
            return
        from areal_x.shards.starter import server_starter

        with server_starter(self.fleet, self.placement) as starter:
            yield starter

    @contextmanager
    def kept(self) -> Iterator[Starter | None]:
        """Returns what starts servers that go on while the processes that train are placed again,
        until the body ends; None if none is started on the nodes of a cluster, or shards start
        them."""
        if not self.places_servers or self.shards or self.fleet is None:
            yield None
            return
        from areal_x.cluster.connection import connected
        from areal_x.engines.fleet.kept import KeptServers
        from areal_x.shards.starter import server_starter

        cpus = self.trainer.mesh.processes * self.placement.cpus + self.other_cpus()
        with connected(cpus), server_starter(self.fleet, self.placement) as starter:
            kept = KeptServers(starter)
            try:
                yield kept
            finally:
                kept.end()

    @contextmanager
    def sharded(
        self,
        directory: Path,
        trainer: Trainer,
        workflow: Workflow,
        logs: Path,
        message: Message,
    ) -> Iterator[Sharded | None]:
        """Returns the shards that the rollout is divided among, not yet opened, whose processes end
        with the body; None if it runs in this process. Needs the connection that `models` keeps.

        Raises: UserError for a workflow that keeps state between episodes.
        """
        count = self.shards
        if not count:
            yield None
            return
        if workflow.state() is not None:
            raise UserError(
                f"cluster.shards = {count} must be 0 with {type(workflow).__name__}, which keeps"
                " state between episodes"
            )
        from areal_x.shards.on_ray import sharded_on_ray
        from areal_x.shards.parts import VLLMParts

        parts = VLLMParts(
            workflow=self.workflow,
            evaluation=self.evaluation,
            backend=self.backend,
            directory=directory.absolute(),
            config=replace(self.vllm, context=self.vllm.context or self.row_length),
            placement=self.placement,
            logs=logs.absolute(),
            lora=self.trainer.lora if self.trainer.lora.rank else None,
            experts=self.trainer.replay_experts,
            kept=may_truncate(self.workflow),
            speculation=self.speculation,
            bindings=gin.config_str(),
        )
        scorer = self.compared_with(trainer, workflow)
        with sharded_on_ray(parts, self.episode_settings(), scorer, message) as found:
            yield found

    @contextmanager
    def hosts(self, logs: Path, message: Message) -> Iterator[Hosts | None]:
        """Returns the other nodes of its cluster, for rewards and programs, until the body ends;
        None if they run on this machine alone, or in shards. Needs the connection that `models` keeps."""
        if self.cluster == trainers.HERE or not self.placement.host_cpus or self.shards:
            yield None
            return
        from areal_x.cluster.hosts import hosts_on_ray
        from areal_x.cluster.surroundings import surroundings

        with (
            marked(logs) as mark,
            hosts_on_ray(self.placement, surroundings(logs, mark=mark), message) as hosts,
        ):
            yield hosts

    def create_engine(
        self,
        directory: Path,
        trainer: Trainer,
        workflow: Workflow,
        run: Path,
        message: Message,
        starter: Starter | None = None,
    ) -> Engine:
        """Returns the engine, not yet started. directory: the model's. starter: starts its
        servers, by default on this machine."""
        if self.engine == "none":
            return NoEngine()
        if self.engine == "embedded":
            context = self.embedded.context or self.row_length
            check_draft(self.speculation, directory)
            # a backend of others may have no such parameter
            of = (self.speculation,) if self.speculation.active else ()
            return EmbeddedEngine(trainer.sampler(self.embedded.slots, context, *of))
        given: dict[str, Any] = {
            "model": directory.absolute(),
            "logs": (run / "logs").absolute(),
            "report": message,
            "lora": self.trainer.lora,
            "experts": self.trainer.replay_experts,
            "scorer": self.compared_with(trainer, workflow),
            "starter": starter,
            "trainer_here": self.cluster == trainers.HERE,
            "kept": not self.serving and may_truncate(workflow),
            "sleeps": self.colocate,
            "speculation": self.speculation,
        }
        if self.engine == "sglang":
            from areal_x.engines.sglang.engine import SGLangEngine

            return SGLangEngine(self.completed(self.sglang, placed=starter is not None), **given)
        from areal_x.engines.vllm.engine import VLLMEngine

        return VLLMEngine(self.completed(self.vllm, placed=starter is not None), **given)

    def completed(self, config: C, placed: bool) -> C:
        """Returns the servers' settings with those that follow from the run's. placed: they start on
        the nodes of a cluster."""
        config = replace(config, context=config.context or self.row_length)
        if not placed:
            return config
        from areal_x.shards.starter import threads_of

        return replace(config, threads=threads_of(config, self.placement))

    def compared_with(self, trainer: Trainer, workflow: Workflow) -> Trainer | None:
        """Returns the trainer if servers are compared with it: they score a prompt at temperature 1
        only, and record experts only while sampling."""
        unlike = self.trainer.replay_experts or self.temperature(workflow) != 1
        return None if unlike else trainer

    def episode_settings(self) -> EpisodeSettings:
        return EpisodeSettings(
            group_size=self.group_size,
            seed=self.seed,
            episode_seconds=self.episode_seconds,
            greedy="greedy" in self.algorithm.needs,
            row_length=self.row_length,
            together=2 if self.algorithm.pairs else 1,
        )

    def create_rollout(
        self,
        engine: Engine,
        workflow: Workflow,
        evaluation: Workflow | None,
        journal: Journal,
        tokenizer: Any,
        message: Message,
        episodes: MakeEpisodes | None = None,
        models: Models | None = None,
        owned: Sequence[Workflow] = (),
    ) -> Rollout:
        """Returns the rollout, not yet started. All workflows are set up for the tokenizer.
        episodes: makes what runs them, by default in this process. models: those that it takes turns
        with, if train.colocate is True. owned: see Rollout."""
        context = engine.context or self.row_length
        runner = Runner(
            engine,
            workflow,
            TaskStream(self.dataset, self.seed),
            TrajectoryQueue(self.groups_per_step, self.max_staleness, self.window),
            **asdict(self.episode_settings()),
            filters=self.algorithm.filters,
            filtered_groups=self.filtered_groups,
            screen=scan_dataset(
                self.dataset, workflow, tokenizer, self.longest_prompt, context, message
            ),
            recorder=journal,
            deterministic=self.deterministic,
            message=message,
            episodes=episodes,
        )
        return Rollout(runner, evaluation, models if self.colocate else None, owned)

    def create_threads(self, trainer: Trainer) -> cores.Threads:
        """Returns what chooses the threads of each step on a CPU."""
        generating: int | None = 0
        if self.deterministic:
            generating = None  # the last bits of some products depend on the number of threads
        elif self.max_staleness and self.engine == "embedded":
            generating = (trainer.threads or 0) // 2
        elif self.computes_beside_servers and not self.places_servers and self.serves_on_cpu():
            fleet = self.fleet
            assert fleet is not None
            generating = fleet.workers * (fleet.threads or default_threads(fleet.workers))
        return cores.Threads(trainer, generating)

    def serves_on_cpu(self) -> bool:
        """True if the servers that the run starts on this machine compute on its CPU."""
        if self.engine == "sglang":
            return installed(self.sglang.python).is_cpu
        return is_cpu_build()


def restore(models: Models, start: resuming.Start, message: Message) -> None:
    """Restores policy and critic from the checkpoint that a run resumes from.

    Raises: UserError if the algorithm needs a critic and the checkpoint has none.
    """
    if start.path is None:
        return
    models.policy.restore(start.path / "trainer")
    if models.critic is not None:
        if not (start.path / "critic").is_dir():
            raise UserError(
                f"{start.path} has no critic, which train.algorithm now needs: continue with an"
                " algorithm that needs none, as the run did, or start a new run from model.path"
            )
        models.critic.restore(start.path / "critic")
    message(f"resumed from step {start.step}")
