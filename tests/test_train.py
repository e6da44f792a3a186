"""The command: what it prints, what it leaves and how it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import gin
import pytest

from areal_x import experiment, train
from areal_x.errors import ConfigError, UserError
from areal_x.protocols.engine import EngineError
from areal_x.run import checkpoint
from areal_x.run.run_dir import open_run

HEAVY = ("jax", "torch", "transformers", "vllm", "datasets", "matplotlib")

TASKS = """
import gin
from areal_x import Workflow

@gin.configurable(module="command_test")
def two_problems():
    return [1, 2]

class Walk(Workflow):
    async def run(self, task, engine):
        raise NotImplementedError

@gin.configurable(module="command_test")
def walk():
    return Walk()
"""

GOOD = """
import command_test_tasks
train.dataset = @two_problems()
train.workflow = @walk()
train.steps = 6
"""


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "play").mkdir()
    monkeypatch.chdir(tmp_path / "play")
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("command_test_tasks.py").write_text(TASKS)
    Path("run.gin").write_text(GOOD)


def test_mistakes_are_told_before_anything_slow_is_imported(tmp_path: Path) -> None:
    """One process takes every mistake in turn: one line each, status 1, and nothing heavy in sys.modules at the end."""
    mistakes = [
        "train.stepz = 3",
        "trian.steps = 3",
        "train.steps = 0",
        "train.steps = '6'",
        "train.steps = ",
        "train.backend = 'jaxx'",
        "import nothing_here",
    ]
    code = (
        "import sys; from areal_x.train import main\n"
        "for binding in sys.argv[1:]: assert main(['run.gin', '-b', binding]) == 1, binding\n"
        "assert main(['runn.gin']) == 1\n"
        f"print(sorted(set({HEAVY}) & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, *mistakes], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
    lines = done.stderr.splitlines()
    assert len(lines) == len(mistakes) + 1
    for line, binding in zip(lines, mistakes, strict=False):
        assert line.startswith(f'error: -b "{binding}": ')
    assert lines[-1] == "error: the gin file 'runn.gin' does not exist; did you mean 'run.gin'?"
    assert not Path("runs").exists()


def test_the_command_itself_fails_with_one_line_and_status_1() -> None:
    command = [sys.executable, "-m", "areal_x.train", "run.gin", "-b", "train.stepz = 3"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: -b \"train.stepz = 3\": train has no parameter 'stepz'; did you mean 'steps'?\n"


def test_an_exception_of_ones_own_code_ends_the_command_with_its_file_and_line(
    ring: Ring, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine.py").write_text("def broken():\n    return 1 / 0\n")
    sys.path.insert(0, str(Path.cwd()))
    try:
        from mine import broken
    finally:
        sys.path.pop(0)
        del sys.modules["mine"]
    try:
        broken()
    except ZeroDivisionError as error:
        ring.error, ring.stop_at = error, 1
    assert train.main(["run.gin"]) == 1
    told = capsys.readouterr().err
    assert told.endswith("error: ZeroDivisionError: division by zero (mine.py:2 in broken)\n")
    assert "return 1 / 0" in told  # the traceback stands above


def test_importing_the_core_loads_no_framework() -> None:
    code = f"import sys, areal_x, areal_x.experiment, areal_x.train; print(sorted(set({HEAVY[:4]}) & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


@dataclass
class Ring:
    """Stands for Experiment.run: takes steps that cost nothing, with checkpoints, and stops where it is told to."""

    stop_at: int = 0
    error: BaseException | None = None
    saves: bool = True
    taken: list[int] = field(default_factory=list)

    def run(self, its: experiment.Experiment, resume: bool = False) -> None:
        run = open_run(Path(its.runs), its.name, gin.operative_config_str(), resume=resume)
        done = checkpoint.newest(run)[0] if resume else 0
        for step in range(done + 1, its.steps + 1):
            self.taken.append(step)
            if self.saves:
                checkpoint.save(run, step, lambda directory: None, {})
            if step == self.stop_at and self.error:
                raise self.error


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch) -> Ring:
    ring = Ring()
    monkeypatch.setattr(experiment.Experiment, "run", lambda self, resume=False: ring.run(self, resume))
    return ring


def test_runs_of_a_file_are_numbered(ring: Ring) -> None:
    assert train.main(["run.gin"]) == 0
    assert train.main(["run.gin", "-b", "train.steps = 2"]) == 0
    assert checkpoint.steps(Path("runs/play-run-1"))[-1] == 6
    assert checkpoint.steps(Path("runs/play-run-2"))[-1] == 2
    assert "train.steps = 2" in Path("runs/play-run-2/config.gin").read_text()


def test_ctrl_c_says_where_the_run_is_and_resume_goes_on_with_it(ring: Ring, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["run.gin", "-b", "train.runs = 'runs'", "-b", "train.steps = 5"]
    ring.stop_at, ring.error = 4, KeyboardInterrupt()
    assert train.main(command) == 130
    said = capsys.readouterr().err
    assert said == (
        "stopped: the run is in runs/play-run-1; continue from step 4 with: "
        'python -m areal_x.train run.gin -b "train.runs = \'runs\'" -b "train.steps = 5" --resume\n'
    )
    ring.error = None
    assert train.main([*command, "--resume"]) == 0
    assert [p.name for p in Path("runs").iterdir()] == ["play-run-1"]
    assert checkpoint.steps(Path("runs/play-run-1"))[-1] == 5


def test_a_scheduler_that_stops_the_run_is_obeyed_as_ctrl_c() -> None:
    Path("waits.py").write_text(
        "import sys, gin\n"
        "@gin.configurable(module='command_test')\n"
        "def waiting():\n    print('ready', flush=True)\n    sys.stdin.readline()\n"
    )
    Path("run.gin").write_text("import waits\n" + GOOD.replace("@two_problems", "@waiting"))
    command = [sys.executable, "-m", "areal_x.train", "run.gin"]
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, text=True, **streams) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        _, said = process.communicate()  # closes its input, so that the function returns
    assert (process.returncode, said) == (130, "stopped\n")
    assert os.listdir("runs") == []  # noqa: PTH208


def test_a_run_stopped_before_its_first_checkpoint_says_so(ring: Ring, capsys: pytest.CaptureFixture[str]) -> None:
    ring.stop_at, ring.error, ring.saves = 1, KeyboardInterrupt(), False
    assert train.main(["run.gin"]) == 130
    assert capsys.readouterr().err == "stopped: the run is in runs/play-run-1; it has no checkpoint yet to resume from\n"


def test_a_named_run_is_not_overwritten(ring: Ring, capsys: pytest.CaptureFixture[str]) -> None:
    named = ["run.gin", "-b", "train.name = 'mine'"]
    assert train.main(named) == 0
    assert train.main(named) == 1
    assert (
        capsys.readouterr().err
        == "error: the run runs/mine exists and is not overwritten: choose another train.name, or use --resume\n"
    )
    assert train.main([*named, "--resume"]) == 0


def test_the_written_config_names_the_run_it_resumes(ring: Ring) -> None:
    assert train.main(["run.gin"]) == 0
    assert train.main(["runs/play-run-1/config.gin", "--resume", "-b", "train.steps = 8"]) == 0
    assert checkpoint.steps(Path("runs/play-run-1"))[-1] == 8


AUTO = ["run.gin", "--resume=auto"]


def test_auto_begins_goes_on_and_ends_with_one_command(ring: Ring, capsys: pytest.CaptureFixture[str]) -> None:
    """As torchrun --max-restarts and Slurm's requeue start it: the same command again and again."""
    ring.stop_at, ring.error = 4, RuntimeError("the machine is gone")
    assert train.main(AUTO) == 1
    ring.error = None
    assert train.main(AUTO) == 0
    assert [p.name for p in Path("runs").iterdir()] == ["play-run"]
    assert ring.taken == [1, 2, 3, 4, 5, 6]
    capsys.readouterr()
    assert train.main(AUTO) == 0
    assert capsys.readouterr().out == "runs/play-run has finished: it has taken 6 of 6 steps\n"
    assert train.main([*AUTO, "-b", "train.steps = 8"]) == 0
    assert ring.taken == [1, 2, 3, 4, 5, 6, 7, 8]


