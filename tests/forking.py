"""Python commands that begin with their imports done: forked from a process that has imported both backends.

`import jax, torch, transformers` takes 3 to 5 s of a core, more than most of the commands that tests start take besides. A
command that is forked is what `python -m` or `python -c` makes of it otherwise: a process of its own with its own environment,
folder, signals and exit. Those whose start is the subject of a test are started by `subprocess`.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import os
import pickle
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, TextIO

ROOT = Path(__file__).parents[1]
IMPORTED = (
    "areal_x.train",
    "areal_x.replay",
    "areal_x.engines.embedded",
    "areal_x.workflows.single_turn",
    "areal_x_jax.trainer",
    "areal_x_jax.sampler",
    "areal_x_torch.trainer",
    "areal_x_torch.sampler",
    "areal_x_torch.sharded_checkpoint",
    "torch.distributed.checkpoint.state_dict_saver",
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.tokenization_utils_sentencepiece",
    "safetensors.numpy",
    "array_api_compat.numpy",
    "array_api_compat.torch",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
)
# Read where a module is imported or Python starts, so they must be those of the process that is forked.
READ_EARLY = ("JAX_", "HF_", "TRANSFORMERS_", "MPL", "PYTHONHASHSEED", "PYTHONUTF8", "LD_", "GOMP_", "OMP_")


def is_read_early(name: str) -> bool:
    return name.startswith(READ_EARLY)


class Process:
    """The part of subprocess.Popen that tests use."""

    def __init__(self, command: Sequence[str], pid: int, ended: int) -> None:
        self.args, self.pid, self.returncode = command, pid, None
        self._ended = ended  # a pipe to which its parent writes how it ended

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._ended], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(list(self.args), timeout or 0)
            self.returncode = int(os.read(self._ended, 16) or b"-9")
            os.close(self._ended)
        return self.returncode

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            return self.wait(timeout=0)
        return None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *error: object) -> None:
        self.wait()


def popen(
    command: Sequence[str], env: Mapping[str, str], cwd: Path, stdout: TextIO, stderr: TextIO
) -> Process | subprocess.Popen[bytes]:
    """Starts `python -m MODULE …`, `python -c TEXT …` or `python FILE.py …`."""
    assert command[0] == sys.executable, command
    assert command[1] in ("-m", "-c") or command[1].endswith(".py"), command
    server = forkserver()
    early = {name for name in {*env, *server.environment} if is_read_early(name)}
    if any(env.get(name) != server.environment.get(name) for name in early):
        return subprocess.Popen(command, env=env, cwd=cwd, stdout=stdout, stderr=stderr)
    return server.start(command, env, cwd, stdout, stderr)


def run(command: Sequence[str], env: Mapping[str, str], cwd: Path, timeout: float = 280) -> subprocess.CompletedProcess[str]:
    """subprocess.run with what it printed as text."""
    from tempfile import TemporaryFile

    with TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        with popen(command, env, cwd, out, err) as process:
            try:
                status = process.wait(timeout)
            finally:
                process.kill()
        printed = [(file.seek(0), file.read())[1] for file in (out, err)]
    return subprocess.CompletedProcess(list(command), status, *printed)


class Forkserver:
    """The process that has imported; one for each process of tests."""

    def __init__(self) -> None:
        from tests.conftest import QUICK

        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket = ours
        self.environment = {**os.environ, "JAX_PLATFORMS": "cpu", **QUICK}
        # That of the tests first: in a worktree it names the backends of this tree, not the installed ones.
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        more = {"OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": paths}
        words = [sys.executable, "-m", "tests.forking", str(theirs.fileno())]
        self._process = subprocess.Popen(
            words, env=self.environment | more, cwd=ROOT, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
        )
        theirs.close()
        atexit.register(self.close)

    def start(self, command: Sequence[str], env: Mapping[str, str], cwd: Path, stdout: TextIO, stderr: TextIO) -> Process:
        ended, write = os.pipe()
        asked = pickle.dumps((list(command), dict(env), str(cwd)))
        with Path(os.devnull).open() as nothing, os.fdopen(write, "wb"):
            fds = [nothing.fileno(), stdout.fileno(), stderr.fileno(), write]
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * len(asked) + 4096)
            socket.send_fds(self._socket, [asked], fds)
        pid = int(self._socket.recv(16))
        return Process(command, pid, ended)

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


forkserver = cache(Forkserver)


# ---- in that process


def serve(requests: socket.socket) -> tuple[list[str], dict[str, str]] | None:
    """Forks for each request until there are no more; in a forked process, what it is to run."""
    running: dict[int, tuple[int, int]] = {}  # by pidfd
    while True:
        for fd in select.select([requests, *running], [], [])[0]:
            if fd in running:
                pid, write = running.pop(fd)
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with suppress(BrokenPipeError):
                    os.write(write, str(status).encode())
                os.close(write)
                os.close(fd)
                continue
            asked, fds, *_ = socket.recv_fds(requests, 1 << 20, 4)
            if not asked:
                return None
            command, environment, folder = pickle.loads(asked)
            if pid := os.fork():
                for given in fds[:3]:
                    os.close(given)
                running[os.pidfd_open(pid)] = pid, fds[3]
                requests.send(str(pid).encode())
                continue
            requests.close()
            for held, write in [*((fd, x[1]) for fd, x in running.items()), (fds[3], None)]:
                os.close(held)
                if write is not None:
                    os.close(write)
            for number, given in enumerate(fds[:3]):
                os.dup2(given, number)
                os.close(given)
            os.chdir(folder)
            return command, environment


def become(command: list[str], environment: dict[str, str], paths: list[str]) -> NoReturn:
    """Goes on as that command, and ends as Python does, but without taking apart every module: that takes a second."""
    os.environ.clear()
    os.environ.update(environment)
    sys.orig_argv = list(command)
    sys.path[:] = [str(Path.cwd()), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)), *paths]
    if environment.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    if environment.get("PYTHONUNBUFFERED"):
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.argv = command[1:] if command[1].endswith(".py") else [command[1], *command[3:]]
    main: Any = ModuleType("__main__")
    sys.modules["__main__"] = main
    status = 0
    try:
        if command[1] == "-m":
            sys.modules.pop(command[2], None)  # it is run, not imported
            runpy._run_module_as_main(command[2])  # type: ignore[attr-defined]
        elif command[1] == "-c":
            exec(compile(command[2], "<string>", "exec"), main.__dict__)
        else:
            main.__file__ = command[1]
            exec(compile(Path(command[1]).read_bytes(), command[1], "exec"), main.__dict__)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if status and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    requests = socket.socket(fileno=int(sys.argv[1]))
    base = [path for path in sys.path if path and Path(path) != ROOT]
    for name in IMPORTED:
        with suppress(ImportError):  # a backend that is not installed
            import_module(name)
    gc.collect()
    gc.freeze()
    if (forked := serve(requests)) is not None:
        become(*forked, base)
    os._exit(0)
