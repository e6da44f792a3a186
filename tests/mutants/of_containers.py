"""Bugs by which a patch is judged by what it changed itself, or a command exceeds its bounds."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, planted

SWE = ("tests/agents/test_swe.py",)
CONTAINERS = ("tests/sandbox/test_containers.py",)

MUTANTS: list[Mutant] = [
    *planted(
        "areal_x/agents/repository.py",
        SWE,
        (
            "a patch changes the files of its tests",
            "for name in (*excluded, *map(literal, task.hidden_paths()))",
            "for name in excluded",
        ),
        (
            "a patch changes conftest.py",
            "for name in (*excluded, *map(literal, task.hidden_paths()))",
            "for name in map(literal, task.hidden_paths())",
        ),
        (
            "tests that were not reported have passed if the exit status is 0",
            "    if test.passes:\n",
            "    if test.passes and result.code:\n",
        ),
        (
            "the output of a test does not matter",
            "passed = passed and stripped(result.output) == stripped(test.output)",
            "passed = passed and bool(test.output)",
        ),
    ),
    *planted(
        "areal_x/agents/swe.py",
        SWE,
        (
            "half of the tests earn half of the reward",
            "Scored(share if self.partial else float(share == 1.0), details)",
            "Scored(share, details)",
        ),
    ),
    *planted(
        "areal_x/agents/container_door.py",
        SWE,
        (
            "a directory below the repository is looked for outside of it",
            'posixpath.join(directory, str(request.get("directory") or ""))',
            'str(request.get("directory") or directory)',
        ),
    ),
    *planted(
        "areal_x/sandbox/containers/remote.py",
        CONTAINERS,
        (
            "a shell splits the words of a command",
            '-s KILL "$seconds" "$@" <',
            '-s KILL "$seconds" $@ <',
        ),
        (
            "an exit status of 124 is taken for a timeout",
            "if code in TIMED_OUT and took >= allowed:",
            "if code in TIMED_OUT:",
        ),
        (
            "a file of any size is copied out",
            "if len(content) > self._copy_bytes:",
            "if not content:",
        ),
    ),
]
