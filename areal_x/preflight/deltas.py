"""Checks that the versions of the weights that deltas need have room, beside the trainer and beside the
servers."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from areal_x.cluster.trainers import HERE
from areal_x.engines.fleet.addresses import is_local
from areal_x.engines.fleet.config import FleetConfig
from areal_x.engines.fleet.delta import CACHED, COPIED
from areal_x.engines.fleet.folders import SHARED_MEMORY, default_parent
from areal_x.errors import ConfigError
from areal_x.preflight.model import Model
from areal_x.preflight.storage import format_bytes, host_memory, staged_bytes
from areal_x.run.run_dir import check_writable, nearest_existing
from areal_x.settings import Settings


@dataclass(frozen=True)
class DeltaRoom:
    """What deltas take, in bytes, while a version is published."""

    copies: float
    """Of the weights in the trainer's host memory."""

    cache: float
    """In `folder` of each machine that serves."""

    folder: Path
    """That the cache is made below."""

    trainer_here: bool

    servers_here: bool
    """True if this machine serves."""

    @property
    def in_memory(self) -> bool:
        """True if the cache is in shared memory."""
        return self.folder.resolve().is_relative_to(SHARED_MEMORY)

    @property
    def memory_here(self) -> float:
        """Bytes of this machine's memory."""
        copies = self.copies if self.trainer_here else 0.0
        return copies + (self.cache if self.servers_here and self.in_memory else 0.0)


def delta_room(settings: Settings, model: Model, on_cpu: bool) -> DeltaRoom | None:
    """Counts what deltas take; None if none are published."""
    fleet = settings.fleet
    if fleet is None or not fleet.delta:
        return None
    version = staged_bytes(settings, model, on_cpu)
    parent = fleet.delta_cache
    started_here = not fleet.urls and not settings.places_servers
    return DeltaRoom(
        copies=COPIED * version,
        cache=CACHED * version,
        folder=Path(parent) if parent else default_parent(),
        trainer_here=settings.cluster == HERE,
        servers_here=started_here or any(map(is_local, fleet.urls)),
    )


def check_deltas(settings: Settings, model: Model, room: DeltaRoom, on_cpu: bool) -> str:
    """Describes what deltas take. on_cpu: the memory is part of another estimate.

    Raises: ConfigError if this machine does not have it: a server without room in its cache would
    read whole weights every time.
    """
    fleet = settings.fleet
    assert fleet is not None
    sizes = (
        f"{COPIED} versions of the weights in the trainer's host memory, {format_bytes(room.copies)},"
        f" and up to {CACHED} in {room.folder} of each machine that serves,"
        f" {format_bytes(room.cache)}"
    )
    if room.servers_here:
        check_cache(settings, fleet, model, room, on_cpu)
    if not on_cpu and room.memory_here > (memory := host_memory()):
        wanted = (
            f"0, or a machine with more memory than {format_bytes(memory)}: deltas take {sizes}"
        )
        raise ConfigError(f"{fleet.binding}.delta", fleet.delta, wanted)
    return sizes


def check_cache(
    settings: Settings, fleet: FleetConfig, model: Model, room: DeltaRoom, on_cpu: bool
) -> None:
    """Raises: ConfigError if the cache of this machine's servers cannot be written, or would fill its
    file system."""
    binding = f"{fleet.binding}.delta_cache"
    check_writable(binding, room.folder)
    place = nearest_existing(room.folder)
    staging = nearest_existing(Path(fleet.staging) if fleet.staging else default_parent())
    needed, beside = room.cache, ""
    if place.stat().st_dev == staging.stat().st_dev:
        staged = staged_bytes(settings, model, on_cpu)
        needed, beside = needed + staged, f" beside the staged one, {format_bytes(staged)}"
    free = shutil.disk_usage(place).free
    if needed > free:
        wanted = (
            f"a folder with room for {CACHED} versions of the weights, {format_bytes(room.cache)}"
            f"{beside}: {room.folder} has {format_bytes(free)}"
        )
        raise ConfigError(binding, fleet.delta_cache, wanted)
