"""A terminal for a model: a folder with files, a shell in it, and hidden tests that say what the
episode was worth.

    train.workflow = @terminal()
    train.dataset = @my_tasks()    # Task("1", "Rename a to b.", ["hello"], {"files": {"a": "hello"}, "tests": ["cat b"]})

Commands run in the sandbox (docs/sandbox.md), one process each; between them the folder is an
archive that this episode holds.
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
from areal_x.protocols.workflow import Generator, Result
from areal_x.rewards.pool import Reward
from areal_x.sandbox import shell
from areal_x.sandbox.pool import Sandbox, SandboxLimits
from areal_x.types import Outcome, Task

PROGRAM = inspect.getsource(shell)
PACKING_SECONDS = 10.0  # beside the command's own, for the archive
BASE64 = 4 / 3  # characters of a byte


@dataclass(frozen=True)
class CommandResult:
    """What became of a command. code: its exit status; None where it was ended. output: what it
    printed."""

    output: str
    code: int | None
    error: str | None = None

    def text(self) -> str:
        """What a model is shown."""
        ended = self.error or (f"exit status {self.code}" if self.code else None)
        return (
            "\n".join(part for part in (self.output.rstrip("\n"), ended) if part)
            or "(the command printed nothing)"
        )


class Folder:
    """The files of one episode, on which commands work one after the other. sandbox: made by
    `sandbox_for` the same limits.

    It is an archive, at most as large as that sandbox allows, however much it holds when it is
    unpacked for a command.
    """

    def __init__(self, sandbox: Sandbox, limits: SandboxLimits, files: Mapping[str, str]) -> None:
        self._sandbox, self._limits = sandbox, limits
        self._archive = archive(files)
        self._lock = asyncio.Lock()

    async def run(self, command: str) -> CommandResult:
        """What a command does stays. One that takes too much memory, files or processes leaves all
        as it was before."""
        async with self._lock:
            ran, self._archive = await self._run(command, test=False)
            return ran

    async def look(self, command: str) -> CommandResult:
        """What a command would do: nothing of it stays, so any number may look at once. It reads no
        settings from the folder, and no module there in the place of Python's own."""
        return (await self._run(command, test=True))[0]

    async def _run(self, command: str, test: bool) -> tuple[CommandResult, str]:
        limits, held = self._limits, self._archive
        asked = {
            "archive": held,
            "command": command,
            "seconds": limits.seconds,
            "characters": limits.output_characters,
            "test": test,
        }
        result = await self._sandbox.run(PROGRAM, json.dumps(asked))
        if result.status != "ok" or result.truncated:
            why = (
                "the folder would grow beyond its limit"
                if result.error is None
                else result.error.splitlines()[-1]
            )
            return CommandResult(
                "", None, f"{why}: the files are as they were before this command"
            ), held
        told = json.loads(result.output)
        late = (
            f"the command was ended after {limits.seconds:g} seconds"
            if told["code"] is None
            else None
        )
        return CommandResult(told["output"], told["code"], late), told["archive"]


def sandbox_for(limits: SandboxLimits, folder_mb: float, workers: int) -> Sandbox:
    """One whose programs have, beside what a command may use, the time and the output that the
    archive takes."""
    room = limits.output_characters + int(folder_mb * 1e6 * BASE64)
    return Sandbox(
        replace(limits, seconds=limits.seconds + PACKING_SECONDS, output_characters=room), workers
    )


def archive(files: Mapping[str, str]) -> str:
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
    """The share of the hidden tests that printed what the answer says, blanks at the end of lines
    and of the whole aside.

    text: a JSON list of what each test printed.
    """
    printed = json.loads(text)
    right = [
        lines(next_reply) == lines(wanted)
        for next_reply, wanted in zip(printed, task.answer, strict=True)
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
    """Works in a folder with the tool `shell`, until a reply calls nothing; then hidden tests look
    at the files.

    A task's metadata holds "files", from name to text, and "tests", shell commands that run in the
    folder afterwards, each on its own copy of it. A module of the folder cannot take the place of
    one of Python's own there; a test that should not run what the model wrote at all says `python3
    -I`. Its answer is a list of what each of them should print, which never comes near the sandbox:
    a model that writes to the folder what a test would like has to know it.

    reward: a function (task, text) -> number, or -> (number, {name: number}), text being a JSON
    list of what the tests printed; by default the share of them that printed what they should.
    limits: of each command, on the files of the folder too. folder_mb: of the folder packed, in
    10^6 bytes: so much of the run's own memory an episode takes. workers: commands at once.
    max_turns: most replies; a command of the last one is not run. result_characters: most that is
    shown of a command's output. credit: what each reply's tokens get of the reward. template: more
    variables of the chat template, as {"enable_thinking": False}. sampling: how completions are
    drawn, each of at most sampling.max_tokens; the model's end tokens are added to its stop tokens.
    reward_workers: most processes that judge at once. reward_timeout_seconds: after which a reward
    is ended with its process. reward_limits: what that process may use beside time.
    """

    binding: ClassVar[str] = "terminal"

    reward: Reward = share_of_tests
    limits: SandboxLimits = field(default_factory=SandboxLimits)
    folder_mb: float = 4.0
    workers: int = 4
    sandbox: Sandbox | None = None
    folder: Folder | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("terminal.folder_mb", self.folder_mb)
        at_least("terminal.workers", self.workers, 1)

    def setup(self, tokenizer: Any) -> Self:
        """Raises UserError as `single_turn` does."""
        return replace(
            super().setup(tokenizer), sandbox=sandbox_for(self.limits, self.folder_mb, self.workers)
        )

    async def run(self, task: Task, engine: Generator) -> Result:
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
        assert self.folder is not None, "only an episode has files to judge"
        looks = await asyncio.gather(*(self.folder.look(test) for test in task.metadata["tests"]))
        return await super().score(task, json.dumps([ran.output for ran in looks]))

    async def close(self) -> None:
        await super().close()
        if self.sandbox is not None:
            await self.sandbox.close()
