"""What a process of a gang takes over from the driver before it does anything else."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from areal_x.errors import UserError

# Libraries read these variables; Ray gives its processes those of the node.
ENVIRONMENT = (
    *("XLA_", "JAX_", "TORCH", "NCCL_", "GLOO_", "HF_", "TRANSFORMERS_", "TOKENIZERS_"),
    *("OMP_", "GOMP_"),  # see areal_x.runtime.cores, which the driver's command asks for
)
THREADS = "OMP_NUM_THREADS"  # Ray sets it if it is missing


@dataclass(frozen=True)
class Surroundings:
    """The driver's working directory, import path and environment."""

    folder: Path
    """Relative paths refer to it."""

    imports: tuple[str, ...]
    """sys.path."""

    environment: Mapping[str, str]
    """Variables that libraries read."""

    logs: Path | None = None
    """Folder for what each process prints."""

    mark: Path | None = None
    """A file that the driver made in that folder (areal_x.runtime.shared_folder)."""

    def enter(self, name: str) -> None:
        """Makes them this process's own. name: of its log.

        Raises: UserError on a node that does not see the folder of the logs, or another one.
        """
        if self.mark is not None and self.mark.parent.is_dir() and not self.mark.exists():
            raise UserError(
                f"the node {socket.gethostname()} has another folder {self.logs} than the driver:"
                " train.runs must be a folder that all nodes share"
            )
        with suppress(OSError):  # another node may not have the folder
            os.chdir(self.folder)
        sys.path += [place for place in self.imports if place not in sys.path]
        if THREADS not in self.environment:
            os.environ.pop(THREADS, None)
        os.environ |= self.environment
        if self.logs is not None:
            try:
                redirect_output(self.logs / f"{name}.log")
            except OSError as error:
                raise UserError(
                    f"the node {socket.gethostname()} cannot write to {self.logs}"
                    f" ({error.strerror}): train.runs must be a folder that all nodes share"
                ) from None


def surroundings(
    logs: Path | None, more: Sequence[str] = (), mark: Path | None = None
) -> Surroundings:
    """Returns this process's. logs: folder for what the others print. more: beginnings of the names
    of more variables that are taken over; keys never are. mark: see `Surroundings.mark`."""
    wanted = (*ENVIRONMENT, *more)
    return Surroundings(
        folder=Path.cwd(),
        imports=tuple(place or str(Path.cwd()) for place in sys.path),
        environment={
            name: x
            for name, x in os.environ.items()
            if name.startswith(wanted) and not name.endswith("_KEY")
        },
        logs=logs and logs.absolute(),
        mark=mark,
    )


def redirect_output(file: Path) -> None:
    """Appends to a file what this process and its libraries print."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    with file.open("ab") as opened:
        for descriptor in (1, 2):
            os.dup2(opened.fileno(), descriptor)
