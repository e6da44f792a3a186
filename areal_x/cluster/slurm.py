"""The tasks that Slurm's srun starts: as many processes of one command, which not every backend
makes one run of."""

from __future__ import annotations

from collections.abc import Mapping

from areal_x.errors import ConfigError, UserError


def tasks(environment: Mapping[str, str]) -> int:
    """How many tasks srun started with this one; 1 in a batch script itself, for which Slurm sets
    the number of the tasks that it may start, and where torchrun or the like says which process
    this is."""
    of_batch_script = "SLURM_JOB_ID" in environment and "SLURM_STEP_ID" not in environment
    if "SLURM_PROCID" not in environment or "RANK" in environment or of_batch_script:
        return 1
    return int(environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS") or 1)


def check_tasks(
    environment: Mapping[str, str], processes: int, backend: str, finds_each_other: bool
) -> None:
    """finds_each_other: whether the backend's processes meet by Slurm's variables alone.

    Raises: UserError, ConfigError for tasks each of which would begin a run of its own.
    """
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
        f" meet by Slurm's variables: set mesh.processes = {each * nodes} and start one task a node"
        f" with srun --nodes {nodes} --ntasks-per-node 1 torchrun --nnodes {nodes} --nproc-per-node"
        f" {each} --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m areal_x.train FILE.gin, HOST"
        " being one of the nodes"
    )
