"""The job as a task of SkyPilot."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from typing import Any

from areal_x.cluster.config import ROLE
from areal_x.cluster.connection import SETTINGS
from areal_x.jobs.job import ATTEMPTS, PORT, Job
from areal_x.jobs.yaml_text import to_yaml

RANK = "$SKYPILOT_NODE_RANK"
TOKEN = "~/.areal-x-ray-token"  # Ray's default place would turn tokens on for SkyPilot's own Ray


def sky(job: Job) -> str:
    """Returns a task for `sky jobs launch --secret RAY_AUTH_TOKEN=…`, which recovers preempted
    clusters."""
    resources: dict[str, Any] = {"job_recovery": {"max_restarts_on_errors": ATTEMPTS}}
    if job.gpus:
        resources["accelerators"] = f"{job.accelerator}:{job.gpus}"
    if job.cpus:
        resources["cpus"] = f"{job.cpus}+"
    commands = [
        "set -e",
        "# In a file that only you can read, as programs of the run inherit variables",
        f'(umask 077; printf %s "$RAY_AUTH_TOKEN" > {TOKEN})',
        "unset RAY_AUTH_TOKEN",
        f"export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={TOKEN}",
        *(f"export {name}={value}" for name, value in SETTINGS.items()),
        *labels(job),
        "~/sky_templates/ray/start_cluster",
        f'if [ "{RANK}" = 0 ]; then',
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


def labels(job: Job) -> Iterator[str]:
    """Yields the lines that label each node; SkyPilot's template has no option for it, so Ray reads
    a variable."""
    for group in job.groups():
        if group.role:
            text = shlex.quote(json.dumps({ROLE: group.role}))
            last = group.first + group.count
            chosen = f'[ "{RANK}" -ge {group.first} ] && [ "{RANK}" -lt {last} ]'
            yield f"if {chosen}; then export RAY_OVERRIDE_LABELS={text}; fi"
