"""Serves the model of a gin file to agents, without training it: to try an agent, or to see what a
run's checkpoint does.

    python -m areal_x.serve examples/arithmetic/grpo.gin
    python -m areal_x.serve FILE.gin -b "model.path = 'runs/NAME/checkpoints/100/trainer'"

Any client opens as many sessions as it likes with the key in gateway.json (areal_x.agents.session);
the rewards that it gives are shown. Ends with Ctrl-C.
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
from areal_x.agents.online import Online, write_address
from areal_x.config.reader import Config
from areal_x.errors import printable
from areal_x.experiment import Experiment
from areal_x.hf.tokenizer import load_tokenizer
from areal_x.protocols.engine import Engine, SamplingParams
from areal_x.rollout.runner import EpisodeEngine
from areal_x.runtime import background, loop
from areal_x.train import parser_of, with_config
from areal_x.types import Scored


@dataclass(kw_only=True)
class Service:
    """A gateway over an engine that holds its weights, whose sessions are whoever's that asks.

    hosted: whose sampling, limits and gateway it has. address: the file for the gateway's address
    and key.
    """

    engine: Engine
    hosted: GatewayWorkflow
    address: Path
    say: Callable[[str], None] = print
    opened: int = 0
    watching: set[asyncio.Task[None]] = field(default_factory=set)

    async def start(self) -> None:
        host = self.hosted.lazy_gateway()
        host.gateway.on_open = self.open
        await host.start()
        write_address(self.address, host.gateway.url, host.gateway.key)
        self.say(f"serving at {host.gateway.url}; its address and key are in {self.address}")

    async def open(self, label: str | None) -> GatewaySession:
        self.opened += 1
        session = await self.hosted.open(
            EpisodeEngine(self.engine, (0, self.opened), nothing, nothing)
        )
        watching = background.start(self.watch(session, label), "the watch over a session")
        self.watching.add(watching)
        watching.add_done_callback(self.watching.discard)
        return session

    async def watch(self, session: GatewaySession, label: str | None) -> None:
        with session:
            outcome = await session.ended()
        worth = (
            f"reward {outcome.reward:g}" if isinstance(outcome, Scored) else type(outcome).__name__
        )
        self.say(
            f"session {session.id}{f' ({printable(label)})' if label else ''}:"
            f" {len(session.calls())} calls, {worth}"
        )

    async def close(self) -> None:
        await self.hosted.close()
        await asyncio.gather(*self.watching, return_exceptions=True)


def nothing(_: int) -> None: ...


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status, as of `areal_x.train`."""
    parser = parser_of("serve", __doc__)
    parser.add_argument("file", metavar="FILE.gin", type=Path)
    parser.add_argument(
        "--address",
        type=Path,
        default=Path(ADDRESS),
        help="where the gateway's address and key are written",
    )
    options = parser.parse_args(arguments)

    def work(config: Config) -> None:
        serve(gin.get_configurable("train")(), options.address)

    return with_config(options.file, [*options.bindings, "train.serving = True"], work)


def serve(experiment: Experiment, address: Path, say: Callable[[str], None] = print) -> None:
    """Returns when it is interrupted."""
    directory = experiment.find_model(experiment.trainer.model.path)
    workflow = experiment.workflow
    hosted = (
        workflow
        if isinstance(workflow, GatewayWorkflow)
        else Online(sampling=workflow.sampling_params() or SamplingParams())
    )
    hosted = hosted.setup(load_tokenizer(directory))
    trainer = experiment.create_models(directory, hosted).policy
    engine = experiment.create_engine(directory, trainer, hosted, address.parent, say)
    service = Service(engine=engine, hosted=hosted, address=address, say=say)

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
