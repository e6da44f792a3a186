"""The command `areal-x tinker`: serves the API on loopback until it is stopped."""

from __future__ import annotations

import argparse
import json
import logging
import os
import secrets
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import gin

from areal_x.cluster.trainers import HERE
from areal_x.engines.fleet.config import PROGRAMS, FleetConfig
from areal_x.engines.fleet.named_adapters import AdapterRoom
from areal_x.engines.fleet.speculation import check_run as check_speculation
from areal_x.engines.sglang.config import SGLangConfig
from areal_x.engines.vllm.config import VLLMConfig
from areal_x.errors import ConfigError, UserError, positive
from areal_x.experiment import Experiment
from areal_x.hf.tokenizer import load_tokenizer
from areal_x.protocols.trainer_config import LoRAConfig, ModelConfig, TrainerConfig
from areal_x.runtime import loop
from areal_x.runtime.command import command_of
from areal_x.runtime.credentials import write_address
from areal_x.runtime.thread import OneThread
from areal_x.tinker.account import Server
from areal_x.tinker.app import application
from areal_x.tinker.embedded_weights import EmbeddedWeights
from areal_x.tinker.host import EXACT, TrainerHost
from areal_x.tinker.journal import Journal
from areal_x.tinker.listening import APIServer
from areal_x.tinker.recovery import check_base, recover
from areal_x.tinker.sampling import SampledWeights, Samplers
from areal_x.tinker.served_weights import ServedWeights, create_engine
from areal_x.train import with_config

DESCRIPTION = """Serves training and sampling to clients of the Tinker API, on this machine.

    areal-x tinker --model Qwen/Qwen3-0.6B
    areal-x tinker examples/arithmetic/grpo.gin -b "train.backend = 'torch'"
    areal-x tinker --model Qwen/Qwen3-8B --engine vllm --max-rank 32

Clients take the address and the key that are printed from the environment: TINKER_BASE_URL and
TINKER_API_KEY. A server that is started again in its directory, however it ended, goes on with the
same address and key, and its clients with it. The server listens on loopback alone. From another machine, forward the port:
ssh -L PORT:127.0.0.1:PORT HOST"""
LOOPBACK = "127.0.0.1"
PREFIX = "tml-"  # without which clients refuse a key
ADDRESS = "tinker.json"
MAX_RANK, MAX_ADAPTERS = 64, 8  # of servers
FAILED = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 once it is stopped, 1 after a sentence about a mistake."""
    options = parse(arguments)
    if options.file is not None:

        def work(_: object) -> None:
            experiment = gin.get_configurable("train")()
            config = replace(experiment.trainer, row_length=experiment.row_length)
            slots, program = experiment.embedded.slots, options.engine or experiment.engine
            fleet = getattr(experiment, program) if program in PROGRAMS else None
            if fleet is not None:
                check_file(experiment, fleet)
            serve(options, experiment.backend, config, slots, fleet)

        return with_config(options.file, options.bindings, work)
    try:
        config = TrainerConfig(
            model=ModelConfig(path=options.model),
            lora=LoRAConfig(),
            row_length=options.context or 4096,
        )
        fleet = fleet_config(options.engine, options.slots)
        serve(options, options.backend, config, options.slots, fleet)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        pass
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Returns the options of the command line."""
    parser = argparse.ArgumentParser(
        prog=command_of("tinker"),
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "file",
        metavar="FILE.gin",
        nargs="?",
        type=Path,
        help="takes model, backend, trainer and lora.targets from a gin file",
    )
    parser.add_argument(
        "-b", dest="bindings", action="append", default=[], metavar="BINDING", help="of the file"
    )
    parser.add_argument("--model", help="a Hugging Face directory or hub name, without a file")
    parser.add_argument("--backend", default="torch", choices=("jax", "torch"), help="(torch)")
    parser.add_argument("--context", type=int, help="tokens of the longest sequence (4096)")
    parser.add_argument("--slots", type=int, default=32, help="sequences sampled at once (32)")
    parser.add_argument(
        "--exact",
        choices=EXACT,
        default="samples",
        help="what does not depend on other clients' requests, bit for bit (samples)",
    )
    parser.add_argument(
        "--engine",
        choices=("embedded", *PROGRAMS),
        help="samples; by default train.engine of the file, or the backend's own (embedded)",
    )
    parser.add_argument(
        "--max-rank",
        type=int,
        help="rank of the largest adapter, with servers: by default lora.rank of the file, or"
        f" {MAX_RANK}",
    )
    parser.add_argument(
        "--max-adapters",
        type=int,
        default=MAX_ADAPTERS,
        help=f"adapters in one batch of a server ({MAX_ADAPTERS})",
    )
    parser.add_argument("--name", help="base_model of the clients; by default the model's path")
    parser.add_argument(
        "--teacher",
        action="append",
        default=[],
        metavar="MODEL",
        help="a further model, which clients sample from and score with by this name, but do not"
        " train; may be repeated",
    )
    parser.add_argument("--port", type=int, default=0, help="0, the default, takes a free one")
    parser.add_argument(
        "--directory",
        type=Path,
        default=Path("runs/tinker"),
        help=f"for checkpoints, the journal, and {ADDRESS} with address and key (runs/tinker)",
    )
    parser.add_argument(
        "--keys", type=Path, help="a file with a key a line, each for a client of its own"
    )
    options = parser.parse_args(arguments)
    if (options.file is None) == (options.model is None):
        parser.error("give either FILE.gin or --model")
    if options.file is None and options.bindings:
        parser.error("-b binds settings of a FILE.gin")
    return options


