"""Settings of the cluster."""

from __future__ import annotations

from dataclasses import dataclass

import gin

from areal_x.errors import at_least, positive

ROLE = "role"
"""The label of nodes that `cluster.ranks_on`, `.servers_on`, `.hosts_on` and `.shards_on` compare."""


@gin.configurable("cluster")
@dataclass(frozen=True)
class ClusterConfig:
    """Nodes of the processes that train, of servers and of rewards, with train.cluster =
    'ray'."""

    accelerators: int | None = None
    """Accelerators of each process. None is as many as the backend uses in one process (one with
    torch, all of a node with JAX), or none in a cluster without accelerators."""

    resource: str = "GPU"
    """Kind of accelerator, as Ray names it: "GPU", "TPU", "NPU"."""

    cpus: float = 1.0
    """CPUs that are reserved for each process."""

    ranks_on: str = ""
    """Value of the label "role" of the nodes that train, as in `ray start --labels role=train`;
    "" allows any node."""

    server_accelerators: int | None = None
    """Accelerators of each server, on each of its nodes. None is what its parallel sizes need
    (vllm.tensor × pipeline × data, or those of sglang), or none in a cluster without accelerators."""

    server_cpus: float = 1.0
    """CPUs that are reserved for each server, on each of its nodes."""

    servers_on: str = ""
    """Value of the label "role" of the nodes that serve; "" allows any node."""

    host_cpus: float = 1.0
    """CPUs that another node must have for rewards and the sandbox's programs to run there too. None
    are reserved, so that ranks and servers have room first; 0 runs all of them on the driver's
    machine."""

    hosts_on: str = ""
    """Value of the label "role" of the nodes that run rewards and programs; "" allows any node."""

    shards: int = 0
    """Number of processes that the rollout is divided among, with train.engine = 'vllm': each has a
    part of the servers, and runs the episodes, rewards and programs of its groups. 0 runs all in the
    driver."""

    shard_cpus: float = 1.0
    """CPUs that are reserved for each shard."""

    shards_on: str = ""
    """Value of the label "role" of the nodes that run shards; "" allows any node."""

    attempts: int = 3
    """How often the processes that train may be lost within ten steps before the run ends."""

    def __post_init__(self) -> None:
        if self.accelerators is not None:
            at_least("cluster.accelerators", self.accelerators, 0)
        at_least("cluster.cpus", self.cpus, 0)
        if self.server_accelerators is not None:
            at_least("cluster.server_accelerators", self.server_accelerators, 0)
        positive("cluster.server_cpus", self.server_cpus)
        at_least("cluster.host_cpus", self.host_cpus, 0)
        at_least("cluster.shards", self.shards, 0)
        positive("cluster.shard_cpus", self.shard_cpus)
        positive("cluster.attempts", self.attempts)
