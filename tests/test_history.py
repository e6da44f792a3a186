"""benchmarks/history.py: the arithmetic of its ratios, and a commit that is slower."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import history

FAST, SLOW = "import time\n", "import time\ntime.sleep(0.3)\n"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "repository"
    (root / "benchmarks").mkdir(parents=True)
    history.git(root, "init", "--quiet", "--initial-branch=main")
    for name, value in {"user.name": "a", "user.email": "a@b"}.items():
        history.git(root, "config", name, value)
    commit(root, FAST, "fast")
    return root


def commit(root: Path, code: str, subject: str) -> str:
    (root / "benchmarks" / "work.py").write_text(code)
    history.git(root, "add", ".")
    history.git(root, "commit", "--quiet", "--allow-empty", "-m", subject)
    return history.git(root, "rev-parse", "HEAD")


def test_a_ratio_is_new_by_old_round_by_round() -> None:
    seconds, cpu = history.ratios(
        "x", {"seconds": [3.0, 2.0, 9.0], "CPU": [1, 1, 1]}, {"seconds": [2.0, 2.0, 1.0], "CPU": [1, 1, 1]}
    )
    assert (seconds.clock, seconds.median, seconds.least, seconds.largest, seconds.lost) == ("seconds", 1.5, 1.0, 9.0, True)
    assert (cpu.clock, cpu.median, cpu.lost) == ("CPU", 1.0, False)
    assert not history.Ratio("x", "CPU", 1.10, 1.0, 1.2).lost


def test_a_slowed_commit_is_named_with_its_spread_and_recorded(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fast, slow = history.current(repository), commit(repository, SLOW, "slow")
    scripts = {"work": ("benchmarks/work.py",), "nothing": ("-c", "pass")}
    assert history.main(["--rounds", "1", "--only", "work"], scripts, repository) == 1
    named = [line for line in capsys.readouterr().out.splitlines() if line.startswith("LOST")]
    assert any(line.startswith("LOST work, seconds: ") for line in named)
    (line,) = map(json.loads, (repository / "benchmarks" / "history.jsonl").read_text().splitlines())
    assert (line["commit"], line["base"]) == (slow, fast)
    (seconds,) = (ratio for ratio in line["ratios"] if ratio["clock"] == "seconds")
    assert seconds["script"] == "work"
    assert 1.1 < seconds["least"] <= seconds["median"] <= seconds["largest"]
    assert {"date", "machine", "versions"} <= set(line)
    assert history.git(repository, "worktree", "list").count("\n") == 0


def test_the_base_is_the_last_recorded_commit_that_is_there(repository: Path) -> None:
    recorded = repository / "benchmarks" / "history.jsonl"
    first, second = history.current(repository), commit(repository, SLOW, "second")
    assert history.default_base(repository, recorded) == first  # main is the current commit: the one before
    commit(repository, FAST, "third")
    recorded.write_text("".join(json.dumps({"commit": c}) + "\n" for c in (first, second, first + "+", "0" * 40)))
    assert history.default_base(repository, recorded) == second
    (repository / "benchmarks" / "work.py").write_text(SLOW)
    assert history.current(repository).endswith("+")


def test_a_script_that_fails_ends_the_comparison_with_its_output(repository: Path) -> None:
    with pytest.raises(RuntimeError, match=r"bad ended with 3 in .*\n.*why"):
        history.compare(repository, repository, {"bad": ("-c", "print('why'); raise SystemExit(3)")}, 1)
