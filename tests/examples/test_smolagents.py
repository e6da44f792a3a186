"""Products by an agent of smolagents, as it is: what it says to its model is what the tutor showed, and all is recorded."""

from __future__ import annotations

import asyncio
from pathlib import Path

import gin
import numpy as np
import pytest

from areal_x.config.reader import load
from areal_x.errors import ConfigError
from areal_x.hf.tokenizer import load_tokenizer
from areal_x.rollout.episode import run_episode
from areal_x.rollout.episodes import EpisodeEngine
from areal_x.types import Episode, Scored, Task, Trajectory
from examples.smolagents import warm_start as module
from examples.smolagents.warm_start import ID, PIECES, WITHOUT_SYSTEM, batches, guessed, worked
from examples.tiny.model import write_model
from examples.tools.task import problems
from tests.examples.running import ROOT, Script, check_file, gin_files, trained


@pytest.mark.parametrize("file", gin_files("smolagents"), ids=lambda file: file.stem)
def test_an_example_can_be_run(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    check_file(file)


def talked(task: Task, shown: list[Trajectory], directory: Path) -> Episode:
    """The episode in which the model says, reply by reply, what the demonstrations say."""
    write_model(directory, PIECES, 0, WITHOUT_SYSTEM, max_position_embeddings=1024)
    load(ROOT / "examples" / "smolagents" / "tiny.gin")

    async def run() -> Episode:
        workflow = gin.get_configurable("agent")().setup(load_tokenizer(directory))
        try:
            view = EpisodeEngine(Script([one.tokens[one.mask] for one in shown]), (0,), lambda _: None, lambda _: None)
            episode = await run_episode(workflow, task, view, 60)
        finally:
            await workflow.close()
        assert isinstance(episode, Episode), episode
        return episode

    return asyncio.run(run())


def test_each_reply_is_token_for_token_the_demonstration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("smolagents")
    monkeypatch.chdir(ROOT)
    task = problems(1)[0]
    shown = worked(task, "0" * ID)
    episode = talked(task, shown, tmp_path)
    assert isinstance(episode.outcome, Scored)
    assert episode.outcome.reward == 1.0
    for said, demonstration in zip(episode.trajectories, shown, strict=True):
        np.testing.assert_array_equal(said.mask, demonstration.mask)
        differ = np.flatnonzero(said.tokens != demonstration.tokens)
        assert len(differ) <= ID  # the id of the call
        assert all(PIECES[token - 2] in "0123456789abcdef" for token in said.tokens[differ])


def test_a_guess_is_one_reply_and_earns_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("smolagents")
    monkeypatch.chdir(ROOT)
    task = problems(1)[0]
    shown = guessed(task, np.random.default_rng(0))
    episode = talked(task, [shown], tmp_path)
    assert isinstance(episode.outcome, Scored)
    assert episode.outcome.reward == 0.0
    (said,) = episode.trajectories
    np.testing.assert_array_equal(said.tokens, shown.tokens)
    np.testing.assert_array_equal(said.mask, shown.mask)


def test_the_tutor_calls_the_tool_in_a_fifth_of_the_problems() -> None:
    counts = np.zeros(2)
    for batch in batches(20, seed=0, calls=0.2):
        assert batch.shape == (25, module.ROW_LENGTH)
        learnt = batch.tokens[batch.mask > 0]
        counts += [
            sum(PIECES[token - 2].startswith(f'{{"name": "{name}"') for token in learnt)
            for name in ("multiply", "final_answer")
        ]
    called, answered = counts
    assert called / answered == pytest.approx(0.2, abs=0.03)


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"multiplying\.warm_start\.steps"):
        module.warm_start(steps=1)
    with pytest.raises(ConfigError, match=r"multiplying\.warm_start\.calls"):
        module.warm_start(calls=1.5)


def test_two_steps_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("smolagents")
    settings = {"multiplying__warm_start__steps": 2, "multiplying__warm_start__backend": "torch", "tools__held_out__count": 4}
    rows = trained("smolagents/tiny.gin", tmp_path, monkeypatch, **settings, sampling__max_tokens=8)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert (rows[-1]["failed"], rows[-1]["timed_out"]) == (0, 0)
    assert rows[-1]["scored"] >= 8
    assert rows[-1]["trained_tokens"] > 0
