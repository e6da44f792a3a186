"""The command `areal-x lab`: serves the page on loopback until it is stopped."""

from __future__ import annotations

import argparse
import secrets
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import uvicorn

from areal_x.errors import UserError
from areal_x.lab.app import Lab, application
from areal_x.lab.vocabulary import tokenizer_file
from areal_x.runtime.command import command_of

DESCRIPTION = """Serves a page about runs, from their files alone: metrics, trajectories token by token,
failures, settings. The runs may be running, finished or crashed.

    areal-x lab                 # those of the folder runs/
    areal-x lab runs/NAME

The page is served on this machine alone, under an address with a key. To look at it from another
machine, forward the port: ssh -L PORT:127.0.0.1:PORT HOST"""
LOOPBACK = "127.0.0.1"
HEADER_BYTES = 1 << 14
MOST_CONNECTIONS = 256
CLOSING_SECONDS = 2
SWITCH_SECONDS = 0.001  # Python's own is 0.005
FAILED = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 once it is stopped, 1 after a sentence about a mistake."""
    options = parse(arguments)
    try:
        serve(options.place, options.port, options.tokenizer)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        pass
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Returns the options of the command line."""
    parser = argparse.ArgumentParser(
        prog=command_of("lab"),
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "place",
        metavar="RUN | FOLDER",
        nargs="?",
        type=Path,
        default=Path("runs"),
        help="a run's directory, or a folder of runs (runs)",
    )
    parser.add_argument("--port", type=int, default=0, help="0, the default, takes a free one")
    parser.add_argument(
        "--tokenizer",
        type=Path,
        help="a folder with tokenizer.json, for runs whose own is not on this machine",
    )
    return parser.parse_args(arguments)


def serve(
    place: Path,
    port: int = 0,
    tokenizer: Path | None = None,
    message: Callable[[str], None] = print,
) -> None:
    """Serves until it is interrupted. message: called with the page's address, once it is served.

    Raises: UserError for a folder that is not there, or a port that is taken.
    """
    if not place.is_dir():
        raise UserError(f"there is no folder {place}: name a run's directory, or a folder of runs")
    tokenizer = tokenizer_file(tokenizer)
    try:
        listener = socket.create_server((LOOPBACK, port), backlog=128)
    except (OSError, OverflowError) as error:
        raise UserError(f"port {port} cannot be served ({error}): 0 takes a free one") from error
    port = listener.getsockname()[1]
    key = secrets.token_urlsafe(24)
    hosts = {f"{name}:{port}" for name in (LOOPBACK, "localhost")}
    lab = Lab(place, tokenizer)
    config = uvicorn.Config(
        application(lab, key, lambda: hosts),
        http="h11",
        h11_max_incomplete_event_size=HEADER_BYTES,
        log_config=None,
        log_level="error",
        access_log=False,  # its lines would have the key
        lifespan="off",
        ws="none",
        server_header=False,
        limit_concurrency=MOST_CONNECTIONS,
        timeout_graceful_shutdown=CLOSING_SECONDS,
    )
    # A thread that builds an index gives way to those that answer.
    sys.setswitchinterval(SWITCH_SECONDS)
    message(f"http://{LOOPBACK}:{port}/{key}/")
    try:
        uvicorn.Server(config).run(sockets=[listener])
    finally:
        lab.close()
        listener.close()
