"""The ring, top to bottom. Who reads only this file knows how the system works.

    dataset ──task──▶ rollout (runner, workflow, engine) ──scored groups──▶ queue
                         ▲                                                    │ a batch of groups, staleness bounded
                         │ weights                                            ▼
                      trainer ◀── packed rows ◀── advantages, weights (host, numpy)

The rollout runs on its own thread and never waits for the trainer but where the queue's bound on staleness says so; everything
below runs on the caller's thread, one line after the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gin
import numpy as np

from areal_x import checkpoint
from areal_x.algorithms import losses
from areal_x.algorithms.recipes import Algorithm, grpo
from areal_x.config import config_text
from areal_x.data.batch import make_batch, staleness
from areal_x.data.stream import TaskStream
from areal_x.data.tokenizer import load_tokenizer
from areal_x.errors import ConfigError, at_least, one_of, positive
from areal_x.model_dir import resolve
from areal_x.monitor.display import Display
from areal_x.monitor.metrics import MetricsWriter, check_loggers, read
from areal_x.monitor.plot import plot
from areal_x.rollout.embedded import EmbeddedConfig, EmbeddedEngine
from areal_x.rollout.engine import Engine
from areal_x.rollout.queue import TrajectoryQueue
from areal_x.rollout.rollout import Rollout
from areal_x.rollout.runner import RolloutStats
from areal_x.rollout.vllm.engine import VLLMConfig, VLLMEngine
from areal_x.rollout.workflows import Workflow
from areal_x.run_dir import open_run
from areal_x.trainer import Trainer, TrainerConfig, create_trainer, find_backend
from areal_x.types import Batch, Group, Scored, Task

ENGINES = ("embedded", "vllm")


@dataclass(frozen=True)
class Turn:
    """One turn of the ring: the metrics it wrote, the groups it consumed and the batch it trained on.

    The turn before the first step (the evaluation of the initial model) has neither groups nor batch.
    """

    metrics: dict[str, float]
    groups: Sequence[Group] = ()
    batch: Batch | None = None


@dataclass(frozen=True)
class Result:
    """Where a finished run lies and what it measured, one row a step."""

    directory: Path
    metrics: list[dict[str, float]]


@gin.configurable("train")
@dataclass(kw_only=True)
class Experiment:
    """One reinforcement-learning run.

    dataset: the tasks, in an order that `seed` shuffles anew each epoch. held_out: judged greedily, never trained on.
    workflow: turns a task into scored trajectories. algorithm: a recipe (areal_x.algorithms.recipes).
    trainer, embedded, vllm: settings of the parts, each configurable under its own name.
    backend: "jax" or "torch". engine: "embedded" (the backend's sampler, in this process) or "vllm" (servers).
    steps: optimizer steps. groups_per_step: tasks in a step's batch. group_size: attempts at each task.
    max_staleness: how many versions old a group may be when it is trained on; 0 is synchronous, on-policy training.
    window: how many groups ahead of the oldest a finished one may be consumed; 1 is strict order (see TrajectoryQueue).
    row_length: tokens in a packed row, and the longest prompt and completion together.
    episode_seconds: longest time an episode may take. evaluate_every, checkpoint_every: in steps; 0 is at the end only
    (evaluation also at the start). keep_checkpoints: how many of the newest stay.
    name: the directory below `runs`. loggers: "wandb" and "trackio", beside metrics.jsonl and TensorBoard (always written).
    """

    dataset: Sequence[Task]
    workflow: Workflow
    held_out: Sequence[Task] = ()
    algorithm: Algorithm = field(default_factory=grpo)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    embedded: EmbeddedConfig = field(default_factory=EmbeddedConfig)
    vllm: VLLMConfig = field(default_factory=VLLMConfig)
    backend: str = "jax"
    engine: str = "embedded"
    steps: int = 100
    groups_per_step: int = 16
    group_size: int = 8
    max_staleness: int = 2
    window: int = 1
    row_length: int = 1024
    episode_seconds: float = 600.0
    evaluate_every: int = 0
    checkpoint_every: int = 0
    keep_checkpoints: int = 2
    seed: int = 0
    name: str | None = None
    runs: str = "runs"
    loggers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        find_backend(self.backend)
        one_of("train.engine", self.engine, ENGINES)
        check_loggers(self.loggers)
        for name in ("steps", "groups_per_step", "group_size", "window", "row_length", "episode_seconds", "keep_checkpoints"):
            positive(f"train.{name}", getattr(self, name))
        for name in ("max_staleness", "evaluate_every", "checkpoint_every"):
            at_least(f"train.{name}", getattr(self, name), 0)
        for binding, context in (("embedded.context", self.embedded.context), ("vllm.context", self.vllm.context)):
            if context > self.row_length:
                wanted = f"at most train.row_length = {self.row_length}, as a sequence is never cut to fit its row"
                raise ConfigError(binding, context, wanted)

    def run(self, resume: bool = False) -> Result:
        """Trains to the last step with a live display, and leaves a plot in the run's directory."""
        run = self.open(resume)
        with Display(self.steps) as display:
            for turn in self.turns(run, resume, display.message):
                display.show(turn.metrics)
        rows, picture = read(run), run / "plot.png"
        plot(rows, picture)
        print(f"run: {run}\nplot: {picture} (reward, accuracy and staleness over steps)")
        return Result(run, rows)

    def plan(self) -> None:
        """Builds what needs no process and no device: the dataset and the workflow are there, the model can be found."""
        if not callable(self.trainer.model.path):
            self.workflow.setup(load_tokenizer(resolve(self.trainer.model.path)))

    def open(self, resume: bool = False) -> Path:
        """The run's directory, which this process then writes to alone. Raises: UserError when its name is taken or unknown."""
        resolve(self.trainer.model.path)  # a model that is not there should not leave a run behind
        return open_run(Path(self.runs), self.name, config_text(), resume=resume)

    def turns(self, run: Path, resume: bool = False, message: Callable[[str], None] = print) -> Iterator[Turn]:
        """The ring, one turn at a time: for a notebook that wants to look, or stop, between two steps."""

        # ---- what the ring consists of
        directory = resolve(self.trainer.model.path)
        workflow = self.workflow.setup(load_tokenizer(directory))
        trainer = self.create_trainer(directory, workflow)
        reference = self.create_trainer(directory, workflow) if "reference" in self.algorithm.needs else None
        loss = losses.combine(self.algorithm.loss, losses.policy_gap)
        progress: dict[str, Any] = {}
        if resume:
            step, path, progress = checkpoint.newest(run, message)
            trainer.restore(path / "trainer")
            message(f"resumed from step {step}")
        rollout = Rollout(
            self.create_engine(directory, trainer, run, message),
            workflow,
            TaskStream(self.dataset, self.seed),
            TrajectoryQueue(self.groups_per_step, self.max_staleness, self.window),
            group_size=self.group_size,
            seed=self.seed,
            episode_seconds=self.episode_seconds,
            filters=self.algorithm.filters,
        )

        with rollout, MetricsWriter(run, self.loggers, resumed_at=trainer.version if resume else None) as metrics:
            rollout.start(progress.get("rollout"))
            rollout.publish(trainer)
            if not resume:
                row = {"step": 0, **self.evaluate(rollout)}
                metrics.write(row)
                yield Turn(row)

            # ---- the ring
            while trainer.version < self.steps:
                watch, before = Stopwatch(), rollout.stats()
                groups = rollout.take()
                watch.lap("wait_seconds")
                ages = staleness(groups, trainer.version)
                batch = self.prepare(groups, trainer, reference)
                watch.lap("logprob_seconds")
                learned = trainer.update(batch, loss)
                watch.lap("update_seconds")
                published = rollout.publish(trainer)
                watch.lap("publish_seconds")

                # ---- what it did
                row = {"step": trainer.version, **describe(groups, ages), **learned, **watch.laps, "seconds": watch.total}
                row |= {"pause_seconds": published.paused_seconds, **rates(row, before, rollout.stats())}
                if self.is_due(self.evaluate_every, trainer.version):
                    row |= self.evaluate(rollout)
                metrics.write(row)
                if self.is_due(self.checkpoint_every, trainer.version):
                    self.save(run, trainer, rollout)
                    message(f"checkpoint of step {trainer.version} saved")
                yield Turn(row, groups, batch)

    def prepare(self, groups: Sequence[Group], trainer: Trainer, reference: Trainer | None) -> Batch:
        """The packed rows of a step, with every log-probability that the algorithm asks for."""
        batch = make_batch(groups, self.algorithm, self.row_length)
        if self.algorithm.proximal == "recompute":
            batch = batch.replace(proximal_logp=trainer.logprobs(batch))
        if reference is not None:
            batch = batch.replace(reference_logp=reference.logprobs(batch))
        return batch

    def evaluate(self, rollout: Rollout) -> dict[str, float]:
        """The mean reward of greedy answers to the held-out tasks, under the weights that were published last."""
        if not self.held_out:
            return {}
        outcomes = rollout.evaluate(self.held_out)
        rewards = [outcome.reward for outcome in outcomes if isinstance(outcome, Scored)]
        row = {"accuracy": float(np.mean(rewards))} if rewards else {}
        failed = len(outcomes) - len(rewards)
        return row | ({"evaluation_failed": failed} if failed else {})

    def save(self, run: Path, trainer: Trainer, rollout: Rollout) -> None:
        """Everything that `--resume` needs: the trainer's state and where the rollout was. `trainer/` is a model directory."""
        state = {"rollout": rollout.state()}
        checkpoint.save(run, trainer.version, lambda path: trainer.save(path / "trainer"), state, self.keep_checkpoints)

    def is_due(self, every: int, step: int) -> bool:
        return step == self.steps or (every > 0 and step % every == 0)

    def create_trainer(self, directory: Path, workflow: Workflow) -> Trainer:
        """The policy is the model at the temperature it is sampled at, so that both sides speak of one distribution."""
        sampling = getattr(workflow, "sampling", None)
        temperature = sampling.temperature if sampling is not None else self.trainer.temperature
        model = replace(self.trainer.model, path=str(directory))
        return create_trainer(self.backend, replace(self.trainer, model=model, temperature=temperature))

    def create_engine(self, directory: Path, trainer: Trainer, run: Path, message: Callable[[str], None]) -> Engine:
        if self.engine == "embedded":
            return EmbeddedEngine(trainer.sampler(self.embedded.slots, self.embedded.context or self.row_length))
        return VLLMEngine(replace(self.vllm, context=self.vllm.context or self.row_length), directory, run / "logs", message)


class Stopwatch:
    """Seconds of each lap since the one before, by name."""

    def __init__(self) -> None:
        self.began = self.last = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name], self.last = now - self.last, now

    @property
    def total(self) -> float:
        return self.last - self.began


