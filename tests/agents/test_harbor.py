"""Tasks in Harbor's folders: what is read, and an episode where podman or Docker works."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from areal_x.agents.harbor import Harbor, harbor_tasks, read_rewards
from areal_x.errors import UserError
from areal_x.rollout.episode import run_episode
from areal_x.sandbox.containers.command_line import works
from areal_x.sandbox.containers.container import ContainerError
from areal_x.sandbox.containers.limits import ContainerLimits, Kind
from areal_x.types import Episode, Failed, Scored
from tests.agents.chat.speaking import Says, tokenizer_of
from tests.agents.test_swe import ROOT
from tests.sandbox.machines import IMAGE

TOML = (
    '[environment]\ndocker_image = "{image}"\nworkdir = "/work"\n[verifier]\ntimeout_sec = 15\nenv = {{ WANTED = "hello" }}\n'
)
SCRIPT = """#!/bin/sh
cd /logs/verifier
test -f /tests/more.txt && grep -qx "$WANTED" /work/a.txt && echo 1 >reward.txt || echo 0 >reward.txt
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "tasks" / "greeting"
    (place / "tests").mkdir(parents=True)
    (place / "task.toml").write_text(TOML.format(image=IMAGE))
    (place / "instruction.md").write_text("Write hello to a.txt.\n")
    (place / "tests" / "test.sh").write_text(SCRIPT)
    (place / "tests" / "more.txt").write_text("")
    return place


def test_a_folder_is_a_task(folder: Path) -> None:
    (task,) = harbor_tasks(str(folder.parent))
    assert (task.id, task.prompt) == ("greeting", "Write hello to a.txt.\n")
    about = task.metadata["harbor"]
    assert (about["image"], about["directory"], about["seconds"], about["variables"]) == (
        IMAGE,
        "/work",
        15,
        {"WANTED": "hello"},
    )
    (folder / "task.toml").write_text("")
    (task,) = harbor_tasks(str(folder), image="mine/{task}:1")
    assert (task.metadata["harbor"]["image"], task.metadata["harbor"]["directory"]) == ("mine/greeting:1", "/app")


@pytest.mark.parametrize(
    ("toml", "what"),
    [
        ("[[steps]]\nname = 'a'", "several steps"),
        ("[verifier]\nenvironment_mode = 'separate'", "a verifier apart"),
        ("[environment]\nos = 'windows'", "another system"),
        ("[", "cannot be read"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(folder: Path, toml: str, what: str) -> None:
    (folder / "task.toml").write_text(toml)
    with pytest.raises(UserError, match=what):
        harbor_tasks(str(folder))


def test_a_folder_without_tests_and_a_path_without_tasks_are_refused(folder: Path) -> None:
    (folder / "tests" / "test.sh").unlink()
    with pytest.raises(UserError, match=r"no tests/test\.sh"):
        harbor_tasks(str(folder))
    with pytest.raises(UserError, match="has no task"):
        harbor_tasks(str(folder / "tests"))


def test_rewards_are_read_as_harbor_does() -> None:
    assert read_rewards("0.5\n") == {"reward": 0.5}
    assert read_rewards('{"a": 1, "b": 0}') == {"reward": 0.5, "a": 1.0, "b": 0.0}
    assert read_rewards('{"reward": 1, "b": 0}') == {"reward": 1.0, "b": 0.0}
    for wrong in ("", "yes", "nan", "true", '{"a": "1"}', "{}", "[1]"):
        with pytest.raises(ContainerError, match="no reward"):
            read_rewards(wrong)


@pytest.mark.parametrize("kind", ["podman", "docker"])
def test_an_episode_is_rewarded_by_the_tests_of_the_folder(folder: Path, kind: Kind) -> None:
    if not works(kind):
        pytest.skip(f"{kind} runs no containers here")
    (task,) = harbor_tasks(str(folder))
    tokenizer = tokenizer_of("qwen25")

    def episode(command: str) -> Episode:
        said = [tokenizer.encode(f"{text}<|im_end|>", add_special_tokens=False) for text in (command, "done")]
        workflow = Harbor(
            command=(sys.executable, "tests/agents/shell_agent.py", "{prompt}"),
            environment={"PYTHONPATH": str(ROOT)},
            directory=str(ROOT),
            containers=ContainerLimits(kind=kind, seconds=20.0),
        )

        async def run() -> Episode:
            ready = workflow.setup(tokenizer)
            try:
                return await run_episode(ready, task, Says(*said), 120)  # type: ignore[arg-type]
            finally:
                await ready.close()

        return asyncio.run(run())

    for command, reward in (
        ("echo hello >a.txt", 1.0),
        ("ls /tests; mkdir -p /logs/verifier; echo 1 >/logs/verifier/reward.txt", 0.0),
    ):
        outcome = episode(command).outcome
        assert isinstance(outcome, Scored), outcome
        assert outcome.reward == reward
    (folder / "tests" / "test.sh").write_text("#!/bin/sh\nexit 1\n")
    assert isinstance(outcome := episode("true").outcome, Failed)
    assert "wrote no reward" in outcome.error