def test_auto_goes_on_with_the_name_that_is_bound(ring: Ring) -> None:
    named = ["-b", "train.name = 'mine'", "-b", "train.steps = 2"]
    assert train.main([*AUTO, *named]) == 0
    assert train.main([*AUTO, *named[:3], "train.steps = 3"]) == 0
    assert [p.name for p in Path("runs").iterdir()] == ["mine"]
    assert ring.taken == [1, 2, 3]


def test_auto_begins_again_what_ended_before_its_first_checkpoint_and_keeps_what_there_was(
    ring: Ring, capsys: pytest.CaptureFixture[str]
) -> None:
    ring.stop_at, ring.error, ring.saves = 1, KeyboardInterrupt(), False
    for _ in range(2):
        assert train.main(AUTO) == 130
    said = capsys.readouterr()
    assert "runs/play-run ended before its first checkpoint and begins again; its files are now in" in said.out
    ring.error, ring.saves = None, True
    assert train.main(AUTO) == 0
    assert sorted(p.name for p in Path("runs").iterdir()) == ["play-run", "play-run.before-1", "play-run.before-2"]


def test_auto_does_not_take_a_run_from_a_process_that_writes_to_it(ring: Ring) -> None:
    code = "from pathlib import Path; from areal_x.run.run_dir import open_run; open_run(Path('runs'), 'play-run', ''); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as other:
        while not Path("runs/play-run/config.gin").exists():
            assert other.poll() is None
        assert train.main(AUTO) == 1
        other.communicate(b"\n")
    assert Path("runs/play-run/config.gin").exists()


