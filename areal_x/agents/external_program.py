"""Runs an agent's program once: keeps its output, and leaves no process behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from areal_x.agents.prompt_text import content_text
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
# the end of standard error that is shown in the error of a failed episode
STDERR_CHARACTERS = 400


class ProgramFailed(RuntimeError):
    """A program that ended with a nonzero exit status."""


async def run_program(
    command: Sequence[str],
    task: Task,
    environment: Mapping[str, str],
    directory: str,
    output_bytes: int,
    processes: int,
    standard_input: bytes | None = None,
    folder: str | None = None,
) -> str:
    """Returns the last `output_bytes` bytes that the program printed, decoded.

    environment: all of its variables except AREAL_X_TASK. processes: most at once. standard_input:
    the program may read it or not. folder: deleted when the program has ended, however it did.
    Cancelling this ends the program and everything that it started.

    Raises: ProgramFailed with the end of its standard error.
    """
    prompt = last_message_text(task)
    words = [word.replace("{id}", task.id).replace("{prompt}", prompt) for word in command]
    lifeline_end, lifeline = os.pipe()
    try:
        process = await asyncio.create_subprocess_exec(
            *guard.command(MODULE, lifeline_end, words, processes, folder, flags=("-I", "-S")),
            stdin=asyncio.subprocess.DEVNULL if standard_input is None else asyncio.subprocess.PIPE,
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
        printed, complained, _ = await asyncio.gather(
            last_bytes(process.stdout, output_bytes),
            last_bytes(process.stderr, output_bytes),
            write_all(process.stdin, standard_input or b""),
        )
    finally:
        os.close(lifeline)  # ends the program, if it still runs
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
    """Returns the exit code. The program may have stopped its guard with a signal, so this wakes
    it."""
    while True:
        try:
            return await asyncio.wait_for(process.wait(), guard.POLL_SECONDS)
        except TimeoutError:
            # not by process.send_signal, which asks for the exit status first and so takes it from
            # the thread of asyncio that waits for it
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGCONT)


def inherited_environment(names: Iterable[str]) -> dict[str, str]:
    """Returns the variables of this process that any program may need, and those named. Others,
    such as the keys of other services in a run's environment, are withheld from the model."""
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


async def write_all(stream: asyncio.StreamWriter | None, data: bytes) -> None:
    """Writes to a program that may end before it has read everything, and closes its input."""
    if stream is None:
        return
    with suppress(BrokenPipeError, ConnectionResetError):
        stream.write(data)
        await stream.drain()
    stream.close()


def task_json(task: Task) -> str:
    prompt: Any = (
        task.prompt if isinstance(task.prompt, str) else [dict(message) for message in task.prompt]
    )
    return json.dumps({"id": task.id, "prompt": prompt, "metadata": dict(task.metadata)})


def last_message_text(task: Task) -> str:
    """Returns the prompt as one text: the last message's, if it is a list of messages."""
    return task.prompt if isinstance(task.prompt, str) else content_text(task.prompt[-1])
