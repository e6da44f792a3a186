"""A gang on Ray whose weights real vLLM servers pull: `python -m tests.cluster.pulls FOLDER MODEL PROCESSES SERVERS` does
what it reads, a line at a time, and answers each with a line of JSON.

publish           changes the trainer's weights and publishes them: the version
scores            for each server that serves, how far its log-probabilities are from those of transformers' model with the
                  trainer's weights, and from those of the weights before, in nats per token
kill NUMBER       kills a server's process
serve COUNT       waits until so many servers serve
wait              until all servers serve, or wait for weights
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import psutil

SECONDS = 200.0
ANSWER = "answer: "


def change(trainer: Any, rank: int, step: int) -> None:
    """Adds to every weight what its place decides."""
    import torch

    with torch.no_grad():
        for x in trainer.model.parameters():
            part = x.to_local() if hasattr(x, "to_local") else x
            places = torch.arange(part.numel(), dtype=torch.float32)
            part += (0.05 * torch.sin((1.3 + step) * places)).view_as(part)


def log_probabilities(model: Path, tensors: dict[str, np.ndarray], tokens: list[int]) -> np.ndarray:
    """Those of each token given the ones before it, by transformers."""
    import torch
    from safetensors.numpy import save_file
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as written:
        shutil.copy(model / "config.json", written)
        whole = {name: np.ascontiguousarray(x) for name, x in tensors.items()}
        save_file(whole, Path(written, "model.safetensors"), metadata={"format": "pt"})
        found = AutoModelForCausalLM.from_pretrained(written, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = found(torch.tensor([tokens])).logits[0].log_softmax(-1)
    return np.array([0.0, *(float(logits[i, token]) for i, token in enumerate(tokens[1:]))])


class Runs:
    """An engine over placed servers, and a trainer in a gang."""

    def __init__(self, engine: Any, trainer: Any, model: Path) -> None:
        self.engine, self.trainer, self.model = engine, trainer, model
        self.weights = [dict(trainer.weights())]
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(SECONDS)

    def publish(self) -> int:
        version = len(self.weights)
        self.trainer.apply(change, version)
        self.weights.append(dict(self.trainer.weights()))
        self.run(self.engine.swap(self.engine.stage(self.trainer, version)))
        return int(self.engine.version)

    def scores(self) -> dict[str, tuple[float, float]]:
        tokens = self.engine._probe_prompt().tolist()
        before, now = (log_probabilities(self.model, x, tokens) for x in self.weights[-2:])
        found = {}
        for name in self.engine.fleet.serving():
            scored = self.run(self.engine._score(self.engine.supervisor.replicas[name]))
            found[name] = float(np.abs(scored - now).mean()), float(np.abs(scored - before).mean())
        return found

    def kill(self, number: int) -> str:
        """Kills all processes of a server."""
        replica = list(self.engine.supervisor.replicas.values())[number]
        process = psutil.Process(replica.server.pid)
        for child in process.children(recursive=True):
            child.send_signal(signal.SIGKILL)
        return str(replica.name)

    def serve(self, count: int) -> int:
        async def enough() -> None:
            while len(self.engine.fleet.serving()) < count:
                await asyncio.sleep(0.05)

        self.run(enough())
        return count

    def wait(self) -> list[str]:
        async def all_back() -> None:
            members, joining = self.engine.fleet.members, self.engine.publisher.sender._joining
            while not all(member.serves or name in joining for name, member in members.items()):
                await asyncio.sleep(0.05)

        self.run(all_back())
        return list(self.engine.fleet.serving())


def main(folder: Path, model: Path, processes: int, servers: int) -> None:
    import areal_x.engines.vllm.engine as engines
    from areal_x.cluster.config import ClusterConfig
    from areal_x.cluster.places import places_on_ray, server_room
    from areal_x.cluster.surroundings import surroundings
    from areal_x.cluster.trainers import trainers_on_ray
    from areal_x.engines.fleet.placed import ClusterStarter, Keeper
    from areal_x.engines.vllm.config import VLLMConfig
    from areal_x.protocols.trainer_config import MeshConfig, ModelConfig, TrainerConfig

    engines.check_machine = lambda *_: None  # refuses vLLM's build for CPUs
    mesh = MeshConfig(processes=processes, fsdp=processes)
    config = TrainerConfig(ModelConfig(str(model)), mesh=mesh, precision="fp32")
    cluster = ClusterConfig(cpus=0.1, server_cpus=0.1)
    with (
        trainers_on_ray("torch", {"policy": config}, {}, cluster, folder) as trainers,
        places_on_ray(server_room(cluster, 1), 1, Keeper, surroundings(None, ["VLLM_"])) as places,
    ):
        vllm = VLLMConfig(servers=servers, transport="rdt", context=64, concurrency=4, threads=1, wait_seconds=SECONDS)
        started = engines.VLLMEngine(
            vllm, model, folder, lambda text: print(text, file=sys.stderr), starter=ClusterStarter(places), trainer_here=False
        )
        runs = Runs(started, trainers["policy"], model)
        try:
            runs.run(started.start())
            print(ANSWER + json.dumps("started"), flush=True)
            for line in sys.stdin:
                command, *words = line.split()
                print(ANSWER + json.dumps(getattr(runs, command)(*map(int, words))), flush=True)
        finally:
            runs.run(started.close())


if __name__ == "__main__":
    words = sys.argv[1:]
    main(Path(words[0]), Path(words[1]), int(words[2]), int(words[3]))
    os._exit(0)  # whatever a thread of a broken publication still waits for
