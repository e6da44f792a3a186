"""Slurm tasks: srun starts many processes of one command, each of which would begin a run of its
own."""

from __future__ import annotations

from collections.abc import Mapping

from areal_x.errors import UserError


def tasks(environment: Mapping[str, str]) -> int:
    """Returns how many tasks srun started together with this one. 1 in a batch script itself, where
    Slurm sets the number of tasks that the script may start, and inside `ray symmetric-run`, whose
    command runs in one of the tasks only."""
    of_batch_script = "SLURM_JOB_ID" in environment and "SLURM_STEP_ID" not in environment
    if "SLURM_PROCID" not in environment or "RAY_ADDRESS" in environment or of_batch_script:
        return 1
    return int(environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS") or 1)


def check_tasks(environment: Mapping[str, str]) -> None:
    """Raises: UserError for tasks that would each begin a run of their own."""
    if (count := tasks(environment)) > 1:
        nodes = int(environment.get("SLURM_STEP_NUM_NODES") or environment.get("SLURM_NNODES") or 1)
        raise UserError(
            f"srun started {count} tasks, and each would begin a run of its own: start one task a"
            f" node, srun --nodes {nodes} --ntasks-per-node 1 ray symmetric-run --address HOST:6379"
            f" --min-nodes {nodes} -- python -m areal_x.train FILE.gin -b \"train.cluster = 'ray'\","
            " HOST being one of the nodes"
        )
