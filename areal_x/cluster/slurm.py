"""Slurm tasks: srun starts many processes of one command, which not every backend can join into one
run."""

from __future__ import annotations

from collections.abc import Mapping

from areal_x.errors import ConfigError, UserError


def tasks(environment: Mapping[str, str]) -> int:
    """Returns how many tasks srun started together with this one. 1 in a batch script itself, where
    Slurm sets the number of tasks that the script may start, and under torchrun or the like, which
    says which process this is."""
    of_batch_script = "SLURM_JOB_ID" in environment and "SLURM_STEP_ID" not in environment
    if "SLURM_PROCID" not in environment or "RANK" in environment or of_batch_script:
        return 1
    return int(environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS") or 1)


def check_tasks(
    environment: Mapping[str, str], processes: int, backend: str, finds_each_other: bool
) -> None:
    """Raises: UserError, ConfigError for tasks that would each begin a run of their own.
    finds_each_other: True if the backend's processes join by Slurm's variables alone."""
    count = tasks(environment)
    if count == 1 or (finds_each_other and count == processes):
        return
    if finds_each_other:
        wanted = (
            f"{count}, as many tasks as srun started (or start a single one with srun --ntasks 1)"
        )
        raise ConfigError("mesh.processes", processes, wanted)
    nodes = int(environment.get("SLURM_STEP_NUM_NODES") or environment.get("SLURM_NNODES") or 1)
    each = max(1, (processes if processes > 1 else count) // nodes)
    raise UserError(
        f"srun started {count} tasks, and each would begin a run of its own, as {backend} does not"
        f" join by Slurm's variables: set mesh.processes = {each * nodes} and start one task a node"
        f" with srun --nodes {nodes} --ntasks-per-node 1 torchrun --nnodes {nodes} --nproc-per-node"
        f" {each} --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m areal_x.train FILE.gin, HOST"
        " being one of the nodes"
    )