def describe(groups: Sequence[Group], ages: Sequence[int]) -> dict[str, float]:
    """What a step consumed: rewards with the verifier's own numbers, lengths, ages."""
    outcomes = [episode.outcome for group in groups for episode in group.scored]
    trajectories = [trajectory for group in groups for episode in group.scored for trajectory in episode.trajectories]
    scored = [outcome for outcome in outcomes if isinstance(outcome, Scored)]
    details = {name for outcome in scored for name in outcome.details}
    return {
        "reward": float(np.mean([outcome.reward for outcome in scored])),
        **{
            f"reward/{name}": float(np.mean([o.details[name] for o in scored if name in o.details])) for name in sorted(details)
        },
        "response_length": float(np.mean([trajectory.mask.sum() for trajectory in trajectories])),
        "trained_tokens": int(sum(trajectory.mask.sum() for trajectory in trajectories)),
        "packed_tokens": int(sum(len(trajectory) for trajectory in trajectories)),
        "staleness_mean": float(np.mean(ages)),
        "staleness_max": max(ages),
    }


def rates(row: Mapping[str, float], before: RolloutStats, after: RolloutStats) -> dict[str, float]:
    """Tokens a second of generation (over the whole turn) and of training (while it trained); the rollout's counts so far."""
    generated = after.generated_tokens - before.generated_tokens
    return {
        "generated_tokens": generated,
        "generation_tokens_per_second": generated / row["seconds"],
        "training_tokens_per_second": row["packed_tokens"] / (row["logprob_seconds"] + row["update_seconds"]),
        "queue_depth": after.depth,
        "scored": after.scored,
        "failed": after.failed,
        "timed_out": after.timed_out,
        "given_back": after.given_back,
    }
