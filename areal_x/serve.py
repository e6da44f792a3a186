"""Serves the model of a gin file to agents without training it, to try an agent or a checkpoint.

    python -m areal_x.serve examples/arithmetic/grpo.gin
    python -m areal_x.serve FILE.gin -b "model.path = 'runs/NAME/checkpoints/100/trainer'"

Any client may open any number of sessions with the key in gateway.json (areal_x.agents.session); the
rewards that it sends are printed. Ctrl-C stops the service.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import gin

from areal_x.agents.client import ADDRESS
from areal_x.agents.gateway.session import GatewaySession
from areal_x.agents.gateway_workflow import GatewayWorkflow
from areal_x.agents.online import Online
from areal_x.config.reader import Config
from areal_x.errors import printable
from areal_x.experiment import Experiment
from areal_x.hf.model_dir import resolve
from areal_x.hf.tokenizer import load_tokenizer
from areal_x.protocols.engine import Engine, SamplingParams
from areal_x.rollout.episodes import EpisodeEngine
from areal_x.runtime import background, loop
from areal_x.train import parser_of, with_config
from areal_x.types import Scored


@dataclass(kw_only=True)
class Service:
    """A gateway over an engine, which opens a session for every client that asks."""

    engine: Engine
    """Has started and has weights."""

    workflow: GatewayWorkflow
    """Has the sampling, the limits and the gateway."""

    address: Path
    """File for the gateway's address and key."""

    message: Callable[[str], None] = print

    opened: int = 0
    """Number of sessions so far."""

    observers: set[asyncio.Task[None]] = field(default_factory=set)
    """Tasks that wait for the ends of sessions."""

    async def start(self) -> None:
        host = self.workflow.lazy_gateway()
        host.gateway.on_open = self.open
        await host.start(self.address)
        self.message(f"serving at {host.gateway.url}; its address and key are in {self.address}")

    async def open(self, label: str | None) -> GatewaySession:
        self.opened += 1
        session = await self.workflow.open(
            EpisodeEngine(self.engine, (0, self.opened), nothing, nothing)
        )
        observer = background.start(self.observe(session, label), "the watch over a session")
        self.observers.add(observer)
        observer.add_done_callback(self.observers.discard)
        return session

    async def observe(self, session: GatewaySession, label: str | None) -> None:
        with session:
            outcome = await session.ended()
        worth = (
            f"reward {outcome.reward:g}" if isinstance(outcome, Scored) else type(outcome).__name__
        )
        self.message(
            f"session {session.id}{f' ({printable(label)})' if label else ''}:"
            f" {len(session.calls())} calls, {worth}"
        )

    async def close(self) -> None:
        await self.workflow.close()
        await asyncio.gather(*self.observers, return_exceptions=True)


def nothing(_: int) -> None: ...


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status, as `areal_x.train` does."""
    parser = parser_of("serve", __doc__)
    parser.add_argument("file", metavar="FILE.gin", type=Path)
    parser.add_argument(
        "--address",
        type=Path,
        default=Path(ADDRESS),
        help="file for the gateway's address and key",
    )
    options = parser.parse_args(arguments)

    def work(config: Config) -> None:
        serve(gin.get_configurable("train")(), options.address)

    return with_config(options.file, [*options.bindings, "train.serving = True"], work)


def serve(experiment: Experiment, address: Path, message: Callable[[str], None] = print) -> None:
    """Serves until it is interrupted."""
    directory = resolve(experiment.trainer.model.path)
    workflow = experiment.workflow
    served = (
        workflow
        if isinstance(workflow, GatewayWorkflow)
        else Online(sampling=workflow.sampling_params() or SamplingParams())
    )
    served = served.setup(load_tokenizer(directory))
    trainer = experiment.create_models(directory, served).policy
    engine = experiment.create_engine(directory, trainer, served, address.parent, message)
    service = Service(engine=engine, workflow=served, address=address, message=message)

    async def until_interrupted() -> None:
        try:
            await engine.start()
            await engine.swap(engine.stage(trainer))
            await service.start()
            await asyncio.Event().wait()
        finally:
            await service.close()
            await engine.close()

    with loop.short_collections():
        loop.run(until_interrupted(), "gateway")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
