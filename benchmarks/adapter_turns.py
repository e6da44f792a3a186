"""Throughput of whole turns of 8 clients of `areal-x tinker` at once, compared with one after the other, on a CPU.

    python benchmarks/adapter_turns.py --backend torch
    python benchmarks/adapter_turns.py --backend jax --exact nothing

Claim: 8 adapters of ranks 4 to 64 at once do at least 2.8 times the turns per second of one after the other.

The work: a turn of a client like the cookbook's rl_loop: its adapter's weights are saved for a sampler, a group of `--group`
answers of `--answer` tokens is sampled to a prompt of `--prompt` tokens, then a forward_backward of `importance_sampling` on
them and an optim_step. The model is the Qwen3 of benchmarks/update.py (26M parameters, fp32), and the server's own Samplers,
Gathering and TrainerHost serve the clients, without HTTP and journal.

* at once: the 8 clients' turns run at the same time
* one after the other: a client's whole turn, then the next one's

Method: warmed up (with JAX compiled), then alternating rounds; medians of `--rounds`, of all clients together, and the least
processor seconds of all threads, which other work on the machine changes less. Memory: the adapters with gradients and moments
(`AdapterBank.nbytes`), and the process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from adapters import RANKS, STEP
from shapes import DENSE
from update import write_random

from areal_x.hf.tokenizer import load_tokenizer
from areal_x.protocols.trainer_config import ModelConfig, TrainerConfig
from areal_x.runtime.thread import OneThread
from areal_x.testing.models import write_tokenizer
from areal_x.tinker import requests
from areal_x.tinker.data import Datum
from areal_x.tinker.embedded_weights import EmbeddedWeights
from areal_x.tinker.gathering import Gathering
from areal_x.tinker.host import EXACT, TrainerHost, Work
from areal_x.tinker.models import Model, Shape, Source
from areal_x.tinker.sampling import Samplers


class Clients:
    """The clients' models, and what serves them."""

    def __init__(self, args: argparse.Namespace, place: Path) -> None:
        config = TrainerConfig(model=ModelConfig(path=str(write_random(place / "model", DENSE))), row_length=256)
        self.args, self.place = args, place
        self.host = TrainerHost(args.backend, config, exact=args.exact)
        self.thread = OneThread("the trainer")
        write_tokenizer(place)  # whose ends no answer has: `stop` is empty
        weights = EmbeddedWeights(self.host, self.thread, args.slots)
        self.samplers = Samplers(self.host, self.thread, load_tokenizer(place), weights)
        self.gathering = Gathering(self.host, self.thread)
        self.models = [Model(f"{i}", Shape(rank), place / str(i), seed=i) for i, rank in enumerate(RANKS)]
        self.turns = 0
        self.spent = {"saving": 0.0, "sampling": 0.0, "training": 0.0}

    async def turn(self, model: Model) -> None:
        self.turns += 1
        number, host = self.turns, self.host
        random = np.random.default_rng(number)
        directory = self.place / f"sampler-{number}"
        begun = time.perf_counter()

        def save() -> Source:
            host.save(model, directory / "state")
            return Source(directory.name, model.shape, directory, model, model.steps)

        source = await self.thread.run(save)
        saved = time.perf_counter()
        prompt = random.integers(0, host.vocabulary, self.args.prompt).tolist()
        body = {
            "prompt": {"chunks": [{"tokens": prompt}]},
            "sampling_params": {"max_tokens": self.args.answer, "stop": []},
            "num_samples": self.args.group,
            "sampling_session_id": "s",
            "seq_id": number,
        }
        asked = requests.read(requests.Sample, json.dumps(body).encode())
        found = (await self.samplers.sample(source, asked, number)).json()["sequences"]
        sampled = time.perf_counter()
        datums = []
        for one in found:
            ids = np.array(prompt + one["tokens"], np.int32)
            answered = len(one["tokens"])
            assert answered == self.args.answer
            logprobs, advantages = np.zeros((2, len(ids) - 1, 1), np.float32)
            logprobs[-answered:, 0] = one["logprobs"]
            advantages[-answered:] = random.normal()
            datums.append(Datum(ids[:-1], ids[1:, None], {"logprobs": logprobs, "advantages": advantages}))
        await self.gathering.forward(model.id, Work(model, datums, "importance_sampling", {}, True))
        await self.thread.run(host.step, model, STEP)
        shutil.rmtree(directory)
        for name, seconds in zip(self.spent, np.diff([begun, saved, sampled, time.perf_counter()]), strict=True):
            self.spent[name] += seconds

    async def at_once(self) -> None:
        await asyncio.gather(*map(self.turn, self.models))

    async def one_by_one(self) -> None:
        for model in self.models:
            await self.turn(model)

    async def measure(self) -> None:
        ways = {"at once": self.at_once, "one after the other": self.one_by_one}
        took: dict[str, list[float]] = {name: [] for name in ways}
        worked: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(self.args.rounds + 2):
            for name, way in ways.items():
                self.spent = dict.fromkeys(self.spent, 0.0)
                begun, before = time.perf_counter(), time.process_time()
                await way()
                seconds, own = time.perf_counter() - begun, time.process_time() - before
                parts = ", ".join(f"{part} {x / len(RANKS):.2f}" for part, x in self.spent.items())
                print(f"round {number}, {name}: {seconds:.2f} s, {own:.2f} processor s; a client's {parts}", file=sys.stderr)
                if number >= 2:
                    took[name].append(seconds)
                    worked[name].append(own)
        await self.samplers.close()
        self.thread.close()
        cells = []
        for name, x in took.items():
            cells.append(f"{statistics.median(x):.2f} ({min(x):.2f}–{max(x):.2f})")
            cells.append(f"{min(worked[name]):.2f}")
        ratios = [statistics.median(took["one after the other"]) / statistics.median(took["at once"])]
        ratios.append(min(worked["one after the other"]) / min(worked["at once"]))
        group, answer, prompt = self.args.group, self.args.answer, self.args.prompt
        print(f"{self.args.backend}, exact: {self.args.exact}; {group} answers of {answer} tokens to {prompt}\n")
        print(
            "| 8 turns at once (s) | processor s | one after the other (s) | processor s | ratio | of processor seconds |\n"
            + "|---" * 6
            + "|"
        )
        print("| " + " | ".join([*cells, *(f"{x:.2f}" for x in ratios)]) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("torch", "jax"), default="torch")
    parser.add_argument("--exact", choices=EXACT, default="samples")
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--answer", type=int, default=16)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        clients = Clients(args, Path(directory))
        asyncio.run(clients.measure())
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        assert clients.host._bank is not None
        print(f"\nadapters with moments: {clients.host._bank.nbytes() / 1e6:.0f} MB; the process at most: {peak:.0f} MiB")


if __name__ == "__main__":
    main()
