"""The picture that a run leaves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
from matplotlib.image import imread

from areal_x.monitor.plot import plot

ROWS = [
    {"step": 0, "accuracy": 0.3},
    {"step": 1, "reward": 0.2, "staleness_mean": 0.0, "staleness_max": 0},
    {"step": 2, "reward": 2.5, "accuracy": 0.9, "staleness_mean": 1.5, "staleness_max": 2},
]


def test_the_curves_are_the_rows() -> None:
    reward, accuracy, staleness = plot(ROWS).axes
    assert [tuple(p) for p in reward.lines[0].get_xydata()] == [(1, 0.2), (2, 2.5)]
    assert [tuple(p) for p in accuracy.lines[0].get_xydata()] == [(0, 0.3), (2, 0.9)]
    assert [tuple(p) for p in staleness.lines[0].get_xydata()] == [(1, 0), (2, 2)]
    assert [tuple(p) for p in staleness.lines[1].get_xydata()] == [(1, 0.0), (2, 1.5)]
    assert reward.get_ylim()[1] > 2.5
    assert all(axes.get_ylabel() for axes in (reward, accuracy, staleness))
    assert staleness.get_xlabel() == "optimizer step"


def test_the_image_is_drawn(tmp_path: Path) -> None:
    plot(ROWS, tmp_path / "plot.png")
    image = imread(tmp_path / "plot.png")
    assert image.shape[:2] == (900, 1050)
    assert len(np.unique(image.reshape(-1, image.shape[2]), axis=0)) > 10


def test_a_run_without_a_step_still_has_a_picture(tmp_path: Path) -> None:
    plot([], tmp_path / "empty.png")
    assert (tmp_path / "empty.png").stat().st_size > 0


def test_no_window_system_is_touched(tmp_path: Path) -> None:
    code = (
        "import sys; from areal_x.monitor.plot import plot\n"
        "plot([], sys.argv[1]); assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "x.png")], check=True)
