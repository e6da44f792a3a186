"""Stands in for vLLM servers with GPUs: the control routes, and behind them vLLM's own receiving engine.

    python -m tests.engines.vllm.receivers WORKERS...   # a server for each number, with so many workers; prints their ports

What needs a GPU is replaced in the process that sends, too (`without_gpu`): NCCL's communicator by one over vLLM's own
StatelessProcessGroup, which meets at the address that the unique id holds here, and CUDA's streams by nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from aiohttp import web
from torch import nn

Replace = Callable[[Any, str, Any], None]
UPDATES = ("/start_weight_update", "/update_weights", "/finish_weight_update")


class Communicator:
    """The methods of vLLM's PyNcclCommunicator that a transfer calls."""

    def __init__(self, group: Any) -> None:
        self.group = group

    @classmethod
    def from_unique_id_bytes(cls, unique_id_bytes: bytes, rank: int, world_size: int, device: int) -> Communicator:
        from vllm.distributed.utils import StatelessProcessGroup

        host, port = unique_id_bytes.rstrip(b"\0").decode().split(":")
        return cls(StatelessProcessGroup.create(host, int(port), rank=rank, world_size=world_size))

    def broadcast(self, tensor: torch.Tensor, src: int, stream: object = None) -> None:
        if self.group.rank == src:
            self.group.broadcast_obj(tensor, src)
        else:
            tensor.copy_(self.group.broadcast_obj(None, src))

    def destroy(self) -> None: ...


def without_gpu(replace: Replace) -> None:
    from vllm.distributed.device_communicators import pynccl
    from vllm.distributed.weight_transfer import packed_tensor

    stream = SimpleNamespace(synchronize=lambda: None)
    replace(pynccl, "PyNcclCommunicator", Communicator)
    replace(packed_tensor, "_get_streams", lambda device, count: (stream,) * count)
    replace(torch.cuda, "current_device", lambda: 0)
    replace(torch.cuda, "synchronize", lambda: None)
    replace(torch.cuda, "stream", lambda stream: nullcontext())
    for of, name in ((torch.cuda, "device"), (torch.accelerator, "device_index")):
        replace(of, name, lambda index: nullcontext())
    replace(torch.accelerator, "current_device_index", lambda: 0)
    replace(torch.accelerator, "synchronize", lambda: None)


def digest(x: torch.Tensor) -> list[Any]:
    """A fingerprint of a tensor."""
    data = x.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return [str(x.dtype), list(x.shape), hashlib.sha256(data).hexdigest()]


class Model(nn.Module):
    """Records the tensors that it is given to load."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: dict[str, list[Any]] = {}

    def load_weights(self, weights: Any) -> None:
        self.loaded |= {name: digest(x) for name, x in weights}


class Server:
    """One server with some workers. calls: method, path and body of each request, in order. refused: a path that fails."""

    release = "0.32.0"

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.engines: list[Any] = []
        self.calls: list[Any] = []
        self.refused = ""
        self.paused = False

    def make_engines(self) -> None:
        from vllm.config.weight_transfer import WeightTransferConfig
        from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

        for rank in range(self.workers):
            parallel = SimpleNamespace(data_parallel_index=0, world_size=self.workers, rank=rank)
            config = SimpleNamespace(parallel_config=parallel, model_config=SimpleNamespace(dtype=torch.float32))
            transfer = WeightTransferConfig(backend="nccl")
            self.engines.append(NCCLWeightTransferEngine(transfer, config, torch.device("cpu"), Model()))

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else None
        if request.path == "/asked":
            return web.json_response({"calls": self.calls, "loaded": [engine.model.loaded for engine in self.engines]})
        if request.path == "/refuse":
            self.refused = body
            return web.json_response(None)
        if request.path == "/restart":
            self.engines, self.paused, self.refused = [], False, ""
            self.make_engines()
            return web.json_response(None)
        if request.headers.get("Authorization") != "Bearer the key":
            return web.json_response({"error": "Unauthorized"}, status=401)
        if request.path == "/health":
            return web.json_response({})
        self.calls.append([request.path_qs, body])
        if request.path == self.refused:
            return web.json_response({"error": {"message": "it was told to refuse"}}, status=500)
        return web.json_response(await self.do(request.path, body))

    async def do(self, path: str, body: Any) -> Any:
        if path == "/version":
            return {"version": self.release}
        if path == "/v1/models":
            return {"data": [{"id": "policy", "max_model_len": 64}]}
        if path == "/is_paused":
            return {"is_paused": self.paused}
        if path in ("/pause", "/resume"):
            self.paused = path == "/pause"
        if path == "/get_world_size":
            return {"world_size": self.workers}
        if path == "/init_weight_transfer_engine":
            info = body["init_info"]
            await self.all(lambda engine: engine.init_transfer_engine(engine.parse_init_info(info)))
        if path == "/start_weight_update":
            await self.all(lambda engine: engine.start_weight_update())
        if path == "/update_weights":
            await self.all(lambda engine: engine.update_weights(body["update_info"]))
        if path == "/finish_weight_update":
            await self.all(lambda engine: engine.finish_weight_update())
        return {}

    async def all(self, work: Callable[[Any], None]) -> None:
        await asyncio.gather(*(asyncio.to_thread(work, engine) for engine in self.engines))

    async def start(self) -> int:
        """Returns the port on which it listens."""
        app = web.Application(client_max_size=2**24)
        app.router.add_route("*", "/{path:.*}", self.answer)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        port: int = self.runner.addresses[0][1]
        return port


async def main(kind: type[Server], *workers: int) -> None:
    servers = [kind(n) for n in workers]
    for server in servers:
        server.make_engines()
    print(*[await server.start() for server in servers], flush=True)
    await asyncio.to_thread(sys.stdin.read)  # until the one that started it is gone
    os._exit(0)  # whatever a receiver still waits for


if __name__ == "__main__":
    without_gpu(setattr)
    asyncio.run(main(Server, *map(int, sys.argv[1:])))
