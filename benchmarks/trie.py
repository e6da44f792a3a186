"""A training step on agents' trajectories with and without `train.share_prompts`.

    python -m benchmarks.trie
    python -m benchmarks.trie --backends torch --kinds calls

Claim: of 8 attempts of 6 turns, whose calls are trajectories of their own, sharing leaves at most a third of the tokens and
half the time of a step, and the gradient is the same to rounding.

Method: the calls of 8 attempts, each with its whole history as its prompt, made into episodes by `areal_x.agents.chat.credit`
as a workflow does. Three kinds of agents:

    calls      every call is exported as a trajectory (credit.export = 'individual')
    reasoning  the template leaves a reply's reasoning out of later prompts, so that each call starts a trajectory
    merged     each prompt continues the tokens before it: an attempt is one trajectory, and only the task is shared

One GRPO update of the benchmarks' model in fp32, in rows of 4,096 tokens. Both packings are warmed up, then stepped alternately
in one process; a ratio is that of the least seconds. The gradient is read off a step of an optimizer that adds a multiple of it
to the weights; shown is the largest deviation of any tensor's, relative to its norm. Tokens are those in rows; JAX computes
whole rows, padding included, and torch the tokens only.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from areal_x.agents.chat.calls import Call
from areal_x.agents.chat.credit import Credit, episode_of_calls
from areal_x.algorithms.recipes import grpo
from areal_x.batching.batch import Models, make_batches
from areal_x.protocols.engine import Completion
from areal_x.trainer import ModelConfig, OptimizerConfig, Trainer, TrainerConfig, create_trainer
from areal_x.types import Batch, Episode, Group, Scored, Task
from benchmarks.model import VOCABULARY, write_model
from benchmarks.shared_prompts import seconds_of

ROW, ATTEMPTS, TURNS = 4096, 8, 6
PROMPT, RESULT = 512, (32, 160)  # tokens of the task with its instructions; of what a tool returns
REPLY, REASONING = {"calls": (32, 96), "reasoning": (16, 48), "merged": (32, 96)}, (96, 192)
ALGORITHM = grpo()
# Adds -1e4 times the gradient: with so large an eps, AdamW's denominator is eps.
STEEPEST = OptimizerConfig(learning_rate=1e10, beta1=0.0, eps=1e6, weight_decay=0.0, clip_norm=0.0)


def group_of(kind: str) -> Group:
    rng = np.random.default_rng(0)

    def drawn(low: int, high: int) -> np.ndarray:
        return rng.integers(0, VOCABULARY, int(rng.integers(low, high + 1))).astype(np.int32)

    task = drawn(PROMPT, PROMPT)

    def episode() -> Episode:
        history, calls = task, []
        for turn in range(TURNS):
            reasoning, reply = drawn(*REASONING)[: None if kind == "reasoning" else 0], drawn(*REPLY[kind])
            tokens = np.concatenate([reasoning, reply])
            logprobs, versions = np.full(len(tokens), -4.6, np.float32), np.zeros(len(tokens), np.int32)
            calls.append(Call(str(turn), history, Completion(tokens, logprobs, versions, "stop")))
            history = np.concatenate([history, reply, drawn(*RESULT)])
        export: Any = "individual" if kind == "calls" else "merged"
        return episode_of_calls(calls, Scored(float(rng.random())), Credit(export=export))

    return Group(Task("0", ""), 0, 0, tuple(episode() for _ in range(ATTEMPTS)))


def trainer_of(backend: str, directory: Path, **changes: Any) -> Trainer:
    return create_trainer(
        backend, TrainerConfig(model=ModelConfig(str(directory)), micro_batch_rows=1, share_prompts=True, **changes)
    )


def gradient_of(backend: str, directory: Path, batch: Batch) -> dict[str, np.ndarray]:
    trainer = trainer_of(backend, directory, optimizer=STEEPEST)
    before = {name: x.copy() for name, x in trainer.weights()}
    trainer.update(batch, ALGORITHM.loss)
    return {name: (x - before[name]).astype(np.float64) for name, x in trainer.weights()}


def measure(backend: str, kind: str, directory: Path, rounds: int) -> dict[str, Any]:
    trainer = trainer_of(backend, directory)
    pack = partial(make_batches, [group_of(kind)], ALGORITHM, ROW, Models(trainer))
    batches = [batch for shares in (False, True) for batch in pack(share_prompts=shares)]
    alone, shared = map(min, seconds_of(trainer, batches, rounds))
    whole, of_shared = (gradient_of(backend, directory, batch) for batch in batches)
    return {
        "backend": backend,
        "kind": kind,
        "tokens": [int(np.count_nonzero(batch.segment_ids)) for batch in batches],
        "rows": [len(batch.tokens) for batch in batches],
        "trained": int(batches[0].mask.sum()),
        "seconds": [alone, shared],
        "ratio": alone / shared,
        "deviation": max(np.linalg.norm(of_shared[name] - x) / np.linalg.norm(x) for name, x in whole.items()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", nargs="+", default=["jax", "torch"])
    parser.add_argument("--kinds", nargs="+", default=list(REPLY), choices=list(REPLY))
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print("| backend | agents | tokens | shared | fewer | rows | shared | step, s | shared | faster | gradients deviate by |")
    print("|---|---|---|---|---|---|---|---|---|---|---|", flush=True)
    results = []
    with TemporaryDirectory() as folder:
        directory = write_model(Path(folder))
        config = directory / "config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": ROW}))
        for backend, kind in product(args.backends, args.kinds):
            found = measure(backend, kind, directory, args.rounds)
            results.append(found)
            (tokens, fewer), (rows, fewer_rows), (seconds, shorter) = found["tokens"], found["rows"], found["seconds"]
            cells = (
                f"{tokens:,} | {fewer:,} | **{tokens / fewer:.1f} ×** | {rows} | {fewer_rows} | {seconds:.2f} | {shorter:.2f}"
            )
            print(f"| {backend} | {kind} | {cells} | **{found['ratio']:.1f} ×** | {found['deviation']:.1e} |", flush=True)
    print(json.dumps({"benchmark": "trie", "results": results}))


if __name__ == "__main__":
    main()
