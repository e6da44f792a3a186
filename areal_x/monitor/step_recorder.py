"""Clocks the phases of each step of the ring, and makes the step's row of metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from areal_x.batching.batch import staleness
from areal_x.errors import UserError
from areal_x.monitor.profiler import Profiler
from areal_x.monitor.step_metrics import (
    Stopwatch,
    describe_groups,
    save_groups,
    saved_tokens,
    throughput,
)
from areal_x.rollout.rollout import Published
from areal_x.rollout.runner import RolloutStats
from areal_x.runtime import cores, timeline
from areal_x.types import Batch, Group

PATIENCE = 3  # steps in a row that may be skipped because their loss or gradient is not finite


class StepRecorder:
    """Times the phases of a run's steps, and makes a row of metrics of each.

    stats: returns the rollout's counts so far. spans: the timeline's records. threads: chooses the
    number of threads that compute a step. profiler: profiles some steps. step_seconds: duration of
    the last step, 0 before the first.
    """

    def __init__(
        self,
        stats: Callable[[], RolloutStats],
        spans: timeline.Recorder,
        threads: cores.Threads,
        share_prompts: bool,
        profiler: Profiler,
    ) -> None:
        self.step_seconds = 0.0
        self._stats, self._spans, self._threads = stats, spans, threads
        self._share_prompts, self._profiler = share_prompts, profiler
        self._skipped = 0  # steps in a row

    def begin(self, step: int) -> None:
        """Starts the clock of a step."""
        self._step = step
        self._profiler.begin(step)
        self._watch = Stopwatch(step)
        self._before = self._stats()

    def waited(self) -> None:
        """The groups of the step have arrived; sets the threads that compute it."""
        self._watch.lap("wait_seconds")
        waited = self._watch.total / self.step_seconds if self.step_seconds else 0.0
        self._chosen = self._threads.before(waited)

    def prepared(self) -> None:
        """The batches are packed, with log-probabilities and advantages."""
        self._watch.lap("logprob_seconds")

    def updated(self) -> None:
        """The optimizer steps are taken."""
        self._watch.lap("update_seconds")

    def published(self) -> None:
        """The engine has the new weights; the step is over."""
        self._watch.lap("publish_seconds")
        self.step_seconds = self._watch.total
        self._profiler.end()

    def row(
        self,
        groups: Sequence[Group],
        batches: Sequence[Batch],
        learned: Mapping[str, float],
        published: Published,
    ) -> dict[str, float]:
        """Returns the step's metrics (docs/metrics.md)."""
        watch = self._watch
        row: dict[str, float] = {
            "step": self._step,
            **describe_groups(groups, staleness(groups, self._step - 1), batches),
            **learned,
            **watch.laps,
            "seconds": watch.total,
        }
        if self._chosen is not None:
            row["threads"] = self._chosen
            computing = row["logprob_seconds"] + row["update_seconds"]
            self._threads.after(computing, row["packed_tokens"])
        if self._share_prompts:
            row["saved_tokens"] = saved_tokens(groups, batches)
        row |= throughput(row, self._before, self._stats(), published)
        row["trainer_idle"] = row["wait_seconds"] / watch.total
        row["rollout_idle"] = self._spans.idle_share(timeline.GENERATION, watch.began, watch.last)
        return row

    def check_finite(
        self, learned: Mapping[str, float], optimizer_steps: int, groups: Sequence[Group], run: Path
    ) -> None:
        """Raises: UserError after PATIENCE steps in a row whose optimizer steps were all skipped,
        and writes the groups of the last into the run's directory."""
        lost = max(learned["skipped"], learned.get("critic/skipped", 0)) == optimizer_steps
        self._skipped = self._skipped + 1 if lost else 0
        if self._skipped == PATIENCE:
            file = save_groups(run / "not_finite.jsonl", groups)
            raise UserError(
                f"{PATIENCE} steps in a row had a loss or gradient that is not finite: see the last"
                f" in {file}"
            )
