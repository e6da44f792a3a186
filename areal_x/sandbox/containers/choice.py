"""Which containers a run uses."""

from __future__ import annotations

import logging

from areal_x.errors import UserError
from areal_x.sandbox.containers.command_line import CommandLineContainers, works
from areal_x.sandbox.containers.container import Containers
from areal_x.sandbox.containers.limits import ContainerLimits, Kind
from areal_x.sandbox.containers.local import LocalContainers
from areal_x.sandbox.containers.on_daytona import DaytonaContainers
from areal_x.sandbox.containers.on_e2b import E2BContainers

LOG = logging.getLogger(__name__)
PROGRAMS: tuple[Kind, ...] = ("podman", "docker")


def containers_of(limits: ContainerLimits) -> Containers:
    """Returns what runs the containers of these settings.

    Raises: UserError if it is not installed, does not work here, or has no key.
    """
    kind = limits.kind
    if kind == "daytona":
        return DaytonaContainers(limits.image, limits)
    if kind == "e2b":
        return E2BContainers(limits.image, limits)
    if kind in PROGRAMS and not works(kind):
        raise UserError(
            f"containers.kind = {kind!r} cannot work: `{kind} info` fails here; install it, start its"
            ' service, or set containers.kind = "local"'
        )
    if kind == "auto":
        kind = next((program for program in PROGRAMS if works(program)), "local")
        LOG.info("containers run in %s", "the local sandbox" if kind == "local" else kind)
    if kind == "local":
        return LocalContainers(limits)
    return CommandLineContainers(kind, limits.image, limits)
