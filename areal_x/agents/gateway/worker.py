"""A process that serves a gateway's requests, started by areal_x.agents.gateway.workers.

    agents ──HTTP──▶ worker ──(channel: keys, prompts, completions)──▶ run: sessions, engine

It accepts connections from the listening socket that all of the gateway's processes share, and does
what takes a processor: encryption, HTTP, JSON, templates, tokens, replies. It has no session and no
key of its own: every request's keys are checked by the run, which also keeps every call.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from areal_x.agents.chat.rendering import PlainRenderer, Renderer, TemplateRenderer
from areal_x.agents.gateway.app import application
from areal_x.agents.gateway.channel import Channel
from areal_x.agents.gateway.connections import GatewayServer
from areal_x.agents.gateway.errors import api_error
from areal_x.agents.gateway.network import Network
from areal_x.agents.gateway.remote import RemoteHost
from areal_x.errors import UserError
from areal_x.hf.tokenizer import load_tokenizer
from areal_x.runtime import background, guard

RENDERERS: dict[str, type[TemplateRenderer | PlainRenderer]] = {
    "template": TemplateRenderer,
    "plain": PlainRenderer,
}


def main(path: list[str], settings: Mapping[str, Any], parent: int) -> None:
    """path: sys.path. settings: see `workers`. parent: this process ends with it."""
    guard.die_with_parent(parent)
    sys.path[:] = path
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the gateway's processes are its parallelism
    if not settings["renderer"]["images"]:
        # transformers would import it for tokenizers too: 415 MB of memory in place of 88, and seconds
        sys.modules["torch"] = None  # type: ignore[assignment]
        os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # that it is missing
    connected = socket.socket(fileno=settings["channel"])
    listener = socket.socket(fileno=settings["listener"])
    asyncio.run(serve_requests(settings, connected, listener))


async def serve_requests(
    settings: Mapping[str, Any], connected: socket.socket, listener: socket.socket
) -> None:
    """Runs until the run closes the gateway, or its end of the channel."""
    server: GatewayServer | None = None

    def served(operation: str) -> Any:
        assert server is not None, "it is asked for nothing before it serves"
        if operation == "clients":
            return open_clients(server)
        server.should_exit = True  # "close"
        return None

    channel = Channel(served, api_error, lambda: os._exit(1), "the gateway's worker")
    await channel.open(connected)
    forward_logs(channel)
    background.watch(asyncio.get_running_loop(), lambda error: failed(channel, error))
    try:
        renderer = load_renderer(settings["renderer"])
        network = Network(**{**settings["network"], "networks": tuple(settings["networks"])})
        server = GatewayServer(
            application(RemoteHost(channel, renderer, settings["beat_seconds"])),
            listener,
            network.encryption(),
            network.admits,
        )
    except UserError as error:
        channel.tell("failed", str(error))
        return
    serving = background.start(server.serve(), "the gateway")
    await server.ready.wait()
    channel.tell("ready")
    gc.collect()
    gc.freeze()  # see areal_x.runtime.loop.short_collections
    await serving


async def open_clients(server: GatewayServer) -> list[tuple[str, int]]:
    """Returns the addresses whose connections are open, once the loop has seen which are not."""
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return server.clients()


def failed(channel: Channel, error: BaseException) -> None:
    """Ends this process because of a background task: the run starts another."""
    channel.tell("log", logging.ERROR, f"a worker of the gateway ends: {error}")
    os._exit(1)


class Forwarded(logging.Handler):
    """Sends lines of the log to the run, which has the files."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(logging.WARNING)
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        self._channel.tell("log", record.levelno, self.format(record))


def forward_logs(channel: Channel) -> None:
    logging.getLogger().addHandler(Forwarded(channel))


# ---- the renderer, the same as the run's


def described(renderer: Renderer) -> dict[str, Any]:
    """Returns from what a worker makes the same renderer. Raises: UserError if it cannot."""
    kind = next((name for name, kind in RENDERERS.items() if type(renderer) is kind), None)
    directory = getattr(getattr(renderer, "tokenizer", None), "name_or_path", "")
    if kind is None or not os.path.isdir(directory):  # noqa: PTH112
        raise UserError(
            "gateway.workers needs the chat template of a model's directory: set rendering ="
            " 'transformers', or gateway.workers = 0"
        )
    digest = digest_of(renderer.tokenizer)  # type: ignore[attr-defined]
    return {"kind": kind, "directory": directory, "digest": digest, "images": renderer.sees_images}


def load_renderer(described: Mapping[str, Any]) -> Renderer:
    """Raises: UserError unless the tokenizer is exactly the run's."""
    tokenizer = load_tokenizer(described["directory"])
    if digest_of(tokenizer) != described["digest"]:
        raise UserError(
            f"the tokenizer of {described['directory']} is not the run's: its files have changed, or"
            " the run has changed its tokenizer; set gateway.workers = 0"
        )
    return RENDERERS[described["kind"]](tokenizer)


def digest_of(tokenizer: Any) -> str:
    """Returns a digest of everything by which a tokenizer renders, encodes and decodes."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    form = tokenizer.get_vocab() if backend is None else json.loads(backend.to_str())
    if backend is not None:  # set by every call that pads or truncates, and by no other
        form = {name: x for name, x in form.items() if name not in ("padding", "truncation")}
    added = tokenizer.added_tokens_decoder.items()
    parts: Sequence[Any] = [
        tokenizer.chat_template,
        getattr(tokenizer, "response_template", None),
        form,
        sorted((id, str(token), token.special) for id, token in added),
        sorted(tokenizer.all_special_ids),
    ]
    text = json.dumps(parts, sort_keys=True, default=str)
    return blake2b(text.encode(errors="surrogatepass")).hexdigest()
