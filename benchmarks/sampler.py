"""Tokens per second of our samplers, a vLLM server, Hugging Face generate and Tunix's sampler on the same model and requests.

    python -m venv /tmp/tunix && /tmp/tunix/bin/pip install google-tunix==0.1.7
    python benchmarks/sampler.py --tunix-python /tmp/tunix/bin/python

Claim: at 64 requests of unequal lengths our JAX sampler reaches at least 4 times the tokens per second of the fastest of the
three others; our torch sampler at least those of Hugging Face generate, on which it is built.

The requests: a random Qwen3 of 0.6M parameters (benchmarks/model.py) in fp32, sampled at temperature 1. `unequal` is 64 prompts
of 8 to 32 tokens with 16 to 256 new tokens each, uniform; `equal` is 64 prompts of 16 with 256 each. No end token can occur, so
lengths are exact. Our samplers and the server return a log-probability for every token; generate and Tunix do not have to.

Method: one process each, compiled and warmed up, then alternating, `--rounds` times each case; while one works the others are
stopped (the vLLM server only sleeps). The table shows median, minimum and maximum tokens/s of the rounds.

generate and Tunix run a batch to its longest sequence; only requested tokens count. They may split the requests, sorted by
length, into 1, 2, 4 or 8 batches: all are tried in the warm-up, and the fastest is used. The server has one thread per core, or
`--vllm-threads`, and is driven by our client; its time includes HTTP.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from model import write_model, write_prompts
from peers.wire import Worker

PEERS = Path(__file__).parent / "peers"
REQUESTS = 64
CASES = ("unequal", "equal")
BATCHES = (1, 2, 4, 8)
THREE = ("vllm", "generate", "tunix")  # the peers of the claim


def main() -> None:
    args = parse_arguments()
    with tempfile.TemporaryDirectory() as directory, ExitStack() as running:
        workers, versions = start(args, Path(directory), running)
        batches = {}
        for worker in workers:
            batches |= {(worker.name, case): warm_up(worker, case) for case in CASES}
            print(f"{worker.name} is warmed up", file=sys.stderr)
        rates: dict[tuple[str, str], list[float]] = {key: [] for key in batches}
        for number in range(args.rounds):
            for case in CASES:
                for worker in workers:
                    rates[worker.name, case].append(rate(worker, case, batches[worker.name, case]))
            print(f"round {number + 1} of {args.rounds} is over", file=sys.stderr)
    results = [
        {
            "case": case,
            "name": name,
            "median": statistics.median(measured),
            "min": min(measured),
            "max": max(measured),
            "batches": batches[name, case],
        }
        for (name, case), measured in rates.items()
    ]
    for case in CASES:
        show(case, [result for result in results if result["case"] == case])
    for name, packages in versions.items():
        print(f"{name}: " + ", ".join(f"{package} {version}" for package, version in packages.items()))
    print(json.dumps({"benchmark": "sampler", "rounds": args.rounds, "results": results, "versions": versions}))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tunix-python", help="the python of an environment with Tunix; without it Tunix is left out")
    everyone = ["jax", "torch", "vllm", "generate"]
    parser.add_argument("--only", nargs="*", default=everyone, choices=everyone, help="whom to measure beside Tunix")
    parser.add_argument("--vllm-threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=7)
    return parser.parse_args()


def start(args: argparse.Namespace, directory: Path, running: ExitStack) -> tuple[list[Worker], dict[str, dict[str, str]]]:
    """Starts one process each, one after the other because loading is work too; returns them with their versions."""
    model, requests = str(write_model(directory / "model")), str(write_requests(directory))
    ours = [sys.executable, str(PEERS / "areal_x_sampler.py"), model, requests]
    commands = {
        "jax": [*ours, "jax"],
        "torch": [*ours, "torch"],
        "vllm": [*ours, "vllm", str(args.vllm_threads)],
        "generate": [sys.executable, str(PEERS / "hf_generate.py"), model, requests],
    }
    commands = {name: commands[name] for name in args.only}
    if args.tunix_python:
        commands["tunix"] = [args.tunix_python, str(PEERS / "tunix_sampler.py"), model, requests]
    workers, versions = [], {}
    for name, command in commands.items():
        worker = Worker(name, command, directory / f"{name}.log", frozen=name != "vllm")
        running.callback(worker.close)
        versions[name] = worker.ready()["versions"]
        workers.append(worker)
        print(f"{name} is ready", file=sys.stderr)
    return workers, versions


def write_requests(directory: Path) -> Path:
    rng = np.random.default_rng(0)
    lengths = {
        "unequal": (rng.integers(8, 33, REQUESTS), rng.integers(16, 257, REQUESTS)),
        "equal": (np.full(REQUESTS, 16), np.full(REQUESTS, 256)),
    }
    cases = {
        case: {
            "prompts": json.loads(write_prompts(directory / f"{case}.json", prompts).read_text()),
            "new_tokens": new_tokens.tolist(),
        }
        for case, (prompts, new_tokens) in lengths.items()
    }
    file = directory / "requests.json"
    file.write_text(json.dumps(cases))
    return file


def warm_up(worker: Worker, case: str) -> int:
    """Compiles everything; returns the best number of batches for this worker (ours and vLLM have no such choice)."""
    choices = BATCHES if worker.name in ("generate", "tunix") else (1,)
    fastest = {}
    for batches in choices:
        worker.ask(case=case, batches=batches)
        fastest[batches] = max(rate(worker, case, batches) for _ in range(2))
    return max(fastest, key=fastest.__getitem__)


def rate(worker: Worker, case: str, batches: int) -> float:
    """Requested tokens per second of one run of the case."""
    answer = worker.ask(case=case, batches=batches)
    return answer["tokens"] / answer["seconds"]


def show(case: str, results: list[dict[str, Any]]) -> None:
    by_name = {result["name"]: result for result in results}
    fastest = max((by_name[name]["median"] for name in THREE if name in by_name), default=None)
    generate = by_name["generate"]["median"] if "generate" in by_name else None
    print(f"{case:10} {'tokens/s':>9} {'least':>9} {'largest':>9} {'batches':>8} {'× fastest of three':>19} {'× generate':>11}")
    for name, r in by_name.items():
        ratios = f"{ratio(r, fastest):>19} {ratio(r, generate):>11}"
        print(f"{name:10} {r['median']:9,.0f} {r['min']:9,.0f} {r['max']:9,.0f} {r['batches']:8} {ratios}")
    print()


def ratio(result: dict[str, Any], other: float | None) -> str:
    return f"{result['median'] / other:.2f}" if other else "-"


if __name__ == "__main__":
    main()
