"""Stand-ins for vLLM's processes, and a driver that starts them on the nodes of a cluster:
`python -m tests.cluster.families FOLDER ARGUMENT…` does what it reads, a line at a time, and answers each line, among
reports of waits and whatever Ray prints."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

GENERATIONS = 3
# In vLLM's place: a server whose child has a child. A stubborn family ignores SIGTERM, and each child leaves its group.
FAMILY = f"""
import signal, subprocess, sys, time
stubborn, generation = "--stubborn" in sys.argv, sys.argv.count("--child")
child = None
def end(*_):
    if child is not None:
        child.terminate()
        child.wait()
    sys.exit(0)
signal.signal(signal.SIGTERM, signal.SIG_IGN if stubborn else end)
if generation < {GENERATIONS - 1}:
    child = subprocess.Popen([sys.executable, *sys.argv, "--child"], start_new_session=stubborn)
print("up", flush=True)
time.sleep(1000)
"""


def write_family(folder: Path) -> None:
    """Writes a package `vllm` whose server is the stand-in."""
    package = folder / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for place in (package, package.parent, package.parent.parent):
        (place / "__init__.py").touch()
    (package / "api_server.py").write_text(FAMILY)


def model_of(folder: Path, number: int) -> Path:
    return folder / f"model-{number}"


def family(folder: Path, number: int, watchdogs: bool = True) -> list[psutil.Process]:
    """The processes of one server that are there, with its watchdogs, which have its command line too."""
    model = str(model_of(folder, number))
    found = []
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
            ours = any(model in word for word in words) if watchdogs else model in words
            if ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def is_up(folder: Path, number: int) -> bool:
    """True if all generations of a server run."""
    log = folder / f"vllm-{number}.log"
    return len(family(folder, number, watchdogs=False)) == GENERATIONS and log.read_text().count("up") >= GENERATIONS


@contextmanager
def placed(folder: Path, arguments: list[str]) -> Iterator[Any]:
    """Connects to the cluster, and yields what starts a server by its number and the places."""
    from areal_x.cluster.config import ClusterConfig
    from areal_x.cluster.connection import connected
    from areal_x.cluster.places import places_on_ray, server_room
    from areal_x.cluster.surroundings import surroundings
    from areal_x.engines.fleet.folders import LOCK
    from areal_x.engines.fleet.placed import ClusterStarter, Keeper
    from areal_x.engines.vllm.server import Launch
    from tests.cluster.cluster import ROLE

    (folder / LOCK).touch()
    with connected(cpus=1):
        room = server_room(ClusterConfig(server_cpus=2, servers_on=ROLE), width=1)
        with places_on_ray(room, 1, Keeper, surroundings(None, ["VLLM_"])) as places:
            starter = ClusterStarter(places)

            async def started(number: int) -> Any:
                model_of(folder, number).mkdir(exist_ok=True)
                log = folder / f"vllm-{number}.log"
                log.write_text("")
                return await starter.start(
                    number,
                    Launch(model_of(folder, number), log, folder, 128, 8, seed=number, arguments=arguments),
                )

            yield started, places


ANSWER = "answer: "


def main(folder: Path, arguments: list[str]) -> None:
    import ray
    from ray.util.placement_group import remove_placement_group

    from areal_x.runtime.waits import watching

    def report(text: str) -> None:
        print(text.replace("\n", " "), flush=True)

    def say(text: str) -> None:
        report(ANSWER + text)

    with placed(folder, arguments) as (start, places):
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True).start()
        begun: dict[int, Any] = {}
        with watching(report, folder, silence_seconds=2.0):
            for line in sys.stdin:
                command, *words = line.split()
                number = int(words[0]) if words else 0
                match command:
                    case "start":
                        begun[number] = asyncio.run_coroutine_threadsafe(start(number), loop).result()
                        say(f"started at {begun[number].url}")
                    case "kill":
                        ray.kill(places._places[number].held[0]._actor)
                        say("killed")
                    case "remove":
                        remove_placement_group(places._places[number]._group)
                        say("removed")
                    case "poll":
                        say(f"{begun[number].poll()} {begun[number].failure_reason()}")
                    case "stop":
                        begun[number].stop()
                        say("stopped")
        loop.call_soon_threadsafe(loop.stop)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
