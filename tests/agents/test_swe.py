"""Episodes on a repository: what a patch earns, and what it cannot reach."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from areal_x.agents.container_door import VARIABLE, open_door
from areal_x.agents.mini_swe_agent import ContainerEnvironment
from areal_x.agents.swe import Swe
from areal_x.errors import ConfigError, UserError
from areal_x.rollout.episode import run_episode
from areal_x.sandbox.containers.limits import ContainerLimits
from areal_x.sandbox.containers.local import LocalContainers
from areal_x.types import Episode, Failed, Scored, Task
from tests.agents.chat.speaking import Says, tokenizer_of

ROOT = Path(__file__).parents[2]
LIMITS = ContainerLimits(kind="local", seconds=20.0, disk_mb=8.0, memory_mb=512.0)
HIDDEN = "import unittest\nfrom shape import area\nclass T(unittest.TestCase):\n    def test_it(self):\n        {}\n"
TESTS = {
    "files": {"tests/test_hidden.py": HIDDEN.format("self.assertEqual(area(3), 9)")},
    "tests": [
        {"command": ["python3", "-m", "unittest", "tests.test_hidden"]},
        {"command": ["python3", "-c", "import shape; print(shape.area(4))"], "output": "16"},
    ],
}
FIX = "sed -i 's/side + side/side * side/' shape.py"


def git(place: Path, *words: str) -> None:
    author = ("-c", "user.name=t", "-c", "user.email=t@localhost")
    subprocess.run(["git", *author, *words], cwd=place, check=True, capture_output=True)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository whose second commit holds the solution."""
    place = tmp_path_factory.mktemp("repository")
    git(place, "init", "--quiet")
    (place / "tests").mkdir()
    (place / "tests" / "__init__.py").write_text("")
    (place / "shape.py").write_text("def area(side):\n    return side + side\n")
    (place / ".gitignore").write_text("*.log\n")
    git(place, "add", "--all")
    git(place, "commit", "--quiet", "-m", "wrong")
    git(place, "tag", "wrong")
    (place / "shape.py").write_text("def area(side):\n    return side * side\n")
    git(place, "commit", "--quiet", "--all", "-m", "the solution")
    return place


def task(place: Path, answer: Any = TESTS, **about: Any) -> Task:
    return Task("area", "Mend area().", answer, {"swe": {"repository": str(place), "commit": "wrong", **about}})


def episode(one: Task, *commands: str, **settings: Any) -> tuple[Any, Says]:
    """The episode in which the model types these commands."""
    tokenizer = tokenizer_of("qwen25")
    said = [tokenizer.encode(f"{text}<|im_end|>", add_special_tokens=False) for text in (*commands, "done")]
    engine = Says(*said)
    workflow = Swe(
        command=(sys.executable, "tests/agents/shell_agent.py", "{prompt}"),
        environment={"PYTHONPATH": str(ROOT)},
        directory=str(ROOT),
        **{"containers": LIMITS, **settings},
    )

    async def run() -> Episode:
        ready = workflow.setup(tokenizer)
        try:
            return await run_episode(ready, one, engine, 120)  # type: ignore[arg-type]
        finally:
            await ready.close()

    return asyncio.run(run()), engine


def outcome(one: Task, *commands: str, **settings: Any) -> Scored:
    found = episode(one, *commands, **settings)[0].outcome
    assert isinstance(found, Scored), found
    return found


def test_a_patch_that_passes_the_hidden_tests_earns_the_reward(repository: Path) -> None:
    found, engine = episode(task(repository), "cat shape.py", FIX)
    assert found.outcome.reward == 1.0
    assert found.outcome.details["tests_passed"] == found.outcome.details["applied"] == 1.0
    shown = tokenizer_of("qwen25").decode(engine.prompts[1])
    assert "0: def area(side):\n    return side + side" in shown
    (trajectory,) = found.trajectories
    trained = tokenizer_of("qwen25").decode(trajectory.tokens[trajectory.mask])
    assert trained == f"cat shape.py<|im_end|>{FIX}<|im_end|>done<|im_end|>"


@pytest.mark.parametrize(
    ("command", "settings", "reward", "passed"),
    [
        ("true", {}, 0.0, 0.0),  # nothing changed
        ("echo 'def area(side): return 16' > shape.py", {}, 0.0, 0.5),
        ("echo 'def area(side): return 9' > shape.py", {"partial": True}, 0.5, 0.5),
        (
            "mkdir lib; echo 'def area(side): return side ** 2' > lib/new.py; echo 'from lib.new import area' > shape.py",
            {},
            1.0,
            1.0,
        ),
        ("echo 'area = lambda side: side ** 2' > side.log; echo 'exec(open(\"side.log\").read())' > shape.py", {}, 0.0, 0.0),
    ],
    ids=["unchanged", "half", "half-counts", "new-files", "ignored-files-are-left"],
)
def test_what_a_patch_earns(repository: Path, command: str, settings: dict[str, Any], reward: float, passed: float) -> None:
    found = outcome(task(repository), command, **settings)
    assert (found.reward, found.details["tests_passed"]) == (reward, passed)