def fleet_config(program: str | None, slots: int) -> FleetConfig | None:
    """Returns the settings of servers without a file; None for the embedded engine."""
    kinds: dict[str | None, type[FleetConfig]] = {"vllm": VLLMConfig, "sglang": SGLangConfig}
    return kinds[program](concurrency=slots) if program in kinds else None


def room_of(options: argparse.Namespace, config: TrainerConfig) -> AdapterRoom:
    """Returns the adapters that servers get room for. Raises: ConfigError."""
    rank = options.max_rank
    if rank is None:
        rank = config.lora.rank or MAX_RANK
    positive("--max-rank", rank)
    positive("--max-adapters", options.max_adapters)
    return AdapterRoom(rank, options.max_adapters)


def report(line: str) -> None:
    """Shows what servers do, beside the lines for the shell on standard output."""
    print(line, file=sys.stderr, flush=True)


def check_file(experiment: Experiment, fleet: FleetConfig) -> None:
    """Raises: ConfigError for settings of a run whose servers do not serve clients so."""
    for name, value, wanted in (("colocate", False, "False"), ("cluster", HERE, f"{HERE!r}")):
        if (found := getattr(experiment, name)) != value:
            why = "with areal-x tinker and servers, which sample while adapters train"
            raise ConfigError(f"train.{name}", found, f"{wanted} {why}")
    check_speculation(experiment.speculation, fleet, None, adapters=True)


def address_of(file: Path) -> dict[str, str]:
    """Returns url and key of the last server of a directory, whose clients may come back; nothing
    without one."""
    try:
        found = json.loads(file.read_text())
        return {name: str(found[name]) for name in ("url", "key")}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def listen(port: int, before: str) -> socket.socket:
    """Returns a listener on a port; for 0, on that of an address of before if it is free.

    Raises: UserError.
    """
    last = before.rpartition(":")[2]
    again = [int(last)] if port == 0 and last.isdigit() else []
    for wanted in (*again, port):
        try:
            return socket.create_server((LOOPBACK, wanted), backlog=512)
        except (OSError, OverflowError) as error:
            failure = error
    taken = f"port {port} cannot be served ({failure}): 0 takes a free one"
    raise UserError(taken) from failure


