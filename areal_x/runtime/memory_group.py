"""Memory limits that the kernel holds: a control group (cgroup 2, or 1) for one worker and all that
it starts.

It counts what no process shows: pages that are shared and mapped by nobody, files in memory, page
tables, what waits in pipes and sockets. Whether a run may make one is tried; where it may not,
areal_x.runtime.footprint counts what can be seen. Only the standard library is imported here.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

REMOVAL_SECONDS = 1.0  # for the kernel to let go of a group whose processes have ended
PROBE_PIPES, PIPE_BYTES = 32, 1 << 16
# by cgroup's version: of the limit, the limit with what is swapped out, what is used, and the
# kernel's kills
FILES = {
    2: ("memory.max", "memory.swap.max", "memory.current", "memory.events"),
    1: (
        "memory.limit_in_bytes",
        "memory.memsw.limit_in_bytes",
        "memory.usage_in_bytes",
        "memory.oom_control",
    ),
}


@dataclass(frozen=True)
class Place:
    """Where groups can be made. path: of the group that they are in."""

    path: str
    version: int


@dataclass(frozen=True)
class MemoryGroup:
    """One that is there. Made by `create`."""

    path: str
    version: int

    def enter(self) -> None:
        """With this process and all that it starts from now on. Raises OSError."""
        Path(self.path, "cgroup.procs").write_text("0")

    def used(self) -> int:
        """Bytes."""
        return int(Path(self.path, FILES[self.version][2]).read_text())

    def overrun(self) -> bool:
        """Whether the kernel has ended a process of it for want of memory."""
        with suppress(OSError):
            words = [
                line.split()
                for line in Path(self.path, FILES[self.version][3]).read_text().splitlines()
            ]
            return any(name == "oom_kill" and int(count) > 0 for name, count in words)
        return False

    def remove(self) -> None:
        """When its processes have ended."""
        _remove(Path(self.path))


def create(place: Place, name: str, most_bytes: float) -> MemoryGroup:
    """Raises OSError."""
    path = Path(place.path, name)
    limit, with_swap, *_ = FILES[place.version]
    with suppress(OSError):  # of one that was killed
        path.rmdir()
    path.mkdir()
    try:
        (path / limit).write_text(str(int(most_bytes)))
        with suppress(OSError):  # where swap is not accounted
            (path / with_swap).write_text("0" if place.version == 2 else str(int(most_bytes)))
        if place.version == 2:
            with suppress(OSError):
                # all of it, so that what is left does not go on without a part
                (path / "memory.oom.group").write_text("1")
    except OSError:
        _remove(path)
        raise
    return MemoryGroup(str(path), place.version)


def find(name: str) -> Place | None:
    """Where this process can make groups that hold, as a group of that name tries; None where it
    cannot."""
    for place in places():
        with suppress(OSError, ValueError):
            if (
                place.version == 2
                and "memory"
                not in (Path(place.path) / "cgroup.subtree_control").read_text().split()
            ):
                (Path(place.path) / "cgroup.subtree_control").write_text("+memory")
            group = create(place, name, 1 << 28)
            try:
                if _counts(group):
                    return place
            finally:
                group.remove()
    return None


def places() -> list[Place]:
    """Where it may be tried: below the group of this process, then beside it, as one of version 2
    that holds processes can have none below."""
    try:
        mounts, groups = (
            Path("/proc/self/mountinfo").read_text(),
            Path("/proc/self/cgroup").read_text(),
        )
    except OSError:
        return []
    return [place for place in parsed(mounts, groups) if os.access(place.path, os.W_OK)]


def parsed(mounts: str, groups: str) -> list[Place]:
    """mounts: as /proc/self/mountinfo has them; groups: as /proc/self/cgroup."""
    own: dict[str, str] = {}
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        own |= (
            {"cgroup2": path}
            if controllers == ""
            else {"cgroup": path}
            if "memory" in controllers.split(",")
            else {}
        )
    found: list[Place] = []
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        root, point = before.split()[3:5]
        kind, _, options = after.split()[:3]
        if kind not in own or (kind == "cgroup" and "memory" not in options.split(",")):
            continue
        with suppress(ValueError):  # of a part of the tree in which this process is not
            inner = Path(own[kind]).relative_to(root)
            if ".." in inner.parts:
                continue
            here = Path(point) / inner
            version = 2 if kind == "cgroup2" else 1
            found.append(Place(str(here), version))
            if version == 2 and here != Path(point):
                found.append(Place(str(here.parent), version))
    return sorted(found, key=lambda place: -place.version)


def remove_all(prefix: str) -> None:
    """The groups whose names begin so, which processes that were killed have left."""
    for place in places():
        for path in _named(place, prefix):
            _remove(path)


def _named(place: Place, prefix: str) -> Iterator[Path]:
    with suppress(OSError):
        yield from [path for path in Path(place.path).iterdir() if path.name.startswith(prefix)]


def _counts(group: MemoryGroup) -> bool:
    """Whether a process can be moved there, and the kernel's memory for it counts: some start with
    cgroup.memory=nokmem."""
    before = group.used()
    pipes: list[tuple[int, int]] = []
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            group.enter()
            for _ in range(PROBE_PIPES):
                pipes.append(os.pipe())
                os.set_blocking(pipes[-1][1], False)
                os.write(pipes[-1][1], bytes(PIPE_BYTES))
            os.write(writing, str(group.used()).encode())
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writing)
    said = os.read(reading, 64)
    os.close(reading)
    os.waitpid(child, 0)
    return bool(said) and int(said) - before > PROBE_PIPES * PIPE_BYTES // 2


def _remove(path: Path) -> None:
    end = time.monotonic() + REMOVAL_SECONDS
    while True:
        try:
            path.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            if time.monotonic() > end:
                return
            time.sleep(0.002)
        else:
            return
