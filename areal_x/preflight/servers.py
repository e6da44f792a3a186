"""Checks that the servers that a run depends on are reachable with its key, and serve what it
needs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from areal_x.engines.fleet.addresses import server_urls
from areal_x.engines.fleet.client import Client
from areal_x.engines.fleet.config import FleetConfig
from areal_x.engines.fleet.quantised import check_quantised
from areal_x.engines.fleet.rotations import check_rotations
from areal_x.engines.fleet.widths import check_model
from areal_x.engines.scoring import server_scorer
from areal_x.engines.sglang import engine as sglang_engine
from areal_x.engines.sglang.client import SGLangClient
from areal_x.engines.sglang.config import SGLangConfig
from areal_x.engines.sglang.installed import installed
from areal_x.engines.sglang.server import check_exact
from areal_x.engines.vllm.client import VLLMClient
from areal_x.engines.vllm.config import VLLMConfig
from areal_x.engines.vllm.gate import unprotected_warning
from areal_x.engines.vllm.installed import has_plugin, is_cpu_build
from areal_x.engines.vllm.transports import TRANSPORTS, check_machine
from areal_x.errors import UserError
from areal_x.hf.tokenizer import load_tokenizer
from areal_x.preflight.model import Model
from areal_x.protocols.speculation import NOTHING, Speculation
from areal_x.runtime import open_files
from areal_x.runtime.loop import run
from areal_x.settings import Settings

TIMEOUT_SECONDS = 20.0  # for one server to answer


def check_engine_servers(
    config: VLLMConfig, placed: bool = False, trainer_here: bool = True
) -> str:
    """Checks the servers that generate. placed: the run starts them on the nodes of a cluster.
    trainer_here: the trainer is in the run's own process.

    Raises: UserError or EngineError for the first one that cannot be used.
    """
    check_machine(config, trainer_here)
    file_warnings = filter(None, [open_files.enough_for(config.requests)])
    if placed:
        return "; ".join([on_nodes(config), *file_warnings])
    if not config.urls:
        kind = "CPU" if is_cpu_build() else "NPU" if has_plugin() else "GPU"
        return "; ".join([f"{config.servers} will be started, by vLLM for {kind}", *file_warnings])
    key = os.environ.get(config.key_variable)
    transfer = TRANSPORTS[config.transport]
    found = query_all(config, lambda url: VLLMClient(url, key, transfer), unprotected_warning)
    return "; ".join([found, *file_warnings])


def check_sglang_servers(
    config: SGLangConfig, placed: bool = False, speculation: Speculation = NOTHING
) -> str:
    """Checks the SGLang servers that generate. placed: the run starts them on the nodes of a cluster,
    each of which looks for its own SGLang. speculation: tokens that they are to guess ahead.

    Raises: UserError or EngineError for the first one that cannot be used.
    """
    file_warnings = filter(None, [open_files.enough_for(config.requests)])
    if placed:
        return "; ".join([on_nodes(config), *file_warnings])
    if not config.urls:
        found = installed(config.python)
        check_exact(speculation, found.is_cpu)
        kind = "CPU" if found.is_cpu else "GPU"
        will = f"{config.servers} will be started, by SGLang {found.version} for {kind}"
        return "; ".join([will, *file_warnings])
    queried = query_all(
        config,
        lambda url: SGLangClient(url, *config.keys(), Path()),
        sglang_engine.unprotected_warning,
    )
    return "; ".join([queried, *file_warnings])


def on_nodes(config: FleetConfig) -> str:
    """Describes the servers that the run starts on the nodes of a cluster."""
    least, most = config.bounds
    number = f"{least}" if least == most else f"{least} to {most}"
    return f"{number} will be started on the nodes of the cluster"


def check_widths(config: FleetConfig, model: Model) -> str:
    """Checks that the servers that the run starts can divide the model.

    Raises: ConfigError for the size that does not fit.
    """
    widths = config.widths
    check_model(config.kind, config.binding, widths, model.config)
    return f"each server on {widths.accelerators} accelerators ({widths}): {config.kind} can divide the model so"


def check_served(config: FleetConfig, model: Model, adapters: bool) -> str:
    """Checks that servers compute the model as the trainer does. adapters: the trainer has some.

    Raises: ConfigError for a head or a rotation that they leave out or read otherwise, and for a model
    that cannot be sent in fp8.
    """
    if config.kind == SGLangConfig.kind:
        sglang_engine.check_head(model.directory)
    check_rotations(config.kind, model.directory)
    check_quantised(config, adapters, model.directory, model.shapes)
    return f"{config.kind} reads its config as the trainer does"


def query_all(
    config: FleetConfig, connect: Callable[[str], Client], warning: Callable[[str], str]
) -> str:
    """Returns what the servers that the run does not start answer. connect: returns a client of one.
    warning: about one that accepts control requests without a key.

    Raises: UserError or EngineError for the first one that cannot be used.
    """
    found = [run(query_server(config, url, connect), "check") for url in config.urls]
    warnings = [
        warning(url)
        for url, (_, accepts_without_key) in zip(config.urls, found, strict=True)
        if accepts_without_key
    ]
    least = min(context for context, _ in found)
    return "; ".join([f"{len(found)} answer, with a context of {least}", *warnings])


async def query_server(
    config: FleetConfig, url: str, connect: Callable[[str], Client]
) -> tuple[int, bool]:
    """Returns a server's context in tokens, and whether it accepts control requests without a
    key."""
    client = connect(url)
    try:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            if not await client.is_healthy():
                raise UserError(
                    f"no healthy {config.kind} server answers at {url}: start it, or take it out of"
                    f" {config.binding}.urls"
                )
            await client.negotiate(ours=False)
            return await client.context(), await client.accepts_without_key()
    except TimeoutError:
        raise UserError(
            f"the {config.kind} server at {url} did not answer within {TIMEOUT_SECONDS:g} s: look at"
            " its log"
        ) from None
    finally:
        await client.close()


def check_scoring_servers(settings: Settings, directory: Path) -> str:
    """Checks that a reference's or the teachers' servers answer, accept the key, and tokenise as the
    trained model does."""
    temperature = settings.temperature(settings.workflow)
    tokenizer = load_tokenizer(directory)
    for binding, given in settings.scorers().items():
        if urls := server_urls(binding, given):
            server_scorer(urls, settings.vllm, settings.sglang, tokenizer, temperature)
    return f"{len(settings.scoring_urls())} answer, with the same tokens"
