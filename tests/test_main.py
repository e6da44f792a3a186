"""The command `areal-x` and its subcommands, and examples copied out of the package."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from areal_x import __main__ as console
from areal_x import __version__, example
from areal_x.runtime.command import command_of, module_of

ROOT = Path(__file__).parents[1]


def output(code: str, folder: Path = ROOT) -> str:
    return subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("name", console.SUBCOMMANDS)
def test_a_subcommand_is_the_module_of_its_name(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert callable(importlib.import_module(module_of(name)).main)
    with pytest.raises(SystemExit) as ended:
        console.run([name, "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: {command_of(name)} ")


def test_the_commands_of_the_package_are_the_subcommands() -> None:
    modules = {file.stem for file in (ROOT / "areal_x").glob("*.py") if "\ndef main(" in file.read_text()}
    modules |= {file.parent.name for file in (ROOT / "areal_x").glob("*/__main__.py")}
    assert modules - {"__main__"} == {module_of(name).partition(".")[2] for name in console.SUBCOMMANDS}


@pytest.mark.parametrize(
    ("program", "command"),
    [
        ("/usr/bin/areal-x", "areal-x train"),
        ("/site-packages/areal_x/__main__.py", "python -m areal_x train"),
        ("/site-packages/areal_x/train.py", "python -m areal_x.train"),
        ("-c", "python -m areal_x.train"),
    ],
)
def test_help_names_the_command_as_it_was_started(program, command, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", [program])
    with pytest.raises(SystemExit):
        console.run(["train", "--help"])
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: {command} ")
    assert f"    {command} examples/arithmetic/grpo.gin\n" in shown


def test_what_is_no_subcommand_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert console.run(["trian"]) == 2
    assert capsys.readouterr().err == "error: there is no subcommand 'trian'; did you mean 'train'?\n"
    assert console.run([]) == 2
    assert console.run(["--help"]) == 0
    assert console.run(["--version"]) == 0
    assert capsys.readouterr().out.endswith(f"{__version__}\n")


def test_a_subcommand_whose_extra_is_missing_says_how_to_install_it() -> None:
    code = (
        "import sys; sys.modules['starlette'] = None; sys.stderr = sys.stdout\n"
        "from areal_x.__main__ import run; print(run(['serve', 'FILE.gin']))"
    )
    assert output(code).splitlines() == ["error: agents need the package starlette: pip install 'areal-x[agents]'", "1"]


def test_the_overview_and_the_list_of_examples_load_nothing_that_a_run_needs() -> None:
    code = (
        "import sys; before = set(sys.modules); from areal_x.__main__ import run; run(['--help']); run(['example'])\n"
        "loaded = {n.split('.')[0] for n in set(sys.modules) - before if not n.startswith('_')}\n"
        "print(sorted(loaded - sys.stdlib_module_names))"
    )
    assert output(code).splitlines()[-1] == "['areal_x']"


def test_an_example_comes_with_those_it_uses(tmp_path: Path) -> None:
    told = example.copy_example("agents", tmp_path)
    parts = sorted(part.name for part in (tmp_path / "examples").iterdir())
    assert parts == [
        "__init__.py",
        "agents",
        "arithmetic",
        "tiny",
    ]
    assert f"wrote {tmp_path}/examples/tiny\n" in told
    assert told.endswith("examples/agents/FILE.gin, where FILE is one of agents_sdk, javascript, openai_client, workers")
    for file in (tmp_path / "examples").rglob("*.*"):
        assert file.read_bytes() == (ROOT / file.relative_to(tmp_path)).read_bytes()
    assert example.copy_example("arithmetic", tmp_path)  # what is there already is the same


def test_every_example_of_the_documentation_can_be_copied(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^\| \[(\w+)\]\(\.\./examples/\1\)", page, re.MULTILINE))
    assert documented == set(example.names())
    told = example.copy_example("letters", tmp_path)
    assert told.endswith(f"next, in {tmp_path}: python -m examples.letters.task")
    assert (tmp_path / "examples/letters/task.py").is_file()


def test_an_example_brings_the_settings_of_the_program_that_it_runs(tmp_path: Path) -> None:
    example.copy_example("swe", tmp_path)
    assert (tmp_path / "examples" / "swe" / "tiny.yaml").is_file()


def test_the_files_of_an_example_can_be_read_where_they_were_copy_example(tmp_path: Path) -> None:
    example.copy_example("self_play", tmp_path)
    code = (
        "import sys; from areal_x.config.reader import load; sys.path.insert(0, ''); load('examples/self_play/tiny.gin')\n"
        "print({m.__file__ for n, m in sys.modules.items() if n.split('.')[0] == 'examples'})"
    )
    files = [Path(file) for file in eval(output(code, tmp_path))]
    assert len(files) > 3
    assert all(file.is_relative_to(tmp_path) for file in files)


def test_a_file_of_the_users_is_not_overcopy_example(tmp_path: Path, monkeypatch, capsys) -> None:
    mine = tmp_path / "examples" / "arithmetic" / "task.py"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    monkeypatch.chdir(tmp_path)
    assert console.run(["example", "arithmetic"]) == 1
    assert "examples/arithmetic/task.py exists and differs" in capsys.readouterr().err
    assert [file.name for file in (tmp_path / "examples").rglob("*.*")] == ["task.py"]
    assert console.run(["example", "arithmetics"]) == 1
    assert capsys.readouterr().err == "error: there is no example 'arithmetics'; did you mean 'arithmetic'?\n"


def test_every_example_is_listed_with_a_description() -> None:
    lines = example.listing().splitlines()
    assert {line.split()[0] for line in lines} == {file.parent.name for file in (ROOT / "examples").glob("*/*.gin")} | {
        "letters"
    }
    assert all(len(line.split()) > 3 for line in lines)