@pytest.mark.parametrize(
    "command",
    [
        "printf 'import unittest\\n' > tests/test_hidden.py",
        "echo 'raise SystemExit(0)' > conftest.py; mkdir -p tests/sub; echo 'raise SystemExit(0)' > tests/sub/conftest.py",
        "mkdir -p tests/__pycache__; echo x > tests/__pycache__/test_hidden.cpython-311.pyc; echo x > shape.pyc",
    ],
    ids=["tests", "conftest", "bytecode"],
)
def test_changes_of_files_that_decide_what_tests_report_do_not_reach_them(repository: Path, command: str) -> None:
    tests = [{"command": ["sh", "-c", "cat tests/test_hidden.py; find . -name '*conftest.py' -o -name '*.pyc'"], "output": ""}]
    answer = {"files": {"tests/test_hidden.py": ""}, "tests": tests}
    found = outcome(task(repository, answer), f"{command}; echo >> shape.py")
    assert found.details["patch_bytes"] > 0
    assert found.reward == 1.0


def test_the_solution_in_the_later_history_is_not_there(repository: Path) -> None:
    _, engine = episode(task(repository), "git log --all --format=%s; git tag; ls")
    shown = tokenizer_of("qwen25").decode(engine.prompts[1])
    assert "0: before\nshape.py\ntests\n" in shown


def test_named_tests_have_to_be_reported(repository: Path) -> None:
    named = {
        "command": ["python3", "-m", "unittest", "-v", "tests.test_hidden"],
        "passes": ["test_it (tests.test_hidden.T.test_it)"],
    }
    one = task(repository, {**TESTS, "tests": [named]})
    assert outcome(one, FIX).reward == 1.0
    assert outcome(one, "echo 'raise SystemExit(0)' > shape.py").reward == 0.0  # exit status 0, and no test ran
    unknown = task(repository, {**TESTS, "tests": [{**named, "passes": [*named["passes"], "test_other"]}]})
    assert outcome(unknown, FIX).reward == 0.0


def test_the_tests_may_be_a_patch_themselves(repository: Path) -> None:
    added = "\n".join(f"+{line}" for line in HIDDEN.format("self.assertEqual(area(3), 9)").splitlines())
    head = "diff --git a/tests/test_hidden.py b/tests/test_hidden.py\nnew file mode 100644\n--- /dev/null\n"
    patch = f"{head}+++ b/tests/test_hidden.py\n@@ -0,0 +1,5 @@\n{added}\n"
    one = task(repository, {"patch": patch, "tests": TESTS["tests"]})
    assert outcome(one, f"{FIX}; echo broken > tests/test_hidden.py").reward == 1.0


def test_a_repository_that_the_model_broke_fails_the_episode(repository: Path) -> None:
    found = episode(task(repository), "rm -rf .git")[0]
    assert isinstance(found.outcome, Failed)
    assert "git in the container failed" in found.outcome.error


def test_a_patch_larger_than_allowed_fails_the_episode(repository: Path) -> None:
    small = ContainerLimits(kind="local", seconds=20.0, disk_mb=8.0, copy_mb=0.1)
    found = episode(task(repository), "head -c 300000 /dev/urandom > large", containers=small)[0]
    assert isinstance(found.outcome, Failed)
    assert "cannot be copied" in found.outcome.error


def test_tasks_that_cannot_work_stop_the_run(repository: Path) -> None:
    for one, error in (
        (Task("t", "p"), 'needs metadata\\["swe"\\]'),
        (task(repository, {"tests": []}), "has no tests"),
        (task(repository, {"tests": [{"command": "make test"}]}), "is a list of words"),
        (task(repository, commit="missing"), "has no commit missing"),
        (task(repository, commit="--output=stolen"), "'--output=stolen', which is no commit"),
        (task(repository, repository="/no/such/place"), "has no commit wrong"),
        (task(repository, repository=None, image="python:3"), "needs podman, Docker"),
    ):
        with pytest.raises(UserError, match=error):
            episode(one, "true")


def test_settings_that_cannot_work_are_named(repository: Path) -> None:
    with pytest.raises(ConfigError, match=r"swe\.command"):
        Swe(command=())
    with pytest.raises(ConfigError, match=r"swe\.processes"):
        Swe(command=("true",), processes=0)


def test_a_door_answers_whatever_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that make no sense, one that is too long, and a client that leaves."""

    async def send(path: str, data: bytes) -> bytes:
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(data)
        writer.write_eof()
        try:
            return await reader.read()
        except ConnectionError:
            return b""
        finally:
            writer.close()

    async def go() -> None:
        containers = LocalContainers(LIMITS, workers=1)
        try:
            container = await containers.start()
            await container.run(["mkdir", "-p", "repository/src"])
            async with open_door(container, "repository") as path:
                assert Path(path).parent.stat().st_mode & 0o077 == 0
                for wrong in (b"{}\n", b"[]\n", b"no json\n", b'{"command": 3}\n', b'{"command": "true", "seconds": "x"}\n'):
                    assert b'"code": null, "error": "' in await send(path, wrong)
                assert b"JSONDecodeError" in await send(path, b"")
                assert await send(path, b"x" * 9_000_000) == b""
                monkeypatch.setenv(VARIABLE, path)
                environment = ContainerEnvironment(timeout=5, env={"PAGER": "cat"}, unknown=1)
                shown = await asyncio.to_thread(environment.execute, {"command": "basename $PWD; echo $PAGER; exit 2"})
                assert shown == {"output": "repository\ncat\n", "returncode": 2, "exception_info": ""}
                inner = await asyncio.to_thread(environment.execute, {"command": "basename $PWD"}, "src")
                assert inner["output"] == "src\n"
                late = await asyncio.to_thread(environment.execute, {"command": "sleep 60"}, timeout=1)
                assert late["returncode"] == -1
                assert "after 1 seconds" in late["exception_info"]
            assert not Path(path).exists()
        finally:
            await containers.close()

    asyncio.run(go())
