"""Runs a program in the process that was made for it: the only place in this project that executes
code from outside."""

from __future__ import annotations

import ast
import atexit
import contextlib
import json
import os
import sys
import threading
import traceback
import types
from pathlib import Path
from typing import Any

NAME = "main.py"
SPARE = 8 << 20  # bytes held in reserve, so that a program out of memory can still report it
OUT_OF_MEMORY = b'{"status": "memory", "error": "MemoryError"}'


def run(code: str, folder: str, report_fd: int, echo_last: bool, characters: int) -> int:
    """Returns the exit code. An error is written to `report_fd` as JSON, of at most about
    `characters`.

    echo_last: prints the value of a last line that is an expression, as a notebook does.
    """
    path = Path(folder, NAME)
    spare = [bytearray(SPARE)]
    error: BaseException | None = None
    try:
        path.write_text(code, encoding="utf-8", errors="surrogateescape")
        _execute(code, str(path), echo_last)
    except BaseException as raised:
        spare.clear()
        error = raised
    try:
        _finish()
    except BaseException as raised:
        error = error or raised
    if error is None:
        return 0
    if isinstance(error, SystemExit):
        return _exit_code(error, report_fd)
    _report(report_fd, error, str(path), characters)
    return 1


def _execute(code: str, path: str, echo_last: bool) -> None:
    module = types.ModuleType("__main__")
    module.__file__ = path
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    sys.argv = [path]
    tree = ast.parse(code, path)
    last = (
        tree.body.pop() if echo_last and tree.body and isinstance(tree.body[-1], ast.Expr) else None
    )
    exec(compile(tree, path, "exec"), module.__dict__)
    if last is not None:
        exec(compile(ast.Interactive([last]), path, "single"), module.__dict__)


def _finish() -> None:
    """Ends like the interpreter: waits for threads, runs exit handlers, flushes output."""
    threads = vars(threading)["_shutdown"]
    registered = vars(atexit)["_run_exitfuncs"]
    with contextlib.suppress(OSError, ValueError):
        threads()
        registered()
        sys.stdout.flush()
        sys.stderr.flush()


def _exit_code(leaving: SystemExit, report_fd: int) -> int:
    if leaving.code is None or leaving.code == 0:
        return 0
    if isinstance(leaving.code, int):
        _write(report_fd, {"status": "error", "error": f"exit status {leaving.code & 0xFF}"})
        return leaving.code & 0xFF
    _write(report_fd, {"status": "error", "error": str(leaving.code)})
    return 1


def _report(report_fd: int, error: BaseException, path: str, characters: int) -> None:
    memory = isinstance(error, MemoryError)
    try:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != path:
            trace = trace.tb_next  # skip the frames of this module
        # Without memory for a traceback, the interpreter raises one MemoryError after another.
        text = "".join(traceback.format_exception(type(error), error, trace, chain=not memory))
        if len(text) > characters:
            half = characters // 2
            text = f"{text[:half]}\n…\n{text[-half:]}"
        _write(report_fd, {"status": "memory" if memory else "error", "error": text.rstrip()})
    except BaseException:
        os.write(
            report_fd,
            (
                OUT_OF_MEMORY
                if memory
                else b'{"status": "error", "error": "an error that cannot be shown"}'
            ),
        )


def _write(report_fd: int, content: dict[str, Any]) -> None:
    data = json.dumps(content).encode()
    while data:
        data = data[os.write(report_fd, data) :]
