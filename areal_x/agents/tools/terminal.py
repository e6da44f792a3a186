"""A terminal for the model: a folder of files, a shell in it, and hidden tests that score the
episode.

    train.workflow = @terminal()
    train.dataset = @my_tasks()    # Task("1", "Rename a to b.", ["hello"], {"files": {"a": "hello"}, "tests": ["cat b"]})

Commands run in the sandbox (docs/sandbox.md), each in a process of its own; between commands the
episode holds the folder as an archive.
"""

from __future__ import annotations

import asyncio
import base64
import inspect
import io
import json
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import gin

from areal_x.agents.multi_turn import ToolUse
from areal_x.agents.tools.toolbox import Schema, Toolbox, tool_schema
from areal_x.errors import UserError, at_least, positive
from areal_x.protocols.workflow import EpisodeResult, Generator
from areal_x.rewards.pool import Reward
from areal_x.runtime.hosts import Hosts
from areal_x.sandbox import shell
from areal_x.sandbox.pool import Programs, Sandbox, SandboxLimits, SpreadSandbox
from areal_x.types import Outcome, Task
from areal_x.workflows.single_turn import RewardedWorkflow

PROGRAM = inspect.getsource(shell)
PACKING_SECONDS = 10.0  # for the archive, in addition to the command's time
BASE64 = 4 / 3  # characters per byte


@dataclass(frozen=True)
class CommandResult:
    """The result of a command. code: its exit status; None if it was killed. output: what it
    printed."""

    output: str
    code: int | None
    error: str | None = None

    def text(self) -> str:
        """Returns the text that the model reads."""
        ended = self.error or (f"exit status {self.code}" if self.code else None)
        return (
            "\n".join(part for part in (self.output.rstrip("\n"), ended) if part)
            or "(the command printed nothing)"
        )


class Folder:
    """The files of one episode, on which commands run one after the other. sandbox: from
    `sandbox_for` with the same limits.

    The files are an archive, at most as large as that sandbox allows, however large they are when
    it is unpacked for a command.
    """

    def __init__(self, sandbox: Programs, limits: SandboxLimits, files: Mapping[str, str]) -> None:
        self._sandbox = sandbox
        self._limits = limits
        self._archive = pack_files(files)
        self._lock = asyncio.Lock()

    async def run(self, command: str) -> CommandResult:
        """Runs a command and keeps its changes. A command that exceeds the limits on memory, files
        or processes leaves the files unchanged."""
        async with self._lock:
            result, self._archive = await self._run(command, test=False)
            return result

    async def run_test(self, command: str) -> CommandResult:
        """Runs a command and discards its changes, so any number may run at once. It reads no
        settings from the folder, and no module there replaces one of Python's own."""
        return (await self._run(command, test=True))[0]

    async def _run(self, command: str, test: bool) -> tuple[CommandResult, str]:
        limits = self._limits
        held = self._archive
        request = {
            "archive": held,
            "command": command,
            "seconds": limits.seconds,
            "characters": limits.output_characters,
            "test": test,
        }
        result = await self._sandbox.run(PROGRAM, json.dumps(request))
        if result.status != "ok" or result.truncated:
            why = (
                "the folder would grow beyond its limit"
                if result.error is None
                else result.error.splitlines()[-1]
            )
            return CommandResult(
                "", None, f"{why}: the files are as they were before this command"
            ), held
        reply = json.loads(result.output)
        late = (
            f"the command was ended after {limits.seconds:g} seconds"
            if reply["code"] is None
            else None
        )
        return CommandResult(reply["output"], reply["code"], late), reply["archive"]


def sandbox_for(limits: SandboxLimits, folder_mb: float, workers: int) -> Sandbox:
    """Returns a sandbox whose programs have, in addition to a command's limits, the time and the
    output that the archive takes."""
    room = limits.output_characters + int(folder_mb * 1e6 * BASE64)
    return Sandbox(
        replace(limits, seconds=limits.seconds + PACKING_SECONDS, output_characters=room), workers
    )


def pack_files(files: Mapping[str, str]) -> str:
    """A tar.gz of these texts, in base64."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=1) as tar:
        for name, text in files.items():
            data = text.encode()
            about = tarfile.TarInfo(name)
            about.size = len(data)
            tar.addfile(about, io.BytesIO(data))
    return base64.b64encode(packed.getvalue()).decode()


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
