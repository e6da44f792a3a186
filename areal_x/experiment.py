"""The ring, top to bottom. Who reads only this file knows how the system works.

    dataset ──task──▶ rollout (runner, workflow, engine) ──scored groups──▶ queue
                         ▲                                                    │ a batch of groups, staleness bounded
                         │ weights                                            ▼
                      trainer ◀── packed rows ◀── advantages, weights (host, numpy)

The rollout runs on its own thread and never waits for the trainer but where the queue's bound on
staleness says so; everything below runs on the caller's thread, one line after the other. Of
several processes that train one model the first runs the ring, and the others follow its trainers'
calls (areal_x.cluster.ranks).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gin
import numpy as np

from areal_x.algorithms import losses, mismatch
from areal_x.batching.batch import Models, make_batches, staleness
from areal_x.cluster import ranks
from areal_x.cluster.links import Follower, Leader
from areal_x.config.recorded import by_gin, settings_of, text_of
from areal_x.engines.embedded import EmbeddedEngine
from areal_x.engines.none import NoEngine
from areal_x.engines.vllm import server as servers
from areal_x.engines.vllm.engine import VLLMEngine
from areal_x.engines.vllm.gpu_transfer import check_machine
from areal_x.engines.vllm.scorer import ServerScorer, server_urls
from areal_x.errors import UserError
from areal_x.hf.model_dir import resolve
from areal_x.hf.tokenizer import check_vocabulary, load_tokenizer
from areal_x.monitor.display import Display
from areal_x.monitor.measures import (
    Stopwatch,
    describe,
    explained,
    judge,
    rates,
    save_groups,
    saved_tokens,
)
from areal_x.monitor.metrics import MetricsWriter, read
from areal_x.monitor.plot import PLOT, drawn
from areal_x.monitor.timeline_plot import PICTURE
from areal_x.monitor.trackers import Tracker, start
from areal_x.monitor.trajectories import show_in_notebooks
from areal_x.protocols.backends import create_trainer
from areal_x.protocols.engine import Engine
from areal_x.protocols.trainer import Scorer, Trainer
from areal_x.protocols.trainer_config import LoRAConfig
from areal_x.protocols.workflow import Workflow, computed_by
from areal_x.rollout.queue import TrajectoryQueue
from areal_x.rollout.rollout import Rollout
from areal_x.rollout.runner import Runner
from areal_x.run import checkpoint, resuming
from areal_x.run.journal import Journal
from areal_x.run.run_dir import open_run
from areal_x.runtime import cores, timeline
from areal_x.runtime.interrupts import check, noted, noted_in_each
from areal_x.runtime.loop import short_collections
from areal_x.runtime.waits import waiting, watching
from areal_x.settings import Settings
from areal_x.tasks.screening import scan_dataset
from areal_x.tasks.stream import TaskStream
from areal_x.types import Batch, Group, Loss, Turn

PATIENCE = 3  # steps in a row that may be skipped as their loss or gradient is not finite


@dataclass(frozen=True)
class Result:
    """Where a finished run lies and what it measured, one row a step."""

    directory: Path
    metrics: list[dict[str, float]]


@by_gin
@gin.configurable("train")
@dataclass(kw_only=True)
class Experiment(Settings):
    __doc__ = Settings.__doc__

    @noted()
    def run(self, resume: bool | str = False) -> Result:
        """Trains to the last step with a live display, and leaves a plot in the run's directory.

        resume: goes on from the newest checkpoint; "auto" goes on where the run is, and begins
        where it is not. Of several processes each calls it; in all but the first it returns,
        without metrics, when the first has ended.
        """
        joined = self.join()
        if isinstance(joined, Follower):
            self.follow(joined)
            return Result(Path(self.runs), [])
        goes_on = resuming.decided(resume, Path(self.runs), self.name, self.steps)
        if goes_on is None:
            ranks.tell(joined, ranks.FINISHED)
            return Result(run := Path(self.runs, self.name or ""), read(run))
        run = self.open(goes_on)
        with Display(self.steps) as display, drawn(run) as draw:
            for turn in self.turns(run, goes_on, display.message):
                display.show(turn.metrics)
                draw()
        if joined is not None:
            joined.done()
        print(f"run: {run}\nplot: {run / PLOT} (reward, accuracy and staleness over steps)")
        print(f"timeline: {run / PICTURE}, {run / timeline.FILE} (opens in ui.perfetto.dev)")
        return Result(run, read(run))

    def plan(self) -> None:
        """Builds what needs no process and no device: the dataset and the workflow are there, the
        model can be found."""
        if not callable(self.trainer.model.path):
            computed_by(self.workflow, self.backend).setup(
                load_tokenizer(resolve(self.trainer.model.path))
            )

    def open(self, resume: bool = False) -> Path:
        """The run's directory, which this process then writes to alone. Raises: UserError when its
        name is taken or unknown."""
        show_in_notebooks()
        joined = self.join()  # before anything looks at a device
        name = resuming.named(Path(self.runs), self.name, resume)  # before models are loaded
        cores.limit_spinning(self.computes_beside_servers)  # before anything imports torch
        if self.engine == "vllm":
            check_machine(self.vllm)
        resolve(self.trainer.model.path)  # a model that is not there should not leave a run behind
        run = open_run(Path(self.runs), name, lambda name: text_of(self, name=name), resume=resume)
        ranks.tell(joined, ranks.BEGINS)
        return run

    @noted_in_each
    def turns(
        self, run: Path, resume: bool = False, message: Callable[[str], None] = print
    ) -> Iterator[Turn]:
        """The ring, one turn at a time: for a notebook that wants to look, or stop, between two
        steps."""

        # ---- what the ring consists of
        began = (
            resuming.start(run, self.dataset, self.seed, message) if resume else resuming.BEGINNING
        )
        directory = self.find(self.trainer.model.path)
        tokenizer = load_tokenizer(directory)
        workflow = computed_by(self.workflow, self.backend).setup(tokenizer)
        # None: its own
        evaluation = (
            self.evaluation and computed_by(self.evaluation, self.backend).setup(tokenizer).greedy()
        )
        models = self.create_models(directory, workflow)
        learned_by = self.losses()
        joined = self.join()
        if isinstance(joined, Leader):
            models = ranks.lead(joined, models, learned_by)
        trainer, loss = models.policy, learned_by["policy"]
        began.restore(models, message)
        engine = self.create_engine(directory, trainer, workflow, run, message)
        drawn_from = resuming.drawn_from(self.dataset, self.seed)
        step, skipped = began.step, 0
        seconds = np.inf

        with (
            Journal(run, self.journal.keep_steps) as journal,
            self.create_rollout(
                engine, workflow, evaluation, journal, tokenizer, message
            ) as rollout,
            MetricsWriter(run, self.trackers(run), resumed_at=step if resume else None) as metrics,
            checkpoint.Saver(run, self.keep_checkpoints, message) as saver,
            timeline.recording(run) as spans,
            watching(message, run / "logs", lambda: seconds if np.isfinite(seconds) else 0.0),
            self.create_threads(trainer) as threads,
            short_collections(),
        ):
            rollout.start(
                began.rollout(journal, self.stream, self.groups_per_step, self.deterministic)
            )
            rollout.publish(trainer, step)
            if not resume:
                row = {"step": 0, **self.evaluate(rollout, models)}
                metrics.write(row)
                yield Turn(row)

            # ---- the ring
            while step < self.steps:
                watch, before = Stopwatch(step + 1), rollout.stats()
                groups = rollout.take()
                watch.lap("wait_seconds")
                computing = threads.before(watch.total / seconds)
                ages = staleness(groups, step)
                how = (
                    self.algorithm,
                    self.row_length,
                    models,
                    step,
                    self.minibatches,
                    self.share_prompts,
                )
                with waiting("the run", f"the trainer's step {step + 1}"):
                    batches = make_batches(groups, *how)
                    watch.lap("logprob_seconds")
                    learned = self.learn(batches, models, loss)
                lost = max(learned["skipped"], learned.get("critic/skipped", 0)) == self.minibatches
                skipped = skipped + 1 if lost else 0
                if skipped == PATIENCE:
                    file = save_groups(run / "not_finite.jsonl", groups)
                    raise UserError(
                        f"{PATIENCE} steps in a row had a loss or gradient that is not finite: see"
                        f" the last in {file}"
                    )
                watch.lap("update_seconds")
                step += 1
                published = rollout.publish(trainer, step)
                watch.lap("publish_seconds")

                # ---- what it did
                seconds = watch.total
                row = {
                    "step": step,
                    **describe(groups, ages, batches),
                    **learned,
                    **watch.laps,
                    "seconds": seconds,
                }
                if computing is not None:
                    row["threads"] = computing
                    threads.after(
                        row["logprob_seconds"] + row["update_seconds"], row["packed_tokens"]
                    )
                if self.share_prompts:
                    row["saved_tokens"] = saved_tokens(groups, batches)
                row |= rates(row, before, rollout.stats(), published)
                row["trainer_idle"] = watch.laps["wait_seconds"] / watch.total
                row["rollout_idle"] = spans.idle_share(timeline.GENERATION, watch.began, watch.last)
                if self.is_due(self.evaluate_every, step):
                    row |= self.evaluate(rollout, models)
                metrics.write(row)
                if self.is_due(self.checkpoint_every, step):
                    with timeline.span("checkpoint", step=step):
                        journal.sync()  # what the checkpoint was made of
                        saver.save(
                            step,
                            models.save,
                            {"rollout": rollout.state(), "drawn_from": drawn_from},
                        )
                        journal.prune(min(checkpoint.steps(run), default=0), step)
                    spans.write(run)
                yield Turn(row, groups, batches)

    def follow(self, process_0: Follower) -> None:
        """What every process but the first does: the same calls of the same trainers."""
        if ranks.told(process_0) == ranks.FINISHED:
            return
        directory = self.find(self.trainer.model.path)
        ranks.serve(process_0, self.create_models(directory, self.workflow), self.losses())

    def join(self) -> Leader | Follower | None:
        return ranks.join(self.backend, self.trainer.mesh.processes)

    def find(self, path: str | Callable[[], str]) -> Path:
        """The directory of a model; of a function's, which one process calls, all are told."""
        joined = self.join()
        if joined is None or not callable(path):
            return resolve(path)
        return Path(joined.agree(lambda: str(resolve(path).absolute())))

    def trackers(self, run: Path) -> Iterator[Tracker]:
        return (start(name, run, self.project, settings_of(run)) for name in self.loggers)

    def losses(self) -> dict[str, Loss]:
        """What the trainers minimise, by their names in Models."""
        # What is only written was drawn by no policy that there could be a gap to.
        watched = (
            (losses.policy_gap, mismatch.LagMetrics(self.lags())) if self.engine != "none" else ()
        )
        of_critic = (
            {} if self.algorithm.value_loss is None else {"critic": self.algorithm.value_loss}
        )
        return {"policy": losses.combine(self.algorithm.step_loss(), *watched), **of_critic}

    def lags(self) -> int:
        """How many ages, in versions, the metrics of the mismatch tell apart."""
        # groups, the queue's bound
        most = (self.max_staleness + 1) * self.groups_per_step + self.window - 2
        oldest = most // self.groups_per_step
        return min(oldest + 1, mismatch.MAX_LAGS)

    def learn(self, batches: Sequence[Batch], models: Models, loss: Loss) -> dict[str, float]:
        """An optimizer step on each batch, of the policy and of the critic, and the means of what
        they said; skipped and critic/skipped are how many of them changed nothing, as their loss or
        gradient was not finite."""
        said = []
        for batch in batches:
            check()
            row = models.policy.update(batch, loss)
            if models.critic is not None and self.algorithm.value_loss is not None:
                learned = models.critic.update(batch, self.algorithm.value_loss)
                row |= {f"critic/{name}": x for name, x in learned.items()} | explained(batch)
            said.append(row)
        # The first batch is the one that the policy from before the step has read.
        means = {
            name: float(np.mean([row[name] for row in said if name in row]))
            for name in said[0] | said[-1]
        }
        means = {
            name: x for name, x in means.items() if not name.startswith(mismatch.PREFIX)
        } | mismatch.metrics_by_lag(said[0])
        return means | {
            name: sum(row[name] for row in said)
            for name in ("skipped", "critic/skipped")
            if name in means
        }

    def evaluate(self, rollout: Rollout, models: Models) -> dict[str, float]:
        """The mean reward of greedy answers to the held-out tasks, under the weights that were
        published last; without an engine, what the loss says of what is written there."""
        if not self.held_out:
            return {}
        with timeline.span("evaluate", tasks=len(self.held_out)):
            episodes = rollout.evaluate(self.held_out)
        groups = [
            Group(task, i, 0, (episode,))
            for i, (task, episode) in enumerate(zip(self.held_out, episodes, strict=True))
        ]
        rewards = [reward for group in groups for reward in group.rewards]
        failed = (
            {"evaluation_failed": float(len(groups) - len(rewards))}
            if len(rewards) < len(groups)
            else {}
        )
        if not rewards:
            return failed
        if self.engine != "none":
            return failed | {"accuracy": float(np.mean(rewards))}
        (batch,) = make_batches(groups, self.algorithm, self.row_length, models)
        return failed | judge(batch, self.algorithm, models.policy)

    def is_due(self, every: int, step: int) -> bool:
        return step == self.steps or (every > 0 and step % every == 0)

    def scoring_urls(self) -> tuple[str, ...]:
        """Of the servers that score in the place of a reference or a teacher, where the algorithm
        needs one and has servers."""
        name = next(
            (name for name in ("teacher", "reference") if name in self.algorithm.needs), None
        )
        return () if name is None else server_urls(f"train.{name}", getattr(self, name))

    def create_models(self, directory: Path, workflow: Workflow) -> Models:
        """The trainer, and what else the algorithm needs.

        The policy is the model at the temperature it is sampled at, so that both sides speak of one
        distribution.
        """
        temperature = self.temperature(workflow)
        config = replace(self.trainer, temperature=temperature, share_prompts=self.share_prompts)
        config = replace(config, deterministic=self.deterministic, row_length=self.row_length)
        needs = self.algorithm.needs

        def trainer(path: Path, **changes: Any) -> Trainer:
            model = replace(config.model, path=str(path))
            return create_trainer(self.backend, replace(config, model=model, **changes))

        # another model would have chosen other experts
        others: dict[str, Any] = {"replay_experts": False}
        reference: Scorer | None = None
        critic = None
        if needs & {"reference", "teacher"}:
            name = "teacher" if "teacher" in needs else "reference"
            given = getattr(self, name)
            if urls := self.scoring_urls():
                key = os.environ.get(self.vllm.key_variable)
                reference = ServerScorer(urls, key, load_tokenizer(directory), temperature)
            else:
                other = directory if given is None else self.find(given)
                check_vocabulary(f"train.{name}", other, directory)
                reference = trainer(other, frozen=True, lora=LoRAConfig(rank=0), **others)
        if "values" in needs:
            start = directory if self.critic.path is None else self.find(self.critic.path)
            check_vocabulary("critic.path", start, directory)
            optimizer = replace(config.optimizer, learning_rate=self.critic.learning_rate)
            critic = trainer(start, head="value", optimizer=optimizer, **others)
        asked: dict[str, Any] = {"head": self.algorithm.head, "entropy": "entropy" in needs}
        if "teacher_logits" in needs:
            teacher: Any = self.teacher  # there, and no server: else refused at construction
            asked |= {"teacher": str(self.find(teacher)), "divergence": self.algorithm.divergence}
        return Models(trainer(directory, **asked), reference, critic)

    def create_threads(self, trainer: Trainer) -> cores.Threads:
        """Sets how many threads a step is computed with, where a CPU is shared with what generates
        meanwhile."""
        generating = 0
        if self.deterministic:
            # the last bits of some products depend on how many compute them
            return cores.Threads(trainer, 0)
        if self.max_staleness and self.engine == "embedded":
            generating = cores.available() // 2
        elif (
            self.max_staleness
            and self.engine == "vllm"
            and not self.vllm.urls
            and servers.is_cpu_build()
        ):
            generating = self.vllm.servers * (
                self.vllm.threads or servers.default_threads(self.vllm.servers)
            )
        return cores.Threads(trainer, generating)

    def temperature(self, workflow: Workflow) -> float:
        """That the policy is sampled at."""
        sampling = getattr(workflow, "sampling", None)
        return sampling.temperature if sampling is not None else self.trainer.temperature

    def create_rollout(
        self,
        engine: Engine,
        workflow: Workflow,
        evaluation: Workflow | None,
        journal: Journal,
        tokenizer: Any,
        message: Callable[[str], None],
    ) -> Rollout:
        """Both workflows are set up. journal: told of every group."""
        context = engine.context or self.row_length
        runner = Runner(
            engine,
            workflow,
            self.stream(),
            TrajectoryQueue(self.groups_per_step, self.max_staleness, self.window),
            group_size=self.group_size,
            seed=self.seed,
            episode_seconds=self.episode_seconds,
            filters=self.algorithm.filters,
            filtered_groups=self.filtered_groups,
            greedy="greedy" in self.algorithm.needs,
            row_length=self.row_length,
            together=2 if self.algorithm.pairs else 1,
            screen=scan_dataset(
                self.dataset, workflow, tokenizer, self.longest_prompt, context, message
            ),
            recorder=journal,
            deterministic=self.deterministic,
            message=message,
        )
        return Rollout(runner, evaluation)

    def stream(self) -> TaskStream:
        return TaskStream(self.dataset, self.seed)

    def create_engine(
        self,
        directory: Path,
        trainer: Trainer,
        workflow: Workflow,
        run: Path,
        message: Callable[[str], None],
    ) -> Engine:
        """directory: of the model."""
        if self.engine == "none":
            return NoEngine()
        if self.engine == "embedded":
            return EmbeddedEngine(
                trainer.sampler(self.embedded.slots, self.embedded.context or self.row_length)
            )
        config = replace(self.vllm, context=self.vllm.context or self.row_length)
        experts = self.trainer.replay_experts
        # Servers score a prompt at temperature 1, and record experts only of what they sample.
        says = None if experts or self.temperature(workflow) != 1 else trainer
        return VLLMEngine(
            config, directory, run / "logs", message, self.trainer.lora, experts, says
        )
