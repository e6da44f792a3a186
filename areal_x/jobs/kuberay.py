"""The job as a RayJob of KubeRay."""

from __future__ import annotations

from typing import Any

from areal_x.cluster.config import ROLE
from areal_x.cluster.connection import SETTINGS
from areal_x.jobs.job import ATTEMPTS, Group, Job
from areal_x.jobs.yaml_text import to_yaml

RAY_VERSION = "2.60.0"
SHARED_MEMORY = "64Gi"  # Ray's object store
GROUP = "worker"  # the name of nodes without a role


def kuberay(job: Job) -> str:
    """Returns a RayJob: a fresh Ray cluster for each attempt, the driver on a head without GPUs."""
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
                        "template": pod(job, "ray-head", 0, 0),
                    },
                    "workerGroupSpecs": [workers(job, group) for group in job.groups()],
                },
            },
        }
    )


def workers(job: Job, group: Group) -> dict[str, Any]:
    """Returns the nodes of one role."""
    return {
        "groupName": group.role or GROUP,
        "replicas": group.count,
        "minReplicas": group.count,
        "maxReplicas": group.count,
        **({"labels": {ROLE: group.role}} if group.role else {}),
        "rayStartParams": {},
        "template": pod(job, "ray-worker", job.gpus, job.cpus),
    }


def pod(job: Job, name: str, gpus: int, cpus: int) -> dict[str, Any]:
    """Returns the template of a node's pod."""
    limits = {
        **({"cpu": cpus} if cpus else {}),
        **({"nvidia.com/gpu": gpus} if gpus else {}),
    }
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
