"""The ring, top to bottom: this file alone shows how the system works.

    dataset ──task──▶ rollout (runner, workflow, engine) ──scored groups──▶ queue
                         ▲                                                    │ a batch of groups, staleness bounded
                         │ weights                                            ▼
                      trainer ◀── packed rows ◀── advantages, weights (host, numpy)

The rollout runs on its own thread and waits for the trainer only where the queue's bound on
staleness requires it; everything below runs on the caller's thread, one line after the other. With
train.cluster = 'ray' the trainer is in other processes, which make its calls together
(areal_x.cluster.ganged); if one is lost, the run continues from its newest checkpoint. With
train.colocate = True both sides share their accelerators: `take` gives them to the trainer, and
`publish` back to the servers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import gin
import numpy as np

from areal_x.algorithms import mismatch
from areal_x.batching.batch import Models, fill_batches, pack_minibatches
from areal_x.batching.step_outputs import complete
from areal_x.build import Factory, Message, Parts
from areal_x.cluster.attempts import Attempts
from areal_x.cluster.gang import loss_behind
from areal_x.cluster.trainers import HERE
from areal_x.config.writer import changed_settings, gin_file_of, records_gin_parts
from areal_x.engines.vllm.transports import check_machine
from areal_x.evaluation.in_runs import held_out_metrics, set_metrics
from areal_x.hf.model_dir import resolve
from areal_x.hf.tokenizer import load_tokenizer
from areal_x.monitor.display import Display
from areal_x.monitor.metrics import read
from areal_x.monitor.plot import PLOT, live_plots
from areal_x.monitor.step_metrics import explained_variance
from areal_x.monitor.timeline_plot import PICTURE
from areal_x.monitor.trajectories import show_in_notebooks
from areal_x.run import checkpoint, resuming
from areal_x.run.run_dir import open_run
from areal_x.runtime import cores, timeline
from areal_x.runtime.interrupts import (
    deferred_interrupts,
    deferred_interrupts_in_each,
    raise_if_interrupted,
)
from areal_x.runtime.waits import waiting
from areal_x.settings import Settings
from areal_x.types import Batch, Loss, Turn

if TYPE_CHECKING:
    from areal_x.engines.fleet.server import Starter


@dataclass(frozen=True)
class RunResult:
    """A finished run: its directory and its metrics, one row per step."""

    directory: Path
    metrics: list[dict[str, float]]


@records_gin_parts
@gin.configurable("train")
@dataclass(kw_only=True)
class Experiment(Factory):
    __doc__ = Settings.__doc__

    @deferred_interrupts()
    def run(self, resume: bool | str = False) -> RunResult:
        """Trains to the last step with a live display, and leaves a plot in the run's directory.

        resume: True continues from the newest checkpoint; "auto" continues if the run exists and
        starts it if not.
        """
        resumes = resuming.decide(resume, Path(self.runs), self.name, self.steps)
        if resumes is None:  # it has finished
            return RunResult(run := Path(self.runs, self.name or ""), read(run))
        run = self.open(resumes)
        with Display(self.steps) as display, live_plots(run) as draw, self.kept() as starter:
            for turn in self.attempts(run, resumes, display.message, starter):
                display.show(turn.metrics)
                draw()
        print(f"run: {run}\nplot: {run / PLOT} (reward, accuracy and staleness over steps)")
        print(f"timeline: {run / PICTURE}, {run / timeline.FILE} (opens in ui.perfetto.dev)")
        return RunResult(run, read(run))

    def open(self, resume: bool = False, name: str | None = None) -> Path:
        """Creates or reopens the run's directory, which only this process then writes to. name: by
        default train.name.

        Raises: UserError if its name is taken or, with `resume`, unknown.
        """
        show_in_notebooks()
        name = name or self.name
        name = resuming.check_name(Path(self.runs), name, resume)  # before models are loaded
        cores.limit_spinning(self.computes_beside_servers)  # before anything imports torch
        if self.engine == "vllm":
            check_machine(self.vllm, self.cluster == HERE)
        resolve(self.trainer.model.path)  # a missing model should not leave a run behind
        return open_run(
            Path(self.runs),
            name,
            lambda name: gin_file_of(self, name=name),
            resume=resume,
            changed_settings=changed_settings,
        )

    def attempts(
        self, run: Path, resume: bool, message: Message, starter: Starter | None
    ) -> Iterator[Turn]:
        """Runs `turns`, and again from the newest checkpoint whenever processes that train were
        lost. starter: of the servers, which all attempts use."""
        attempts = Attempts(self.placement.attempts)
        while True:
            step = attempts.begin(checkpoint.steps(run)[-1] if resume else 0)
            try:
                for turn in self.turns(run, resume, message, starter):
                    step = int(turn.metrics["step"])
                    yield turn
                return
            except Exception as error:
                lost = loss_behind(error)
                if lost is None or not attempts.worthwhile(lost, step):
                    raise lost or error from error.__cause__
            message(f"{lost} (its output: {run / 'logs'}); the run continues")
            resumes = resuming.resume_if_begun(run.parent, run.name, self.steps, message)
            if resumes is None:  # the last checkpoint was complete
                return
            if not resumes:
                self.open(name=run.name)
            resume = resumes

    @deferred_interrupts_in_each
    def turns(
        self,
        run: Path,
        resume: bool = False,
        message: Message = print,
        starter: Starter | None = None,
    ) -> Iterator[Turn]:
        """Runs the ring and yields after each step, so that a notebook can look or stop there.
        starter: of the servers, by default of this ring's own."""
        with self.parts(run, resume, message, starter) as parts:
            rollout, models, clock = parts.rollout, parts.models, parts.recorder
            rollout.publish(models.policy, parts.start.step)
            if not resume:
                row = {"step": 0, **self.evaluate(parts)}
                parts.metrics.write(row)
                yield Turn(row)

            for step in range(parts.start.step + 1, self.steps + 1):
                clock.begin(step)
                groups = rollout.take()
                clock.waited()
                with waiting("the run", f"the trainer's step {step}"):
                    packed = pack_minibatches(
                        groups,
                        algorithm=self.algorithm,
                        row_length=self.row_length,
                        minibatches=self.minibatches,
                        share_prompts=self.share_prompts,
                    )
                    batches = fill_batches(
                        packed,
                        algorithm=self.algorithm,
                        models=models,
                        version=step - 1,
                        own_pass=self.own_pass,
                    )
                    clock.prepared()
                    kept = parts.collector(batches, packed)
                    learned = self.learn(batches, models, parts.loss, kept.collect)
                clock.check_finite(learned, self.minibatches, groups, run)
                clock.updated()
                published = rollout.publish(models.policy, step, wait=self.waits(step))
                clock.published()

                row = clock.row(groups, batches, learned, published)
                row |= rollout.balance(row["trainer_idle"], row["rollout_idle"])
                if self.is_due(self.evaluate_every, step):
                    row |= self.evaluate(parts)
                parts.record(row)
                completed = complete(batches, self.algorithm, kept.outputs)
                parts.record_tokens(step, completed, packed, kept.outputs)
                if self.is_due(self.checkpoint_every, step):
                    parts.save(step)
                if self.export_every and self.is_due(self.export_every, step):
                    parts.export(step)
                yield Turn(row, groups, completed)

    def learn(
        self,
        batches: Sequence[Batch],
        models: Models,
        loss: Loss,
        updated: Callable[[int], None] = lambda _: None,
    ) -> dict[str, float]:
        """Runs one optimizer step per batch (policy, then critic) and returns the metrics averaged
        over batches. updated: called with a batch's index after its step of the policy.

        skipped and critic/skipped count the optimizer steps that changed nothing because their loss
        or gradient was not finite.
        """
        rows = []
        for index, batch in enumerate(batches):
            raise_if_interrupted()
            row = models.policy.update(batch, loss)
            updated(index)
            if models.critic is not None and self.algorithm.value_loss is not None:
                learned = models.critic.update(batch, self.algorithm.value_loss)
                row |= {f"critic/{name}": x for name, x in learned.items()} | explained_variance(
                    batch
                )
            rows.append(row)
        means = {}
        for name in rows[0] | rows[-1]:
            values = [row[name] for row in rows if name in row]
            counts = name in ("skipped", "critic/skipped")
            means[name] = sum(values) if counts else float(np.mean(values))
            if name.endswith("ranks/slowest"):  # the number of a process has no mean
                means[name] = values[-1]
        # Only the first batch was scored by the policy from before the step.
        means = {name: x for name, x in means.items() if not name.startswith(mismatch.PREFIX)}
        return means | mismatch.metrics_by_lag(rows[0])

    def evaluate(self, parts: Parts) -> dict[str, float]:
        """Returns what the newest published weights score: greedy answers to the held-out tasks
        (without an engine, the loss on their demonstrations), and the named sets."""
        generates = self.engine != "none"
        of = parts.rollout, parts.models, self.algorithm, self.row_length, generates
        row = held_out_metrics(self.held_out, *of)
        return row | set_metrics(self.evaluations, parts.evaluations, parts.rollout)

    def waits(self, step: int) -> bool:
        """True if the trainer waits until the engine has a step's weights, instead of going on as
        soon as they are staged: the last ones, and where publications have fixed places."""
        return step == self.steps or self.deterministic

    def is_due(self, every: int, step: int) -> bool:
        """True at the last step and at multiples of `every` (0: never before the last)."""
        return step == self.steps or (every > 0 and step % every == 0)

    def plan(self) -> None:
        """Builds what needs no process and no device, to see that dataset, workflow and model are
        there."""
        if not callable(self.trainer.model.path):
            tokenizer = load_tokenizer(resolve(self.trainer.model.path))
            self.workflow.computed_by(self.backend).setup(tokenizer)
