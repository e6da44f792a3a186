"""A training step compared with TRL's and Tunix's on the same work: seconds per step, and our time by phase.

    python -m venv /tmp/trl && /tmp/trl/bin/pip install torch==2.13.0 trl==1.16.0
    python -m venv /tmp/tunix && /tmp/tunix/bin/pip install google-tunix==0.1.7
    python benchmarks/step.py --trl-python /tmp/trl/bin/python --tunix-python /tmp/tunix/bin/python

Claim: synchronously a step takes at most half the time of the faster of the two, asynchronously less.

The work: GRPO of a random Qwen3 of 0.6M parameters (benchmarks/model.py) in fp32; a step is 8 prompts of 12 to 20 tokens, 8
samples of each, exactly 64 new tokens per sample (no end token can occur), a reward that counts digits, one AdamW update with
clipping. On-policy, without a reference model, without checkpoints. All have the same prompts and all cores.

Method: one process each (benchmarks/peers), compiled and warmed up, then alternating, `--rounds` times `--steps` steps; while
one works the others are stopped. A value is the mean of a round's steps; the table shows median, minimum and maximum of the
rounds. An asynchronous run is stopped and continued in mid-flight like any other, so it gains nothing while others work. The
phases of our step are medians over all steps, from metrics.jsonl; in an asynchronous run the cores generate for later steps in
every phase.

The peers' settings are in their files. Both sample in the training process, on the trainer's weights, like our embedded engine.
Other work on the machine slows TRL most (OpenMP threads spin while one of them waits for a core): measure on an idle one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from model import write_model, write_prompts
from peers import wire
from peers.wire import Worker

PEERS = Path(__file__).parent / "peers"
TRAINED_TOKENS = 64 * 64


def main() -> None:
    args = parse_arguments()
    with tempfile.TemporaryDirectory() as directory, ExitStack() as running:
        workers = start(args, Path(directory), running)
        rounds: dict[str, list[dict[str, Any]]] = {worker.name: [] for worker in workers}
        for worker in workers:
            worker.ask(steps=args.warmup)
            print(f"{worker.name} is warmed up", file=sys.stderr)
        for number in range(args.rounds):
            for worker in workers:
                rounds[worker.name].append(worker.ask(steps=args.steps))
            print(f"round {number + 1} of {args.rounds} is over", file=sys.stderr)
    results = {name: summarise(answers) for name, answers in rounds.items()}
    show(results)
    print(json.dumps({"benchmark": "step", "steps": args.steps, "rounds": args.rounds, "results": results}))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", help="the python of an environment with TRL; without it TRL is left out")
    parser.add_argument("--tunix-python", help="the python of an environment with Tunix; without it Tunix is left out")
    parser.add_argument(
        "--ours", nargs="*", default=["jax:0", "jax:2", "torch:0", "torch:2"], help="backend:max_staleness, each a process"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=10, help="steps a round")
    parser.add_argument("--warmup", type=int, default=8, help="steps before the first round, compilation among them")
    return parser.parse_args()


def start(args: argparse.Namespace, directory: Path, running: ExitStack) -> list[Worker]:
    """Starts the selected workers."""
    model = str(write_model(directory / "model"))
    prompts = str(write_prompts(directory / "prompts.json", np.random.default_rng(0).integers(12, 21, 512)))
    commands = {
        f"ours {ours}": [sys.executable, str(PEERS / "areal_x_grpo.py"), model, prompts, *ours.split(":")] for ours in args.ours
    }
    for name, python in (("trl", args.trl_python), ("tunix", args.tunix_python)):
        if python:
            commands[name] = [python, str(PEERS / f"{name}_grpo.py"), model, prompts]
    return wire.start(commands, directory, running)


def summarise(answers: list[dict[str, Any]]) -> dict[str, Any]:
    means = [statistics.fmean(answer["seconds"]) for answer in answers]
    median = statistics.median(means)
    result = {"median": median, "min": min(means), "max": max(means), "tokens_per_second": TRAINED_TOKENS / median}
    if "phases" in answers[0]:
        phases = answers[0]["phases"]
        result["phases"] = {p: statistics.median(s for answer in answers for s in answer["phases"][p]) for p in phases}
    return result | {"versions": answers[0]["versions"]}


def show(results: dict[str, dict[str, Any]]) -> None:
    fastest = min((r["median"] for name, r in results.items() if not name.startswith("ours")), default=None)
    print(f"{'':14} {'s/step':>8} {'least':>8} {'largest':>8} {'trained tok/s':>14} {'× fastest peer':>15}")
    for name, r in results.items():
        faster = f"{fastest / r['median']:15.2f}" if fastest else f"{'-':>15}"
        print(f"{name:14} {r['median']:8.3f} {r['min']:8.3f} {r['max']:8.3f} {r['tokens_per_second']:14,.0f} {faster}")
    print()
    ours = {name: r["phases"] for name, r in results.items() if "phases" in r}
    if ours:
        print(f"{'ms a step':14} " + " ".join(f"{phase.removesuffix('_seconds'):>8}" for phase in next(iter(ours.values()))))
    for name, phases in ours.items():
        print(f"{name:14} " + " ".join(f"{1000 * seconds:8.1f}" for seconds in phases.values()))
    print()
    for name, r in results.items():
        print(f"{name}: " + ", ".join(f"{package} {version}" for package, version in r["versions"].items()))


if __name__ == "__main__":
    main()
