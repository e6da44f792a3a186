"""Checks that the servers that a run depends on are reachable with its key, and serve what it
needs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

from areal_x.engines.vllm.client import VLLMClient
from areal_x.engines.vllm.config import VLLMConfig
from areal_x.engines.vllm.gate import unprotected_warning
from areal_x.engines.vllm.installed import is_cpu_build
from areal_x.engines.vllm.scorer import ServerScorer
from areal_x.engines.vllm.transports import TRANSPORTS, check_machine
from areal_x.errors import UserError
from areal_x.hf.tokenizer import load_tokenizer
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
        least, most = config.bounds
        number = f"{least}" if least == most else f"{least} to {most}"
        on_nodes = f"{number} will be started on the nodes of the cluster"
        return "; ".join([on_nodes, *file_warnings])
    if not config.urls:
        kind = "CPU" if is_cpu_build() else "GPU"
        return "; ".join([f"{config.servers} will be started, by vLLM for {kind}", *file_warnings])
    key = os.environ.get(config.key_variable)
    found = [
        run(query_server(url, key, TRANSPORTS[config.transport]), "check") for url in config.urls
    ]
    key_warnings = [
        unprotected_warning(url)
        for url, (_, accepts_without_key) in zip(config.urls, found, strict=True)
        if accepts_without_key
    ]
    return "; ".join(
        [
            f"{len(found)} answer, with a context of {min(context for context, _ in found)}",
            *key_warnings,
            *file_warnings,
        ]
    )


async def query_server(url: str, key: str | None, transfer: str) -> tuple[int, bool]:
    """Returns a server's context in tokens, and whether it accepts control requests without a
    key."""
    client = VLLMClient(url, key, transfer)
    try:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            if not await client.is_healthy():
                raise UserError(
                    f"no healthy vLLM server answers at {url}: start it, or take it out of"
                    " vllm.urls"
                )
            return await client.context(), await client.accepts_without_key()
    except TimeoutError:
        raise UserError(
            f"the vLLM server at {url} did not answer within {TIMEOUT_SECONDS:g} s: look at its log"
        ) from None
    finally:
        await client.close()


def check_scoring_servers(settings: Settings, urls: Sequence[str], directory: Path) -> str:
    """Checks that a reference's or teacher's servers answer, accept the key, and tokenise as the
    trained model does."""
    temperature = settings.temperature(settings.workflow)
    ServerScorer(
        urls, os.environ.get(settings.vllm.key_variable), load_tokenizer(directory), temperature
    )
    return f"{len(urls)} answer, with the same tokens"
