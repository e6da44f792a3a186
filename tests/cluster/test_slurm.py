"""Slurm's tasks join into one run, or are refused with the command that would do it."""

from __future__ import annotations

import pytest

from areal_x.cluster import ranks
from areal_x.cluster.slurm import tasks
from areal_x.errors import ConfigError, UserError

NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
BATCH = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_NNODES": "2"}
STEP = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2"}


@pytest.fixture
def environment(monkeypatch):
    for name in (*NAMES, *BATCH, *STEP):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(ranks, "_joined", [])

    def given(**variables: str) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return given


@pytest.mark.parametrize(
    "variables, count",
    [
        ({}, 1),
        (BATCH, 1),  # the script itself, which may start four
        ({"SLURM_NTASKS": "4"}, 1),  # a shell of salloc
        (BATCH | STEP, 4),
        (BATCH | STEP | {"SLURM_STEP_NUM_TASKS": "1"}, 1),
        (BATCH | STEP | {"RANK": "3"}, 1),  # torchrun says who this is
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, 2),
    ],
)
def test_tasks_are_those_of_sruns_step(variables, count):
    assert tasks(variables) == count


@pytest.mark.parametrize("processes, each", [(1, 2), (16, 8)])
def test_torch_under_srun_is_told_the_right_line(environment, processes, each):
    environment(**BATCH | STEP)
    line = f"srun --nodes 2 --ntasks-per-node 1 torchrun --nnodes 2 --nproc-per-node {each} .*-m areal_x.train"
    with pytest.raises(UserError, match=rf"srun started 4 tasks.*set mesh\.processes = {2 * each} .*{line}"):
        ranks.join("torch", processes)


def test_a_single_task_is_a_run_like_any_other(environment):
    environment(**BATCH | STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1"})
    assert ranks.join("torch", 1) is None


def test_jax_wants_as_many_processes_as_there_are_tasks(environment):
    pytest.importorskip("areal_x_jax")
    environment(**BATCH | STEP)
    for processes in (1, 2):
        with pytest.raises(ConfigError, match=rf"mesh\.processes = {processes} .*4, as many tasks as srun started"):
            ranks.join("jax", processes)
