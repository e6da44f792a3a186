"""What it costs a step to record its tokens for the lab: advantages, the trainer's log-probabilities, entropies.

    python benchmarks/token_records.py [--rounds N] [--backend torch] [--only demo | model | entropy] [--minibatches N]
        [--processes N]

Claim: at the default journal.token_share, less than 0.5 % of a step.

Three parts, each of which compares within one process:

* demo: the arithmetic example, all of its ring, at the default share and with all groups. Measured is what the ring spends
  (`OutputCollector.collect`, `Parts.record_tokens`: wall clock and this thread's CPU) and what the journal's thread spends on
  encoding (CPU), as shares of the steps' seconds. With `--minibatches`, a step makes several optimizer steps; with
  `--processes`, so many processes on Ray train the model, and send what they kept to the ring's.
* model: the random Qwen3 of benchmarks/update.py (26M parameters), a step of GRPO on `--sequences` sequences, the same parts.
* entropy: the same step with and without journal.entropy, which makes the step compute them, alternately; the ratio of their
  least seconds and of their CPU seconds.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import gin
from own_pass import groups_of
from truncation import VOCABULARY
from update import CONFIG, ROW_LENGTH, draw_sequences, write_random

from areal_x.algorithms.recipes import grpo
from areal_x.batching.batch import Minibatch, Models, fill_batches, pack_minibatches
from areal_x.batching.step_outputs import OutputCollector, StepOutputs, complete
from areal_x.build import Parts
from areal_x.monitor.token_records import recorded_tickets, token_records
from areal_x.protocols.backends import create_trainer
from areal_x.protocols.trainer_config import ModelConfig, OptimizerConfig, TrainerConfig
from areal_x.run.journal import Journal
from areal_x.run.token_record import SHARE, TokenRecord
from areal_x.train import with_config
from areal_x.types import Batch

SHARES = (SHARE, 1.0)
MEAN_LENGTH = 250  # tokens of a sequence
CLOCKS = {"seconds": time.perf_counter, "CPU": time.process_time}


class Spent:
    """Adds up what calls of functions take."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.wall = self.cpu = 0.0

    def timing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **more: Any) -> Any:
            began = time.perf_counter(), time.thread_time()
            try:
                return function(*arguments, **more)
            finally:
                self.wall += time.perf_counter() - began[0]
                self.cpu += time.thread_time() - began[1]

        return timed


@contextmanager
def measured() -> Iterator[tuple[Spent, Spent]]:
    """Yields what the ring and the journal's thread spend on records in the body."""
    ring, thread = Spent(), Spent()
    of = (ring, OutputCollector, "collect"), (ring, Parts, "record_tokens"), (thread, TokenRecord, "encode")
    made = [(kind, name, getattr(kind, name)) for _, kind, name in of]
    for spent, kind, name in of:
        setattr(kind, name, spent.timing(getattr(kind, name)))
    try:
        yield ring, thread
    finally:
        for kind, name, function in made:
            setattr(kind, name, function)


def report(what: str, share: float, steps: int, seconds: float, ring: Spent, thread: Spent) -> None:
    each = 1000 / steps
    print(
        f"{what}, share {share:.4g}: steps of {1000 * seconds / steps:.0f} ms; the ring {each * ring.wall:.3f} ms"
        f" ({ring.wall / seconds:.3%}; CPU {ring.cpu / seconds:.3%}), the journal's thread {each * thread.cpu:.3f} ms"
        f" ({thread.cpu / seconds:.3%})",
        flush=True,
    )


def demo(rounds: int, backend: str, minibatches: int, processes: int) -> None:
    with measured() as (ring, thread):

        def work(_: Any) -> None:
            run = gin.get_configurable("train")()
            seconds, steps = 0.0, 0
            for turn in run.turns(run.open(), message=lambda _: None):
                if turn.metrics["step"] == 2:  # the first compiles
                    ring.clear()
                    thread.clear()
                    seconds, steps = 0.0, 0
                seconds, steps = seconds + turn.metrics.get("seconds", 0.0), steps + 1
            report("demo", run.journal.token_share, steps, seconds, ring, thread)

        for share in SHARES:
            with tempfile.TemporaryDirectory() as runs:
                bound = [f"train.backend = {backend!r}", f"train.steps = {rounds}", "train.evaluate_every = 0"]
                bound += [f"journal.token_share = {share}", f"train.runs = {runs!r}", "train.name = 'measured'"]
                bound += [f"train.minibatches = {minibatches}"]
                if processes > 1:
                    bound += ["train.cluster = 'ray'", f"mesh.processes = {processes}", f"mesh.fsdp = {processes}"]
                with_config(Path("examples/arithmetic/grpo.gin"), bound, work)


