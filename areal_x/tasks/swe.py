"""Tasks on repositories: an issue to resolve, and hidden tests of the patch that does.

A task's metadata["swe"] says where it is worked on, its answer how the patch is tested:

    metadata["swe"] = {
        "repository": "repos/flask",     # a git repository of this machine, or
        "image": "swebench/sweb.eval…",  # an image that has it, at
        "directory": "/testbed",
        "commit": "3e1d7f…",             # the state before the patch; of an image, the one that it has
    }
    answer = {
        "files": {"tests/test_it.py": "…"},        # written after the patch, and/or
        "patch": "diff --git …",                   # applied after it
        "tests": [                                 # all have to pass
            {"command": ["python3", "-m", "unittest", "-v"]},                   # exit status 0
            {"command": ["python3", "shape.py"], "output": "square\\n"},         # and this output
            {"command": ["pytest", "-rA"], "passes": ["tests/test_it.py::test_it"]},  # named tests
        ],
    }
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import gin

from areal_x.types import Task

ABOUT = "swe"  # key of a task's metadata
DIRECTORY = "repository"  # of a repository that is copied in
# names in the headers of a patch; a path with blanks or quotes is quoted by git
CHANGED = re.compile(r'^(?:---|\+\+\+) (?:[ab]/([^"\n\t]+)|/dev/null)', re.MULTILINE)
TESTS = ("python", "-m", "pytest", "-rA", "-p", "no:cacheprovider", "--tb=no", "-q")


@dataclass(frozen=True)
class HiddenTest:
    """A test of a patch. command: its words. output: what it has to print, if that matters; trailing
    blanks do not. passes: names of tests that it has to report as passed, as `pytest -rA` or
    `unittest -v` does; without names its exit status has to be 0."""

    command: tuple[str, ...]
    output: str | None = None
    passes: tuple[str, ...] = ()


@dataclass(frozen=True)
class SweTask:
    """What a task on a repository holds; see the module's docstring."""

    repository: str | None
    image: str | None
    directory: str
    commit: str
    tests: tuple[HiddenTest, ...]
    files: Mapping[str, str] = field(default_factory=dict)
    patch: str = ""

    def hidden_paths(self) -> list[str]:
        """Returns the files that belong to the tests: no patch of a model changes them."""
        return sorted({*self.files, *filter(None, CHANGED.findall(self.patch))})


def read_swe(task: Task) -> SweTask:
    """Returns what a task on a repository holds. Raises: ValueError for one that cannot work."""
    about, answer = task.metadata.get(ABOUT), task.answer
    if not isinstance(about, Mapping) or not isinstance(answer, Mapping):
        raise ValueError(f'task {task.id} needs metadata["{ABOUT}"] and an answer with "tests"')
    repository, image = about.get("repository"), about.get("image")
    if not (repository or image):
        raise ValueError(f'task {task.id} has neither a "repository" nor an "image"')
    commit = about.get("commit") or "HEAD"
    if not isinstance(commit, str) or commit.startswith("-"):  # an option, such as --output
        raise ValueError(f"task {task.id} has {commit!r}, which is no commit")
    tests = tuple(_test(task.id, test) for test in answer.get("tests", ()))
    if not tests:
        raise ValueError(f"task {task.id} has no tests, so every patch would pass")
    return SweTask(
        repository=repository,
        image=image,
        directory=about.get("directory") or DIRECTORY,
        commit=commit,
        tests=tests,
        files=dict(answer.get("files") or {}),
        patch=answer.get("patch") or "",
    )


def _test(id: str, test: Any) -> HiddenTest:
    if not isinstance(test, Mapping) or set(test) - {"command", "output", "passes"}:
        raise ValueError(f'task {id}: a test has "command", "output" and "passes", not {test!r}')
    command = test.get("command")
    words = isinstance(command, Sequence) and not isinstance(command, str)
    if not words or not command or not all(isinstance(word, str) for word in command):
        raise ValueError(f"task {id}: the command of a test is a list of words, not {command!r}")
    return HiddenTest(tuple(command), test.get("output"), tuple(test.get("passes") or ()))


@gin.configurable
def swebench_task(
    record: Mapping[str, Any],
    id: str,
    image: str = "swebench/sweb.eval.x86_64.{instance}:latest",
    separator: str = "_1776_",
    repositories: str | None = None,
    directory: str = "/testbed",
    command: Sequence[str] = TESTS,
) -> Task:
    """Makes a task of a record in the form of SWE-bench: `instance_id`, `repo`, `base_commit`,
    `problem_statement`, `test_patch`, `FAIL_TO_PASS` and `PASS_TO_PASS`.

    Args:
        record: One of the dataset's.
        id: Used if the record has no `instance_id`.
        image: Image of the task, in which {instance} stands for its name; a record's own
            `image_name` or `docker_image` comes first.
        separator: What stands for "__" in {instance}: "_1776_" in the names of SWE-bench's images.
        repositories: A folder with git repositories, "owner__name" each, which are used in place of
            images.
        directory: Where the repository is in the image.
        command: Runs the tests; the files of the test patch follow. Repositories whose tests run
            otherwise need another.

    Raises: ValueError for a record without tests.
    """
    name = str(record.get("instance_id") or id)
    names = [*_names(record.get("FAIL_TO_PASS")), *_names(record.get("PASS_TO_PASS"))]
    if not names:
        raise ValueError(f"{name} has no FAIL_TO_PASS and no PASS_TO_PASS")
    patch = str(record.get("test_patch") or "")
    files = sorted(set(filter(None, CHANGED.findall(patch))))
    commit = str(record["base_commit"])
    about: dict[str, Any] = {"commit": commit}
    if repositories is not None:
        about["repository"] = f"{repositories}/{str(record['repo']).replace('/', '__')}"
    else:
        about["image"] = (
            record.get("image_name")
            or record.get("docker_image")
            or image.replace("{instance}", name.replace("__", separator).lower())
        )
        about["directory"] = directory
    answer = {"patch": patch, "tests": [{"command": [*command, *files], "passes": names}]}
    kept = {name: record[name] for name in ("instance_id", "repo", "version") if name in record}
    return Task(name, record["problem_statement"], answer, {ABOUT: about, **kept})


def _names(value: Any) -> list[str]:
    """A list of names, or its JSON text."""
    found = json.loads(value) if isinstance(value, str) and value else value or []
    return [str(name) for name in found]


@gin.configurable
def swe_task(record: Mapping[str, Any], id: str) -> Task:
    """Makes a task of a record with a `prompt`, with `repository` or `image` (and `directory`,
    `commit`), with `tests` (and `files`, `patch`); other fields become metadata.

    Args:
        record: One of the dataset's.
        id: The task's.

    Raises: ValueError for a record that cannot work.
    """
    own = ("repository", "image", "directory", "commit")
    of_tests = ("tests", "files", "patch")
    rest = {name: x for name, x in record.items() if name not in ("prompt", *own, *of_tests)}
    about = {name: record[name] for name in own if record.get(name)}
    answer = {name: record[name] for name in of_tests if record.get(name)}
    task = Task(id, record["prompt"], answer, {ABOUT: about, **rest})
    read_swe(task)
    return task
