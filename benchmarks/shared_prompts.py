"""A training step with and without `train.share_prompts`, and the engines' prefill of identical prompts.

    python -m benchmarks.shared_prompts
    python -m benchmarks.shared_prompts --server
    python -m benchmarks.shared_prompts --backends torch --sizes 256x64x8

Claim: if a prompt is four times as long as its eight answers, a step takes at most half the time; if sharing saves little, it
costs nothing.

Method: one GRPO update of the benchmarks' model in fp32 on 4 groups, with prompts and answers between half and one and a half
times the named length, in rows of 1,024 tokens. Both packings are warmed up, then stepped alternately in one process; a ratio
is that of the median seconds. Tokens are those in rows; JAX computes whole rows, padding included, and torch the tokens only.
Then each backend's sampler is filled with 64 prompts of the first named length, all different or as many copies of each as
there are attempts, alternately.

--server: only this; a vLLM server generates 64 completions, 8 per prompt at once; then each is continued, as in a second turn.
Shown is the number of prompt tokens found in its prefix cache, by its own count.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from areal_x.algorithms.recipes import grpo
from areal_x.batching.batch import Models, make_batches
from areal_x.engines.vllm.config import VLLMConfig
from areal_x.engines.vllm.engine import VLLMEngine
from areal_x.protocols.engine import Request, SamplingParams
from areal_x.protocols.sampler import SlotRequest
from areal_x.trainer import ModelConfig, Trainer, TrainerConfig, create_trainer
from areal_x.types import Batch, Episode, Group, Scored, Task, Trajectory
from benchmarks.model import VOCABULARY, write_model

ROW, GROUPS, SLOTS = 1024, 4, 64
SIZES = ("256x64x8", "320x32x16", "128x128x8", "64x256x8", "32x64x8", "16x64x8")  # prompt, answer, attempts
ALGORITHM = grpo()


def groups_of(prompt: int, answer: int, attempts: int) -> list[Group]:
    rng = np.random.default_rng(0)

    def drawn(length: int) -> np.ndarray:
        return rng.integers(0, VOCABULARY, int(rng.integers(length // 2, length * 3 // 2 + 1)))

    def episode(begin: np.ndarray) -> Episode:
        tokens = drawn(answer)
        trajectory = Trajectory.from_completion(begin, tokens, np.full(len(tokens), -4.6), np.zeros(len(tokens)))
        return Episode(Scored(float(rng.random())), (trajectory,))

    begins = [drawn(prompt) for _ in range(GROUPS)]
    return [Group(Task(str(i), ""), i, 0, tuple(episode(b) for _ in range(attempts))) for i, b in enumerate(begins)]


def seconds_of(trainer: Trainer, batches: list[Batch], rounds: int) -> list[list[float]]:
    """Seconds per batch, alternating; the first two rounds, which compile, are excluded."""
    taken: list[list[float]] = [[] for _ in batches]
    for _ in range(rounds + 2):
        for seconds, batch in zip(taken, batches, strict=True):
            begun = time.perf_counter()
            trainer.update(batch, ALGORITHM.loss)
            seconds.append(time.perf_counter() - begun)
    return [seconds[2:] for seconds in taken]


def measure(backend: str, size: str, directory: Path, rounds: int) -> dict[str, Any]:
    groups = groups_of(*map(int, size.split("x")))
    trainer = create_trainer(backend, TrainerConfig(model=ModelConfig(str(directory)), micro_batch_rows=2, share_prompts=True))
    pack = partial(make_batches, groups, ALGORITHM, ROW, Models(trainer))
    batches = [batch for shares in (False, True) for batch in pack(share_prompts=shares)]
    taken = seconds_of(trainer, batches, rounds)
    alone, shared = (statistics.median(seconds) for seconds in taken)
    return {
        "backend": backend,
        "size": size,
        "tokens": [int(np.count_nonzero(batch.segment_ids)) for batch in batches],
        "rows": [len(batch.tokens) for batch in batches],
        "seconds": [alone, shared],
        "ratio": shared / alone,
    }


def measure_fill(backend: str, size: str, directory: Path, rounds: int) -> dict[str, Any]:
    """Seconds of the prefill of SLOTS prompts: all different, and with as many copies as there are attempts."""
    prompt, _, attempts = map(int, size.split("x"))
    trainer = create_trainer(backend, TrainerConfig(model=ModelConfig(str(directory))))
    sampler, rng = trainer.sampler(SLOTS, prompt + 16), np.random.default_rng(0)
    sampler.load(trainer.snapshot())
    how = SamplingParams(max_tokens=8)
    taken: list[list[float]] = [[], []]
    for _ in range(rounds + 2):
        for seconds, of_each in zip(taken, (1, attempts), strict=True):
            prompts = [rng.integers(0, VOCABULARY, prompt).astype(np.int32) for _ in range(SLOTS // of_each)]
            requests = [SlotRequest(slot, prompts[slot // of_each], 0, how, slot) for slot in range(SLOTS)]
            begun = time.perf_counter()
            sampler.fill(requests)
            seconds.append(time.perf_counter() - begun)
            sampler.free(range(SLOTS))
    alone, alike = (statistics.median(seconds[2:]) for seconds in taken)
    return {"backend": backend, "size": size, "seconds": [alone, alike], "ratio": alike / alone}


async def measure_server(directory: Path, prompt: int, answer: int, attempts: int, context: int) -> dict[str, tuple[int, int]]:
    """Returns, for the first and the second turn, the number of prompt tokens and how many of them the server did not
    compute."""
    rng, how = np.random.default_rng(0), SamplingParams(max_tokens=answer)
    engine = VLLMEngine(
        VLLMConfig(context=context, concurrency=SLOTS, adaptive=True), directory, directory / "logs", report=lambda line: None
    )
    await engine.start()
    (replica,) = engine.supervisor.replicas.values()
    found, before = {}, np.zeros(2, int)
    try:
        drawn = [rng.integers(0, VOCABULARY, prompt).astype(np.int32) for _ in range(SLOTS // attempts)]
        prompts = [one for one in drawn for _ in range(attempts)]
        for turn in ("first turn", "second turn"):
            said = await asyncio.gather(*(engine.generate(Request(tokens, how)) for tokens in prompts))
            text = await replica.client.metrics()
            now = np.array([counted(text, f"vllm:prefix_cache_{what}_total") for what in ("queries", "hits")])
            found[turn], before = tuple((now - before).tolist()), now
            more = rng.integers(0, VOCABULARY, answer).astype(np.int32)  # a tool's result
            prompts = [np.concatenate([p, one.tokens, more]) for p, one in zip(prompts, said, strict=True)]
    finally:
        await engine.close()
    return found


def counted(text: str, name: str) -> int:
    """The sum of a counter in Prometheus text format."""
    return int(sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(f"{name}{{")))


def show_server(size: str) -> None:
    prompt, answer, attempts = map(int, size.split("x"))
    context = 2 * prompt + 3 * answer
    with TemporaryDirectory() as folder:
        directory = write_model(Path(folder))
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps({**config, "max_position_embeddings": context}))
        found = asyncio.run(measure_server(directory, prompt, answer, attempts, context))
    print("| vLLM | tokens of prompts | of these from its cache |\n|---|---|---|")
    for turn, (asked, held) in found.items():
        print(f"| {turn} | {asked:,} | {held:,} ({held / asked:.0%}) |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", nargs="+", default=["jax", "torch"])
    parser.add_argument("--sizes", nargs="+", default=SIZES, help="prompt x answer x attempts")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--server", action="store_true", help="measure a vLLM server alone")
    args = parser.parse_args()
    if args.server:
        show_server(args.sizes[0])
        return
    print("| backend | prompt × answer × attempts | tokens | shared | rows | shared | step, s | shared | ratio |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    results = []
    with TemporaryDirectory() as folder:
        directory = write_model(Path(folder))
        for backend, size in product(args.backends, args.sizes):
            found = measure(backend, size, directory, args.rounds)
            results.append(found)
            (tokens, fewer), (rows, fewer_rows), (seconds, shorter) = found["tokens"], found["rows"], found["seconds"]
            cells = f"{tokens:,} | {fewer:,} | {rows} | {fewer_rows} | {seconds:.2f} | {shorter:.2f} | **{found['ratio']:.2f}**"
            print(f"| {backend} | {size.replace('x', ' × ')} | {cells} |", flush=True)
        print("\n| backend | prompt × attempts | prefill of different prompts, s | of alike ones, s | ratio |")
        print("|---|---|---|---|---|")
        fills = [measure_fill(backend, args.sizes[0], directory, args.rounds) for backend in args.backends]
        for found in fills:
            prompt, _, attempts = found["size"].split("x")
            seconds, shorter = found["seconds"]
            print(f"| {found['backend']} | {prompt} × {attempts} | {seconds:.3f} | {shorter:.3f} | **{found['ratio']:.2f}** |")
    print(json.dumps({"benchmark": "shared_prompts", "results": results, "prefill": fills}))


if __name__ == "__main__":
    main()
