"""Asynchronous runs that end in the same bits however long each part of them takes."""

from __future__ import annotations

import asyncio
from dataclasses import fields, replace
from pathlib import Path

import pytest

from areal_x.engines.embedded import EmbeddedConfig
from areal_x.errors import ConfigError, UserError
from areal_x.experiment import Experiment
from tests.random_delays import TwoCalls, delayed, digest
from tests.thorough import further


@pytest.fixture(scope="module")
def embedded() -> EmbeddedConfig:
    return EmbeddedConfig(slots=8)  # fewer than a wave has requests


@pytest.mark.parametrize("backend", ["torch", *further("jax")])
def test_asynchronous_runs_with_different_delays_and_one_that_was_resumed_end_in_the_same_bits(
    backend: str, tiny_model_dir: Path, tmp_path: Path
) -> None:
    pytest.importorskip(f"areal_x_{backend}")
    slots = EmbeddedConfig(slots=8)  # fewer than a wave has requests

    def run(experiment: Experiment, until: int, resume: bool = False) -> Path:
        directory = experiment.open(resume)
        for turn in experiment.turns(directory, resume, lambda _: None):
            if "staleness_max" in turn.metrics:
                assert turn.metrics["staleness_max"] == min(turn.metrics["step"] - 1, 4)  # it was asynchronous
            if turn.metrics["step"] == until:
                break
        return directory

    whole = run(delayed(tiny_model_dir, tmp_path, 0, backend=backend, name="whole", embedded=slots), 7)
    broken = delayed(tiny_model_dir, tmp_path, 1, backend=backend, name="broken", embedded=slots, checkpoint_every=3)
    run(broken, 5)  # between checkpoints, with groups of later versions in the journal
    assert digest(run(broken, 7, resume=True)) == digest(whole)


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"engine": "vllm"}, r"train\.deterministic = True .*'vllm'"),
        ({"window": 2}, r"train\.deterministic = True .*train\.window = 2"),
    ],
)
def test_what_depends_on_clocks_is_refused_by_name(
    tiny_model_dir: Path, tmp_path: Path, changes: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        delayed(tiny_model_dir, tmp_path, 0, **changes)


def test_calls_that_an_episode_makes_at_once_are_refused(tiny_model_dir: Path, tmp_path: Path) -> None:
    class Both(TwoCalls):
        async def run(self, task, engine):
            await asyncio.gather(super().run(task, engine), super().run(task, engine))

    experiment: Experiment = delayed(tiny_model_dir, tmp_path, 0)
    workflow = Both(**{field.name: getattr(experiment.workflow, field.name) for field in fields(experiment.workflow)})
    with pytest.raises(UserError, match="cannot order concurrent calls by one episode"):
        replace(experiment, workflow=workflow).run()
