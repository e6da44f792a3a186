"""Stands in for Ray in one process: actors that threads run, names, and results that are copied into buffers set for them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

Replace = Callable[[Any, str, Any], None]
HOST_MEMORY = Path(__file__).parents[2] / "cluster" / "host_memory" / "sitecustomize.py"


class Method:
    def __init__(self, pool: ThreadPoolExecutor, function: Callable[..., Any]) -> None:
        self._pool, self._function = pool, function

    def remote(self, *arguments: Any, **named: Any) -> Future[Any]:
        return self._pool.submit(self._function, *arguments, **named)


class Actor:
    def __init__(self, target: Any) -> None:
        self.target = target
        self._pool = ThreadPoolExecutor(16)

    def __getattr__(self, name: str) -> Method:
        return Method(self._pool, getattr(self.target, name))


class LocalRay:
    """Its actors by their names. buffers: for each result, where it is copied to."""

    def __init__(self) -> None:
        self.actors: dict[str, Actor] = {}
        self.buffers: dict[Future[Any], Any] = {}
        self.pulled: list[int] = []  # bytes

    def get(self, of: Any) -> Any:
        if isinstance(of, list):
            return [self.get(x) for x in of]
        found = of.result(60)
        if (buffers := self.buffers.pop(of, None)) is not None:
            for to, x in zip(buffers, found, strict=True):
                assert (to.shape, to.dtype) == (x.shape, x.dtype)
                to.copy_(x)
                self.pulled.append(x.nbytes)
        return found

    def spawn(self, engine: Any, served_names: list[str]) -> None:
        """Makes an engine's producer (ShardedRDTTrainerWeightTransferEngine._spawn_server)."""
        from vllm.distributed.weight_transfer.sharded_rdt_trainer import _RDTProducerServer

        info = engine._init_info
        engine._server_name = f"producer {len(self.actors)}"
        producer = _RDTProducerServer(
            served_names=served_names,
            num_rdt_buffers=info.num_rdt_buffers,
            buffer_presize_gb=info.buffer_presize_gb,
            gather_lookahead=info.gather_lookahead,
            stall_timeout_s=info.stall_timeout_s,
            workers_per_replica=info.workers_per_replica,
        )
        engine._server = self.actors[engine._server_name] = Actor(producer)


def replace_ray(replace: Replace) -> LocalRay:
    """Puts a local Ray in the place of Ray and of CUDA for vLLM's sharded-RDT classes."""
    import ray
    import ray.experimental
    import torch
    from vllm.distributed.weight_transfer import sharded_rdt_engine, sharded_rdt_trainer

    from areal_x.engines.vllm import rdt_receiver

    spec = spec_from_file_location("host_memory", HOST_MEMORY)
    assert spec is not None
    assert spec.loader is not None
    host_memory = module_from_spec(spec)
    spec.loader.exec_module(host_memory)
    local = LocalRay()
    for module in (sharded_rdt_trainer, sharded_rdt_engine):
        replace(module, "register_nixl_memory", lambda tensor: None)
        replace(module, "buffer_alloc_bytes", lambda size, presize=0: size)
    host_memory.change_torch(torch, replace)
    host_memory.change_sender(sharded_rdt_trainer, replace)
    host_memory.change_receiver(sharded_rdt_engine, replace)

    def spawn(engine: Any, served_names: list[str]) -> None:
        local.spawn(engine, served_names)

    replace(sharded_rdt_trainer.ShardedRDTTrainerWeightTransferEngine, "_spawn_server", spawn)
    replace(ray, "get", local.get)
    replace(ray, "ObjectRef", Future)  # vLLM's sender waits for nothing else
    replace(rdt_receiver, "join_cluster", lambda: None)
    replace(ray, "kill", lambda actor: None)
    replace(ray, "get_actor", lambda name, namespace: local.actors[name])
    replace(ray.experimental, "set_target_for_ref", local.buffers.__setitem__)
    return local