def model(rounds: int, backend: str, sequences: int, minibatches: int, folder: Path) -> None:
    step = stepper(backend, sequences, folder, entropy=False, minibatches=minibatches)
    with measured() as (ring, thread):
        for share in SHARES:
            (folder / f"run-{share}").mkdir()
            seconds, began = 0.0, 0.0
            with Journal(folder / f"run-{share}") as journal:
                record = ring.timing(lambda of, journal=journal, share=share: journal.trained(1, token_records(*of, share)))
                for number in range(rounds + 1):
                    if number == 1:  # the first compiles
                        ring.clear()
                        journal.flush()
                        thread.clear()
                        seconds = 0.0
                    began = time.perf_counter()
                    record(step(share))
                    seconds += time.perf_counter() - began
            report(f"26M, {sequences} sequences", share, rounds, seconds, ring, thread)


def entropy(rounds: int, backend: str, sequences: int, folder: Path) -> None:
    steps = {wanted: stepper(backend, sequences, folder, entropy=wanted, minibatches=1) for wanted in (False, True)}
    took: dict[str, dict[bool, list[float]]] = {clock: {False: [], True: []} for clock in CLOCKS}
    for number in range(rounds + 1):
        for wanted in (False, True)[:: 1 if number % 2 else -1]:
            began = {clock: read() for clock, read in CLOCKS.items()}
            steps[wanted](SHARE)
            for clock, read in CLOCKS.items():
                if number:
                    took[clock][wanted].append(read() - began[clock])
    ratios = ", ".join(f"{min(x[True]) / min(x[False]):.3f} × in {clock}" for clock, x in took.items())
    print(f"a step of 26M with journal.entropy: {ratios} ({1000 * min(took['seconds'][False]):.0f} ms without)")


def stepper(
    backend: str, sequences: int, folder: Path, entropy: bool, minibatches: int
) -> Callable[[float], tuple[Sequence[Batch], Sequence[Minibatch], Sequence[StepOutputs]]]:
    """Returns a step of GRPO: from the share of the groups that is recorded to its batches, their parts, and what was kept."""
    directory = folder / "model"
    if not directory.is_dir():
        write_random(directory, CONFIG)
    still = OptimizerConfig(learning_rate=1e-30, weight_decay=0.0)
    model = ModelConfig(str(directory))
    config = TrainerConfig(model=model, row_length=ROW_LENGTH, optimizer=still, micro_batch_rows=1, entropy=entropy)
    trainer = create_trainer(backend, config)
    algorithm, groups = grpo(), groups_of(draw_sequences(VOCABULARY, sequences, MEAN_LENGTH))
    loss, tickets = algorithm.step_loss(), itertools.count()

    def step(share: float) -> Any:
        of_step = [replace(group, ticket=next(tickets)) for group in groups]
        parts = pack_minibatches(of_step, algorithm, ROW_LENGTH, minibatches=minibatches)
        batches = fill_batches(parts, algorithm, Models(trainer), version=1)
        kept = OutputCollector(trainer, batches, [bool(recorded_tickets(part, share)) for part in parts])
        for index, batch in enumerate(batches):
            trainer.update(batch, loss)
            kept.collect(index)
        return complete(batches, algorithm, kept.outputs), parts, kept.outputs

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--backend", default="torch")
    parser.add_argument("--only", choices=("demo", "model", "entropy"))
    parser.add_argument("--minibatches", type=int, default=1)
    parser.add_argument("--processes", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if given.only in (None, "demo"):
            demo(2 * given.rounds, given.backend, given.minibatches, given.processes)
        if given.only in (None, "model"):
            model(given.rounds, given.backend, given.sequences, given.minibatches, Path(folder))
        if given.only in (None, "entropy"):
            entropy(given.rounds, given.backend, given.sequences, Path(folder))


if __name__ == "__main__":
    main()
