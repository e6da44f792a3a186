"""Tasks of Harbor, the form of Terminal-Bench 2: folders with an instruction, an image and a test
script.

    train.dataset = @harbor_tasks()
    harbor_tasks.path = "terminal-bench-2"
    train.workflow = @harbor()
    harbor.command = ("mini", "--task", "{prompt}", …)
    containers.kind = "podman"

An agent's program works in the container of its episode as in `swe`; then the folder's tests are
copied into the same container and write the reward to /logs/verifier/reward.txt or reward.json, as
Harbor's verifier reads it. The form is that of Harbor 0.26; tasks with several steps, services or a
verifier of its own environment are refused.
"""

from __future__ import annotations

import io
import json
import math
import tarfile
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import gin

from areal_x.agents.agent import NEVER_CALLED
from areal_x.agents.calling import AgentResult
from areal_x.agents.container_agent import ContainerAgent
from areal_x.agents.container_door import VARIABLE, open_door
from areal_x.agents.gateway.session import GatewaySession
from areal_x.errors import UserError
from areal_x.runtime.thread import in_thread
from areal_x.sandbox.containers.container import Container, ContainerError
from areal_x.types import Failed, Outcome, Scored, Task

ABOUT = "harbor"  # key of a task's metadata
REWARDS = ("/logs/verifier/reward.json", "/logs/verifier/reward.txt")  # the first one counts
TEST = """mkdir -p /logs/verifier /logs/agent /logs/artifacts && rm -f /logs/verifier/reward.*
chmod +x /tests/test.sh && exec /tests/test.sh"""


@gin.configurable
def harbor_tasks(path: str, image: str = "localhost/{task}", size: int | None = None) -> list[Task]:
    """Returns the tasks in the folders below a path, for the workflow `harbor`, by their names.

    Args:
        path: A folder of task folders, or one task folder.
        image: Image of a task whose task.toml names none, in which {task} stands for its name:
            `podman build -t localhost/NAME NAME/environment` makes it.
        size: Number of tasks; by default all.

    Raises: UserError if there is none, and for a task that cannot be used.
    """
    places = sorted(file.parent for file in Path(path).glob("**/task.toml"))[:size]
    if not places:
        raise UserError(f"harbor_tasks.path = {path!r} has no task: no folder with a task.toml")
    return [_task(place, image) for place in places]


def _task(place: Path, image: str) -> Task:
    try:
        config = tomllib.loads((place / "task.toml").read_text(encoding="utf-8"))
        instruction = (place / "instruction.md").read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"the Harbor task {place} cannot be read: {error}") from None
    environment = config.get("environment", {})
    verifier = config.get("verifier", {})
    compose = place / "environment" / "docker-compose.yaml"
    for there, what in (
        ("steps" in config, "several steps"),
        (compose.exists(), "several services"),
        (
            verifier.get("environment_mode") == "separate" or "environment" in verifier,
            "a verifier apart",
        ),
        (environment.get("os", "linux") != "linux", "another system than Linux"),
        (not (place / "tests" / "test.sh").is_file(), "no tests/test.sh"),
    ):
        if there:
            raise UserError(f"the Harbor task {place} has {what}, which is not supported")
    about = {
        "tests": str((place / "tests").resolve()),
        "image": environment.get("docker_image") or image.replace("{task}", place.name),
        "directory": environment.get("workdir") or "/app",
        "seconds": verifier.get("timeout_sec", 600.0),
        "variables": verifier.get("env", {}),
    }
    return Task(place.name, instruction, metadata={ABOUT: about})


@gin.configurable("harbor", denylist=["host", "pool", "machines"])
@dataclass(frozen=True, kw_only=True)
class Harbor(ContainerAgent):
    """An agent's program that does a Harbor task in a container, whose tests then give the reward.

    It finds the address of the container in AREAL_X_CONTAINER, besides what `agent_process` gives
    it. Further rewards of a reward.json are details. Tests run for at most `containers.seconds`.
    """

    binding: ClassVar[str] = "harbor"

    async def work(self, task: Task, session: GatewaySession) -> AgentResult:
        about = task.metadata[ABOUT]
        async with self.container(about["image"]) as container:
            made = await container.run(["mkdir", "-p", about["directory"]], directory="/")
            if made.code != 0:
                raise ContainerError(f"{about['directory']} cannot be made: {made.text()}")
            async with open_door(container, about["directory"]) as address:
                await self.run_command(task, session, {VARIABLE: address})
            if not session.calls():
                return None
            return json.dumps(await tested(container, about))

    async def judge(self, task: Task, session: GatewaySession, result: AgentResult) -> Outcome:
        if not session.calls():
            return Failed(NEVER_CALLED)
        if self.pool is not None:
            return await self.pool.score(task, str(result))
        found = json.loads(str(result))
        return Scored(found.pop("reward"), found)


async def tested(container: Container, about: Mapping[str, Any]) -> dict[str, float]:
    """Runs the tests of a task and returns its rewards by name; "reward" is among them.

    Raises: ContainerError without a reward that can be read.
    """
    await container.copy_in(await in_thread(packed, about["tests"]), "/tests")
    result = await container.run(
        ["sh", "-c", TEST],
        directory=about["directory"],
        seconds=about["seconds"],
        variables={name: str(value) for name, value in about["variables"].items()},
    )
    for path in REWARDS:
        try:
            text = (await container.copy_out(path)).decode()
        except ContainerError:
            continue
        return read_rewards(text)
    raise ContainerError(f"the tests wrote no reward: {result.text()[-400:]}")


def read_rewards(text: str) -> dict[str, float]:
    """Reads a reward.txt or reward.json: a number, or numbers by name, whose mean is the reward
    unless one is called so.

    Raises: ContainerError for anything else.
    """
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    rewards = found if isinstance(found, dict) else {"reward": found}
    wrong = [
        value
        for value in rewards.values()
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value)
    ]
    if wrong or not rewards:
        raise ContainerError(f"the tests wrote {text[:100]!r}, which is no reward")
    numbers = {str(name): float(value) for name, value in rewards.items()}
    return {"reward": sum(numbers.values()) / len(numbers), **numbers}


def packed(folder: str) -> bytes:
    """Returns a folder as a tar archive."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        tar.add(folder, ".")
    return archive.getvalue()
