"""Experimental: the sending side of `vllm.transport = 'rdt'`, in the processes that train: vLLM's
sharded-RDT engine in each of them, from which every worker of every server pulls its own slices.

    process that trains                      node of a server
    gathers a layer ─▶ producer ◀──pulls── worker: the slices that its loaders would have copied
                     (a Ray actor)  (NIXL)

A process gathers one layer ahead of those that the workers still pull, so no process holds more than
two gathered layers. All processes gather all layers, and the workers divide their pulls among them.

The functions are called with each process's trainer and number, in the processes of a gang
(areal_x.protocols.trainer.InProcesses), and return what the first process returns. They have not
run on GPUs: docs/torch.md lists what the tests cover. vLLM's engine could call the servers itself;
here the engine of the run does, which knows them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from areal_x.engines.vllm.nccl_sender import EngineCalls, check_device
from areal_x.engines.vllm.transports import missing_packages
from areal_x.errors import UserError

NAMESPACE = "areal_x"  # Ray's, in which workers look producers up
# Without any pull for so long, a producer gives up waiting for a server that is gone.
STALL_SECONDS = 30.0

_sender: Any = None  # vLLM's, of this process: there is one trainer that is published


def invite(trainer: Any, rank: int, sizes: Sequence[int], here: bool) -> dict[str, Any]:
    """Makes a new producer in every process, and returns what workers need to pull from them.
    sizes: the workers of each server."""
    global _sender
    check_process()
    check_sizes(sizes)
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.sharded_rdt_trainer import ShardedRDTTrainerInitInfo

    shut_down()
    info = ShardedRDTTrainerInitInfo(
        rank=rank,
        num_consumers=sum(sizes),
        workers_per_replica=sizes[0],
        trainer_actor_namespace=NAMESPACE,
        stall_timeout_s=STALL_SECONDS,
    )
    _sender = WeightTransferTrainerFactory.trainer_init(
        info, client=EngineCalls(), source=weight_source(trainer)
    )
    return dict(_sender.get_worker_init_payload()) if rank == 0 else {}


def joining(invitation: dict[str, Any], sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Returns what each server is told to join. sizes: the workers of each."""
    count = len(sizes)
    return [{**invitation, "replica_rank": i, "num_replicas": count} for i in range(count)]


def connect(trainer: Any, rank: int, invitation: dict[str, Any]) -> None:
    """Does nothing: workers connect themselves."""


def describe(trainer: Any, rank: int) -> dict[str, Any]:
    """Returns nothing: workers have planned their pulls when they joined."""
    return {}


def send(trainer: Any, rank: int) -> str | None:
    """Serves the weights until all workers have pulled theirs. Returns why that failed, after the
    process has gathered the rest with the others, which wait for it; None if it did not.

    Raises: what the trainer does.
    """
    import torch

    # Producers read on streams of their own, which do not wait for the optimizer step on the
    # trainer's.
    torch.cuda.synchronize()
    source = _sender.source
    source.trainer = trainer
    try:
        _sender.send_weights()
    except Exception as error:
        if source.failed:
            raise
        source.exhaust()
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    return None


def leave(trainer: Any, rank: int) -> None:
    """Ends a `send` in another thread: its producer's pulls and waits fail."""
    if _sender is not None:
        with suppress(Exception):
            _sender._rpc("set_gather_error", "the publication was given up")


def shut_down() -> None:
    """Ends this process's producer."""
    global _sender
    if _sender is not None:
        _sender.shutdown()
        _sender = None


def check_process() -> None:
    """Raises: UserError if this process cannot send."""
    if missing := missing_packages():
        raise UserError(
            f"vllm.transport = 'rdt' needs {missing} on every node that trains or serves:"
            f" pip install {missing} there, or use 'files'"
        )
    check_device("rdt")


def check_sizes(sizes: Sequence[int]) -> None:
    """Raises: UserError for servers with different numbers of workers, which vLLM's plan of pulls
    does not know."""
    if len(set(sizes)) > 1:
        raise UserError(
            "vllm.transport = 'rdt' needs servers with the same number of workers, and these have"
            f" {', '.join(map(str, sizes))}: start all with the same parallel sizes, or use 'files'"
        )


def weight_source(trainer: Any) -> Any:
    """Returns vLLM's WeightSource of a trainer's tensors, layer by layer. What the trainer yields
    before its place, as the embeddings of a model with a vision tower, is held until then. It reads
    names and shapes in one pass over them; all later passes yield the same."""
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource, layerwise_groups

    class Source(WeightSource):  # type: ignore[misc]
        def __init__(self) -> None:
            self.trainer = trainer
            self.failed = False
            self._tensors: Iterator[tuple[str, Any]] = iter(())
            found = {
                name: ParamMeta(name, x.dtype, tuple(x.shape))
                for name, x in trainer.device_weights()
            }
            ordered = [name for group in layerwise_groups(list(found)) for name in group]
            self._metadata = [found[name] for name in ordered]

        def metadata(self) -> list[Any]:
            return self._metadata

        def __iter__(self) -> Iterator[tuple[str, Any]]:
            self._tensors = iter(self.trainer.device_weights())
            early: dict[str, Any] = {}
            for meta in self._metadata:
                while meta.name not in early:
                    name, x = self._next()
                    early[name] = x
                yield meta.name, early.pop(meta.name)

        def exhaust(self) -> None:
            """Ends the pass that was begun."""
            for _ in self._tensors:
                pass

        def _next(self) -> tuple[str, Any]:
            try:
                return next(self._tensors)
            except BaseException:
                self.failed = True
                raise

    return Source()
