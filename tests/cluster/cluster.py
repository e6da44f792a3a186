"""A Ray cluster of several nodes on this machine: `python -m tests.cluster.cluster NODES` prints its address, adds or kills a
node for each line it reads ("add", "kill"), and ends with its input."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import psutil

TOKEN = "a token of the tests, of enough characters"
ADDRESS, DONE = "address:", "done"
HEAD, ROLE = "head", "other"  # labels of the head and of all other nodes
ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": TOKEN,
    "RAY_kill_child_processes_on_worker_exit": "false",
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}


@dataclass
class Cluster:
    """The process that keeps a cluster."""

    process: subprocess.Popen[str]
    address: str
    environment: dict[str, str]

    def ask(self, command: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()
        return "done" if f"{DONE}\n" in self.process.stdout else "ended"  # Ray may print lines of its own


@contextmanager
def cluster(nodes: int, **environment: str) -> Iterator[Cluster]:
    """Starts a cluster with these variables, by default one that needs TOKEN."""
    variables = os.environ | ENVIRONMENT | environment
    command = [sys.executable, "-m", "tests.cluster.cluster", str(nodes)]
    with subprocess.Popen(command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = next((line.split()[1] for line in process.stdout if line.startswith(ADDRESS)), None)
        assert address, "the cluster did not start"
        yield Cluster(process, address, {"RAY_ADDRESS": address, **ENVIRONMENT, **environment})
        process.stdin.close()  # type: ignore[union-attr]
        process.wait(timeout=60)


@contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Kills a process and all that it has started."""
    try:
        yield
    finally:
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        for member in family:
            with suppress(psutil.NoSuchProcess):
                member.kill()
        psutil.wait_procs(family, timeout=30)


def main(nodes: int) -> None:
    from ray.cluster_utils import Cluster as Nodes

    head = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": 100 << 20, "labels": {"role": HEAD}}
    made = Nodes(initialize_head=True, head_node_args=head)
    node = {"num_cpus": 2, "object_store_memory": 100 << 20, "labels": {"role": ROLE}}
    others = [made.add_node(**node) for _ in range(nodes - 1)]
    print(ADDRESS, made.address, flush=True)
    for line in sys.stdin:
        if line.strip() == "add":
            others.append(made.add_node(**node))
        else:
            made.remove_node(others.pop(0), allow_graceful=False)
        print(DONE, flush=True)
    made.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]))
