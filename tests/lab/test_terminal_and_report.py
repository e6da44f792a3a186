"""`areal-x top` and `areal-x report`: a run in a terminal, and in one file."""

from __future__ import annotations

import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from areal_x import report, top
from areal_x.lab.report import BEGINNING
from areal_x.lab.terminal import panel, run_at, show
from tests.lab.journals import (
    FAILED,
    HOSTILE,
    LATE,
    group,
    scored,
    write_journal,
    write_metrics,
    write_timeline,
    write_tokenizer,
)

STEP = {"seconds": 2.0, "wait_seconds": 1.2, "update_seconds": 0.8, "logprob_seconds": 0.0, "publish_seconds": 0.0}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    made = tmp_path / "runs" / "run"
    attempts = [scored("the answer is 42", 1.0), scored(HOSTILE, 0.0), FAILED, LATE]
    write_journal(made, [group(0, attempts), group(1, [scored("slow", 0.5)], task=HOSTILE)], [[0]])
    write_tokenizer(made / "checkpoints" / "2" / "trainer")
    (made / "config.gin").write_text(f"train.steps = 5\ntrain.name = {HOSTILE!r}\n")
    rows = [{"step": i, "reward": i / 10, "loss": 1.0, f"reward/{HOSTILE}": 1.0, **STEP} for i in range(1, 9)]
    write_metrics(made, rows)
    write_timeline(made)
    stall = {"time": 0.0, "silent_seconds": 75.0, "sentences": [f"the trainer has waited 75 s for {HOSTILE}"], "waits": []}
    (made / "logs").mkdir()
    (made / "logs" / "waits.json").write_text(json.dumps(stall | {"threads": [{"name": "rollout", "stack": "in take <b>"}]}))
    return made


class Tags(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_a_report_has_what_the_lab_shows_in_one_file_that_runs_and_loads_nothing(run, tmp_path, capsys) -> None:
    file = tmp_path / "sent.html"
    assert report.main([str(run), str(file)]) == 0
    assert capsys.readouterr().out == f"wrote {file}\n"
    page = file.read_text()
    tags = Tags(page)
    names = {tag for tag, _ in tags.found}
    assert not names & {"script", "img", "link", "iframe", "object", "embed", "form", "a"}
    attributes = {name for _, attributes in tags.found for name in attributes}
    assert not attributes & {"src", "href"}
    assert not [name for name in attributes if name.startswith("on")]
    assert re.findall(r"url\(|@import|https?:", page) == []
    assert "default-src 'none'" in page
    text = "".join(tags.text)
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert HOSTILE.split("\x1b")[0] in text  # escaped, not left out
    assert "60% of a step: the trainer waits for answers to be generated" in text
    for wanted in (
        "the answer is 42",
        FAILED.outcome.error,
        FAILED.outcome.traceback,
        "Nothing has moved for 1:15",
        "in take <b>",
    ):
        assert wanted in text
    assert re.search(r"Slowestgroup 1, task .*: reward 0.5, 9 tokens, scored, 1.5 s", text)
    assert "train.steps" in text
    assert {"reward", "loss"} <= set(tags.text)


def test_a_report_is_written_again_and_over_nothing_else(run, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert [report.main([str(run)]) for _ in range(2)] == [0, 0]
    assert (tmp_path / "run.html").read_text().startswith(BEGINNING)
    other = tmp_path / "mine.html"
    other.write_text("mine")
    for words, why in (
        ([str(run), str(other)], "is not a report"),
        ([str(run), str(tmp_path / "no" / "where.html")], "cannot be written"),
        ([str(tmp_path / "nothing")], "is not a run's directory"),
        ([str(run), "--tokenizer", str(tmp_path)], "there is no"),
    ):
        assert report.main(words) == 1
        assert why in capsys.readouterr().err
    assert other.read_text() == "mine"


def test_top_shows_the_run_once_where_there_is_no_terminal(run, capsys) -> None:
    assert top.main([str(run)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "run stopped, step 8/5" in shown
    assert "nothing has moved for 1:15: the trainer has waited 75 s" in shown
    assert "60% of a step" in shown
    assert re.search(r"generation 60\.0% █+ trainer 25\.0% █+ rewards 15\.0% █+ of the 0:02 of 1 steps", shown)
    assert "0.1 to 0.8" in shown
    assert "\x1b" not in shown
    assert top.main([str(run / "logs")]) == 1
    assert "is not a run's directory" in capsys.readouterr().err


def test_top_goes_on_in_a_terminal_until_the_run_ends(run, monkeypatch) -> None:
    from areal_x.run import run_dir

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    run_dir._lock(run)
    looked = []

    def end(_: float) -> None:
        looked.append(panel(run_at(run))[1])
        if len(looked) == 2:
            run_dir._locked.pop(run.resolve() / run_dir.LOCK).close()

    monkeypatch.setattr("areal_x.lab.terminal.time.sleep", end)
    stream = Terminal()
    show(run_at(run), stream)
    assert looked == [True, True]
    assert "stopped" in stream.getvalue()
