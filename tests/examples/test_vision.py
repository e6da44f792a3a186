"""Counting squares: the pictures, the tutor, and two steps of a model that sees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("PIL")

from areal_x.errors import ConfigError
from areal_x.hf.image_reader import image_urls, load_image_reader, read_prompt_images
from areal_x.types import Scored, Task
from areal_x.workflows.single_turn import SingleTurn
from examples.vision import warm_start as module
from examples.vision.task import CELLS, drawn, pictures, verify
from examples.vision.warm_start import batches, shown, write_model
from tests.examples.running import ROOT, check_file, conversed, gin_files, same_tokens, trained
from tests.thorough import thorough


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("vision")
    write_model(directory, 0)
    return directory


@pytest.mark.parametrize("file", gin_files("vision"), ids=lambda file: file.stem)
def test_an_example_can_be_run(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    check_file(file)


@pytest.mark.parametrize("pixels", [32, 224])
def test_a_picture_has_as_many_squares_as_it_says(pixels: int) -> None:
    side = pixels // CELLS * 3 // 4
    for squares in range(1, CELLS**2 + 1):
        picture = drawn(np.random.default_rng(squares), squares, pixels)
        assert picture.shape == (pixels, pixels, 3)
        assert (picture.max(-1) >= 140).sum() == squares * side**2


def test_pictures_are_fixed_by_their_seed_and_those_to_judge_by_are_others() -> None:
    tasks, unseen = pictures(300, seed=1), pictures(300, split="test", seed=1)
    assert {task.answer for task in tasks} == set("12345")
    assert pictures(300, seed=1) == tasks != pictures(300, seed=2)
    assert pictures(300, split="test", seed=2) == unseen
    assert not {image_urls(task.prompt) for task in tasks} & {image_urls(task.prompt) for task in unseen}
    for changes, binding in (({"most": 17}, "most"), ({"pixels": 15}, "pixels"), ({"split": "dev"}, "split")):
        with pytest.raises(ConfigError, match=rf"vision\.pictures\.{binding}"):
            pictures(**changes)


def test_the_last_number_is_the_answer() -> None:
    task = Task("t", "", "3")
    assert [verify(task, text) for text in ("3", "Of 5 shapes, 3 are squares.")] == [1.0, 1.0]
    assert [verify(task, text) for text in ("", "2", "33", "3 or 4")] == [0.0] * 4


def test_an_episode_is_token_for_token_and_patch_for_patch_the_demonstration(model: Path) -> None:
    task = pictures(1)[0]
    example = shown(model, task)
    episode = conversed(SingleTurn(reward=verify, reward_workers=1), model, task, example)
    assert isinstance(episode.outcome, Scored)
    assert episode.outcome.reward == 1.0
    same_tokens(episode, example)
    (trajectory,) = episode.trajectories
    assert trajectory.images is not None
    assert example.images is not None
    np.testing.assert_array_equal(trajectory.images.patches, example.images.patches)


def test_demonstrations_fill_their_rows_and_teach_right_counts(model: Path) -> None:
    made = list(batches(model, steps=2, seed=0, most=5))
    assert len(made) == 2
    for batch in made:
        assert batch.shape == (25, module.ROW_LENGTH)
        assert (batch.image_segments > 0).sum() == 25 * module.IN_ROW
        assert batch.mask.sum() == 2 * 25 * module.IN_ROW  # a count and the end token


def test_what_the_model_sees_of_a_picture_is_the_picture(model: Path) -> None:
    """Its patches, put together again: rows of windows of 2×2 patches of 4×4 pixels, twice in time."""
    task = pictures(1)[0]
    images: Any = read_prompt_images(type("Tokenizer", (), {"name_or_path": str(model)}), task.prompt)
    assert load_image_reader(str(model)).form.merge == 2
    apart = images.patches.reshape(4, 4, 2, 2, 3, 2, 4, 4)[:, :, :, :, :, 0]
    seen = apart.transpose(0, 2, 5, 1, 3, 6, 4).reshape(32, 32, 3)
    np.testing.assert_allclose((seen + 1) * 127.5, drawn_first(), atol=1e-3)


def drawn_first() -> np.ndarray:
    rng = np.random.default_rng([1, 0])
    return drawn(rng, int(rng.integers(1, 6)), 32)


@thorough
def test_two_steps_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"vision__warm_start__steps": 2, "vision__pictures__count": 40, "test/vision__pictures__count": 8}
    rows = trained("vision/tiny.gin", tmp_path, monkeypatch, **settings)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert (rows[-1]["scored"], rows[-1]["failed"], rows[-1]["timed_out"]) == (rows[-1]["scored"], 0, 0)
    assert rows[-1]["scored"] >= 8
    assert rows[1]["policy_gap"] < 1e-5  # between what the engine recorded and what the trainer says, nats a token
