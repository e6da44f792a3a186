"""A notebook shows trajectories as they were trained on."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from areal_x.algorithms.recipes import grpo
from areal_x.hf.tokenizer import load_tokenizer
from areal_x.monitor.trajectories import extremes, show_trajectory, show_turn, trained
from areal_x.types import NOT_THE_POLICY, Trajectory, Turn
from tests.experiments import tiny_experiment

DRAWN = Trajectory.from_completion(
    np.array([5, 6]), np.array([7, 8, 9]), np.array([-0.5, -1.0, -0.25]), np.array([3, 3, 4]), reward=1.0
)


@pytest.fixture(scope="module")
def turn(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Turn:
    experiment = tiny_experiment(tiny_model_dir, tmp_path_factory.mktemp("runs"), steps=1, minibatches=2)
    experiment = replace(experiment, algorithm=grpo(proximal="recompute"))
    *_, last = experiment.turns(experiment.open())
    return last


def hovered(page: str) -> list[float]:
    return [float(x) for x in re.findall(r"title='([^']*)'", page)]


def test_a_trajectory_is_shown_by_log_probability_and_version() -> None:
    page = show_trajectory(DRAWN).html
    assert hovered(page) == [-0.5, -1.0, -0.25, -1, -1, 0]
    assert "reward 1</b>, 3 of 5 tokens trained on, ended by stop" in page
    once = show_trajectory(replace(DRAWN, versions=np.where(DRAWN.mask, 3, NOT_THE_POLICY).astype(np.int32))).html
    assert hovered(once) == [-0.5, -1.0, -0.25]
    assert "all of version 3" in once


def test_a_notebook_shows_a_trajectory_without_being_asked_to() -> None:
    script = (
        "from IPython.core.interactiveshell import InteractiveShell\n"
        "shell = InteractiveShell.instance()\n"
        "import numpy as np\n"
        "from areal_x import Trajectory\n"
        "import areal_x.experiment\n"
        "shown = Trajectory.from_completion(np.array([5]), np.array([7]), np.array([-0.5]), np.array([3]))\n"
        "print(shell.display_formatter.format(shown)[0]['text/html'])\n"
    )
    pytest.importorskip("IPython")
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert "1 of 2 tokens trained on" in shown


def test_with_a_tokenizer_tokens_are_text(tiny_model_dir: Path) -> None:
    tokenizer = load_tokenizer(tiny_model_dir)
    page = show_trajectory(DRAWN, tokenizer)._repr_html_()
    assert tokenizer.decode([8]) == "6"
    assert ">6</span>" in page


def test_every_trajectory_of_a_turn_has_the_numbers_that_were_trained_on(turn: Turn) -> None:
    found = trained(turn)
    assert len(turn.batches) == 2
    every = [t for group in turn.groups for episode in group.scored for t in episode.trajectories]
    assert sorted(id(t.trajectory) for t in found) == sorted(map(id, every))
    for one in found:
        for batch in turn.batches:
            for row in range(batch.shape[0]):
                for segment in range(1, batch.segment_ids[row].max() + 1):
                    at = (row, batch.segment_ids[row] == segment)
                    if np.array_equal(batch.tokens[at], one.trajectory.tokens) and np.array_equal(
                        batch.behavior_logp[at], one.trajectory.logprobs
                    ):
                        np.testing.assert_array_equal(one.advantages, batch.advantages[at])
                        np.testing.assert_array_equal(one.gaps, batch.proximal_logp[at] - batch.behavior_logp[at])
                        break


def test_a_turn_shows_its_largest_and_smallest_advantage(turn: Turn, tiny_model_dir: Path) -> None:
    found = trained(turn)
    best, worst = extremes(found)
    advantages = np.concatenate([t.advantages[t.trajectory.mask] for t in found])
    assert found[best].advantages.max() == advantages.max()
    assert found[worst].advantages.min() == advantages.min()
    page = show_turn(turn, load_tokenizer(tiny_model_dir), [worst]).html
    mask = found[worst].trajectory.mask
    told = [*found[worst].advantages[mask], *found[worst].gaps[mask]]
    assert hovered(page) == pytest.approx(told, rel=1e-3)


def test_what_the_trainer_was_not_asked_is_not_shown(tiny_model_dir: Path, turn: Turn) -> None:
    unasked = replace(turn, batches=[batch.replace(proximal_logp=batch.behavior_logp) for batch in turn.batches])
    page = show_turn(unasked, load_tokenizer(tiny_model_dir)).html
    assert "trainer − engine" not in page
    assert "log-probability when it was sampled" in page
