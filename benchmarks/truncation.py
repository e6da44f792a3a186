"""The cost of truncated sampling in training: an optimizer step and the log-probabilities of the same batch, with the tokens
that sampling kept and without.

    python benchmarks/truncation.py

Claim: a step costs at most 1.10 × that of whole distributions, whatever the size of the kept sets, on either backend.

The work: GRPO steps of the random Qwen3 of benchmarks/update.py (26M parameters, vocabulary 32,000, tied, fp32) on
`--sequences` sequences of which three quarters are sampled. The sizes of the kept sets are drawn at random: up to 50 (as
top-p 0.9 and top-k 50 leave, mean about 20), or log-uniform up to half the vocabulary (top-p 0.99 of a flat distribution).

Method: in one process, compiled and warmed up, then alternately, `--rounds` times. The table shows the least seconds of the
rounds, their ratio to the least of whole distributions (other work on the machine only adds), and the median of the ratios of
neighbouring measurements. Bytes are of `Batch.kept` and of the journal's entry, per sampled token.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from update import CONFIG, ROW_LENGTH, draw_sequences, write_random

from areal_x.algorithms.recipes import grpo
from areal_x.algorithms.weighting import token_mean
from areal_x.batching.packing import pack
from areal_x.protocols.backends import create_trainer
from areal_x.protocols.trainer import Trainer
from areal_x.protocols.trainer_config import ModelConfig, TrainerConfig
from areal_x.run.group_bytes import encode
from areal_x.types import Batch, Episode, Group, Kept, Scored, Task, Trajectory

VOCABULARY = CONFIG["vocab_size"]


def top_k_sizes(rng: np.random.Generator, count: int) -> np.ndarray:
    return np.minimum(1 + rng.exponential(25, count).astype(int), 50)


def wide_sizes(rng: np.random.Generator, count: int) -> np.ndarray:
    return np.exp(rng.uniform(0, np.log(VOCABULARY / 2), count)).astype(int)


KINDS: dict[str, Callable[[np.random.Generator, int], np.ndarray] | None] = {
    "whole": None,
    "top-p 0.9, top-k 50": top_k_sizes,
    "top-p 0.99": wide_sizes,
}


def with_kept(whole: Trajectory, sizes: Callable[[np.random.Generator, int], np.ndarray], seed: int) -> Trajectory:
    """The trajectory with random sets of kept tokens of these sizes, each with the sampled one."""
    rng, counts = np.random.default_rng(seed), np.zeros(len(whole), np.int32)
    counts[whole.mask] = sizes(rng, int(whole.mask.sum()))
    ids = []
    for token, count in zip(whole.tokens.tolist(), counts.tolist(), strict=True):
        if count:
            found = rng.choice(VOCABULARY, count, replace=False)
            found[0] = found[0] if token in found else token
            ids.append(np.sort(found))
    return replace(whole, kept=Kept(counts, np.concatenate(ids).astype(np.int32)))


def batch_of(made: list[Trajectory]) -> Batch:
    packed = pack(made, ROW_LENGTH)
    batch = packed.batch
    advantages = packed.spread(np.random.default_rng(1).normal(size=len(made)).astype(np.float32))
    weights = np.asarray(token_mean(batch.mask, batch.segment_ids), np.float32)
    return batch.replace(
        advantages=advantages, weights=weights, proximal_logp=batch.behavior_logp, ages=np.zeros_like(batch.tokens)
    )


def seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measured(trainer: Trainer, batches: dict[str, Batch], rounds: int) -> dict[str, dict[str, dict[str, float]]]:
    """Seconds and ratios to "whole" of each kind of batch."""
    loss = grpo().loss
    works: dict[str, Callable[[Batch], Any]] = {
        "step": lambda batch: trainer.update(batch, loss),
        "log-probabilities": trainer.logprobs,
    }
    found: dict[str, dict[str, list[float]]] = {work: {kind: [] for kind in batches} for work in works}
    for number in range(rounds + 1):
        for work, run in works.items():
            for kind, batch in batches.items():
                took = seconds(lambda run=run, batch=batch: run(batch))  # type: ignore[misc]
                if number:  # the first compiles
                    found[work][kind].append(took)
        print(f"round {number} of {rounds} is over", file=sys.stderr)
    results: dict[str, dict[str, dict[str, float]]] = {}
    for work, of_kinds in found.items():
        whole = of_kinds["whole"]
        results[work] = {
            kind: {
                "least": min(took),
                "ratio": min(took) / min(whole),
                "median ratio": statistics.median(mine / theirs for mine, theirs in zip(took, whole, strict=True)),
            }
            for kind, took in of_kinds.items()
        }
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", nargs="*", default=["jax", "torch"])
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--mean-length", type=int, default=250)
    parser.add_argument("--layers", type=int, default=CONFIG["num_hidden_layers"])
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    made = []
    for tokens in draw_sequences(VOCABULARY, args.sequences, args.mean_length):
        ids, prompt = np.array(tokens, np.int32), max(len(tokens) // 4, 1)
        zeros = np.zeros(len(ids) - prompt, np.float32)
        made.append(Trajectory.from_completion(ids[:prompt], ids[prompt:], zeros - 10, zeros.astype(np.int32), 1.0))
    of_kinds = {
        kind: made if sizes is None else [with_kept(t, sizes, seed) for seed, t in enumerate(made)]
        for kind, sizes in KINDS.items()
    }
    batches = {kind: batch_of(made) for kind, made in of_kinds.items()}
    sampled = sum(int(t.mask.sum()) for t in made)
    about = {}
    for kind, own in of_kinds.items():
        journal = len(encode(Group(Task("", ""), 0, 0, (Episode(Scored(1.0), tuple(own)),))))
        about[kind] = {
            "mean size": sum(len(t.kept.ids) for t in own if t.kept is not None) / sampled,
            "batch bytes": 0 if batches[kind].kept is None else batches[kind].kept.nbytes / sampled,
            "journal bytes": journal / sampled,
        }
    results = {}
    with tempfile.TemporaryDirectory() as directory:
        path = write_random(Path(directory) / "model", CONFIG | {"num_hidden_layers": args.layers})
        for backend in args.backends:
            trainer = create_trainer(backend, TrainerConfig(model=ModelConfig(str(path)), row_length=ROW_LENGTH))
            results[backend] = measured(trainer, batches, args.rounds)
    print(f"{sampled} sampled tokens of {sum(map(len, made))}, in {batches['whole'].shape[0]} rows")
    print(f"{'':22} {'kept':>8} {'batch B/token':>14} {'journal B/token':>16}")
    for kind, row in about.items():
        print(f"{kind:22} {row['mean size']:8.1f} {row['batch bytes']:14.0f} {row['journal bytes']:16.1f}")
    for backend, works in results.items():
        for work, kinds in works.items():
            for kind, row in kinds.items():
                figures = f"{row['least']:8.3f} s {row['ratio']:6.3f} × (median {row['median ratio']:.3f})"
                print(f"{backend:6} {work:18} {kind:22} {figures}")
    print(json.dumps({"benchmark": "truncation", "about": about, "results": results}))


if __name__ == "__main__":
    main()
