"""tests.engines.vllm.receivers with vllm-ascend's receiving engine, each server in a process of its own.

python -m tests.engines.vllm.hccl_receivers WORKERS    # prints its port
"""

from __future__ import annotations

import asyncio
import sys
from types import SimpleNamespace
from typing import Any

from tests.engines.vllm import hccl_on_cpu
from tests.engines.vllm.receivers import Model, Server, main


class AscendServer(Server):
    """As the worker of vllm-ascend drives its engine."""

    release = "0.23.0"

    def make_engines(self) -> None:
        from vllm.config.weight_transfer import WeightTransferConfig
        from vllm_ascend.distributed.weight_transfer.hccl_engine import HCCLWeightTransferEngine

        for rank in range(self.workers):
            parallel: Any = SimpleNamespace(data_parallel_index=0, world_size=self.workers, rank=rank)
            self.engines.append(HCCLWeightTransferEngine(WeightTransferConfig(backend="hccl"), parallel, Model()))

    async def do(self, path: str, body: Any) -> Any:
        if path == "/update_weights":
            await self.all(
                lambda engine: engine.receive_weights(
                    engine.parse_update_info(body["update_info"]), load_weights=engine.model.load_weights
                )
            )
        return await super().do(path, body) if path == "/init_weight_transfer_engine" else {}


if __name__ == "__main__":
    hccl_on_cpu.install()
    asyncio.run(main(AscendServer, *map(int, sys.argv[1:])))
