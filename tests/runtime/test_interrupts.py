"""A single Ctrl-C or SIGTERM ends a run, at whatever moment it comes; a second one ends what is stuck."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import weakref
from concurrent.futures import Future
from importlib.util import find_spec
from pathlib import Path

import pytest

from areal_x.errors import UserError
from areal_x.runtime import interrupts
from areal_x.runtime.interrupts import deferred_interrupts, deferred_interrupts_in_each, raise_if_interrupted
from areal_x.runtime.loop import result
from tests import forking
from tests.conftest import environment_with
from tests.thorough import further

OF_A_STEP = ["the loss", "a destructor", "a weak reference's callback", "a collection of garbage"]
EVERY_MOMENT = 26


class Thing:
    pass


def interrupted_in_a_callback() -> None:
    """Whatever is raised there is printed and forgotten."""
    thing = Thing()
    gone = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGINT))
    del thing
    assert gone() is None


def stopped(place: Path, model: Path, backend: str, moments: list[str]) -> list[dict[str, object]]:
    code = "import sys; from tests.interrupted_runs import main; main(*sys.argv[1:])"
    done = forking.run([sys.executable, "-c", code, str(model), backend, *moments], environment_with(1), place)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize(
    ("backend", "moments"), [("torch", ["an import", "the dataset", *OF_A_STEP]), *further(("torch", []), ("jax", OF_A_STEP))]
)
def test_a_signal_is_honoured_at_whatever_moment_it_comes(tmp_path, tiny_model_dir, backend, moments):
    if find_spec(f"areal_x_{backend}") is None:
        pytest.skip(f"the {backend} backend is not installed")
    runs = stopped(tmp_path, tiny_model_dir, backend, moments)
    assert len(runs) == (len(moments) or EVERY_MOMENT)
    for run in runs:
        assert run["came"], run
        assert run["status"] == interrupts.INTERRUPTED, run
        last = run["said"].splitlines()[-1]
        if run["checkpoints"]:
            assert f"continue from step {run['checkpoints'][-1]} with: python -m areal_x.train" in last, run
            assert last.endswith("--resume"), run
        else:
            assert last == "stopped" or last.endswith("it has no checkpoint yet to resume from"), run
        assert "Traceback" not in run["said"], run
        assert "Exception ignored" not in run["said"], run
        assert (run["threads"], run["children"], run["handled"]) == ([], [], True), run


STUCK = """
import gin, time

@gin.configurable(module="tests")
def stuck():
    print("ready", flush=True)
    while True:
        time.sleep(0.01)

@gin.configurable(module="tests")
def walk():
    return None
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_a_run_that_is_stuck(tmp_path, number):
    (tmp_path / "stuck.py").write_text(STUCK)
    (tmp_path / "run.gin").write_text("import stuck\ntrain.dataset = @stuck()\ntrain.workflow = @walk()\n")
    command = [sys.executable, "-m", "areal_x.train", "run.gin"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=tmp_path, text=True, **streams) as process:
        assert process.stdout.readline() == "ready\n"
        while process.poll() is None:  # some of them are one with the first
            process.send_signal(number)
            try:
                process.wait(0.2)
            except subprocess.TimeoutExpired:
                continue
        _, said = process.communicate()
    assert (process.returncode, said) == (130, interrupts.SECOND)


def test_an_interrupt_that_comes_within_a_callback_of_the_interpreters_is_not_lost():
    before = signal.getsignal(signal.SIGINT)
    with deferred_interrupts() as outer:
        outer()
        with deferred_interrupts() as inner:
            interrupted_in_a_callback()
            with pytest.raises(KeyboardInterrupt):
                inner()
        outer()  # raised once: what closes now is not disturbed
        raise_if_interrupted()
    assert signal.getsignal(signal.SIGINT) is before is signal.default_int_handler
    raise_if_interrupted()


def test_an_interrupt_that_nobody_asked_for_is_raised_at_the_end():
    with pytest.raises(KeyboardInterrupt), deferred_interrupts():
        interrupted_in_a_callback()


