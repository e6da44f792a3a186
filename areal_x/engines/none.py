"""An engine that generates nothing: for runs that train on recorded data alone."""

from __future__ import annotations

from typing import Any

from areal_x.protocols.engine import Completion, Engine, EngineError, Request, Staged


class NoEngine(Engine):
    """Stands in for an engine in runs whose workflow sends no requests (train.engine = "none") and
    in replays."""

    def __init__(self) -> None:
        self.concurrency = 64
        self.context = 0
        self.version = -1

    async def start(self) -> None:
        """Does nothing."""

    async def generate(self, request: Request) -> Completion:
        raise EngineError('train.engine = "none" generates nothing: set it to "embedded" or "vllm"')

    def stage(self, trainer: Any, version: int | None = None) -> Staged:
        return Staged(int(trainer.version) if version is None else version)

    async def swap(self, staged: Staged) -> float:
        self.version = staged.version
        return 0.0

    async def close(self) -> None:
        """Does nothing."""
