"""Configurables that the gin files of tests/preflight/test_check.py bind."""

from __future__ import annotations

import gin

from areal_x.types import Array, Batch, Policy, Task


@gin.configurable(module="checked")
def tasks(same: bool = False) -> list[Task]:
    return [Task("0" if same else str(i), f"{i}+{i}=", "1") for i in range(5)]


@gin.configurable(module="checked")
def ones(task: Task, text: str) -> float:
    return float(text.count("1"))


@gin.configurable(module="checked")
def maker() -> str:
    raise RuntimeError("made now")


@gin.configurable(module="checked")
def blind(task: Task, text: str) -> float:
    return 1.0


@gin.configurable(module="checked")
def one_value(policy: Policy, batch: Batch) -> Array:
    return (batch.advantages * policy.logp * batch.mask).sum()
