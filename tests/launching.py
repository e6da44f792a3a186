"""Starts a command in several processes that train one model together."""

from __future__ import annotations

import random
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from areal_x.cluster.gang import Span
from areal_x.cluster.measures import differences
from areal_x.monitor.metrics import read
from areal_x.run.journal import FILE
from areal_x.run.token_record import TokenRecord
from tests import forking
from tests.conftest import environment_with

Process = forking.Process | subprocess.Popen[bytes]


def free_port() -> int:
    """A free port outside the range for outgoing connections, one of which could take it before the processes listen."""
    while True:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port := random.randrange(20_000, 32_000)))
            return port


@contextmanager
def started(command: Sequence[str], processes: int, devices: int, folder: Path, **more: str) -> Iterator[list[Process]]:
    """Starts the command in several processes, with outputs in files out-0, err-0 …; kills those that are left at the end."""
    environment = environment_with(devices, PYTHONFAULTHANDLER="1", **more)
    if processes > 1:
        environment |= {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with ExitStack() as stack:
        made = []
        for rank in range(processes):
            out, err = (stack.enter_context((folder / f"{name}-{rank}").open("w")) for name in ("out", "err"))
            own = {"RANK": str(rank)} if processes > 1 else {}
            made.append(stack.enter_context(forking.popen(command, environment | own, folder, out, err)))
            stack.callback(made[-1].kill)
        yield made


def finished(command: Sequence[str], processes: int, devices: int, folder: Path, **more: str) -> None:
    """Runs the command in several processes to its end, which must be successful in all."""
    with started(command, processes, devices, folder, **more) as made:
        codes = [process.wait(timeout=500) for process in made]
    assert not any(codes), f"{codes}\n" + "\n".join((folder / f"err-{rank}").read_text() for rank in range(processes))


TASKS = """
import gin

from tests.ones import counts_ones  # the reward's process imports this, and no more
from dataclasses import replace

@gin.configurable(module="processes_test")
def tasks():
    from tests.experiments import TASKS
    return TASKS

@gin.configurable(module="processes_test")
def written():
    from tests.experiments import TASKS
    return [replace(task, answer="12") for task in TASKS]

@gin.configurable(module="processes_test")
def ones(task, text):
    return counts_ones(task, text)

@gin.configurable(module="processes_test")
def made_once():
    import os
    assert os.environ.get("RANK", "0") == "0", "one process makes the model"
    return MODEL
"""
RUN = """
import processes_tasks
model.path = @processes_test.made_once
train.steps = 2
train.groups_per_step = 2
train.group_size = 4
train.max_staleness = 0
train.row_length = 32
train.name = 'run'
trainer.micro_batch_rows = 2
optimizer.learning_rate = 1e-3
mesh.fsdp = 4
"""
ONLINE = """
train.dataset = @processes_test.tasks()
train.workflow = @single_turn()
single_turn.reward = @processes_test.ones
sampling.max_tokens = 8
embedded.slots = 8
train.algorithm = @grpo()
grpo.kl_coefficient = 0.1
"""
WRITTEN = """
train.dataset = @processes_test.written()
train.workflow = @demonstrations()
train.engine = 'none'
train.algorithm = @sft()
train.steps = 100000
train.checkpoint_every = 3
train.keep_checkpoints = 1
mesh.processes = 2
"""


ONE_RANK = ("train.cluster = 'ray'", "train.backend = 'torch'", "mesh.fsdp = 1")  # a run on Ray
SLOW = """
@gin.configurable(module="processes_test")
def slow_ones(task, text):
    import os, time
    if not os.path.exists(FAST):
        time.sleep(SECONDS)
    return counts_ones(task, text)
"""


def command_of(directory: Path, folder: Path, text: str, *bindings: str) -> list[str]:
    """The command of a run of this model, whose gin file is written to a new folder."""
    folder.mkdir()
    (folder / "processes_tasks.py").write_text(TASKS.replace("MODEL", repr(str(directory))))
    (folder / "run.gin").write_text(RUN + text)
    return [sys.executable, "-m", "areal_x.train", "run.gin", *(x for b in bindings for x in ("-b", b))]


def assert_measured_alike(one: Path, two: Path) -> None:
    """Asserts that two runs of ONLINE, in these folders, the second in two processes, wrote the same metrics, and the second
    those that compare its processes."""
    expected, rows = (read(x / "runs" / "run") for x in (one, two))
    assert len(rows) == 3
    for row, alone in zip(rows[1:], expected[1:], strict=True):
        assert row.keys() == alone.keys() | differences([Span("update", 0.0, 0.0, 0.0, 0)] * 2).keys()
        for name in ("reward", "response_length", "trained_tokens"):  # the same tokens were sampled
            assert row[name] == alone[name]
        for name in ("loss", "grad_norm", "reference_kl", "policy_gap"):
            assert row[name] == pytest.approx(alone[name], rel=1e-3, abs=1e-6)
    assert rows[1]["reward"] > 0


def assert_recorded_alike(one: Path, two: Path) -> None:
    """Asserts that the journals of two runs, in these folders, have the same numbers of each token."""
    expected, found = (records(x / "runs" / "run") for x in (one, two))
    assert list(found) == list(expected) == [0, 1, 2, 3]
    for ticket, (step, record) in expected.items():
        assert found[ticket][0] == step
        for name, precision in (("logprobs", 1e-4), ("advantages", 2e-3), ("entropies", 5e-3)):
            alone, together = (getattr(x, name) for x in (record, found[ticket][1]))
            assert np.abs(alone).max() > 0 or name == "advantages"
            np.testing.assert_allclose(together, alone, atol=precision, err_msg=name)


def records(run: Path) -> dict[int, tuple[int, TokenRecord]]:
    """Of each recorded group of a run, by ticket, the step and what it made of the tokens."""
    with closing(sqlite3.connect(run / FILE)) as connection:
        found = connection.execute("SELECT ticket, step, content FROM trained ORDER BY ticket").fetchall()
    return {ticket: (step, TokenRecord.decode(content)) for ticket, step, content in found}


def slow_rewards(folder: Path, seconds: float = 0.1) -> Path:
    """Adds the reward @processes_test.slow_ones to a run's folder. Returns the file that makes it fast once it is there."""
    fast = folder / "fast"
    with (folder / "processes_tasks.py").open("a") as tasks:
        tasks.write(SLOW.replace("FAST", repr(str(fast))).replace("SECONDS", str(seconds)))
    return fast
