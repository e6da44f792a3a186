"""Two nodes of a cluster with Slurm, on this machine: Linux namespaces that a virtual cable joins, and stand-ins for Slurm's
commands.

Each node has a network, processes, a host name, /etc/hosts, /dev/shm and /tmp/ray of its own, and shares all other files. The
script runs on the first node; a task that `srun` starts
on the other one gets a signal itself, without its children, as under Slurm's cgroups.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

JOB = "7"
ADDRESSES = {"IPv4": ("10.77.0.1", "10.77.0.2"), "IPv6": ("fd77::1", "fd77::2")}
LENGTHS = {"IPv4": "24", "IPv6": "64"}
HOLD = ["unshare", "--net", "--pid", "--mount", "--uts", "--ipc", "--fork", "--kill-child", "--mount-proc"]
# What a node does before it waits for its end.
PREPARE = """
set -e
mount --make-rprivate /
hostname "$1"
mount --bind "$2" /etc/hosts
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mkdir -p /tmp/ray
mount -t tmpfs -o mode=1777 tmpfs /tmp/ray
ip link set lo up
echo up
exec sleep infinity
"""
SRUN = f"""#!{sys.executable}
import json, os, signal, socket, sys
place = socket.socket(socket.AF_UNIX)
place.connect({{place!r}})
signal.signal(signal.SIGTERM, lambda *_: place.sendall(b"TERM\\n"))
asked = dict(words=sys.argv[1:], environment=dict(os.environ), folder=os.getcwd())
place.sendall(json.dumps(asked).encode() + b"\\n")
answer = place.makefile().readline()
sys.exit(int(answer or 1))
"""
SCONTROL = """#!/bin/bash
case "$1 $2" in
    'show hostnames') printf 'node-0\\nnode-1\\n' ;;
    requeue*) echo "$2" >> REQUEUED ;;
esac
"""


def can_make_nodes() -> bool:
    """True if this process may make namespaces."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
        return False
    made = subprocess.run([*HOLD, "ip", "link", "add", "end-0", "type", "veth", "peer", "name", "end-1"], capture_output=True)
    return made.returncode == 0


@dataclass
class Node:
    """The process that keeps a node."""

    name: str
    pid: int

    def enter(self, words: Sequence[str], folder: Path) -> list[str]:
        """Returns the command that runs another one on this node."""
        inside = ["nsenter", "--target", str(self.pid), "--net", "--pid", "--mount", "--uts", "--ipc"]
        return [*inside, "sh", "-c", 'cd "$0" && exec "$@"', str(folder), *words]

    def processes(self) -> list[psutil.Process]:
        """The node's processes, but the one that keeps it."""
        own = Path(f"/proc/{self.pid}/ns/pid").readlink()
        found = []
        for process in psutil.process_iter():
            with suppress(OSError, psutil.Error):
                here = Path(f"/proc/{process.pid}/ns/pid").readlink() == own
                if here and process.pid != self.pid and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found


