"""The plot that a run writes."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from areal_x.monitor.metrics import MetricsWriter
from areal_x.monitor.plot import live_plots, plot

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


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, None])
def test_a_run_has_its_pictures_however_it_ends(tmp_path: Path, error: type[BaseException] | None) -> None:
    with pytest.raises(error) if error else nullcontext(), live_plots(tmp_path):
        with MetricsWriter(tmp_path) as metrics:
            metrics.write({"step": 1, "reward": 0.5})
        assert not (tmp_path / "plot.png").exists()
        if error:
            raise error
    assert (tmp_path / "plot.png").stat().st_size > 0


def test_a_run_that_measured_nothing_has_no_picture_and_one_that_cannot_be_drawn_ends_as_it_would(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with live_plots(tmp_path):
        pass
    assert not (tmp_path / "plot.png").exists()
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    (tmp_path / "plot.png").mkdir()
    with live_plots(tmp_path):
        pass
    assert capsys.readouterr().out.startswith(f"no plot of {tmp_path} could be drawn (")


def test_a_run_is_drawn_on_the_way_now_and_then_and_not_for_more_than_its_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, at = 0.0, []
    monkeypatch.setattr("time.monotonic", lambda: now)

    def slow(_: Path) -> None:
        nonlocal now
        at.append(now)
        now += 5

    monkeypatch.setattr("areal_x.monitor.plot.write_plots", slow)
    with live_plots(tmp_path) as again:
        for _ in range(1200):
            now += 1
            again()
    assert at == [61.0, 61.0 + 5 + 501, 61.0 + 2 * (5 + 501), now - 5]
