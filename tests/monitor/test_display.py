"""The display of a run's progress."""

from __future__ import annotations

import io
import sys
import types

import pytest
from rich.console import Console

from areal_x.monitor.display import Display, clock, in_notebook, line, panel, seconds_left, sparkline

ROW = {
    "step": 12, "reward": 0.5341, "accuracy": 0.914,
    "generation_tokens_per_second": 12_345.0, "training_tokens_per_second": 810.0,
    "staleness_mean": 1.25, "staleness_max": 2, "queue_depth": 7, "failed": 3, "timed_out": 0, "seconds": 2.0,
}  # fmt: skip


def test_without_a_terminal_each_step_is_one_plain_line() -> None:
    stream = io.StringIO()
    with Display(48, stream) as display:
        display.message("server 1 of 2 starts")
        display.show({"step": 0, "accuracy": 0.32})
        display.show(ROW)
        display.show({**ROW, "step": 48, "failed": 0})
    rates = "generated 12.3k tok/s  trained 810 tok/s"
    assert stream.getvalue().splitlines() == [
        "server 1 of 2 starts",
        "step  0/48  accuracy 32.0%",
        f"step 12/48  reward 0.534  accuracy 91.4%  {rates}  staleness 1.2 (at most 2)  queue 7  failed 3  left 1:12",
        f"step 48/48  reward 0.534  accuracy 91.4%  {rates}  staleness 1.2 (at most 2)  queue 7",
    ]


def test_what_a_row_lacks_is_left_out() -> None:
    assert line({"step": 3, "reward": 0.0, "accuracy": None}, 9, None) == "step 3/9  reward 0.000"


def test_the_time_left_is_that_of_a_usual_step() -> None:
    rows = [
        {"step": 0, "seconds": 99.0},
        {"step": 1, "seconds": 60.0},
        {"step": 2, "seconds": 2.0},
        {"step": 3, "seconds": 2.0},
    ]
    assert seconds_left(rows, 13) == 20.0
    assert seconds_left(rows[:1], 13) is None
    assert [clock(s) for s in (0, 59.6, 3599, 3661)] == ["0:00", "1:00", "59:59", "1:01:01"]


def test_a_sparkline_goes_from_the_lowest_to_the_highest() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█" or sparkline([0.0, 0.5, 1.0]) == "▁▄█"
    assert sparkline([0.3, 0.3]) == "▁▁"
    assert sparkline([]) == ""
    assert sparkline([float(i) for i in range(1000)], width=8) == "▁▂▃▄▅▆▇█"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_in_a_terminal_a_panel_is_redrawn_and_messages_stay_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    stream = Terminal()
    with Display(48, stream) as display:
        display.message("checkpoint of step 10 saved [in brackets]")
        display.show({**ROW, "step": 11, "reward": 0.1})
        display.show(ROW)
    shown = stream.getvalue()
    assert "checkpoint of step 10 saved [in brackets]" in shown
    last = shown[shown.rindex("step 12/48") :]
    for text in ("12.3k tok/s", "91.4%", "1.2 (at most 2)", "1:12 left", "▁█"):
        assert text in last


def test_the_panel_keeps_the_accuracy_of_the_last_evaluation() -> None:
    console = Console(file=io.StringIO(), width=160)
    console.print(panel([ROW, {"step": 13, "reward": 0.6}], 48, elapsed=61.0, since_last=0.0))
    assert "91.4%" in console.file.getvalue()  # type: ignore[attr-defined]
    assert "1:01 elapsed" in console.file.getvalue()  # type: ignore[attr-defined]


def test_the_panel_is_there_before_the_first_step() -> None:
    console = Console(file=io.StringIO(), width=80)
    console.print(panel([], 48, elapsed=3.0, since_last=3.0))
    assert "step 0/48" in console.file.getvalue()  # type: ignore[attr-defined]


def test_in_a_notebook_one_line_changes_in_place(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: object()))
    assert in_notebook()
    with Display(9) as display:
        display.show({"step": 1, "reward": 0.125})
        display.show({"step": 2})
        display.message("saved")
        display.show({"step": 3})
    assert capsys.readouterr().out == "\rstep 1/9  reward 0.125\rstep 2/9              \nsaved\n\rstep 3/9\n"


def test_outside_a_notebook_none_is_found() -> None:
    assert not in_notebook()


def test_a_run_that_learns_nothing_from_most_groups_says_so_after_some_steps() -> None:
    def shown(rows: list[dict[str, float]]) -> list[int]:
        """The steps after which a warning is shown."""
        display = Display(len(rows), stream := io.StringIO())
        steps = []
        for step, row in enumerate(rows):
            display.show({"step": step, **row})
            if "no variance" in stream.getvalue().splitlines()[-1]:
                steps.append(step)
        return steps

    nothing = {"groups_without_variance": 0.75, "zero_advantages": 0.8}
    assert shown([{}, *([nothing] * 21)]) == [5, 10, 20]
    assert shown([{}, *([nothing] * 4), {"groups_without_variance": 0.5, "zero_advantages": 0.5}, *([nothing] * 5)]) == [10]
    # Groups of one whose advantages compare the whole batch, and a credit that gives most tokens nothing.
    assert shown([{"groups_without_variance": 1.0, "zero_advantages": 0.0}] * 9) == []
    assert shown([{"groups_without_variance": 0.1, "zero_advantages": 0.9}] * 9) == []
    assert shown([{"reward": 1.0}] * 9) == []
