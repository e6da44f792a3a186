"""Speed-up of asynchronous training: generation does not wait for the trainer, nor the trainer for generation.

    python -m benchmarks.speed [--regimes rollout trainer] [--steps N] [--rounds 1] [--figure docs/speed.png]

Claim: with `max_staleness = 4` a run takes the time that the slower of its two sides takes alone (within 5 %), and never longer
than with 0, on two cores that both sides share.

The work: answers of a real vLLM server with lognormal lengths (sigma 1, capped) fixed by task and index, so that every run
samples and trains on the same number of tokens; random Qwen3s in fp32, GRPO with AdamW on torch. In the regime "rollout" (1M
parameters; short prompts, answers of up to 320 tokens) generation is the slower side, in "trainer" (26M; longer prompts, short
answers) training is.

Settings, each with `max_staleness` 0 and 4 alternately:
pinned     the server on one core, the trainer on the other
unpinned   one compute thread each, on either core
shared     the fair comparison: synchronously each side has two compute threads in its phase; with 4 the server has one, the
           default on two cores, and the trainer two

Method: a run's time is from its first admission to its last published step. `generation` is the same run without training, as
fast as the server runs with `max_staleness = 4`; training is the time of log-probabilities, updates and publications in the
synchronous run. No schedule of the same work takes less than generation followed by the last update, or than the first batch's
generation followed by training; if both share cores, the part after that first batch takes at least the processor time of both
on two cores. The bound is the time of the synchronous run divided by that.

Two cores are not two machines: memory and caches are shared. The slower side is therefore measured again while another process
multiplies matrices on the other core for as large a share of the time as the other side computes in the run; the resulting
bound is what can be reached on this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import model

SETTINGS = ("pinned", "unpinned", "shared")


@dataclass(frozen=True)
class Regime:
    """A model, and lengths in tokens."""

    steps: int
    groups: int
    group_size: int
    prompt: int
    median: int
    longest: int
    model: dict[str, int]


NARROW = {"hidden_size": 160, "intermediate_size": 352, "num_attention_heads": 5, "num_key_value_heads": 1}
WIDE = {"hidden_size": 512, "intermediate_size": 1664, "num_attention_heads": 8, "num_hidden_layers": 8, "head_dim": 64}
REGIMES = {
    "rollout": Regime(48, groups=4, group_size=4, prompt=16, median=60, longest=320, model=NARROW),
    "trainer": Regime(20, groups=2, group_size=8, prompt=160, median=40, longest=96, model=WIDE),
}


# ---- one run, in a process of its own


@dataclass(frozen=True)
class LongTailed:
    """A workflow whose answers have lengths and rewards determined by (ticket, index)."""

    regime: Regime

    def setup(self, tokenizer: Any) -> LongTailed:
        return self

    def greedy(self) -> LongTailed:
        return self

    async def run(self, task: Any, engine: Any) -> Any:
        from areal_x.protocols.engine import Request, SamplingParams
        from areal_x.types import Trajectory

        rng = np.random.default_rng(engine.key)
        length = int(min(max(rng.lognormal(np.log(self.regime.median), 1.0), 1), self.regime.longest))
        prompt = np.random.default_rng(int(task.id)).integers(5, 90, self.regime.prompt).astype(np.int32)
        said = await engine.generate(Request(prompt, SamplingParams(max_tokens=length)))
        return [Trajectory.from_completion(prompt, said.tokens, said.logprobs, said.versions, float(rng.integers(2)))]

    async def close(self) -> None: ...


def run(directory: Path, name: str, setting: str, staleness: int, steps: int, learns: bool) -> dict[str, Any]:
    """Seconds of a run by phase, and the processor time of both sides."""
    import psutil

    from areal_x.engines.vllm.config import VLLMConfig
    from areal_x.experiment import Experiment
    from areal_x.rollout.rollout import Rollout
    from areal_x.trainer import ModelConfig, OptimizerConfig, TrainerConfig
    from areal_x.types import Task

    regime = REGIMES[name]
    threads = 2 if setting == "shared" else 1
    server_threads = threads if staleness == 0 else 1
    if setting == "pinned":
        os.sched_setaffinity(0, {0})  # until the server takes it

        def unpin(self: Rollout, *arguments: Any) -> None:
            start(self, *arguments)
            for thread in psutil.Process().threads():
                os.sched_setaffinity(thread.id, {1})

        start, Rollout.start = Rollout.start, unpin  # type: ignore[method-assign]
    if not learns:
        Experiment.learn = lambda self, batches, *_: {"skipped": 0.0}  # type: ignore[method-assign]
    model = ModelConfig(str(directory / name))
    experiment = Experiment(
        dataset=[Task(str(i), "") for i in range(1000)],
        workflow=LongTailed(regime),
        trainer=TrainerConfig(model=model, optimizer=OptimizerConfig(learning_rate=1e-6), micro_batch_rows=8),
        vllm=VLLMConfig(threads=server_threads, concurrency=128),
        backend="torch",
        engine="vllm",
        steps=steps,
        groups_per_step=regime.groups,
        group_size=regime.group_size,
        max_staleness=staleness,
        window=4 if staleness else 1,
        row_length=regime.prompt + regime.longest,
        runs=str(directory / "runs"),
    )
    import torch  # after the experiment has set its environment

    torch.set_num_threads(threads)
    rows, turns = [], experiment.turns(experiment.open(), message=lambda _: None)
    next(turns)
    own, servers = psutil.Process(), psutil.Process().children(recursive=True)
    before, began = [cpu_seconds(p) for p in (own, *servers)], time.perf_counter()
    for turn in turns:
        rows.append(turn.metrics)
        seconds = time.perf_counter() - began
        after = [cpu_seconds(p) for p in (own, *servers)]
        if turn.metrics["step"] == steps:
            break
    parts = {name: sum(row[f"{name}_seconds"] for row in rows) for name in ("wait", "logprob", "update", "publish", "pause")}
    spent = [b - a for a, b in zip(before, after, strict=True)]
    cpu = {"trainer_cpu": spent[0], "server_cpu": sum(spent[1:])}
    of_steps = [training({name: row[f"{name}_seconds"] for name in ("logprob", "update", "publish")}) for row in rows]
    return {"seconds": seconds, "first": rows[0]["wait_seconds"], "steps": of_steps, **parts, **cpu}


def cpu_seconds(process: Any) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@contextmanager
def competing(regime: str, share: float, core: int | None) -> Iterator[None]:
    """Runs a process beside the block that computes for this share of the time, on this core or any."""
    command = [sys.executable, "-m", "benchmarks.speed", "--compete", regime, str(share), str(-1 if core is None else core)]
    process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"})
    try:
        yield
    finally:
        process.kill()
        process.wait()


def compete(regime: str, share: float, core: int) -> None:
    if core >= 0:
        os.sched_setaffinity(0, {core})
    rng, shape, ring = np.random.default_rng(0), REGIMES[regime].model, os.getppid()
    x = rng.normal(size=(1024, shape["hidden_size"])).astype(np.float32)
    w = rng.normal(size=(shape["hidden_size"], shape["intermediate_size"])).astype(np.float32)
    while os.getppid() == ring:
        began = time.perf_counter()
        while (busy := time.perf_counter() - began) < 0.05:
            x @ w
        time.sleep(busy * (1 - share) / share)


# ---- all of them


def measure(directory: Path, steps: int, *what: Any) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.speed", "--directory", str(directory), "--steps", str(steps), "--run"]
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    ended = subprocess.run([*command, *map(str, what)], check=True, stdout=subprocess.PIPE, text=True, env=environment)
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


def training(run: dict[str, Any]) -> float:
    return run["logprob"] + run["update"] + run["publish"]


def least_seconds(synchronous: dict[str, Any], generation: dict[str, Any], steps: int, shares_cores: bool) -> float:
    """Minimum seconds of any schedule of the same work."""
    first = generation["first"]
    least = max(generation["seconds"] + synchronous["update"] / steps, first + training(synchronous))
    if not shares_cores:
        return least
    both = synchronous["trainer_cpu"] + generation["server_cpu"] - first  # the server then has one thread
    return max(least, first + both / len(os.sched_getaffinity(0)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--regimes", nargs="+", default=list(REGIMES), choices=list(REGIMES))
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=SETTINGS)
    parser.add_argument("--steps", type=int, help="that many, in place of each regime's own")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--figure", type=Path, default=Path("docs/speed.png"))
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--run", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--compete", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.run:
        regime, setting, staleness, learns = given.run
        print(json.dumps(run(given.directory, regime, setting, int(staleness), given.steps, learns == "True")))
        return
    if given.compete:
        regime, share, core = given.compete
        compete(regime, float(share), int(core))
        return
    print("| regime | setting | synchronous, s | ahead, s | ratio | bound | share of it | beside a busy core | share of that |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    bars = {}
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        for regime in given.regimes:
            write(regime, directory / regime)
            found = {setting: measured(directory, given, regime, setting) for setting in given.settings}
            for setting, of in found.items():
                ratio, bound, beside = (of["synchronous"] / of[name] for name in ("ahead", "least", "beside"))
                cells = f"{of['synchronous']:.1f} | {of['ahead']:.1f} | {ratio:.2f} | {bound:.2f} | {ratio / bound:.0%}"
                cells += " | – | –" if setting == "shared" else f" | {beside:.2f} | {ratio / beside:.0%}"
                print(f"| {regime} | {setting} | {cells} |", flush=True)
                bars[f"{regime}\n{setting}"] = ratio, bound
    draw(bars, given.figure)


def measured(directory: Path, given: argparse.Namespace, regime: str, setting: str) -> dict[str, Any]:
    """Medians over rounds, in which the runs alternate."""
    rounds = []
    steps = given.steps or REGIMES[regime].steps
    for _ in range(given.rounds):
        synchronous, ahead = (measure(directory, steps, regime, setting, staleness, True) for staleness in (0, 4))
        generation = measure(directory, steps, regime, setting, 4, False)
        print(f"{regime}, {setting}: {synchronous} {ahead} {generation}", file=sys.stderr, flush=True)
        least = least_seconds(synchronous, generation, steps, setting != "pinned")
        beside = (
            least if setting == "shared" else least_beside(directory, regime, setting, steps, synchronous, ahead, generation)
        )
        rounds.append({"synchronous": synchronous["seconds"], "ahead": ahead["seconds"], "least": least, "beside": beside})
    return {name: float(np.median([of[name] for of in rounds])) for name in rounds[0]}


def least_beside(
    directory: Path,
    regime: str,
    setting: str,
    steps: int,
    synchronous: dict[str, Any],
    ahead: dict[str, Any],
    generation: dict[str, Any],
) -> float:
    """As `least_seconds`, with the slower side measured while the other core computes."""
    if generation["seconds"] > training(synchronous):
        share = min(training(ahead) / ahead["seconds"], 1.0)
        with competing(regime, share, 1 if setting == "pinned" else None):
            generation = measure(directory, steps, regime, setting, 4, False)
    else:
        few = max(steps // 4, 2)
        share = min(generation["server_cpu"] / ahead["seconds"], 1.0)
        with competing(regime, share, 0 if setting == "pinned" else None):
            part = measure(directory, few, regime, setting, 0, True)
        slower = sum(part["steps"]) / sum(synchronous["steps"][:few])
        synchronous = synchronous | {name: synchronous[name] * slower for name in ("logprob", "update", "publish")}
    print(f"beside, {share:.2f} busy: {generation} {synchronous}", file=sys.stderr, flush=True)
    return least_seconds(synchronous, generation, steps, setting != "pinned")


def write(regime: str, directory: Path) -> None:
    """Writes a random model, with the tokenizer of the other benchmarks."""
    model.CONFIG |= {"max_position_embeddings": 1024} | REGIMES[regime].model
    model.write_model(directory)


def draw(bars: dict[str, tuple[float, float]], path: Path) -> None:
    """Plots the speed-up beside its bound."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    places = np.arange(len(bars))
    ratios, bounds = zip(*bars.values(), strict=True)
    axes.bar(places, bounds, 0.7, color="#DDDDDD", label="bound")
    axes.bar(places, ratios, 0.5, color="#0072B2", label="max_staleness 4")
    axes.axhline(1, color="#000000", linewidth=0.8)
    axes.set(ylabel="times as fast as synchronous")
    axes.set_xticks(places, list(bars), fontsize=8)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
