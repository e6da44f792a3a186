"""Writes the job that runs a gin file on the nodes of a cluster; submits nothing.

    python -m areal_x.launch slurm FILE.gin --nodes 8 --gpus 8 -b "mesh.processes = 64" > job.sbatch
    python -m areal_x.launch sky FILE.gin --nodes 8 --gpus 8 --accelerator H100 > job.yaml
    python -m areal_x.launch kuberay FILE.gin --nodes 8 --gpus 8 --image IMAGE --claim CLAIM > job.yaml

The job starts Ray on all nodes and the file on the first, with train.cluster = 'ray' and
--resume=auto: when the cluster repeats it after a failure, the run continues. -b binds one parameter
over the file's; what the job would have no room for is refused here (docs/cluster.md).
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from areal_x.cluster.connection import SETTINGS
from areal_x.cluster.trainers import RAY
from areal_x.config.reader import Config
from areal_x.errors import ConfigError, at_least, positive
from areal_x.protocols.backends import load_backend
from areal_x.run import run_dir
from areal_x.runtime.command import quote
from areal_x.train import parser_of, with_config

ATTEMPTS = 10  # how often a cluster repeats the job
GRACE_SECONDS = 120  # from a cluster's warning to the end
PORT = 6379
LONGEST_NAME = 40  # a RayJob's has at most 47 characters, and begins with a letter
RAY_VERSION = "2.60.0"
SHARED_MEMORY = "64Gi"  # Ray's object store


@dataclass(frozen=True)
class Job:
    """What a run needs of a cluster."""

    name: str
    file: str
    bindings: tuple[str, ...]
    nodes: int

    gpus: int
    """GPUs of each node."""

    accelerator: str
    """Their model, as SkyPilot names it."""

    image: str
    """Container image with this package."""

    claim: str
    """Kubernetes' claim of the volume that all nodes share."""

    folder: str
    """Where that volume is; the run's files are below it."""

    setup: str
    """Commands that prepare a node's environment."""

    def command(self) -> str:
        """Returns the command of the first node."""
        bindings = [f"-b {quote(binding)}" for binding in self.bindings]
        words = ["python -m areal_x.train", shlex.quote(self.file), "--resume=auto", *bindings]
        return " ".join(words)


def slurm(job: Job) -> str:
    """Returns a batch script: one task a node, `ray symmetric-run` in each."""
    gpus = [f"#SBATCH --gpus-per-node={job.gpus}"] if job.gpus else []
    resources = f"--num-gpus {job.gpus} " if job.gpus else ""
    return "\n".join(
        [
            "#!/bin/bash",
            f"#SBATCH --job-name={job.name}",
            f"#SBATCH --nodes={job.nodes}",
            "#SBATCH --ntasks-per-node=1",
            *gpus,
            "#SBATCH --exclusive",
            "#SBATCH --requeue",
            "#SBATCH --open-mode=append",
            f"#SBATCH --signal=B:TERM@{GRACE_SECONDS}",
            "set -euo pipefail",
            *([job.setup] if job.setup else []),
            'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            'address=$(srun --nodes 1 --ntasks 1 --nodelist "$head" hostname --ip-address)',
            f'export RAY_ADDRESS="${{address%% *}}:{PORT}"',
            "export RAY_AUTH_MODE=token RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=600",
            'export RAY_AUTH_TOKEN_PATH="$PWD/.ray-token-$SLURM_JOB_ID"',
            *(f"export {name}={value}" for name, value in SETTINGS.items()),
            '(umask 077; head -c 32 /dev/urandom | od -An -tx1 | tr -d " \\n" > "$RAY_AUTH_TOKEN_PATH")',
            "ulimit -n 65536 || true",
            "# A signal to this script goes on to the run, which ends at its next safe place.",
            f'srun --kill-on-bad-exit=1 ray symmetric-run --address "$RAY_ADDRESS" --min-nodes {job.nodes} {resources}-- \\',
            f"    {job.command()} &",
            "trap 'kill -TERM $!; wait $!' TERM",
            "wait $!",
            "",
        ]
    )


def sky(job: Job) -> str:
    """Returns a task of SkyPilot, for `sky jobs launch --secret RAY_AUTH_TOKEN=…`, which recovers
    preempted clusters."""
    resources: dict[str, Any] = {"job_recovery": {"max_restarts_on_errors": ATTEMPTS}}
    if job.gpus:
        resources["accelerators"] = f"{job.accelerator}:{job.gpus}"
    commands = [
        "export RAY_AUTH_MODE=token",
        *(f"export {name}={value}" for name, value in SETTINGS.items()),
        "~/sky_templates/ray/start_cluster",
        'if [ "$SKYPILOT_NODE_RANK" = 0 ]; then',
        f'  export RAY_ADDRESS="$(echo "$SKYPILOT_NODE_IPS" | head -n 1):{PORT}"',
        f"  {job.command()}",
        "fi",
    ]
    return to_yaml(
        {
            "name": job.name,
            "num_nodes": job.nodes,
            "resources": resources,
            "workdir": ".",
            "file_mounts": {job.folder: {"name": f"{job.name}-runs", "mode": "MOUNT_CACHED"}},
            "secrets": {"RAY_AUTH_TOKEN": None},
            "setup": job.setup or "pip install 'areal-x[ray]' areal-x-jax areal-x-torch\n",
            "run": "\n".join(commands) + "\n",
        }
    )


