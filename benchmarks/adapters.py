"""Throughput of adapters of several ranks that train at once, compared with one after the other, on a CPU.

    python benchmarks/adapters.py --backend torch
    python benchmarks/adapters.py --backend torch --turns      # and as whole models take turns in a trainer

Claim: 8 adapters of ranks 4 to 64 at once train on at least 2.8 times the tokens per second of one after the other.

The work: the Qwen3 of benchmarks/update.py (26M parameters, fp32) and the steps of 8 clients of `areal-x tinker` (TrainerHost,
without HTTP): each a forward_backward of `--sequences` sequences of `--tokens` tokens, with the losses of the API in turn, and
an optim_step.

* at once: the clients' requests wait together and go through one pass
* one after the other: each client's forward_backward and optim_step, then the next one's, in the same bank
* in turns (`--turns`): one after the other in a trainer that has one adapter at a time, the others on disk, with a second
  forward pass in each step: what the server does with whole models

Method: warmed up (with JAX compiled), then alternating rounds; medians of `--rounds`, of all clients together. The second ratio
is of the least processor seconds of all threads, which other work on the machine changes less. Memory: the adapters with
gradients and moments (`AdapterBank.nbytes`), and the process.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from shapes import DENSE
from update import write_random

from areal_x.protocols.trainer_config import ModelConfig, OptimizerConfig, TrainerConfig
from areal_x.tinker.data import Datum
from areal_x.tinker.host import TrainerHost, Work
from areal_x.tinker.losses import LOSSES
from areal_x.tinker.models import Model, Shape

RANKS = (4, 8, 8, 16, 16, 32, 32, 64)
STEP = OptimizerConfig(learning_rate=1e-4, beta2=0.95, eps=1e-12, weight_decay=0.0, clip_norm=0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("torch", "jax"), default="torch")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--tokens", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--turns", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        config = TrainerConfig(model=ModelConfig(path=str(write_random(place / "model", DENSE))), row_length=1024)
        host = TrainerHost(args.backend, config)
        print(f"{args.backend}: 8 adapters of ranks {', '.join(map(str, RANKS))}, tokens per second (least to most)\n")
        titles = "sequences × tokens of each", "at once", "one after the other", "ratio", "of processor seconds", "in turns"
        print("| " + " | ".join(titles) + " |\n" + "|---" * len(titles) + "|")
        for sequences in args.sequences:
            for tokens in args.tokens:
                measure(host, place, sequences, tokens, args.rounds, args.turns)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        assert host._bank is not None
        print(f"\nadapters with moments: {host._bank.nbytes() / 1e6:.0f} MB; the process at most: {peak:.0f} MiB")


def measure(host: TrainerHost, place: Path, sequences: int, tokens: int, rounds: int, turns: bool) -> None:
    random = np.random.default_rng(0)

    def models(of: str) -> list[Model]:
        return [Model(f"{i}", Shape(rank), place / of / str(i), seed=i) for i, rank in enumerate(RANKS)]

    def works(of: list[Model]) -> list[Work]:
        names = [name for name in LOSSES if name not in ("gspo", "stable_reinforce")]
        return [
            Work(model, [datum(names[i % len(names)]) for _ in range(sequences)], names[i % len(names)], {}, True)
            for i, model in enumerate(of)
        ]

    def datum(loss: str) -> Datum:
        ids = random.integers(0, host.vocabulary, tokens + 1).astype(np.int32)
        inputs = {name: random.normal(size=(tokens, 1)).astype(np.float32) for name in LOSSES[loss].inputs}
        return Datum(ids[:-1], ids[1:, None], inputs)

    def at_once(given: list[Work]) -> None:
        host.advance([(work, host.pass_tokens) for work in given])
        for work in given:
            assert work.error is None, work.error
            assert work.done
            host.step(work.model, STEP)

    def one_by_one(given: list[Work]) -> None:
        for work in given:
            host.forward(work.model, work.datums, work.loss, {}, True)
            host.step(work.model, STEP)

    def in_turns(given: list[Work]) -> None:
        for work in given:
            host._turns.forward(work.model, work.datums, work.loss, {}, True)
            host._turns.step(work.model, STEP)

    own, others = models("at once"), models("turns")
    ways: dict[str, tuple[Callable[[list[Work]], None], list[Model]]] = {
        "at once": (at_once, own),
        "one by one": (one_by_one, own),
    }
    if turns:
        ways["turns"] = in_turns, others
    took: dict[str, list[float]] = {name: [] for name in ways}
    worked: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 2):
        for name, (way, of) in ways.items():
            given = works(of)
            begun, before = time.perf_counter(), time.process_time()
            way(given)
            if number >= 2:
                took[name].append(time.perf_counter() - begun)
                worked[name].append(time.process_time() - before)
        print(f"{sequences} × {tokens}: round {number}", file=sys.stderr)
    trained = len(RANKS) * sequences * tokens
    cells = [f"{trained / statistics.median(x):.0f} ({trained / max(x):.0f}–{trained / min(x):.0f})" for x in took.values()]
    ratio = statistics.median(took["one by one"]) / statistics.median(took["at once"])
    least = {name: min(x) for name, x in worked.items()}
    cells[2:2] = [f"{ratio:.2f}", f"{least['one by one'] / least['at once']:.2f} ({least['at once']:.2f} s)"]
    print(f"| {sequences} × {tokens} | " + " | ".join(cells) + (" |" if turns else " | – |"), flush=True)


if __name__ == "__main__":
    main()
