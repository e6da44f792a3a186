"""Memory limits enforced by the kernel: a control group (cgroup version 2 or 1) for one worker and
everything that it starts.

A control group also counts memory that no process shows: shared pages that nothing maps, files in
memory, page tables, data in pipes and sockets. A run tries to create one; if it may not,
areal_x.runtime.footprint counts what /proc shows. Only the standard library is imported here.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

REMOVAL_SECONDS = 1.0  # for the kernel to release a group whose processes have ended
PROBE_PIPES, PIPE_BYTES = 32, 1 << 16
# By cgroup version, the files of the limit, the limit including swap, the usage, and the kernel's
# kills.
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
    """A control group in which groups can be created."""

    path: str

    version: int
    """1 or 2, of cgroup."""


@dataclass(frozen=True)
class MemoryGroup:
    """An existing control group; `create` returns it."""

    path: str
    version: int

    def enter(self) -> None:
        """Moves this process, and all that it will start, into the group. Raises: OSError."""
        Path(self.path, "cgroup.procs").write_text("0")

    def used(self) -> int:
        """Returns the memory in use, in bytes."""
        return int(Path(self.path, FILES[self.version][2]).read_text())

    def overrun(self) -> bool:
        """True if the kernel has killed a process of the group for exceeding the limit."""
        with suppress(OSError):
            words = [
                line.split()
                for line in Path(self.path, FILES[self.version][3]).read_text().splitlines()
            ]
            return any(name == "oom_kill" and int(count) > 0 for name, count in words)
        return False

    def remove(self) -> None:
        """Removes the group once its processes have ended."""
        _remove(Path(self.path))


def create(place: Place, name: str, most_bytes: float) -> MemoryGroup:
    """Creates a group with a limit. Raises: OSError."""
    path = Path(place.path, name)
    limit, with_swap, *_ = FILES[place.version]
    with suppress(OSError):  # left by a killed process
        path.rmdir()
    path.mkdir()
    try:
        (path / limit).write_text(str(int(most_bytes)))
        with suppress(OSError):  # swap may not be accounted
            (path / with_swap).write_text("0" if place.version == 2 else str(int(most_bytes)))
        if place.version == 2:
            with suppress(OSError):
                # Kill all processes together: none should go on without the others.
                (path / "memory.oom.group").write_text("1")
    except OSError:
        _remove(path)
        raise
    return MemoryGroup(str(path), place.version)


def find(name: str) -> Place | None:
    """Returns where this process can create groups whose limits hold, tried with a group of this
    name; None if nowhere."""
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
    """Returns the candidates: the group of this process, then that group's parent, because a group
    of version 2 that has processes cannot have subgroups."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text()
        groups = Path("/proc/self/cgroup").read_text()
    except OSError:
        return []
    return [place for place in parse_places(mounts, groups) if os.access(place.path, os.W_OK)]


def parse_places(mounts: str, groups: str) -> list[Place]:
    """Returns the candidates of `places`. mounts: content of /proc/self/mountinfo. groups: content of
    /proc/self/cgroup."""
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
        with suppress(ValueError):  # mounted from a part of the tree without this process
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
    """Removes the groups with this name prefix that killed processes left."""
    for place in places():
        for path in _named(place, prefix):
            _remove(path)


def _named(place: Place, prefix: str) -> Iterator[Path]:
    with suppress(OSError):
        yield from [path for path in Path(place.path).iterdir() if path.name.startswith(prefix)]


def _counts(group: MemoryGroup) -> bool:
    """True if a process can enter the group and its kernel memory counts: some machines boot with
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
    answer = os.read(reading, 64)
    os.close(reading)
    os.waitpid(child, 0)
    return bool(answer) and int(answer) - before > PROBE_PIPES * PIPE_BYTES // 2


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
