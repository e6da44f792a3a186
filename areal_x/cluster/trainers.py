"""The trainers of a run: in this process, or in a gang of processes on Ray."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import gin

from areal_x.cluster.config import ROLE, ClusterConfig
from areal_x.cluster.connection import connected, nodes
from areal_x.cluster.dealing import Dealer
from areal_x.cluster.gang import Gang, Room
from areal_x.cluster.ganged import RANK, GangTrainer
from areal_x.cluster.rank import Rank, RankSpec
from areal_x.cluster.surroundings import surroundings
from areal_x.errors import ConfigError, one_of
from areal_x.protocols.backends import create_trainer, load_backend
from areal_x.protocols.trainer import Trainer
from areal_x.protocols.trainer_config import TrainerConfig
from areal_x.runtime.shared_folder import marked
from areal_x.types import Loss

HERE, RAY = CLUSTERS = ("here", "ray")


def trainers_here(backend: str, configs: Mapping[str, TrainerConfig]) -> dict[str, Trainer]:
    """Builds the trainers in this process. configs: by name."""
    return {name: create_trainer(backend, config) for name, config in configs.items()}


@contextmanager
def trainers_on_ray(
    backend: str,
    configs: Mapping[str, TrainerConfig],
    losses: Mapping[str, Loss],
    cluster: ClusterConfig,
    logs: Path | None = None,
    other_cpus: float = 0.0,
) -> Iterator[dict[str, Trainer]]:
    """Builds the trainers in processes of their own, as many as mesh.processes, which end with the
    body. losses: of each trainer that is updated. logs: folder for what the processes print.
    other_cpus: what else the run places in the cluster needs.

    Raises: UserError, ConfigError for a cluster that cannot be used or has no room, and whatever
    the construction raises.
    """
    from areal_x.cluster.on_ray import RayGang

    size, own = next(iter(configs.values())).mesh.processes, load_backend(backend)
    spec = RankSpec(
        backend=backend,
        size=size,
        configs=configs,
        losses=losses,
        bindings=gin.config_str(),
    )
    with connected(cpus=size * cluster.cpus + other_cpus):
        room = Room(
            cpus=cluster.cpus,
            accelerators=accelerators(backend, cluster, nodes()),
            resource=cluster.resource,
            labels={ROLE: cluster.ranks_on} if cluster.ranks_on else {},
        )
        with marked(logs) if logs else nullcontext() as mark:
            around = surroundings(logs, mark=mark)
            gang = RayGang(RANK, size, room, partial(Rank, spec), around)
        try:
            join(gang, gang.nodes, gang.addresses[0])
            built = gang.gather("build")
            found: dict[str, Trainer] = {}
            for name, config in configs.items():
                shares = [of_rank[name].shares for of_rank in built]
                dealer = Dealer(own, config, shares, gang.nodes)
                found[name] = GangTrainer(gang, name, built[0][name], dealer, losses.get(name))
            yield found
        finally:
            gang.end()


def accelerators(backend: str, cluster: ClusterConfig, there: Sequence[Mapping[str, float]]) -> int:
    """Returns the accelerators of each process. there: the resources of each node."""
    if cluster.accelerators is not None:
        return cluster.accelerators
    most = int(max((node.get(cluster.resource, 0) for node in there), default=0))
    each = load_backend(backend).DEVICES_EACH
    return most if each is None else min(each, most)


def join(gang: Gang, node_of: Sequence[str], address: str) -> None:
    """Makes the processes one group. node_of: the node of each. address: the first one's."""
    place = gang.first("meeting_place", address)
    gang.each(
        "join",
        [
            (*place, node_of[:rank].count(node), node_of.count(node))
            for rank, node in enumerate(node_of)
        ],
    )


def check_cluster(cluster: str, processes: int) -> None:
    """Raises: ConfigError for a cluster that is not one of CLUSTERS, or several processes without
    one."""
    one_of("train.cluster", cluster, CLUSTERS)
    if cluster == HERE and processes > 1:
        wanted = "'ray' with mesh.processes above 1 (pip install areal-x[ray], docs/cluster.md)"
        raise ConfigError("train.cluster", cluster, wanted)
