"""Small jobs in a folder, of four kinds, each scored by hidden tests of its result.

    Rename every .txt file to .md.                      each file has its new name and its old text
    Make total.py print the sum of numbers.txt.         with other numbers in it too
    scale(n) in scaling.py should return n times 7.     called with some numbers
    Delete the lines with ERROR from events.log.        the others are still there

The reward is the share of tests with the expected output (areal_x.agents.tools.terminal); an
unchanged folder earns nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import gin
import numpy as np

from areal_x import Task, at_least, one_of

NAMES = (
    "apple",
    "birch",
    "cedar",
    "daisy",
    "elder",
    "fern",
    "grass",
    "hazel",
    "iris",
    "jasmin",
    "kale",
    "laurel",
)
INSTRUCTION = (
    "Use the tool `shell`, whose commands run in the folder with the files. When it is done,"
    " say so."
)


@dataclass(frozen=True)
class Job:
    """A job in a folder, with its tests and a solution."""

    wanted: str
    """The request to the model."""
    files: dict[str, str]
    """Initial content of the folder."""
    tests: list[tuple[str, str]]
    """Commands with their expected output."""
    solution: str
    """A command that does the job."""


@gin.configurable(module="terminal_jobs")
def jobs(
    split: str = "train", count: int = 2000, instructed: bool = False, seed: int = 0
) -> list[Task]:
    """Returns jobs of the four kinds in turn; those of the split "test" are separate, and the same
    for every seed.

    Args:
        split: "train" or "test".
        count: Number of jobs.
        instructed: Adds an instruction on how to work, for models not trained on the task.
        seed: Seed of the training jobs.
    """
    one_of("terminal_jobs.jobs.split", split, ("train", "test"))
    at_least("terminal_jobs.jobs.count", count, 1)
    rng = np.random.default_rng([7, seed] if split == "train" else 8)
    return [task(f"{split}/{i}", drawn(i, rng), instructed) for i in range(count)]


def drawn(index: int, rng: np.random.Generator) -> Job:
    """A random job, of the kind determined by the index."""
    return KINDS[index % len(KINDS)](rng)


def task(id: str, job: Job, instructed: bool = False) -> Task:
    prompt = [
        {"role": "user", "content": f"{job.wanted} {INSTRUCTION}" if instructed else job.wanted}
    ]
    metadata = {"files": job.files, "tests": [command for command, _ in job.tests]}
    return Task(id, prompt, [printed for _, printed in job.tests], metadata)


def rename(rng: np.random.Generator) -> Job:
    texts = {name: str(rng.integers(1000)) for name in _names(3, rng)}
    tests = [("ls", "\n".join(f"{name}.md" for name in sorted(texts)))]
    tests += [(f"cat {name}.md", text) for name, text in texts.items()]
    files = {f"{name}.txt": text for name, text in texts.items()}
    return Job(
        "Rename every .txt file to .md.",
        files,
        tests,
        "for f in *.txt; do mv $f ${f%.txt}.md; done",
    )


def total(rng: np.random.Generator) -> Job:
    given, others = rng.integers(1, 100, (2, 4)).tolist()
    again = "; ".join(
        ["rm numbers.txt", *(f"echo {n} >> numbers.txt" for n in others), "python3 total.py"]
    )
    files = {"numbers.txt": "".join(f"{n}\n" for n in given), "total.py": "print(0)\n"}
    tests = [("python3 total.py", str(sum(given))), (again, str(sum(others)))]
    solution = "echo \"print(sum(map(int, open('numbers.txt'))))\" > total.py"
    return Job(
        "Make total.py print the sum of numbers.txt, which has a number on each line.",
        files,
        tests,
        solution,
    )


def mend(rng: np.random.Generator) -> Job:
    wrong, right = rng.permutation(np.arange(2, 10))[:2].tolist()
    files = {"scaling.py": f"def scale(n):\n    return {wrong} * n\n"}
    tests = [
        (f"python3 -c 'import scaling; print(scaling.scale({n}))'", str(n * right))
        for n in rng.integers(1, 50, 3).tolist()
    ]
    return Job(
        f"scale(n) in scaling.py should return n times {right}.",
        files,
        tests,
        f"sed -i s/[0-9]/{right}/ scaling.py",
    )


def clean(rng: np.random.Generator) -> Job:
    names, bad = _names(6, rng), set(rng.permutation(6)[:2].tolist())
    lines = [f"{'ERROR' if i in bad else 'INFO'} {name}\n" for i, name in enumerate(names)]
    tests = [("cat events.log", "".join(line for line in lines if line.startswith("INFO")))]
    return Job(
        "Delete the lines with ERROR from events.log.",
        {"events.log": "".join(lines)},
        tests,
        "sed -i /ERROR/d events.log",
    )


KINDS: tuple[Callable[[np.random.Generator], Job], ...] = (rename, total, mend, clean)


def _names(count: int, rng: np.random.Generator) -> list[str]:
    return [NAMES[i] for i in rng.permutation(len(NAMES))[:count].tolist()]
