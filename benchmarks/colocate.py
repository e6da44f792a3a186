"""Memory of trainer and servers in turns (train.colocate) against both at once.

    python benchmarks/colocate.py [--backends jax torch] [--steps 3] [--sglang PYTHON]

Claim: while one side has its turn, the other one's memory is free, so that the peak of their sum is lower.

The work: steps of GRPO on a random Qwen3 of 36M parameters in fp32 (146 MB; with gradients and moments 580 MB), with a real
vLLM server, or an SGLang server of the interpreter PYTHON: 8 groups of 4 answers of 152 tokens. In turns, and at once as usual
with max_staleness = 1, each in a process of its own.

Measured every 50 ms from the first published weights to the last step, from /proc: the bytes that no file backs (shared pages
divided among their processes) of the trainer's process, and of the server's; and, as the backend counts it, the trainer's state
on its devices. On a CPU these devices' memory is the host's: torch moves nothing and counts 0, JAX copies from arrays of its
CPU device to numpy's and counts what would leave a GPU. So the sums show what the server releases, and the last column what a
trainer on an accelerator would. Printed in MB: the peaks of both sides and of their sum, and the server's least.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from areal_x.batching.batch import Models
from areal_x.engines.sglang.config import SGLangConfig
from areal_x.engines.vllm.config import VLLMConfig
from areal_x.experiment import Experiment
from areal_x.protocols.engine import SamplingParams
from areal_x.protocols.trainer_config import ModelConfig, OptimizerConfig, TrainerConfig
from areal_x.runtime.footprint import memory_bytes
from areal_x.runtime.timeline import read
from areal_x.testing import models
from areal_x.types import Task
from areal_x.workflows.single_turn import SingleTurn

MEGABYTE = 1e6
SIZES = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 9, "num_attention_heads": 8}
SIZES |= {"num_key_value_heads": 8, "head_dim": 64, "vocab_size": 2048, "max_position_embeddings": 512}
LENGTH = 160


def parity(task: Task, answer: str) -> float:
    """A reward that differs within groups, whatever the model writes."""
    return float(sum(map(ord, answer)) % 2)


def sides(own: psutil.Process, engine: str) -> dict[str, int]:
    """The bytes of this process, and of the server that it started."""
    words = {p.pid: p.cmdline() for p in own.children(recursive=True)}
    server = [pid for pid, of in words.items() if __file__ not in of and any(engine in word.lower() for word in of)]
    return {"trainer": int(memory_bytes([own.pid], 0)), "server": int(memory_bytes(server, 0))}


def run(backend: str, colocate: bool, steps: int, folder: Path, sglang: str) -> None:
    """Runs the experiment in this process and prints a line of JSON. sglang: the interpreter that has it; '' for vLLM."""
    engine = "sglang" if sglang else "vllm"
    model = models.write_model(folder / "model", **SIZES)
    samples: list[tuple[float, dict[str, int]]] = []
    on_devices: dict[str, int] = {}
    own, ended = psutil.Process(), threading.Event()

    def watch() -> None:
        while not ended.is_set():
            with suppress(psutil.NoSuchProcess, FileNotFoundError):
                samples.append((time.perf_counter(), sides(own, engine)))
            ended.wait(0.05)

    for name in ("rest", "wake"):
        move = getattr(Models, name)

        def counted(self: Models, move: Any = move, name: str = name) -> None:
            move(self)
            on_devices[name] = self.device_bytes()

        setattr(Models, name, counted)
    experiment = Experiment(
        dataset=[Task(str(i), f"{i}+{i}=", f"{2 * i}") for i in range(100)],
        workflow=SingleTurn(reward=parity, sampling=SamplingParams(max_tokens=LENGTH - 8), reward_workers=1),
        trainer=TrainerConfig(ModelConfig(str(model)), OptimizerConfig(learning_rate=1e-5), micro_batch_rows=4),
        vllm=VLLMConfig(context=LENGTH, prove_every=0),
        sglang=SGLangConfig(context=LENGTH, prove_every=0, python=sglang),
        engine=engine,
        backend=backend,
        colocate=colocate,
        max_staleness=0 if colocate else 1,
        steps=steps,
        groups_per_step=8,
        group_size=4,
        row_length=LENGTH,
        runs=str(folder),
        name="run",
    )
    watcher = threading.Thread(target=watch)
    began = 0.0
    rows = []
    try:
        for turn in experiment.turns(experiment.open(), message=lambda _: None):
            if not began:
                began = time.perf_counter()
                watcher.start()
            rows.append(turn.metrics)
            if len(rows) > steps:
                ended.set()  # before the server ends
    finally:
        ended.set()
        watcher.join()
    found = [sample for at, sample in samples if at >= began]
    peaks = {side: max(sample[side] for sample in found) for side in ("trainer", "server")}
    sums = max(sum(sample.values()) for sample in found)
    least = min(sample["server"] for sample in found)
    moves = {name: sum(row.get(f"{name}_seconds", 0.0) for row in rows[1:]) / steps for name in ("sleep", "wake", "rest")}
    spans = len(read(folder / "run")["trainer"])
    print(json.dumps({**peaks, "sum": sums, "least": least, "devices": on_devices, "moves": moves, "spans": spans}))


def measured(backend: str, colocate: bool, steps: int, sglang: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--run", backend, str(int(colocate)), folder, "--steps", str(steps)]
        command += ["--sglang", sglang]
        output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", nargs="+", default=["jax", "torch"])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--sglang", default="", metavar="PYTHON", help="serve with SGLang, which this interpreter has")
    parser.add_argument("--run", nargs=3, metavar=("BACKEND", "COLOCATE", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        backend, colocate, folder = options.run
        run(backend, bool(int(colocate)), options.steps, Path(folder), options.sglang)
        return
    print("| backend | | trainer | server | sum | server, least | state on devices: trainer's turn → at rest |")
    print("|---|---|---|---|---|---|---|")
    for backend in options.backends:
        of = {name: measured(backend, name == "in turns", options.steps, options.sglang) for name in ("at once", "in turns")}
        for name, row in of.items():
            cells = [f"{row[key] / MEGABYTE:.0f}" for key in ("trainer", "server", "sum", "least")]
            state = " → ".join(f"{row['devices'][key] / MEGABYTE:.0f}" for key in ("wake", "rest")) if row["devices"] else "–"
            print("|", " | ".join([backend, name, *cells, state]), "|", flush=True)
        ratio = of["in turns"]["sum"] / of["at once"]["sum"]
        seconds = ", ".join(f"{name} {x:.2f} s" for name, x in of["in turns"]["moves"].items())
        print(f"{backend}: the sum peaks at {ratio:.2f} of that at once; per step: {seconds}", flush=True)


if __name__ == "__main__":
    main()
