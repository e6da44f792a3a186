"""The versions of Python, Ray and this package on the nodes of a cluster."""

from __future__ import annotations

import platform
import socket
from importlib.metadata import version

from areal_x.cluster.process import PACKAGE
from areal_x.errors import UserError

SECONDS = 60.0  # for a node to start a process


def installed() -> dict[str, str]:
    """Returns the versions on this node."""
    return {"Python": platform.python_version(), "Ray": version("ray"), PACKAGE: version(PACKAGE)}


def check_installed() -> str:
    """Starts a process on each node of the cluster that this process is connected to, and describes
    the versions. Raises: UserError for the first node with others, without the package, or without
    an answer."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    own = installed()
    asked = {}
    for node in ray.nodes():
        if node["Alive"]:
            there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            task = ray.remote(installed).options(num_cpus=0, scheduling_strategy=there)
            asked[task.remote()] = f"{node['NodeManagerAddress']} ({node['NodeManagerHostname']})"
    done, late = ray.wait(list(asked), num_returns=len(asked), timeout=SECONDS)
    for reference in late:
        raise UserError(f"the node {asked[reference]} has started no process in {SECONDS:g} s")
    for reference in done:
        try:
            found = ray.get(reference)
        except ray.exceptions.RayError as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
            raise UserError(
                f"the node {asked[reference]} cannot run this package ({reason}): install"
                f" {PACKAGE} {own[PACKAGE]} on all nodes"
            ) from None
        for name, here in own.items():
            if found[name] != here:
                raise UserError(
                    f"the node {asked[reference]} has {name} {found[name]}, this one"
                    f" ({socket.gethostname()}) {here}: install the same version on all nodes"
                )
    return ", ".join(f"{name} {here}" for name, here in own.items())