def kuberay(job: Job) -> str:
    """Returns a RayJob: a fresh Ray cluster for each attempt, the driver on a head without GPUs."""

    def pod(name: str, gpus: int) -> dict[str, Any]:
        limits = {"nvidia.com/gpu": gpus} if gpus else {}
        container = {
            "name": name,
            "image": job.image,
            "env": [{"name": key, "value": value} for key, value in SETTINGS.items()],
            "resources": {"limits": limits, "requests": limits},
            "volumeMounts": [
                {"name": "shared", "mountPath": job.folder},
                {"name": "memory", "mountPath": "/dev/shm"},
            ],
        }
        memory = {"medium": "Memory", "sizeLimit": SHARED_MEMORY}
        volumes = [
            {"name": "shared", "persistentVolumeClaim": {"claimName": job.claim}},
            {"name": "memory", "emptyDir": memory},
        ]
        return {"spec": {"containers": [container], "volumes": volumes}}

    workers = {
        "groupName": "train",
        "replicas": job.nodes,
        "minReplicas": job.nodes,
        "maxReplicas": job.nodes,
        "rayStartParams": {},
        "template": pod("ray-worker", job.gpus),
    }
    return to_yaml(
        {
            "apiVersion": "ray.io/v1",
            "kind": "RayJob",
            "metadata": {"name": job.name},
            "spec": {
                "entrypoint": job.command(),
                "backoffLimit": ATTEMPTS,
                "shutdownAfterJobFinishes": True,
                "rayClusterSpec": {
                    "rayVersion": RAY_VERSION,
                    "authOptions": {"mode": "token"},
                    "headGroupSpec": {
                        "rayStartParams": {"num-gpus": "0"},
                        "template": pod("ray-head", 0),
                    },
                    "workerGroupSpecs": [workers],
                },
            },
        }
    )


FORMS = {"slurm": slurm, "sky": sky, "kuberay": kuberay}


class Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Writes text of several lines as a block, and equal parts again."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        style = "|" if "\n" in text else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


Dumper.add_representer(str, Dumper.represent_text)


def to_yaml(value: Any) -> str:
    return str(yaml.dump(value, Dumper=Dumper, sort_keys=False, width=1000))


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 1 after one sentence about a mistake."""
    options = parse(arguments)
    options.bindings.append(f"train.cluster = {RAY!r}")

    def work(config: Config) -> None:
        print(FORMS[options.form](job_of(config, options)), end="")

    return with_config(options.file, options.bindings, work, complete=False)


def job_of(config: Config, options: argparse.Namespace) -> Job:
    """Returns the job. Raises: ConfigError for a run that has no room on its nodes, or whose
    attempts would not find each other."""
    positive("--nodes", options.nodes)
    at_least("--gpus", options.gpus, 0)
    folder = Path(options.folder)
    check_room(config, options.nodes, options.gpus)
    bound = config.value("train.name") if config.is_bound("train.name") else None
    name = re.sub("[^a-z0-9]+", "-", str(bound or run_dir.run_stem(options.file)).lower())
    name = name.strip("-")[:LONGEST_NAME]
    bindings = list(options.bindings)
    if options.form == "kuberay" and not options.image:
        raise ConfigError("--image", options.image, "a container image that has this package")
    if options.form != "slurm" and not Path(config.value("train.runs")).is_relative_to(folder):
        bindings.append(f"train.runs = {str(folder / 'runs')!r}")
    return Job(
        name=name if name[:1].isalpha() else f"run-{name}".strip("-"),
        file=str(options.file),
        bindings=tuple(bindings),
        nodes=options.nodes,
        gpus=options.gpus,
        accelerator=options.accelerator,
        image=options.image,
        claim=options.claim,
        folder=options.folder,
        setup=options.setup,
    )


def check_room(config: Config, nodes: int, gpus: int) -> None:
    """Raises: ConfigError for more processes than the nodes have room for."""
    processes = config.value("mesh.processes")
    each = load_backend(config.value("train.backend")).DEVICES_EACH
    on_a_node = 1 if each is None else gpus // each
    if gpus and processes > nodes * on_a_node:
        what = "a node each" if each is None else f"{each} of {nodes} × {gpus} GPUs each"
        raise ConfigError("mesh.processes", processes, f"at most {nodes * on_a_node}, {what}")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Returns the options of the command line."""
    parser = parser_of("launch", __doc__)
    parser.add_argument("form", choices=FORMS, help="the cluster's software")
    parser.add_argument("file", metavar="FILE.gin", type=Path)
    parser.add_argument("--nodes", type=int, required=True, help="number of nodes")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs of each node")
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