def failing(interrupted):
    with deferred_interrupts():
        if interrupted:
            interrupted_in_a_callback()
        raise OSError("a server that the same signal may have ended")


def test_an_interrupt_takes_the_place_of_what_it_may_have_caused():
    with pytest.raises(KeyboardInterrupt) as raised:
        failing(interrupted=True)
    assert isinstance(raised.value.__cause__, OSError)
    with pytest.raises(OSError, match="the same signal"):
        failing(interrupted=False)


def test_an_error_of_closing_does_not_take_the_place_of_an_interrupt():
    """As of the calls of a gang that the same end of a job has taken."""

    def closing():
        try:
            interrupted_in_a_callback()
            raise_if_interrupted()
        finally:
            raise ConnectionError("a process is gone")

    with pytest.raises(KeyboardInterrupt) as raised, deferred_interrupts(), deferred_interrupts():
        closing()
    assert isinstance(raised.value.__cause__, ConnectionError)


def test_signals_of_one_moment_are_one_and_a_later_one_interrupts_where_it_comes(monkeypatch):
    reached = []

    def twice():
        with deferred_interrupts():
            interrupted_in_a_callback()
            signal.raise_signal(signal.SIGINT)
            reached.append("the same moment")
            monkeypatch.setattr(interrupts, "SAME_SECONDS", 0.0)
            signal.raise_signal(signal.SIGINT)
            reached.append("later")

    with pytest.raises(KeyboardInterrupt):
        twice()
    assert reached == ["the same moment"]


def test_another_thread_looks_at_no_note_and_can_leave_one():
    told: list[bool] = []

    def elsewhere() -> None:
        with deferred_interrupts() as look:
            look()
        raise_if_interrupted()
        told.append(interrupts.request_stop())

    def started() -> None:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()

    started()
    with pytest.raises(KeyboardInterrupt), deferred_interrupts():
        started()
    assert told == [False, True]


def test_a_generator_notes_while_it_works_and_not_between():
    closed, seen = [], []

    @deferred_interrupts_in_each
    def steps():
        try:
            for step in range(5):
                if step == 2:
                    interrupted_in_a_callback()
                yield step
        finally:
            closed.append(True)

    def all_of_them():
        for step in steps():
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
            seen.append(step)

    with pytest.raises(KeyboardInterrupt):
        all_of_them()
    assert (seen, closed) == ([0, 1], [True])
    left = steps()
    assert next(left) == 0
    left.close()
    assert closed == [True, True]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_failure_of_another_thread_is_raised_once_where_the_main_thread_waits() -> None:
    failure = UserError("a process is gone")
    with interrupts.deferred_interrupts():
        threading.Thread(target=interrupts.fail, args=[failure]).start()
        with pytest.raises(UserError, match="a process is gone"):
            result(Future())
        interrupts.raise_if_interrupted()


def test_a_failure_that_is_withdrawn_or_comes_too_late_is_not_raised() -> None:
    with interrupts.deferred_interrupts():
        interrupts.fail(UserError("a process is gone"))
        interrupts.withdraw()
        interrupts.raise_if_interrupted()
        interrupts.fail(UserError("a process is gone"))
    interrupts.fail(UserError("a process is gone"))
    with interrupts.deferred_interrupts():
        interrupts.raise_if_interrupted()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_library_that_sets_handlers_of_its_own_ends_nothing(number: signal.Signals) -> None:
    seen: list[int] = []
    before, other = signal.signal(number, lambda number, _: seen.append(number)), signal.getsignal(signal.SIGUSR1)
    try:
        with interrupts.same_signals():
            assert signal.signal(number, lambda *_: sys.exit(15)) is signal.getsignal(number)
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
            signal.raise_signal(number)
        signal.raise_signal(number)
        assert seen == [number, number]
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
        assert signal.signal(number, before) is not before
        assert signal.getsignal(number) is before
    finally:
        signal.signal(number, before)
        signal.signal(signal.SIGUSR1, other)
