"""A repository in a container: the state before a patch, the patch that was made, and its tests in a
clean copy.

Everything that reads what a model wrote, git included, runs in a container.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from areal_x.errors import UserError
from areal_x.runtime.thread import in_thread
from areal_x.sandbox.containers.container import Container, ContainerError
from areal_x.sandbox.folder import pack_files
from areal_x.tasks.swe import HiddenTest, SweTask

ARCHIVE_SECONDS = 120.0
# without the later history, in which the solution may be
BEGIN = """git init --quiet && git add --all --force &&
git -c user.name=areal-x -c user.email=areal-x@localhost commit --quiet --allow-empty -m before"""
HEAD = "git rev-parse HEAD"
# $1: the commit that it is measured from
DIFF = """git add --all && git diff --cached --binary --no-ext-diff --no-textconv --no-color \
--output=.git/areal_x.patch "$1" """
PATCH = ".areal_x.patch"  # in the repository, until it is applied
# the words: options with the files that it may not change
APPLY = f'git apply --whitespace=nowarn "$@" {PATCH} && rm -f {PATCH}'
REPORTS = ("PASSED {}", "{} ... ok", "{} PASSED")  # pytest -rA, unittest -v, pytest -v


@dataclass(frozen=True)
class Tested:
    """The result of a hidden test. output: what it printed."""

    passed: bool
    output: str


async def prepare(container: Container, task: SweTask) -> str:
    """Puts the repository into a container, without its later history. Returns the commit that a
    patch is measured from.

    Raises: UserError for a repository or commit that does not exist; ContainerError.
    """
    begin = HEAD
    if task.repository is not None:
        await copy_repository(container, task)
        begin = f"{BEGIN} && {HEAD}"
    return (await script(container, task, begin)).strip()


async def copy_repository(container: Container, task: SweTask) -> None:
    """Copies the files of the commit into a container. Raises: as `prepare`."""
    assert task.repository is not None
    archive = await in_thread(archive_of, task.repository, task.commit)
    await container.copy_in(archive, task.directory)


async def patch_of(container: Container, task: SweTask, base: str) -> bytes:
    """Returns all changes since a commit, new files included. Raises: ContainerError."""
    await script(container, task, DIFF, base)
    return await container.copy_out(f"{task.directory}/.git/areal_x.patch")


async def test_patch(
    container: Container, task: SweTask, patch: bytes, excluded: Sequence[str]
) -> list[Tested] | None:
    """Applies a patch to a clean copy and runs the hidden tests there. Returns None if the patch
    cannot be applied.

    container: one that has just started. excluded: patterns of files whose changes are left out,
    besides the files of the tests. Raises: as `prepare`.
    """
    if task.repository is not None:
        await copy_repository(container, task)
    left_out = [f"--exclude={name}" for name in (*excluded, *map(literal, task.hidden_paths()))]
    await container.copy_in(pack_files({PATCH: patch}), task.directory)
    words = ["sh", "-c", APPLY, "sh", *left_out]
    if (await container.run(words, directory=task.directory)).code != 0:
        return None
    if task.files:
        await container.copy_in(pack_files(task.files), task.directory)
    if task.patch:
        await container.copy_in(pack_files({PATCH: task.patch}), task.directory)
        await script(container, task, APPLY)
    return [await run_test(container, task, test) for test in task.tests]


async def run_test(container: Container, task: SweTask, test: HiddenTest) -> Tested:
    """Runs one hidden test. Raises: ContainerError."""
    result = await container.run(test.command, directory=task.directory)
    lines = {line.strip() for line in result.output.splitlines()}
    if test.passes:
        passed = all(any(form.format(name) in lines for form in REPORTS) for name in test.passes)
    else:
        passed = result.code == 0
    if test.output is not None:
        passed = passed and stripped(result.output) == stripped(test.output)
    return Tested(passed, result.text())


async def script(container: Container, task: SweTask, text: str, *arguments: str) -> str:
    """Returns what one of the scripts above printed. Raises: ContainerError if it fails."""
    words = ["sh", "-c", text, "sh", *arguments]
    result = await container.run(words, directory=task.directory)
    if result.code != 0:
        raise ContainerError(f"git in the container failed: {result.text()[-400:]}")
    return result.output


def archive_of(repository: str, commit: str) -> bytes:
    """Returns the files of a commit of a repository of this machine, as a tar archive. Raises:
    UserError."""
    words = ["git", "-C", repository, "archive", "--format=tar", commit]
    try:
        done = subprocess.run(words, capture_output=True, timeout=ARCHIVE_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"the repository {repository} cannot be read: {error}") from None
    if done.returncode:
        text = " ".join(done.stderr.decode(errors="replace").split())
        raise UserError(f"the repository {repository} has no commit {commit}: {text}")
    return done.stdout


def literal(path: str) -> str:
    """Returns the pattern that matches only this path."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in path)


def stripped(text: str) -> list[str]:
    """The lines of a text, without trailing blanks."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
