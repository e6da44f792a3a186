"""Rewards that behave badly, importable by the workers that run them."""

import ctypes
import os
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
    """Whatever the task says, if it survived the journey as it was."""
    return task.answer


def counts_the_answer_type(task, text):
    return float(task.answer == ("a", 1) and task.metadata[3] == {"x"})


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
    """Leaves its own and its child's number in the folder that the text names, and never ends."""
    child = subprocess.Popen(["sleep", "1000"])
    folder = Path(text)
    (folder / "half").write_text(f"{os.getpid()} {child.pid}")
    (folder / "half").rename(folder / "pids")
    while True:
        time.sleep(1000)


def hangs_in_c(task, text):
    """Holds the interpreter: no Python signal handler or thread of its own could end it."""
    import re

    re.match(r"(a+)+$", "a" * 64 + "b")


def forks(task, text):
    """A forked child that outlives the score and holds a copy of every descriptor."""
    if child := os.fork():
        Path(text).write_text(str(child))
        return 1.0
    while True:
        time.sleep(1000)


def where(task, text):
    return float(Path.cwd() == Path(text))


def loaded(task, text):
    return float(any(name in sys.modules for name in ("torch", "jax", "vllm", "transformers")))


@gin.configurable(module="reward_functions")
def bound_by_gin(task, text, scale=1.0):
    return scale
