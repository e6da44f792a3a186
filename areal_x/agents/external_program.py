"""One run of an agent's program: a process whose output is kept, and of which nothing is left when
it is done."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from areal_x.runtime import guard
from areal_x.runtime.waits import waiting, whose
from areal_x.types import Task

MODULE = "areal_x.agents.program_launcher"
INHERITED = (
    "HOME",
    "LANG",
    "LANGUAGE",
    "LOGNAME",
    "PATH",
    "SHELL",
    "TERM",
    "TMPDIR",
    "TZ",
    "USER",
    "VIRTUAL_ENV",
)
LOCALE = "LC_"
# characters of what it wrote to standard error, in the error of an episode that failed
STDERR_CHARACTERS = 400


class ProgramFailed(RuntimeError):
    """It ended with another status than 0."""


async def run_program(
    command: Sequence[str],
    task: Task,
    environment: Mapping[str, str],
    directory: str,
    output_bytes: int,
    processes: int,
) -> str:
    """What it printed, at most the last `output_bytes` of it. environment: all that it has beside
    AREAL_X_TASK. processes: most at once. Cancelling this ends it and whatever it started.

    Raises: ProgramFailed with the end of its standard error.
    """
    words = [
        word.replace("{id}", task.id).replace("{prompt}", prompt_text(task)) for word in command
    ]
    lifeline_end, lifeline = os.pipe()
    try:
        process = await asyncio.create_subprocess_exec(
            *guard.command(MODULE, lifeline_end, words, processes, flags=("-I", "-S")),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=directory,
            env={**environment, "AREAL_X_TASK": task_json(task)},
            pass_fds=(lifeline_end,),
            start_new_session=True,  # an interrupt at the terminal is the ring's to handle
        )
    except BaseException:
        os.close(lifeline)
        raise
    finally:
        os.close(lifeline_end)
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        printed, complained = await asyncio.gather(
            last_bytes(process.stdout, output_bytes), last_bytes(process.stderr, output_bytes)
        )
    finally:
        os.close(lifeline)  # all of it ends, if it has not
        with waiting(whose(), "its agent's process to end", f"process {process.pid}"):
            code = await wait_for_exit(process)
    if code:
        how = (
            signal.Signals(code - 128).name
            if code - 128 in signal.valid_signals()
            else f"exit status {code}"
        )
        words_of = " ".join(complained.split())[-STDERR_CHARACTERS:]
        raise ProgramFailed(f"{how}: {words_of}" if words_of else how)
    return printed


async def wait_for_exit(process: asyncio.subprocess.Process) -> int:
    """Its exit code. The program may have stopped its guard, which is then woken."""
    while True:
        try:
            return await asyncio.wait_for(process.wait(), guard.LOOK)
        except TimeoutError:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)


def inherited_environment(names: Iterable[str]) -> dict[str, str]:
    """The variables of this process that any program may need, and those of these names. Keys of
    other services, which a run's environment holds as well, are none of a model's business."""
    wanted = {*INHERITED, *names}
    return {
        name: value
        for name, value in os.environ.items()
        if name in wanted or name.startswith(LOCALE)
    }


async def last_bytes(stream: asyncio.StreamReader, most: int) -> str:
    kept = b""
    while more := await stream.read(1 << 16):
        kept = (kept + more)[-most:]
    return kept.decode(errors="replace")


def task_json(task: Task) -> str:
    prompt: Any = (
        task.prompt if isinstance(task.prompt, str) else [dict(message) for message in task.prompt]
    )
    return json.dumps({"id": task.id, "prompt": prompt, "metadata": dict(task.metadata)})


def prompt_text(task: Task) -> str:
    """The prompt as one text: of messages the last one's."""
    return task.prompt if isinstance(task.prompt, str) else str(task.prompt[-1]["content"])