def read_keys(file: Path | None, before: str | None = None) -> list[str]:
    """Returns the keys of a file; else that of TINKER_API_KEY, that of before, or a new one.

    Raises: UserError for a key that clients would refuse.
    """
    if file is None:
        keys = [os.environ.get("TINKER_API_KEY") or before or PREFIX + secrets.token_urlsafe(24)]
    else:
        try:
            keys = [line.strip() for line in file.read_text().splitlines() if line.strip()]
        except OSError as error:
            raise UserError(f"{file} cannot be read: {error}") from error
    if not keys or any(len(x) < 16 or not x.startswith(PREFIX) for x in keys):
        raise UserError(
            f"a key begins with {PREFIX} and has at least 16 characters: correct"
            f" {file or 'TINKER_API_KEY'}"
        )
    return keys


def teacher_of(config: TrainerConfig, path: str) -> TrainerConfig:
    """Returns the settings of a model that is sampled from alone."""
    return replace(config, model=replace(config.model, path=path), lora=LoRAConfig())


def serve(
    options: argparse.Namespace,
    backend: str,
    config: TrainerConfig,
    slots: int,
    fleet: FleetConfig | None = None,
    message: Callable[[str], None] = print,
) -> None:
    """Serves until it is interrupted. fleet: the settings of servers that sample; None for the
    embedded engine.

    Raises: UserError for a model that cannot be loaded, a port that is taken, or servers that do not
    start.
    """
    logging.basicConfig(level=logging.WARNING)
    if options.context:
        config = replace(config, row_length=options.context)
    options.directory.mkdir(parents=True, exist_ok=True)
    before = address_of(options.directory / ADDRESS)
    keys = read_keys(options.keys, before.get("key"))
    room = room_of(options, config)
    journal = Journal(options.directory)
    host = TrainerHost(backend, config, exact=options.exact)
    path = config.model.path
    name = options.name or (path if isinstance(path, str) else str(host.base))
    tokenizer = load_tokenizer(host.base)
    teachers = {
        x: TrainerHost(backend, teacher_of(config, x), exact=options.exact) for x in options.teacher
    }
    if name in teachers or len(teachers) < len(options.teacher):
        raise UserError(
            f"each --teacher is another model, besides {name!r}, which is trained: name each once"
        )
    tokenizers = {x: load_tokenizer(of.base) for x, of in teachers.items()}
    listener = listen(options.port, before.get("url", ""))
    url = f"http://{LOOPBACK}:{listener.getsockname()[1]}"
    root = options.directory
    write_address(root / ADDRESS, url, keys[0])

    async def until_interrupted() -> None:
        thread = OneThread("areal-x tinker")
        embedded = EmbeddedWeights(host, thread, slots)
        weights: SampledWeights = embedded
        if fleet is not None:
            own = replace(fleet, context=fleet.context or host.context)
            engine = create_engine(own, config.lora, room, host.base, root, report)
            weights = ServedWeights(engine, host, thread, embedded)
        samplers = Samplers(host, thread, tokenizer, weights)
        places = root / "checkpoints", root / "working"
        of_teachers = {
            x: Samplers(of, thread, tokenizers[x], EmbeddedWeights(of, thread, slots))
            for x, of in teachers.items()
        }
        server = Server(host, thread, samplers, name, *places, journal, of_teachers)
        check_base(server)
        if isinstance(weights, ServedWeights):
            await weights.start(root / "working")
        served = application(server, keys)
        for account in served.state.accounts:
            recover(account)
        api = APIServer(served)
        message(f"export TINKER_BASE_URL={url}\nexport TINKER_API_KEY={keys[0]}")
        sys.stdout.flush()
        try:
            await api.serve(sockets=[listener])
        finally:
            for one in (samplers, *of_teachers.values()):
                await one.close()
            thread.close()
            await journal.close()

    try:
        with loop.short_collections():
            loop.run(until_interrupted(), "tinker")
    finally:
        listener.close()
