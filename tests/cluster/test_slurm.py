"""Slurm's tasks that would each begin a run of their own are refused with the command that begins one."""

from __future__ import annotations

import pytest

from areal_x.cluster.slurm import check_tasks, tasks
from areal_x.errors import UserError

BATCH = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_NNODES": "2"}
STEP = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2"}


@pytest.mark.parametrize(
    "variables, count",
    [
        ({}, 1),
        (BATCH, 1),  # the script itself, which may start four
        ({"SLURM_NTASKS": "4"}, 1),  # a shell of salloc
        (BATCH | STEP, 4),
        (BATCH | STEP | {"SLURM_STEP_NUM_TASKS": "1"}, 1),
        (BATCH | STEP | {"RAY_ADDRESS": "host-0:6379"}, 1),  # ray symmetric-run starts the command in one task
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, 2),
    ],
)
def test_tasks_are_those_of_sruns_step(variables, count):
    assert tasks(variables) == count


def test_srun_is_told_the_right_line():
    line = r"srun --nodes 2 --ntasks-per-node 1 ray symmetric-run .*--min-nodes 2 -- python -m areal_x.train"
    with pytest.raises(UserError, match=rf"srun started 4 tasks.*{line}"):
        check_tasks(BATCH | STEP)


def test_a_single_task_is_a_run_like_any_other():
    check_tasks(BATCH | STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1"})
