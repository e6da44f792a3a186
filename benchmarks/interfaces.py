"""The arithmetic example learned through four interfaces: a workflow, and agents with three clients in two languages.

    npm install --prefix examples/agents
    python -m benchmarks.interfaces [--steps 50] [-b 'seed = 1' …]

Claim: the same accuracy within noise; and for one episode with the same seeds, bitwise the same tokens, mask and
log-probabilities.

Each run is `python -m areal_x.train FILE` with `train.steps` and the given bindings; all evaluate held-out problems with the
same workflow. The one episode is sampled by the embedded engine from the runs' initial model.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import subprocess
import sys
import time
from collections.abc import Sequence

import numpy as np

from benchmarks.recipes import ROOT, accuracies, train_file

INTERFACES = {
    "workflow": "examples/arithmetic/grpo.gin",
    "OpenAI client": "examples/agents/openai_client.gin",
    "OpenAI Agents SDK": "examples/agents/agents_sdk.gin",
    "JavaScript client": "examples/agents/javascript.gin",
}
PART = ("tokens", "mask", "logprobs", "versions")


async def episode(experiment: object) -> str:
    """A digest of the arrays of one episode, sampled with fixed seeds."""
    from areal_x.hf.model_dir import resolve
    from areal_x.hf.tokenizer import load_tokenizer
    from areal_x.rollout.episode import run_episode
    from areal_x.rollout.episodes import EpisodeEngine

    directory = resolve(experiment.trainer.model.path)  # type: ignore[attr-defined]
    workflow = experiment.workflow.setup(load_tokenizer(directory))  # type: ignore[attr-defined]
    trainer = experiment.create_models(directory, workflow).policy  # type: ignore[attr-defined]
    engine = experiment.create_engine(directory, trainer, workflow, directory, print)  # type: ignore[attr-defined]
    try:
        await engine.start()
        await engine.swap(engine.stage(trainer))
        view = EpisodeEngine(engine, (0, 0, 7, 3), lambda _: None, lambda _: None)
        (trajectory,) = (await run_episode(workflow, experiment.dataset[0], view, 600)).trajectories  # type: ignore[attr-defined]
    finally:
        await workflow.close()
        await engine.close()
    parts = [np.ascontiguousarray(getattr(trajectory, name)).tobytes() for name in PART]
    return f"{len(trajectory)} tokens {hashlib.sha256(b'|'.join(parts)).hexdigest()[:16]}"


def drawn(file: str, bindings: Sequence[str]) -> str:
    command = [
        sys.executable,
        "-m",
        "benchmarks.interfaces",
        "--episode",
        file,
        *(word for b in bindings for word in ("-b", b)),
    ]
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--interfaces", nargs="+", default=list(INTERFACES), choices=list(INTERFACES))
    parser.add_argument("-b", dest="bindings", action="append", default=[])
    parser.add_argument("--episode", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.episode:
        import gin

        from areal_x.config import load

        load(given.episode, given.bindings)
        print(asyncio.run(episode(gin.get_configurable("train")())))
        return
    print("| interface | held-out accuracy, start → end (best), % | seconds | one episode |\n|---|---|---|---|", flush=True)
    for name in given.interfaces:
        one = drawn(INTERFACES[name], given.bindings)
        began = time.perf_counter()
        found = accuracies(train_file(INTERFACES[name], [*given.bindings, f"train.steps = {given.steps}"]))
        seconds = time.perf_counter() - began
        print(f"| {name} | {found[0]:.1f} → **{found[-1]:.1f}** ({max(found):.1f}) | {seconds:.0f} | {one} |", flush=True)


if __name__ == "__main__":
    main()
