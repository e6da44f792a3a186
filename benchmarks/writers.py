"""How much faster several processes write one version of the weights than one does.

    python benchmarks/writers.py [--megabytes 256] [--writers 1 2 4] [--rate 50] [--folder /dev/shm]

Claim: four writers take at most 1/2.5 of the time of one where a writer's connection to the storage is the bound.

Each writer is a process with areal_x.cluster.rank.Rank, as on Ray, without a model: it copies the tensors of its turn and
writes them when all are ready. Two cases: the folder as it is (shared memory by default, where cores and memory are the bound,
and four writers on two cores cannot be 2.5 × as fast as one), and emulated storage that takes `--rate` MB/s from each client,
as network file systems do: a writer sleeps for each tensor before it writes it. Printed: seconds from the call to the last
writer's end, medians of five, and all writers' CPU seconds.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from areal_x.cluster import rank as rank_module
from areal_x.cluster.rank import Rank, RankSpec
from areal_x.hf.weight_copy import Tensors, write_shards
from areal_x.protocols.trainer import Mine

MEGABYTE = 10**6
TENSOR = np.ones((1000, 1000), np.float32)  # 4 MB
REPEATS = 5


class Model:
    """A trainer whose weights are one tensor under many names."""

    def __init__(self, megabytes: int) -> None:
        self.count = megabytes * MEGABYTE // TENSOR.nbytes

    def weights(self, mine: Mine) -> Iterator[tuple[str, np.ndarray]]:
        return ((f"layers.{i}.weight", TENSOR) for i in range(self.count) if mine(TENSOR.nbytes))


def slowly(rate: float) -> None:
    """Makes this process write so many megabytes a second."""

    def delayed(tensors: Tensors) -> Iterator[tuple[str, np.ndarray]]:
        for name, x in tensors:
            time.sleep(x.nbytes / rate / MEGABYTE)
            yield name, x

    def write(folder: Path, tensors: Tensors, writer: int) -> dict[str, int]:
        return write_shards(folder, delayed(tensors), writer=writer)

    rank_module.write_shards = write  # type: ignore[assignment]


def writer(number: int, count: int, megabytes: int, rate: float, calls: Connection) -> None:
    if rate:
        slowly(rate)
    rank = Rank(RankSpec("torch", count, {}, {}, ""), number)
    rank._trainers["policy"] = Model(megabytes)  # type: ignore[assignment]
    rank.copy_weights("policy", range(count))
    calls.send(None)
    while (folder := calls.recv()) is not None:
        cpu = time.process_time()
        rank.write_weights(folder, range(count))
        calls.send(time.process_time() - cpu)


def measure(count: int, megabytes: int, rate: float, parent: Path) -> tuple[float, float]:
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(count)]
    processes = [
        context.Process(target=writer, args=(number, count, megabytes, rate, theirs))
        for number, (_, theirs) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    ours = [pipe for pipe, _ in pipes]
    for pipe in ours:
        pipe.recv()
    seconds, cpu = [], []
    for _ in range(REPEATS):
        folder = Path(tempfile.mkdtemp(dir=parent))
        began = time.perf_counter()
        for pipe in ours:
            pipe.send(folder)
        cpu.append(sum(pipe.recv() for pipe in ours))
        seconds.append(time.perf_counter() - began)
        written = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        assert written > megabytes // 4 * 4 * MEGABYTE, written
        shutil.rmtree(folder)
    for pipe in ours:
        pipe.send(None)
    for process in processes:
        process.join()
    return statistics.median(seconds), statistics.median(cpu)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--writers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rate", type=float, default=50, help="MB/s of the emulated storage for each client")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    options = parser.parse_args()
    results: dict[str, dict[int, float]] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for name, rate in ((str(options.folder), 0.0), (f"{options.rate:g} MB/s each", options.rate)):
            results[name] = {}
            for count in options.writers:
                seconds, cpu = measure(count, options.megabytes, rate, Path(folder))
                results[name][count] = seconds
                faster = results[name][options.writers[0]] / seconds
                print(f"{name:16} {count} writers: {seconds:.3f} s, {cpu:.3f} s of CPU, {faster:.2f} × the first", flush=True)
    print(json.dumps({"benchmark": "writers", "megabytes": options.megabytes, "seconds": results}))


if __name__ == "__main__":
    main()
