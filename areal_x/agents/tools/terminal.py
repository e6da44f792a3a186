"""A terminal for the model: a folder of files, a shell in it, and hidden tests that score the
episode.

    train.workflow = @terminal()
    train.dataset = @my_tasks()    # Task("1", "Rename a to b.", ["hello"], {"files": {"a": "hello"}, "tests": ["cat b"]})

Commands run in the sandbox (docs/sandbox.md), each in a process of its own; between commands the
episode holds the folder as an archive.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import gin

from areal_x.agents.multi_turn import ToolUse
from areal_x.agents.tools.toolbox import Schema, Toolbox, tool_schema
from areal_x.errors import UserError, at_least, positive
from areal_x.protocols.workflow import EpisodeResult, Generator
from areal_x.rewards.pool import Reward
from areal_x.runtime.hosts import Hosts
from areal_x.sandbox.folder import Folder, sandbox_for
from areal_x.sandbox.pool import Programs, Sandbox, SandboxLimits, SpreadSandbox
from areal_x.types import Outcome, Task
from areal_x.workflows.single_turn import RewardedWorkflow


@dataclass(frozen=True)
class Shell:
    """The tool `shell` of one episode."""

    folder: Folder
    name: str = "shell"
    limits_itself: bool = True  # commands of one reply wait for each other

    @property
    def schema(self) -> Schema:
        description = (
            "Runs a command in a shell and returns what it prints. Each command starts in the same"
            " folder, whose files stay from one to the next; variables and running processes do"
            " not. There is no network."
        )
        command = {"type": "string", "description": "The command, or several lines of them."}
        return tool_schema(
            self.name,
            description,
            {"type": "object", "properties": {"command": command}, "required": ["command"]},
        )

    async def call(self, arguments: dict[str, Any]) -> str:
        return (await self.folder.run(arguments["command"])).text()


def share_of_tests(task: Task, text: str) -> float:
    """Returns the share of the hidden tests that printed what the answer holds, apart from trailing
    blanks and blank lines at the end.

    text: a JSON list of the tests' outputs.
    """
    printed = json.loads(text)
    right = [
        lines(output) == lines(wanted) for output, wanted in zip(printed, task.answer, strict=True)
    ]
    return sum(right) / len(right)


def lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


@gin.configurable(
    "terminal",
    denylist=["tokenizer", "pool", "toolbox", "tools", "tool_seconds", "sandbox", "folder"],
)
@dataclass(frozen=True)
class Terminal(ToolUse):
    """Works in a folder with the tool `shell`, until a reply calls nothing; then hidden tests
    examine the files.

    A task's metadata holds "files", from name to text, and "tests", shell commands that run in the
    folder afterwards, each on its own copy. A module of the folder cannot replace one of Python's
    own there; a test that must not run any code of the model's uses `python3 -I`. The task's answer
    is a list of what each test should print, which never reaches the sandbox: a model cannot pass a
    test without knowing its answer.
    """

    binding: ClassVar[str] = "terminal"

    reward: Reward = share_of_tests
    """A function (task, text) -> number, or -> (number, {name: number}), where text is a JSON list
    of the tests' outputs; by default the share of tests that printed what they should."""
    limits: SandboxLimits = field(default_factory=SandboxLimits)
    """Limits of each command, and of the folder's files."""
    folder_mb: float = 4.0
    """Largest packed folder, in 10^6 bytes, which each episode holds in the run's own memory."""
    workers: int = 4
    """Most commands at once."""
    sandbox: Programs | None = None
    folder: Folder | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("terminal.folder_mb", self.folder_mb)
        at_least("terminal.workers", self.workers, 1)

    def setup(self, tokenizer: Any) -> Self:
        """Raises: UserError as `single_turn` does."""
        return replace(
            super().setup(tokenizer), sandbox=sandbox_for(self.limits, self.folder_mb, self.workers)
        )

    def on_hosts(self, hosts: Hosts) -> Self:
        assert isinstance(self.sandbox, Sandbox), "call setup(tokenizer) first"
        sandbox = SpreadSandbox(self.sandbox, hosts)
        return replace(RewardedWorkflow.on_hosts(self, hosts), sandbox=sandbox)

    async def run(self, task: Task, engine: Generator) -> EpisodeResult:
        assert self.sandbox is not None, "call setup(tokenizer) first"
        if len(task.metadata.get("tests", ())) != len(task.answer or ()) or not task.answer:
            raise UserError(
                f'task {task.id}: metadata["tests"] has to be a list of commands, and answer what'
                " each should print"
            )
        folder = Folder(self.sandbox, self.limits, task.metadata.get("files", {}))
        episode = replace(
            self,
            folder=folder,
            toolbox=Toolbox([Shell(folder)], result_characters=self.result_characters),
        )
        return await ToolUse.run(episode, task, engine)

    async def score(self, task: Task, text: str) -> Outcome:
        assert self.folder is not None, "only an episode has files to test"
        results = await asyncio.gather(
            *(self.folder.run_test(test) for test in task.metadata["tests"])
        )
        return await super().score(task, json.dumps([result.output for result in results]))

    async def close(self) -> None:
        await super().close()
        if self.sandbox is not None:
            await self.sandbox.close()