@dataclass
class Slurm:
    """The nodes, and what Slurm does for a job."""

    nodes: list[Node]
    folder: Path
    steps: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, script: Path, out: Any, **variables: str) -> subprocess.Popen[bytes]:
        """Starts a batch script on the first node."""
        of_job = {"SLURM_JOB_ID": JOB, "SLURM_JOB_NODELIST": "node-[0-1]", "SLURM_NNODES": "2", "SLURM_NTASKS": "2"}
        environment = os.environ | variables | of_job | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
        environment["PATH"] = f"{self.folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        words = self.nodes[0].enter(["bash", str(script)], script.parent)
        return subprocess.Popen(words, env=environment, stdout=out, stderr=subprocess.STDOUT)

    def requeued(self) -> list[str]:
        """The jobs that were put into the queue again."""
        file = self.folder / "requeued"
        return file.read_text().split() if file.exists() else []

    def serve(self, place: socket.socket) -> None:
        while True:
            try:
                connection, _ = place.accept()
            except OSError:
                return
            threading.Thread(target=self.step, args=[connection], daemon=True).start()

    def step(self, connection: socket.socket) -> None:
        """Runs what one `srun` asks for: one task on the second node."""
        with connection, connection.makefile("r") as lines:
            asked = json.loads(lines.readline())
            options = [word for word in asked["words"] if word.startswith("--")]
            command = asked["words"][len(list(_leading(asked["words"]))) :]
            assert {"--nodes=1", "--ntasks=1", "--relative=1"} <= set(options), options
            own = {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_LOCALID": "0", "PMI_RANK": "0"}
            words = self.nodes[1].enter(command, Path(asked["folder"]))
            with (self.folder / "step").open("ab") as log:
                task = subprocess.Popen(words, env=asked["environment"] | own, stdout=log, stderr=log)
            self.steps.append(task)
            threading.Thread(target=self.force, args=[lines], daemon=True).start()
            code = task.wait()
            with suppress(OSError):  # it was told to end meanwhile
                connection.sendall(f"{code if code >= 0 else 128 - code}\n".encode())

    def force(self, lines: Any) -> None:
        """Kills a step when `srun` is told to end, as Slurm does: "forcing job termination"."""
        with suppress(OSError, ValueError):
            for _ in lines:
                for process in self.nodes[1].processes():
                    process.kill()

    def cancel(self, script: subprocess.Popen[bytes]) -> None:
        """Sends SIGTERM to the batch script and to the tasks of all steps."""
        for task in (script, *self.steps):
            signal_task(task, signal.SIGTERM)


def _leading(words: Sequence[str]) -> Iterator[str]:
    for word in words:
        if not word.startswith("--"):
            return
        yield word


def signal_task(task: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Signals a task alone, which is the child of the program that entered its node."""
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(task.pid).children():
            child.send_signal(number)


@contextmanager
def slurm(folder: Path, family: str, loopback: bool = True) -> Iterator[Slurm]:
    """Makes the nodes, joined by IPv4 or IPv6, which end with the body. loopback: a node's own name stands for a loopback
    address there, as on many systems."""
    folder.mkdir()
    with ExitStack() as stack:
        nodes = [stack.enter_context(_node(folder, number, family, loopback)) for number in (0, 1)]
        first, second = (str(node.pid) for node in nodes)
        cable = ["ip", "link", "add", "eth0", "netns", first, "type", "veth", "peer", "name", "eth0", "netns", second]
        subprocess.run(cable, check=True)
        for node, address in zip(nodes, ADDRESSES[family], strict=True):
            nodad = ["nodad"] if family == "IPv6" else []
            for words in (
                ["address", "add", f"{address}/{LENGTHS[family]}", "dev", "eth0", *nodad],
                ["link", "set", "eth0", "up"],
            ):
                subprocess.run(["nsenter", "--target", str(node.pid), "--net", "ip", *words], check=True)
        made = Slurm(nodes, folder)
        place = stack.enter_context(socket.socket(socket.AF_UNIX))
        place.bind(str(folder / "slurmd"))
        place.listen()
        threading.Thread(target=made.serve, args=[place], daemon=True).start()
        _program(folder / "srun", SRUN.format(place=str(folder / "slurmd")))
        _program(folder / "scontrol", SCONTROL.replace("REQUEUED", str(folder / "requeued")))
        yield made


@contextmanager
def _node(folder: Path, number: int, family: str, loopback: bool) -> Iterator[Node]:
    name, own = f"node-{number}", f"{folder}/hosts-{number}"
    addresses = list(ADDRESSES[family])
    if loopback:
        addresses[number] = "127.0.1.1" if family == "IPv4" else "::1"
    lines = [f"{address} node-{other}" for other, address in enumerate(addresses)]
    Path(own).write_text("\n".join(["127.0.0.1 localhost", "::1 localhost", *lines, ""]))
    words = [*HOLD, "bash", "-c", PREPARE, "bash", name, own]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            (child,) = psutil.Process(process.pid).children()
            yield Node(name, child.pid)
        finally:
            process.kill()


def _program(file: Path, text: str) -> None:
    file.write_text(text)
    file.chmod(0o755)
