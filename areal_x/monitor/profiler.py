"""Profiles the steps named by train.profile_steps with the backend's own profiler, in every process
that trains.

    runs/NAME/profile/step-3/rank-0/   torch: trace.json.gz, operators.txt, memory.pickle (CUDA)
                                       JAX: perfetto_trace.json.gz, *.xplane.pb, memory.prof

A profile covers a step from its wait for groups to the publication of its weights. A profile that
cannot be taken or written is reported, and the run continues.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from areal_x.errors import ConfigError, described, within
from areal_x.protocols.trainer import InProcesses, Trainer

FOLDER = "profile"
SHOWN = 40  # rows of operators.txt

Finish = Callable[[], None]
"""Ends a profile and writes its files."""


def check_steps(profiled: Sequence[int], steps: int, backend: str) -> None:
    """Raises: ConfigError for steps that the run does not take, and for a backend whose profiler is
    not known."""
    name = "train.profile_steps"
    if not profiled:
        return
    for step in profiled:
        within(name, step, 1, steps)
    if len(set(profiled)) < len(profiled):
        raise ConfigError(name, tuple(profiled), "each step once")
    if backend not in PROFILERS:
        known = " or ".join(map(repr, PROFILERS))
        wanted = f"() with train.backend = {backend!r}: only {known} can be profiled"
        raise ConfigError(name, tuple(profiled), wanted)


class Profiler:
    """Profiles steps of a run. Leaving the context ends a profile that an error has cut short.

    trainer: whose processes are profiled. message: called with a sentence about each profile.
    """

    def __init__(
        self,
        run: Path,
        steps: Sequence[int],
        backend: str,
        trainer: Trainer,
        message: Callable[[str], None],
    ) -> None:
        self._run, self._steps, self._backend = run.absolute(), frozenset(steps), backend
        self._trainer, self._message = trainer, message
        self._folder: Path | None = None  # of the profile under way

    def begin(self, step: int) -> None:
        """Begins to profile a step, if it is one of those."""
        if step not in self._steps:
            return
        folder = self._run / FOLDER / f"step-{step}"
        problem = self._in_all(begin_here, self._backend, folder)
        if problem:
            self._message(f"step {step} is not profiled: {problem}")
        else:
            self._folder = folder

    def end(self) -> None:
        """Ends the profile under way, if any, and writes it."""
        folder, self._folder = self._folder, None
        if folder is not None:
            problem = self._in_all(end_here)
            self._message(
                f"the profile {folder} is incomplete: {problem}"
                if problem
                else f"profile: {folder}"
            )

    def _in_all(self, function: Callable[..., str], *arguments: Any) -> str:
        if isinstance(self._trainer, InProcesses):
            found: str = self._trainer.apply(function, *arguments)
            return found
        return function(self._trainer, 0, *arguments)

    def __enter__(self) -> Profiler:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._folder is not None:
            with suppress(Exception):  # the error that cut the step short is the one to report
                self.end()


# ---- in each process that trains

_under_way: list[Finish] = []  # at most one: frameworks profile a process as a whole


def begin_here(trainer: Trainer, rank: int, backend: str, folder: Path) -> str:
    """Begins to profile this process into `folder`/rank-N. Returns why it cannot; "" if it does."""
    own = folder / f"rank-{rank}"
    try:
        shutil.rmtree(own, ignore_errors=True)  # of a step that a resumed run takes again
        own.mkdir(parents=True)
        _under_way.append(PROFILERS[backend](own))
    except (OSError, RuntimeError) as error:  # RuntimeError: somebody else is profiling
        return _reported(error)
    return ""


def end_here(trainer: Trainer, rank: int) -> str:
    """Ends this process's profile and writes it. Returns why it could not; "" if it did."""
    try:
        while _under_way:
            _under_way.pop()()
    except (OSError, RuntimeError) as error:
        return _reported(error)
    return ""


def _reported(error: Exception) -> str:
    """Describes an error, also in this process's log: the driver hears of the first process's only."""
    text = described(error)
    print(f"the profile failed: {text}", file=sys.stderr)
    return text


def profile_torch(folder: Path) -> Finish:
    """Begins a profile of all threads, with CUDA's kernels and its allocator's history where there is
    a CUDA device, and returns what ends it."""
    import torch
    from torch._C._profiler import _ExperimentalConfig
    from torch.profiler import profile

    if torch.autograd.profiler._is_profiler_enabled:  # the process would crash at a second's end
        raise RuntimeError("another profile of this process is under way")
    cuda = torch.cuda.is_available()
    # All threads, because the embedded engine samples on one of its own.
    every_thread = _ExperimentalConfig(profile_all_threads=True)
    profiler = profile(record_shapes=True, experimental_config=every_thread)
    if cuda:
        torch.cuda.memory._record_memory_history()
    profiler.start()

    def finish() -> None:
        profiler.stop()
        if cuda:
            torch.cuda.memory._dump_snapshot(str(folder / "memory.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
        profiler.export_chrome_trace(str(folder / "trace.json.gz"))
        by = "self_device_time_total" if cuda else "self_cpu_time_total"
        table = profiler.key_averages().table(sort_by=by, row_limit=SHOWN)
        (folder / "operators.txt").write_text(table, encoding="utf-8")

    return finish


def profile_jax(folder: Path) -> Finish:
    """Begins a profile of the devices and of XLA's host threads, and returns what ends it and writes
    what the devices' memory holds then."""
    import jax

    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # every Python call is an event otherwise: millions a step
    jax.profiler.start_trace(folder, create_perfetto_trace=True, profiler_options=options)

    def finish() -> None:
        jax.profiler.stop_trace()
        jax.profiler.save_device_memory_profile(str(folder / "memory.prof"))

    return finish


PROFILERS: dict[str, Callable[[Path], Finish]] = {"jax": profile_jax, "torch": profile_torch}
