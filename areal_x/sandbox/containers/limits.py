"""What a container may use, and which kind it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import gin

from areal_x.errors import at_least, one_of, positive

Kind = Literal["auto", "podman", "docker", "daytona", "e2b", "local"]
KINDS = ("auto", "podman", "docker", "daytona", "e2b", "local")


@gin.configurable("containers")
@dataclass(frozen=True)
class ContainerLimits:
    """Where the containers of episodes run, and what each may use."""

    kind: Kind = "auto"
    """"podman" or "docker" (their command line), "daytona" or "e2b" (their SDKs), "local" for a folder
    in the sandbox of this machine, which has no images, or "auto": the first of podman, Docker and
    local that works here."""
    image: str = ""
    """Image of tasks that name none; of E2B, the template. "" is the platform's own for Daytona and
    E2B."""
    network: bool = False
    """Whether containers reach a network; local ones never do."""
    seconds: float = 60.0
    """Longest time of a command, in seconds."""
    start_seconds: float = 600.0
    """Longest time of a start, which may include loading an image, in seconds."""
    life_seconds: float = 7200.0
    """Seconds after which a container ends by itself, in case the run cannot end it."""
    memory_mb: float = 4096.0
    """Memory, in 10^6 bytes. Of E2B, the template's own."""
    processors: float = 2.0
    """Processors. Of E2B, the template's own; local ones have no such limit."""
    processes: int = 512
    """Most processes and threads at once. Of Daytona and E2B, the platform's own."""
    disk_mb: float = 256.0
    """Files of a local container, in 10^6 bytes: they are in memory, packed, between its commands.
    Of Daytona, the size of the disk, rounded up to 2^30 bytes."""
    output_characters: int = 20_000
    """Most characters of a command's output; of more, the first and the last half are kept."""
    copy_mb: float = 128.0
    """Largest archive or file that is copied in or out, in 10^6 bytes."""

    def __post_init__(self) -> None:
        one_of("containers.kind", self.kind, KINDS)
        for name in (
            "seconds",
            "start_seconds",
            "life_seconds",
            "processors",
            "disk_mb",
            "copy_mb",
        ):
            positive(f"containers.{name}", getattr(self, name))
        at_least("containers.memory_mb", self.memory_mb, 32)
        at_least("containers.processes", self.processes, 1)
        at_least("containers.output_characters", self.output_characters, 16)