@pytest.mark.parametrize("name", ["nowhere", "unbegun"])
def test_a_name_that_cannot_be_resumed_is_refused_before_anything_is_made(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("runs/unbegun/logs").mkdir(parents=True)
    Path("made.py").write_text(
        "import gin\n@gin.configurable(module='command_test')\ndef slow():\n    raise AssertionError('tasks were made')\n"
    )
    Path("run.gin").write_text("import made\n" + GOOD.replace("@two_problems", "@slow"))
    assert train.main(["run.gin", "--resume", "-b", f"train.name = '{name}'"]) == 1
    told = {
        "nowhere": "error: there is no run runs/nowhere to resume\n",
        "unbegun": "error: runs/unbegun has no checkpoint to resume from\n",
    }
    assert capsys.readouterr().err == told[name]


def test_nothing_to_resume_is_a_sentence(ring: Ring, capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(["run.gin", "--resume"]) == 1
    assert capsys.readouterr().err.startswith("error: there is nothing to resume: runs has no run play-run-1")


@pytest.mark.parametrize(
    "error, said",
    [
        (UserError("the disk is full"), "error: the disk is full\n"),
        (
            ConfigError("train.steps", 6, "less than 5"),
            "error: run.gin:5: train.steps = 6 cannot work: it must be less than 5\n",
        ),
        (UserError("train.steps = 6 is too few"), "error: run.gin:5: train.steps = 6 is too few\n"),
        (EngineError("the server ended"), "error: the server ended\n"),
    ],
)
def test_an_error_while_it_runs_is_one_sentence(
    ring: Ring, capsys: pytest.CaptureFixture[str], error: Exception, said: str
) -> None:
    ring.stop_at, ring.error = 1, error
    assert train.main(["run.gin"]) == 1
    assert capsys.readouterr().err == said


def test_a_bug_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "place_of", lambda error: "")  # as of an error that passed through no user's code
    monkeypatch.setattr(train, "run_named", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train.main(["run.gin"])


def test_a_run_that_fails_before_it_begins_leaves_no_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: experiment.Experiment, resume: bool = False) -> None:
        raise UserError("no model")

    monkeypatch.setattr(experiment.Experiment, "run", fails)
    assert train.main(["run.gin"]) == 1
    assert os.listdir("runs") == []  # noqa: PTH208


def test_a_dry_run_prints_the_config_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(experiment.Experiment, "plan", lambda self: None)
    assert train.main(["run.gin", "--dry-run", "-b", "sampling.max_tokens = 5"]) == 0
    printed = capsys.readouterr().out
    for part in (
        "import command_test_tasks",
        "train.steps = 6",
        "train.dataset = @two_problems()",
        "sampling.max_tokens = 5",
        "grpo.clip_low = 0.2",
    ):
        assert part in printed
    assert not Path("runs").exists()


def test_the_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        train.main(["--help"])
    assert ended.value.code == 0
    assert "python -m areal_x.train examples/arithmetic/grpo.gin" in capsys.readouterr().out
