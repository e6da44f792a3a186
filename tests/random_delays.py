"""A run whose parts take random times, and the digest of everything that it sampled, consumed and trained, by which two runs
are compared."""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from areal_x.engines.embedded import EmbeddedEngine
from areal_x.experiment import Experiment
from areal_x.hf import model_dir
from areal_x.protocols.engine import Request
from areal_x.protocols.workflow import EpisodeResult, Generator
from areal_x.run import checkpoint
from areal_x.run.group_bytes import encode
from areal_x.run.journal import Journal
from areal_x.types import Batch, Episode, Scored, Task, Trajectory
from areal_x.workflows.single_turn import SingleTurn
from tests.experiments import TASKS, tiny_experiment

LONGEST = 0.02  # seconds of a delay: about as long as a call of a tiny model


def delay(rng: random.Random) -> float:
    """A random delay, mostly none and sometimes long, which reorders most."""
    return rng.choice((0, 0, LONGEST * rng.random(), LONGEST))


@dataclass(frozen=True)
class TwoCalls(SingleTurn):
    """Makes two calls, with delays before, between and after them; the second continues the first's answer."""

    rng: Any = None

    async def run(self, task: Task, engine: Generator) -> EpisodeResult:
        await asyncio.sleep(delay(self.rng))
        prompt = np.asarray(self.tokenizer.encode(task.prompt), np.int32)
        first = await engine.generate(Request(prompt, replace(self.sampling, max_tokens=4)))
        await asyncio.sleep(delay(self.rng))
        longer = np.concatenate([prompt, first.tokens]).astype(np.int32)
        said = await engine.generate(Request(longer, self.sampling))
        await asyncio.sleep(delay(self.rng))
        reward = float(np.isin(said.tokens, (3, 5, 7)).mean())
        return Episode(Scored(reward), (Trajectory.from_completion(longer, said.tokens, said.logprobs, said.versions, reward),))


class Delayed(Experiment):
    """An experiment whose steps and sampler take random times too."""

    def learn(self, batches: Sequence[Batch], *others: Any) -> dict[str, float]:
        time.sleep(delay(self.workflow.rng))
        return super().learn(batches, *others)

    def create_engine(self, *arguments: Any) -> Any:
        engine = super().create_engine(*arguments)
        if isinstance(engine, EmbeddedEngine):
            decode, rng = engine._sampler.decode, self.workflow.rng

            def slow(*steps: int) -> Any:
                time.sleep(delay(rng))
                return decode(*steps)

            engine._sampler.decode = slow
        return engine


def delayed(model: Path, runs: Path, delays: Any, **changes: Any) -> Experiment:
    """An asynchronous run with two calls per episode and an evaluation in the middle. delays: seed of the delays alone."""
    workflow = TwoCalls(reward=len, sampling=replace(SingleTurn(len).sampling, max_tokens=8), reward_workers=1)
    settings = {"max_staleness": 4, "deterministic": True, "steps": 7, "held_out": TASKS[:3], "evaluate_every": 3}
    made = tiny_experiment(model, runs, **{**settings, "workflow": replace(workflow, rng=random.Random(delays)), **changes})
    return Delayed(**{field.name: getattr(made, field.name) for field in fields(made)})


def digest(run: Path) -> str:
    """Digest of the groups that each step consumed, in order and to the last bit, and of the final weights."""
    found = hashlib.sha256()
    with Journal(run) as journal:
        for step in journal.steps():
            for group in journal.groups_of(step):
                found.update(f"{step} {group.ticket} {group.task.id} {group.admitted_version} ".encode())
                found.update(encode(group))
    last = run / "checkpoints" / str(checkpoint.steps(run)[-1]) / "trainer"
    for name, tensor in sorted(model_dir.read_tensors(last)):
        found.update(name.encode() + tensor.tobytes())
    return found.hexdigest()
