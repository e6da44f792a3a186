"""Preference pairs: a correct and a wrong answer of the warm-started model to the same problem."""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gin

from areal_x import (
    EmbeddedEngine,
    Group,
    ModelConfig,
    Rollout,
    Runner,
    SamplingParams,
    SingleTurn,
    Task,
    TaskStream,
    TrainerConfig,
    TrajectoryQueue,
    create_trainer,
    load_tokenizer,
)
from examples.arithmetic.task import LONGEST, verify
from examples.arithmetic.warm_start import warm_start
from examples.tiny.cached import cache
from examples.tiny.supervised import installed

SLOTS = 64
LONGEST_ANSWER = LONGEST - len("9999+9999=")


@gin.configurable(module="arithmetic")
def preferences(
    problems: Sequence[Task], attempts: int = 4, seed: int = 0, backend: str = "jax"
) -> list[Task]:
    """Returns a pair, {"chosen": a correct answer, "rejected": a wrong one}, for each problem that
    the model solves in some attempts but not in all. The pairs are cached like the model itself.

    Args:
        problems: The problems to answer.
        attempts: Answers sampled per problem.
        seed: Seed of the sampling.
        backend: The backend that samples; if it is not installed, another one that is.
    """
    model = warm_start()
    settings = [Path(model).name, [task.prompt for task in problems], attempts, seed]
    file = (
        cache("arithmetic")
        / f"preferences-{hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]}.json"
    )
    if not file.exists():
        began = time.perf_counter()
        print(
            f"sampling {attempts} answers to each of {len(problems)} problems, once for these"
            " settings:",
            end="",
            flush=True,
        )
        tokenizer = load_tokenizer(Path(model))
        groups = sample(model, problems, attempts, seed, installed(backend))
        pairs = [pair_of(group, tokenizer) for group in groups if len(set(group.rewards)) == 2]
        print(f" {len(pairs)} pairs in {time.perf_counter() - began:.0f} s", flush=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as unfinished:
            json.dump(pairs, unfinished)
        Path(unfinished.name).replace(file)
    return [Task(prompt, prompt, answer) for prompt, answer in json.loads(file.read_text())]


def sample(
    model: str, problems: Sequence[Task], attempts: int, seed: int, backend: str
) -> list[Group]:
    """Samples the model's answers, one group per problem."""
    config = TrainerConfig(model=ModelConfig(path=model), temperature=1.0)
    trainer = create_trainer(backend, replace(config, mesh=config.mesh.within_one_process()))
    workflow = SingleTurn(
        reward=verify,
        sampling=SamplingParams(max_tokens=LONGEST_ANSWER, temperature=1.0),
        reward_workers=1,
    )
    runner = Runner(
        EmbeddedEngine(trainer.sampler(SLOTS, LONGEST)),
        workflow.setup(load_tokenizer(Path(model))),
        TaskStream(problems, seed),
        TrajectoryQueue(len(problems), max_staleness=0),
        group_size=attempts,
        seed=seed,
    )
    with Rollout(runner) as rollout:
        rollout.start()
        rollout.publish(trainer)
        return rollout.take()


def pair_of(group: Group, tokenizer: Any) -> tuple[str, dict[str, str]]:
    """The problem with its first correct and its first wrong answer, in sampling order."""
    answers = {}
    for episode in reversed(group.scored):
        (trajectory,) = episode.trajectories
        which = "chosen" if trajectory.reward else "rejected"
        answers[which] = tokenizer.decode(
            trajectory.tokens[trajectory.mask].tolist(), skip_special_tokens=True
        )
    return group.task.prompt, answers
