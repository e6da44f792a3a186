"""The reward of a program: 1 if it passes its task's tests, which run in the sandbox.

train.dataset = @load_dataset()
load_dataset.to_task = @livecodebench_task
single_turn.reward = @code_tests
"""

from __future__ import annotations

import asyncio
from functools import cache

import gin

from areal_x.errors import at_least, positive
from areal_x.rewards.code.extraction import extract_program
from areal_x.rewards.code.judge import Failure, Judge, Run
from areal_x.runtime.hosts import Services
from areal_x.sandbox.pool import ProgramResult, Sandbox, SandboxLimits
from areal_x.tasks.code.program_tests import read_tests
from areal_x.types import Task

FAILURES: tuple[Failure, ...] = ("wrong", "crashed", "exceeded")
CLOCK = 2.0  # seconds by the clock for each of the processor: other programs run at the same time


@gin.configurable
def code_tests(
    task: Task,
    text: str,
    partial: bool = False,
    max_tests: int | None = None,
    seconds: float = 3.0,
    total_seconds: float = 8.0,
    memory_mb: float = 1024.0,
    output_characters: int = 1_000_000,
    processes: int = 8,
    float_tolerance: float = 0.0,
    require_confined: bool = False,
) -> tuple[float, dict[str, float]]:
    """1.0 if the program in `text` passes all tests of the task, else 0.0. It stops at the first test
    that fails.

    The program is the last fenced block of Python, or the whole text without a fence. task.answer
    is {"tests": […]} (areal_x.tasks.code.program_tests). Details: `tests_passed`, the share of tests;
    `no_program`, `wrong`, `crashed`, `exceeded`: 1.0 for the reason of the first failure.

    Args:
        partial: The share of tests that it passes is the reward, and all are run.
        max_tests: Run the first tests only; None runs all.
        seconds: Processor time of a test; it may take twice as long by the clock.
        total_seconds: Of all tests together, by the clock. Keep the workflow's
            reward_timeout_seconds longer: a reward that exceeds it has no result, not 0.
        memory_mb: Memory of a test, in 10^6 bytes.
        output_characters: Most characters that a test may print or return.
        processes: Most processes and threads of a test; fewer than reward_limits.processes by 8.
        float_tolerance: By how much numbers may differ, relative or absolute; 0 compares "1.0" and
            "1" as equal, and nothing else.
        require_confined: If True, fail rather than run a program with incomplete isolation
            (docs/sandbox.md).

    Raises: ConfigError for a limit that cannot work, ValueError for a task without tests, UserError as
    areal_x.sandbox.Sandbox.start.
    """
    # by these names, which are the reader's
    positive("code_tests.seconds", seconds)
    positive("code_tests.total_seconds", total_seconds)
    at_least("code_tests.max_tests", 1 if max_tests is None else max_tests, 1)
    at_least("code_tests.memory_mb", memory_mb, 32)
    at_least("code_tests.output_characters", output_characters, 16)
    at_least("code_tests.processes", processes, 1)
    at_least("code_tests.float_tolerance", float_tolerance, 0)
    tests = read_tests(task.answer)[:max_tests]
    program = extract_program(text)
    details = dict.fromkeys(("tests_passed", "no_program", *FAILURES), 0.0)
    if not program.strip():
        return 0.0, {**details, "no_program": 1.0}
    limits = SandboxLimits(
        seconds=CLOCK * seconds,
        cpu_seconds=seconds,
        memory_mb=memory_mb,
        output_characters=output_characters,
        processes=processes,
        require_confined=require_confined,
    )
    judge = Judge(_runner(limits), CLOCK * seconds, total_seconds, float_tolerance)
    verdict = judge.judge(program, tests, stop=not partial)
    details["tests_passed"] = verdict.share
    if verdict.failure is not None:
        details[verdict.failure] = 1.0
    return verdict.share if partial else float(verdict.failure is None), details


class TimedSandbox:
    """A sandbox whose programs have a time limit each, besides the sandbox's own."""

    def __init__(self, limits: SandboxLimits) -> None:
        self._sandbox = Sandbox(limits)

    async def run(self, code: str, stdin: str, seconds: float) -> ProgramResult | None:
        """Returns None for a program that takes longer, which is ended. Raises: as Sandbox.start."""
        await self._sandbox.start()
        try:
            async with asyncio.timeout(seconds):
                return await self._sandbox.run(code, stdin)
        except TimeoutError:
            return None

    async def close(self) -> None:
        """Ends the sandbox."""
        await self._sandbox.close()


@cache
def _services() -> Services:
    """The event loop of this process's sandboxes, which end with the process."""
    return Services()


def _runner(limits: SandboxLimits) -> Run:
    def run(code: str, stdin: str, seconds: float) -> ProgramResult | None:
        result: ProgramResult | None = _services().run(
            repr(limits), lambda: TimedSandbox(limits), "run", (code, stdin, seconds)
        )
        return result

    return run
