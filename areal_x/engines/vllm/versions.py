"""Runs inside the vLLM worker: makes versions of the weights in a cache beside the server, from deltas.

vLLM's route /collective_rpc calls `MAKE` of each worker with an order, and `FORGET`.
"""

from __future__ import annotations

from typing import Any

from areal_x.engines.fleet.delta.maker import Answer, Maker

MAKE, FORGET = "areal_x_make_version", "areal_x_forget_versions"

maker = Maker()


def register() -> None:
    """Gives the workers of this process the methods."""
    from vllm.v1.worker.worker_base import WorkerBase

    setattr(WorkerBase, MAKE, make)
    setattr(WorkerBase, FORGET, forget)


def make(_: Any, order: str) -> Answer:
    return maker.answer(order)


def forget(_: Any) -> Answer:
    return maker.forget()
