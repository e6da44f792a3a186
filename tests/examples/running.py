"""Helpers for tests of the examples: load a file, run a few steps, replay a demonstrated conversation."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jaxtyping import Int32

from areal_x import train
from areal_x.config.reader import load
from areal_x.config.types import check_early, check_experiment
from areal_x.hf.tokenizer import load_tokenizer
from areal_x.protocols.engine import Completion, Request
from areal_x.protocols.workflow import Workflow
from areal_x.types import Episode, Task, Trajectory

ROOT = Path(__file__).parents[2]


def gin_files(example: str) -> list[Path]:
    return sorted((ROOT / "examples" / example).glob("*.gin"))


def check_file(file: Path) -> None:
    """Raises what a run of it would, before anything is built."""
    config = load(file, [])
    check_early(config)
    check_experiment(config)


def trained(file: str, directory: Path, monkeypatch: pytest.MonkeyPatch, **bindings: Any) -> list[dict[str, Any]]:
    """The metrics of two steps of a few episodes: of a model that was hardly supervised, kept in `directory` like the run.

    By torch, which compiles nothing. bindings: more of them, with "__" for a dot.
    """
    pytest.importorskip("areal_x_torch")
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("XDG_CACHE_HOME", str(directory / "cache"))
    bound = {
        "train.backend": "torch",
        "train.steps": 2,
        "train.groups_per_step": 2,
        "train.group_size": 2,
        "train.evaluate_every": 2,
        "train.checkpoint_every": 0,
        "train.runs": str(directory),
        "train.name": "run",
        "embedded.slots": 64,
        **{name.replace("__", "."): value for name, value in bindings.items()},
    }
    arguments = [part for name, value in bound.items() for part in ("-b", f"{name} = {value!r}")]
    assert train.main([str(ROOT / "examples" / file), *arguments]) == 0
    return [json.loads(line) for line in (directory / "run" / "metrics.jsonl").read_text().splitlines()]


class Script:
    """An engine that generates what it was given, turn by turn (areal_x.workflows.single_turn.Generator)."""

    context, version = 4096, 0

    def __init__(self, completions: Sequence[Int32[np.ndarray, " N"]]) -> None:
        self._left: Iterator[Int32[np.ndarray, " N"]] = iter(completions)

    async def generate(self, request: Request) -> Completion:
        tokens = next(self._left)
        return Completion(tokens, np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.int32), "stop")


def spoken(shown: Trajectory) -> list[Int32[np.ndarray, " N"]]:
    """What the model says in a demonstration, turn by turn."""
    borders = np.flatnonzero(np.diff(shown.mask.astype(int))) + 1
    return [shown.tokens[part] for part in np.split(np.arange(len(shown)), borders) if shown.mask[part[0]]]


def conversed(workflow: Workflow, model: Path, task: Task, shown: Trajectory) -> Episode:
    """The episode in which a model says, turn by turn, what the demonstration says."""

    async def run() -> Episode:
        ready = workflow.setup(load_tokenizer(model))
        try:
            episode = await ready.run(task, Script(spoken(shown)))
        finally:
            await ready.close()
        assert isinstance(episode, Episode), episode
        return episode

    return asyncio.run(run())


def same_tokens(episode: Episode, shown: Trajectory) -> None:
    """Asserts that the episode is one trajectory, and that what is learnt from it is what the demonstration taught."""
    (trajectory,) = (replace(t, reward=None) for t in episode.trajectories)
    np.testing.assert_array_equal(trajectory.tokens, shown.tokens)
    np.testing.assert_array_equal(trajectory.mask, shown.mask)
