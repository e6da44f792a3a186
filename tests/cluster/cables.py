"""Nodes of a Ray cluster in network namespaces of their own, whose cables can be cut. Needs root."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from areal_x.cluster.connection import SETTINGS

PORT = 6379
HEAD = "10.77.0.1"


def ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


def available() -> bool:
    """True if this machine lets us make namespaces."""
    if os.geteuid() or shutil.which("ip") is None:
        return False
    name = f"areal-x-{secrets.token_hex(3)}"
    with suppress(subprocess.CalledProcessError):
        ip("netns", "add", name)
        ip("netns", "delete", name)
        return True
    return False


@dataclass(frozen=True)
class Cables:
    """The cluster. names: of the namespaces, the head's first."""

    names: list[str]
    environment: Mapping[str, str]

    def inside(self, number: int, *command: str) -> list[str]:
        """The command that runs another one on a node."""
        return ["ip", "netns", "exec", self.names[number], *command]

    def node_of(self, pid: int) -> int:
        return self.names.index(ip("netns", "identify", str(pid)).strip())

    def cut(self, number: int) -> None:
        ip("-n", self.names[0], "link", "set", f"to{number}", "down")


@contextmanager
def wired(nodes: int, folder: Path) -> Iterator[Cables]:
    """Starts a head that trains nothing and so many nodes with one CPU each, which reach each other through it."""
    key = secrets.token_hex(2)
    names = [f"areal-x-{key}-{number}" for number in range(nodes + 1)]
    variables = {"RAY_ADDRESS": f"{HEAD}:{PORT}", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    variables |= SETTINGS | {"GLOO_SOCKET_IFNAME": "eth0"}
    with ExitStack() as stack:
        for name in names:
            ip("netns", "add", name)
            stack.callback(remove, name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", names[0], "address", "add", f"{HEAD}/32", "dev", "lo")
        ip("netns", "exec", names[0], "sysctl", "-q", "-w", "net.ipv4.ip_forward=1")
        for number, name in enumerate(names[1:], 1):
            ip("link", "add", f"to{number}", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", name)
            for where, device, last in ((names[0], f"to{number}", 1), (name, "eth0", 2)):
                ip("-n", where, "address", "add", f"10.77.{number}.{last}/24", "dev", device)
                ip("-n", where, "link", "set", device, "up")
            ip("-n", name, "route", "add", "default", "via", f"10.77.{number}.1")
        made = Cables(names, variables)
        environment = {k: v for k, v in (os.environ | variables).items() if k != "RAY_ADDRESS"}
        for number in range(nodes + 1):
            own = ["--head", f"--port={PORT}", "--num-cpus=0", "--include-dashboard=false", f"--temp-dir={folder / 'ray'}"]
            if number:
                own = [f"--address={HEAD}:{PORT}", "--num-cpus=1"]
            address = f"--node-ip-address={HEAD if not number else f'10.77.{number}.2'}"
            ray = [str(Path(sys.executable).with_name("ray")), "start", *own, address, "--object-store-memory=100000000"]
            done = subprocess.run(
                made.inside(number, *ray), env=environment, capture_output=True, text=True, timeout=120, check=False
            )
            assert done.returncode == 0, done.stdout + done.stderr
        yield made


def remove(name: str) -> None:
    """Ends the processes of a namespace, and removes it."""
    until = time.monotonic() + 30
    while (pids := ip("netns", "pids", name).split()) and time.monotonic() < until:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.1)
    ip("netns", "delete", name)
