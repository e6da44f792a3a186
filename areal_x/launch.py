"""Writes the job that runs a gin file on the nodes of a cluster; submits nothing.

    python -m areal_x.launch slurm FILE.gin --nodes 8 --gpus 8 -b "mesh.processes = 64" > job.sbatch
    python -m areal_x.launch sky FILE.gin --nodes 8 --gpus 8 --accelerator H100 > job.yaml
    python -m areal_x.launch kuberay FILE.gin --nodes 8 --gpus 8 --image IMAGE --claim CLAIM > job.yaml

The job starts Ray on all nodes, labels them as the file asks, and runs the file with train.cluster =
'ray' and --resume=auto: when the cluster repeats it after a failure, the run continues. -b binds one
parameter over the file's. What the nodes would have no room for, ranks or servers, is refused
here (docs/cluster.md).
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from areal_x.cluster.config import ClusterConfig
from areal_x.cluster.needs import (
    CPU,
    Need,
    Node,
    Resources,
    Servers,
    check_needs,
    needs_of,
    with_roles,
)
from areal_x.cluster.trainers import RAY
from areal_x.config.reader import Config
from areal_x.engines.fleet.config import program_of, widths_in
from areal_x.engines.fleet.widths import check_hosts
from areal_x.errors import ConfigError, at_least, positive
from areal_x.jobs.job import Job
from areal_x.jobs.kuberay import kuberay
from areal_x.jobs.sky import sky
from areal_x.jobs.slurm import slurm
from areal_x.run import run_dir
from areal_x.train import parser_of, with_config

FORMS = {"slurm": slurm, "sky": sky, "kuberay": kuberay}
LONGEST_NAME = 40  # a RayJob's has at most 47 characters, and begins with a letter


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 1 after one sentence about a mistake."""
    options = parse(arguments)
    options.bindings.append(f"train.cluster = {RAY!r}")

    def work(config: Config) -> None:
        print(FORMS[options.form](job_of(config, options)), end="")

    return with_config(options.file, options.bindings, work, complete=False)


def job_of(config: Config, options: argparse.Namespace) -> Job:
    """Returns the job. Raises: ConfigError for a run that has no room on its nodes, or whose
    attempts or nodes would not find its files."""
    positive("--nodes", options.nodes)
    at_least("--gpus", options.gpus, 0)
    at_least("--cpus", options.cpus, 0)
    if options.form == "kuberay" and not options.image:
        raise ConfigError("--image", options.image, "a container image that has this package")
    roles = roles_of(config, options.nodes, options.gpus, options.cpus)
    bound = config.value("train.name") if config.is_bound("train.name") else None
    return Job(
        name=label_of(str(bound or run_dir.run_stem(options.file))),
        file=str(options.file),
        bindings=(*options.bindings, *shared_folders(config, options)),
        roles=roles,
        gpus=options.gpus,
        cpus=options.cpus,
        accelerator=options.accelerator,
        image=options.image,
        claim=options.claim,
        folder=options.folder,
        setup=options.setup,
    )


def servers_of(config: Config) -> Servers | None:
    """Returns the servers that the run places on nodes, when it begins; None if it places none.
    Raises: ConfigError unless each node has an equal part of one."""
    name = program_of(config.value)
    if not name or config.value(f"{name}.urls"):
        return None
    widths = widths_in(config.value)
    check_hosts(name, widths)
    count = int(config.value(f"{name}.servers"))
    if config.value(f"{name}.most"):
        count = max(1, int(config.value(f"{name}.least")))
    return Servers(count, widths.accelerators, widths.hosts, name)


def roles_of(config: Config, nodes: int, gpus: int, cpus: int) -> list[str]:
    """Returns the label of each node. Raises: ConfigError for what has no room."""
    cluster = ClusterConfig()
    resources: Resources = {cluster.resource: gpus, **({CPU: cpus} if cpus else {})}
    needs = needs_of(
        backend=config.value("train.backend"),
        processes=config.value("mesh.processes"),
        servers=servers_of(config),
        cluster=cluster,
        there=[resources],
    )
    found = with_roles(needs, nodes, resources)
    check_needs(needs, found)
    if cluster.hosts_on not in ("", *(node.role for node in found)):
        found = spare_labelled(needs, found, cluster.hosts_on)
    return [node.role for node in found]


def spare_labelled(needs: Sequence[Need], nodes: Sequence[Node], role: str) -> list[Node]:
    """Returns the nodes with this label on the last ones, as many as ranks and servers leave.
    Raises: ConfigError if they leave none."""
    for count in range(len(nodes), 0, -1):
        kept = nodes[: len(nodes) - count]
        found = [*kept, *(replace(node, role=role) for node in nodes[len(kept) :])]
        with suppress(ConfigError):
            check_needs(needs, found)
            return found
    wanted = "left out, or --nodes greater: ranks and servers leave no node for rewards alone"
    raise ConfigError("cluster.hosts_on", role, wanted)


def shared_folders(config: Config, options: argparse.Namespace) -> list[str]:
    """Returns the bindings that put the run's files and the weights for its servers where all nodes
    see them. Raises: ConfigError if only the reader knows such a folder."""
    folder = Path(options.folder)
    wanted = {"train.runs": folder / "runs"}
    servers = servers_of(config)
    if servers is not None and options.nodes > 1:
        staging = f"{servers.binding}.staging"
        wanted[staging] = folder / "weights"
        if options.form == "slurm" and not config.value(staging):
            raise ConfigError(staging, "", "a folder that all nodes share under one path")
    if options.form == "slurm":  # which runs the job in a folder that all nodes share
        return []
    return [
        f"{name} = {str(place)!r}"
        for name, place in wanted.items()
        if not Path(config.value(name)).is_relative_to(folder)
    ]


def label_of(name: str) -> str:
    """Returns a name as clusters allow it."""
    label = re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")[:LONGEST_NAME]
    return label if label[:1].isalpha() else f"run-{label}".strip("-")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Returns the options of the command line."""
    parser = parser_of("launch", __doc__)
    parser.add_argument("form", choices=FORMS, help="the cluster's software")
    parser.add_argument("file", metavar="FILE.gin", type=Path)
    parser.add_argument("--nodes", type=int, required=True, help="number of nodes")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs of each node")
    parser.add_argument(
        "--cpus", type=int, default=0, help="CPUs of each node (default: what Ray finds)"
    )
    parser.add_argument("--accelerator", default="H100", help="model of the GPUs (sky)")
    parser.add_argument("--image", default="", help="container image (kuberay)")
    parser.add_argument("--claim", default="areal-x", help="claim of the shared volume (kuberay)")
    parser.add_argument(
        "--folder", default="/shared", help="folder of the shared volume (sky, kuberay)"
    )
    parser.add_argument("--setup", default="", help="commands that prepare a node (slurm, sky)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
