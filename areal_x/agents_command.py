"""Runs agents for a training run on another machine.

    areal-x agents work https://run.example.com:8443 --agent my_agent.solve
    areal-x agents work https://run.example.com:8443 --episodes 16 -- node agent.mjs {prompt}

The run has train.workflow = @remote_agent() and listens on a network (gateway.host); it writes its
key to gateway.json. The worker takes the key from the variable AREAL_X_GATEWAY_KEY or from a file,
never from its command line, which everybody on the machine can read. It takes episodes until the run
ends. Several workers share a run's episodes, and those of one that dies are given to another.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from areal_x.agents.address import check_url
from areal_x.agents.calling import Solve
from areal_x.agents.worker import Attempt, FunctionAttempt, ProgramAttempt, Worker
from areal_x.errors import UserError
from areal_x.runtime import loop
from areal_x.runtime.command import command_of, in_this_form
from areal_x.runtime.credentials import GATEWAY_KEY

NAME = "agents"
FAILED = 1
INTERRUPTED = 130
# What OpenSSL and Python, requests, and Node.js read the authorities from that they trust.
TRUST = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "NODE_EXTRA_CA_CERTS")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 once the run has ended, 1 after a sentence about what is wrong."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    try:
        work(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Returns the options of the command line; `program` is what follows `--`."""
    words = list(arguments)
    cut = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(
        prog=command_of(NAME),
        description=in_this_form(__doc__ or "", NAME),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="work", dest="subcommand")
    one = commands.add_parser(
        "work",
        help="take episodes of a run, run an agent on each, and answer them",
        usage=f"{command_of(NAME)} work URL [options] (--agent MODULE.FUNCTION | -- COMMAND …)",
    )
    one.add_argument("url", metavar="URL", help="address of the run's gateway")
    one.add_argument(
        "--agent",
        metavar="MODULE.FUNCTION",
        help="async def FUNCTION(task, base_url, api_key), from this folder or installed",
    )
    one.add_argument("--episodes", type=int, default=8, metavar="N", help="at once (8)")
    one.add_argument(
        "--key-file",
        type=Path,
        metavar="FILE",
        help=f"the run's gateway.json, or a file with the key alone; by default {GATEWAY_KEY} has it",
    )
    one.add_argument(
        "--certificate",
        metavar="FILE",
        help="PEM file of the authorities to trust, in place of the system's; agents get it too",
    )
    one.add_argument("--name", default=socket.gethostname(), help="for the run's log (the host's)")
    one.add_argument(
        "--patience",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="how long to wait for a run that does not answer (600)",
    )
    one.add_argument(
        "--inherit",
        action="append",
        default=[],
        metavar="VARIABLE",
        help="environment variable that COMMAND gets, beside PATH, HOME and the like; repeatable",
    )
    options = parser.parse_args(words[:cut])
    options.program = tuple(words[cut + 1 :])
    if bool(options.agent) == bool(options.program):
        one.error("give either --agent MODULE.FUNCTION or -- COMMAND …")
    if options.episodes < 1:
        one.error("--episodes must be at least 1")
    return options


def work(options: argparse.Namespace) -> None:
    """Works until the run ends. Raises: UserError."""
    check_url(options.url, "URL")
    key = key_of(options.key_file)
    if options.certificate is not None:
        trust(options.certificate)
    worker = Worker(
        url=options.url.rstrip("/"),
        key=key,
        attempt=attempt_of(options),
        episodes=options.episodes,
        name=options.name,
        patience_seconds=options.patience,
        message=lambda line: print(line, flush=True),
    )
    print(f"working for {worker.url}, {worker.episodes} episodes at once", flush=True)
    loop.run(worker.run(), "worker")
    print(f"the run has ended; {worker.answered} episodes were answered here")


def attempt_of(options: argparse.Namespace) -> Attempt:
    if options.agent:
        return FunctionAttempt(function_named(options.agent))
    return ProgramAttempt(options.program, (*options.inherit, *TRUST))


def function_named(name: str) -> Solve:
    """Returns the function of this name, "module.function". Raises: UserError if there is none."""
    module, _, function = name.rpartition(".")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found: Any = getattr(import_module(module), function) if module else None
    except (ImportError, AttributeError) as error:
        raise UserError(f"--agent {name} cannot be imported: {error}") from None
    if not callable(found):
        raise UserError(f"--agent {name} must be a function, named MODULE.FUNCTION")
    return found  # type: ignore[no-any-return]


def key_of(file: Path | None) -> str:
    """Returns the run's key. Raises: UserError without one."""
    if file is None:
        key = os.environ.get(GATEWAY_KEY, "")
        if not key:
            raise UserError(
                f"the run's key is missing: set the variable {GATEWAY_KEY}, or give --key-file the"
                " run's gateway.json"
            )
        return key.strip()
    try:
        text = file.read_text().strip()
        key = json.loads(text)["key"] if text.startswith("{") else text
    except OSError as error:
        raise UserError(f"--key-file {file} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError):
        key = ""
    if not key or not isinstance(key, str) or len(key.split()) != 1:
        raise UserError(f"--key-file {file} has no key: it must be a run's gateway.json, or a key")
    return key


def trust(file: str) -> None:
    """Has this process and its agents trust the authorities of a file. Raises: UserError if it
    cannot be read."""
    if not os.access(file, os.R_OK):
        raise UserError(f"--certificate {file} cannot be read")
    for name in TRUST:
        os.environ[name] = str(Path(file).resolve())


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
