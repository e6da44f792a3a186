"""What a job consists of, whatever the cluster's software."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from areal_x.runtime.command import quote

ATTEMPTS = 10  # how often a cluster repeats a job that failed
PORT = 6379


@dataclass(frozen=True)
class Group:
    """Nodes with the same label."""

    role: str
    """Value of their label "role"; "" for none."""

    first: int
    """Number of the first one in the job."""

    count: int


@dataclass(frozen=True)
class Job:
    """A run and its nodes."""

    name: str
    file: str
    bindings: tuple[str, ...]

    roles: Sequence[str]
    """The label "role" of each node, "" for none."""

    gpus: int
    """GPUs of each node."""

    cpus: int
    """CPUs of each node; 0 if that is left to Ray."""

    accelerator: str
    """The model of the GPUs, as SkyPilot names it."""

    image: str
    """Container image with this package."""

    claim: str
    """Kubernetes' claim of the volume that all nodes share."""

    folder: str
    """Where that volume is; the run's files are below it."""

    setup: str
    """Commands that prepare a node's environment."""

    @property
    def nodes(self) -> int:
        return len(self.roles)

    def groups(self) -> list[Group]:
        """Returns the nodes by their labels, in order."""
        numbered = groupby(enumerate(self.roles), key=lambda pair: pair[1])
        found = [(role, [number for number, _ in pairs]) for role, pairs in numbered]
        return [Group(role, numbers[0], len(numbers)) for role, numbers in found]

    def command(self) -> str:
        """Returns the command of the run."""
        bindings = [f"-b {quote(binding)}" for binding in self.bindings]
        words = ["python -m areal_x.train", shlex.quote(self.file), "--resume=auto", *bindings]
        return " ".join(words)
