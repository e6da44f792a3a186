"""Commands that a job runs on each of its nodes (areal_x.launch).

    python -m areal_x.cluster.node address OTHER
    python -m areal_x.cluster.node after COUNT COMMAND …

`address` prints the address by which the node OTHER reaches this one. `after` waits until so many
nodes are in the cluster of RAY_ADDRESS, and becomes the command, without the variables by which
Slurm and MPI describe a task: libraries would take each process of Ray for it.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from areal_x.errors import UserError, sentence

TASK = ("SLURM_", "SLURMD_", "PMI_", "PMIX_", "OMPI_", "MPI_")  # variables of one task
KEPT = ("SLURM_JOB_ID",)  # names the job in messages
SECONDS_TO_COME = 600.0
POLL_SECONDS = 2.0
MESSAGE_SECONDS = 20.0
PORT = 9  # of nothing: a datagram socket that is connected sends nothing


def main(words: Sequence[str]) -> int:
    """Returns the exit status; `after` does not return if the nodes come."""
    try:
        match words:
            case ["address", other]:
                print(address_towards(other))
                return 0
            case ["after", count, command, *arguments] if count.isdecimal():
                wait_for_nodes(os.environ.get("RAY_ADDRESS", ""), int(count))
                os.execvpe(command, [command, *arguments], without_task(os.environ))
    except UserError as error:
        print(f"error: {sentence(error)}", file=sys.stderr)
        return 1
    print(__doc__, file=sys.stderr)
    return 2


def address_towards(other: str) -> str:
    """Returns the address by which another node reaches this one: the source of this node's route
    to it. The node's own name may stand for a loopback address, or for several.

    Raises: UserError for a name that is not known, or is this machine's.
    """
    try:
        found = socket.getaddrinfo(other, PORT, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise UserError(f"the node {other} has no address here ({error.strerror})") from None
    for family, kind, protocol, _, place in found:
        with suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.connect(place)
            own, its = probe.getsockname()[0], place[0]
            if own != its and not own.startswith("127.") and own != "::1":
                return str(own)
    raise UserError(f"no network of this node leads to the node {other}: {found[0][4][0]}")


def without_task(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables without those of a task."""
    return {x: y for x, y in environment.items() if x in KEPT or not x.startswith(TASK)}


def wait_for_nodes(address: str, count: int, seconds: float = SECONDS_TO_COME) -> None:
    """Returns when the cluster has so many nodes. Raises: UserError if it has not in time."""
    until, told = time.monotonic() + seconds, time.monotonic()
    while (there := nodes_of(address) if count else 0) < count:
        now = time.monotonic()
        text = f"{there} of {count} nodes are in the Ray cluster at {address}"
        if now > until:
            raise UserError(f"{text} after {seconds:g} s: see the logs of the others")
        if now > told + MESSAGE_SECONDS:
            print(text, file=sys.stderr, flush=True)
            told = now
        time.sleep(POLL_SECONDS)


def nodes_of(address: str) -> int:
    """Returns how many nodes are alive in a cluster; 0 if it does not answer yet."""
    host, _, port = address.rpartition(":")
    try:  # Ray would wait
        socket.create_connection((host.strip("[]"), int(port)), POLL_SECONDS).close()
    except OSError:
        return 0
    from ray._raylet import GcsClient  # type: ignore[attr-defined]
    from ray.exceptions import RpcError

    try:
        found = GcsClient(address=address).get_all_node_info(timeout=30)
    except RpcError:
        return 0
    return sum(node.state == 0 for node in found.values())  # ALIVE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
