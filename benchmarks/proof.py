"""The cost of the proofs of weights, and how often they are wrong.

    python -m benchmarks.proof cost [--proofs 7] [--steps 5]
    python -m benchmarks.proof alarms [--swaps 10000] [--family qwen3]

cost. Claim: the proofs take at most 1 % of a step. The model and the step are those of benchmarks/update.py: a tied Qwen3 of
26M parameters in fp32 and a supervised step of about 4,000 tokens with the torch backend, without the generation that a step
of reinforcement learning waits for. The worker is that of vLLM's engine in this process. Printed, as medians: seconds of a
step; of a proof in full and of a sample, in the worker, while generation is paused; of the claims, which the thread that writes
the weights computes; and shares of a step, with vllm.prove_every = 100.

alarms. Claim: no alarm in 10,000 swaps. A tiny random model of tests/engines/families.py; before each swap every number changes
a little. Each swap is a real one through vLLM's loaders, proved as a run does it: in full every hundredth time. In every
fiftieth, a random tensor stays stale: these are counted as found or missed, and do not count as swaps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.engines import families

if __name__ == "__main__":
    os.environ.update(families.SETTINGS | {"OMP_NUM_THREADS": "2"})

import numpy as np

from areal_x.algorithms import losses
from areal_x.engines.fleet.proof.claims import Claiming, Claims
from areal_x.hf.model_dir import read_tensors
from areal_x.protocols.backends import create_trainer
from areal_x.protocols.trainer_config import ModelConfig, TrainerConfig

EVERY, FAULTY = 100, 50


def claims_of(tensors: dict[str, np.ndarray], version: int, full: bool) -> Claims:
    claiming = Claiming(version, full)
    for name, tensor in tensors.items():
        claiming.add(name, tensor)
    return claiming.done()


def cost(scratch: Path, proofs: int, steps: int) -> dict[str, float]:
    sys.path.insert(0, str(Path(__file__).parent))
    from update import CONFIG, draw_sequences, packed, write_random

    model = write_random(scratch / "model", CONFIG)
    batch = packed(draw_sequences(CONFIG["vocab_size"], 16, 250))
    trainer = create_trainer("torch", TrainerConfig(ModelConfig(str(model)), row_length=1024))
    served = families.Served(model)
    tensors = dict(read_tensors(model))
    seconds: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = work()
        seconds.setdefault(name, []).append(time.perf_counter() - began)
        return result

    for version in range(max(proofs, steps) + 1):  # the first ones warm up
        if version <= steps:
            timed("step", lambda: trainer.update(batch, losses.sft))
        for name, full in (("sample", False), ("full", True)):
            claims = timed(f"claims, {name}", lambda version=version, full=full: claims_of(tensors, version, full))
            verdict = timed(f"proof, {name}", lambda claims=claims: served.verdict(claims))
            assert not verdict.differences
            assert not verdict.unproved
    found = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    mean = (found["proof, full"] + (EVERY - 1) * found["proof, sample"]) / EVERY
    shares = {"sample": found["proof, sample"], "full": found["proof, full"], f"every {EVERY}": mean}
    return found | {f"share of a step, {name}": value / found["step"] for name, value in shares.items()}


def alarms(family: str, scratch: Path, swaps: int) -> dict[str, int]:
    import torch

    old, _, _ = families.prepare(family, scratch)
    served = families.Served(old)
    served.call("init_weight_transfer_engine", {"staging_root": str(scratch)})
    rng = np.random.default_rng(0)
    tensors = dict(read_tensors(old))
    counts = {"swaps": 0, "false alarms": 0, "stale tensors": 0, "found": 0}
    version = 0
    while counts["swaps"] < swaps:
        before = tensors
        tensors = {name: (x * (1 + 1e-4 * rng.standard_normal(x.shape))).astype(x.dtype) for name, x in before.items()}
        delivered, stale = dict(tensors), None
        if version % FAULTY == FAULTY - 1:
            stale = sorted(tensors)[rng.integers(len(tensors))]
            delivered[stale] = before[stale]
        with families.staged(scratch, {name: torch.from_numpy(x) for name, x in delivered.items()}) as folder:
            served.swap(folder)
        verdict = served.verdict(claims_of(tensors, version, version % EVERY == 0))
        assert not verdict.unproved
        named = {words.split()[0] for words in verdict.differences}
        if stale is None:
            counts["swaps"] += 1
            counts["false alarms"] += bool(named)
        else:
            counts["stale tensors"] += 1
            counts["found"] += named == {stale}
        version += 1
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["cost", "alarms"])
    parser.add_argument("--proofs", type=int, default=7)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--swaps", type=int, default=10_000)
    parser.add_argument("--family", default="qwen3")
    options = parser.parse_args()
    families.only_once()
    results: dict[str, Any]
    with tempfile.TemporaryDirectory() as scratch:
        if options.part == "cost":
            results = cost(Path(scratch), options.proofs, options.steps)
        else:
            results = {"family": options.family, **alarms(options.family, Path(scratch), options.swaps)}
    for name, value in results.items():
        print(f"{name:28} {f'{value:.4f}' if isinstance(value, float) else value}")
    print(json.dumps({"benchmark": "proof", options.part: results}))


if __name__ == "__main__":
    main()
