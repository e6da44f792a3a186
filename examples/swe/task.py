"""Issues in a git repository of five small modules, each scored by hidden tests of the patch.

    scale(n) in scaling.py should return n times 7.     another number is there
    moved(n) in moving.py should return n plus 4.       another number is there

The repository has a commit for each wrong number, so that a task is a commit, an issue and its tests
(areal_x.tasks.swe). It is made once, and cached.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from random import Random
from typing import Literal

import gin

from areal_x import Task, one_of
from examples.tiny.cached import made_once

NUMBERS = range(2, 10)
HELD_OUT = 20  # of the 112 issues
OTHERS = {
    "README.md": "Small things to do with numbers.\n",
    "doubling.py": "def doubled(n):\n    return n + n\n",
    "tests/__init__.py": "",
    "tests/test_doubling.py": (
        "import unittest\n\nfrom doubling import doubled\n\n\n"
        "class Doubling(unittest.TestCase):\n"
        "    def test_doubled(self):\n        self.assertEqual(doubled(4), 8)\n"
    ),
}
HIDDEN = """import unittest

from {module} import {function}


class Hidden(unittest.TestCase):
    def test_it(self):
        self.assertEqual([{function}(n) for n in (3, 8)], {expected})
"""


@dataclass(frozen=True)
class Kind:
    """A kind of issue. sign: the operator between n and the number. words: the operator in words."""

    module: str
    function: str
    sign: str
    words: str

    def file(self, number: int) -> str:
        return f"def {self.function}(n):\n    return n {self.sign} {number}\n"

    def value(self, n: int, number: int) -> int:
        return n * number if self.sign == "*" else n + number


KINDS = (Kind("scaling", "scale", "*", "times"), Kind("moving", "moved", "+", "plus"))


@dataclass(frozen=True)
class Issue:
    """A wrong number in a module, and the right one."""

    kind: Kind
    wrong: int
    right: int

    @property
    def text(self) -> str:
        kind = self.kind
        return f"{kind.function}(n) in {kind.module}.py should return n {kind.words} {self.right}."

    @property
    def solution(self) -> str:
        """A command that resolves it."""
        return f"sed -i s/{self.wrong}/{self.right}/ {self.kind.module}.py"


def all_issues() -> list[Issue]:
    return [Issue(kind, *pair) for kind in KINDS for pair in permutations(NUMBERS, 2)]


@gin.configurable(module="repositories")
def issues(split: Literal["train", "test"] = "train") -> list[Task]:
    """Returns a task for each issue: 20 are held out, the others are the training data.

    Args:
        split: "train" or "test".
    """
    one_of("repositories.issues.split", split, ("train", "test"))
    found = all_issues()
    Random("held out").shuffle(found)
    repository = made_once("repositories", {}, [sys.modules[__name__]], write_repository)
    chosen = found[:HELD_OUT] if split == "test" else found[HELD_OUT:]
    return [task_of(issue, repository) for issue in chosen]


def task_of(issue: Issue, repository: Path) -> Task:
    kind = issue.kind
    expected = [kind.value(n, issue.right) for n in (3, 8)]
    hidden = HIDDEN.format(module=kind.module, function=kind.function, expected=expected)
    code = f"from {kind.module} import {kind.function}; print({kind.function}(5))"
    answer = {
        "files": {"tests/test_hidden.py": hidden},
        "tests": [
            {"command": ["python3", "-m", "unittest", "tests.test_hidden", "tests.test_doubling"]},
            {"command": ["python3", "-c", code], "output": str(kind.value(5, issue.right))},
        ],
    }
    commit = f"{kind.module}-{issue.wrong}"
    about = {"repository": str(repository), "commit": commit}
    return Task(f"{kind.module}/{issue.wrong}/{issue.right}", issue.text, answer, {"swe": about})


def write_repository(directory: Path) -> None:
    """Makes the repository, with a tag for each kind of issue and wrong number."""
    git(directory, "init", "--quiet")
    for kind in KINDS:
        for number in NUMBERS:
            others = {other.module: 2 for other in KINDS}
            files = {f"{k.module}.py": k.file(others[k.module]) for k in KINDS}
            for name, text in {**OTHERS, **files, f"{kind.module}.py": kind.file(number)}.items():
                (directory / name).parent.mkdir(exist_ok=True)
                (directory / name).write_text(text)
            git(directory, "add", "--all")
            git(directory, *("commit", "--quiet", "--allow-empty", "--message", "A number"))
            git(directory, "tag", f"{kind.module}-{number}")


def git(directory: Path, *words: str) -> None:
    author: Sequence[str] = ("-c", "user.name=areal-x", "-c", "user.email=areal-x@localhost")
    subprocess.run(["git", *author, *words], cwd=directory, check=True)
