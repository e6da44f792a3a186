"""Rewards that behave badly, importable by the workers that run them."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import gin


def length(task, text):
    return len(text)


def with_details(task, text):
    return 0.5, {"format": 1, "answer": 0.0}


def given(task, text):
    """Returns the task's answer, whatever it is."""
    return task.answer


def counts_the_answer_type(task, text):
    return float(task.answer == ("a", 1) and task.metadata[3] == {"x"})


def variables(task, text):
    """Returns the names of the environment's variables."""
    return 0.0, dict.fromkeys(os.environ, 1.0)


def raises(task, text):
    raise ValueError("no such\nnumber")


def exits(task, text):
    sys.exit(3)


def exits_at_once(task, text):
    os._exit(task.answer)


def segfaults(task, text):
    ctypes.string_at(0)


def prints(task, text):
    print("noise on standard output", flush=True)
    os.write(1, b'{"reward": 7.0, "details": {}}\n')
    subprocess.run(["echo", "more noise"], check=True)
    return 1.0


def reads_standard_input(task, text):
    return float(sys.stdin.read() == "")


def hangs_with_a_grandchild(task, text):
    """Writes its own and its child's process id to the folder that the text names, and never ends."""
    child = subprocess.Popen(["sleep", "1000"])
    folder = Path(text)
    (folder / "half").write_text(f"{os.getpid()} {child.pid}")
    (folder / "half").rename(folder / "pids")
    while True:
        time.sleep(1000)


def hangs_in_c(task, text):
    """Holds the interpreter lock: no Python signal handler or thread of the process could end it."""
    import re

    re.match(r"(a+)+$", "a" * 64 + "b")


def forks(task, text):
    """Forks a child that outlives the score and holds a copy of every descriptor."""
    if child := os.fork():
        Path(text).write_text(str(child))
        return 1.0
    while True:
        time.sleep(1000)


def forks_and_leaves(task, text):
    """Forks a grandchild, in a session of its own, that outlives the score."""
    if child := os.fork():
        os.waitpid(child, 0)
        return 1.0
    os.setsid()
    if left := os.fork():
        Path(text).write_text(str(left))
        os._exit(0)
    while True:
        time.sleep(1000)


def forks_without_end(task, text):
    """Forks task.answer children, each in a session of its own, with a file named for its process id."""
    for _ in range(task.answer):
        child = os.fork()
        if child == 0:
            os.setsid()
            (Path(text) / str(os.getpid())).touch()
            time.sleep(1000)
        while not (Path(text) / str(child)).exists():
            time.sleep(0.001)
    while True:
        time.sleep(1000)


def allocates(task, text):
    """Allocates task.answer bytes."""
    return float(len(bytearray(task.answer)) == task.answer)


def opens_files(task, text):
    return float(len([os.open(__file__, os.O_RDONLY) for _ in range(task.answer)]))


def writes(task, text):
    """Writes a file of task.answer bytes to the path in the text."""
    with Path(text).open("wb") as file:
        file.truncate(task.answer)
    return 1.0


def connects(task, text):
    """Connects to port task.answer of this machine."""
    with socket.create_connection(("127.0.0.1", task.answer)):
        return 1.0


def where(task, text):
    return float(Path.cwd() == Path(text))


def loaded(task, text):
    return float(any(name in sys.modules for name in ("torch", "jax", "vllm", "transformers")))


@gin.configurable(module="reward_functions")
def bound_by_gin(task, text, scale=1.0):
    return scale


def shares(task, text):
    """Allocates task.answer bytes of shared memory, in pieces that belong to no process alone."""
    import mmap

    kept = [mmap.mmap(-1, 10_000_000) for _ in range(task.answer // 10_000_000)]
    for piece in kept:
        piece.write(bytes(10_000_000))
    time.sleep(float(text or 0))
    return len(kept)


def divides(task, text):
    """Allocates in each of several processes as much as one of them may have."""
    for _ in range(4):
        if os.fork() == 0:
            kept = b"1" * task.answer
            time.sleep(1000)
            os._exit(len(kept))
    time.sleep(1000)


def stops_its_guard(task, text):
    """Stops its guard process; with a text, a child does so repeatedly."""
    guard = os.getppid()
    os.kill(guard, signal.SIGSTOP)
    if text and os.fork() == 0:
        while True:
            os.kill(guard, signal.SIGSTOP)
    return 1.0


def waits_for_file(task, text):
    while not Path(task.metadata["file"]).exists():
        time.sleep(0.01)
    return 1.0


class Opened:
    """Blocks until a file exists when it is unpickled in another process."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return _opened, (str(self.file),)

    def __call__(self, task, text):
        return 1.0


def _opened(file):
    while not Path(file).exists():
        time.sleep(0.01)
    return Opened(Path(file))
