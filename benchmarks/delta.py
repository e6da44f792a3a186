"""Bytes that deltas take (`vllm.delta`), and the seconds to make and apply them.

    python -m benchmarks.delta bytes [--steps 50] [--rates 5e-5 1e-5 1e-6]
    python -m benchmarks.delta seconds [--steps 6]

bytes. Claim: every version that a server makes of deltas is the trainer's, bit for bit, and a delta takes a small share of
whole files where servers have bf16. examples/arithmetic/grpo.gin is run for each learning rate (5e-5 is the file's); after each
step the trainer's own weights go through the trainer's and the server's side of deltas, as fp32 and rounded to bf16 (what a
trainer on an accelerator publishes), and all tensors that the server then has are compared with the trainer's. Printed, as
means over the steps: the share of numbers that changed, and bytes as a share of whole files, of deltas and of two other forms.
These are positions as gaps and the differences, each compressed; and the exclusive or of the bits in planes of bytes,
compressed (zlib, level 6).

seconds. The model and the step of benchmarks/update.py: 26M parameters, trained by the torch backend at 1e-6. Printed, as
medians: seconds to write whole files (staging, as without deltas), to make a delta, its digests included, to read whole files,
to apply the delta, the digest included, and to copy whole files into the cache, the digest included; and the ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from areal_x.algorithms import losses
from areal_x.engines.embedded import EmbeddedEngine
from areal_x.engines.fleet.delta.cache import Cache, Order
from areal_x.engines.fleet.delta.codec import compressed, words_of
from areal_x.engines.fleet.delta.history import History
from areal_x.engines.fleet.staging import StagedFiles, Staging
from areal_x.hf.model_dir import read_tensors
from areal_x.protocols.backends import create_trainer
from areal_x.protocols.trainer_config import ModelConfig, OptimizerConfig, TrainerConfig

SERVED = {"fp32": np.float32, "bf16": ml_dtypes.bfloat16}
Weights = dict[str, np.ndarray]


class Link:
    """Both sides of deltas, in one process."""

    def __init__(self, folder: Path) -> None:
        self.staging, self.history = Staging(folder / "staging"), History(10**9, iter)
        self.cache = Cache(f"{folder / 'cache'}", self.staging.root.name)
        self.staged: StagedFiles | None = None

    def publish(self, version: int, weights: Weights) -> StagedFiles:
        self.history.take(version, weights.items(), self.staged)
        self.staged = self.history.stage(self.staging, version, self.staged, lambda: None)
        self.staging.keep(self.staged)
        return self.staged

    def make(self, staged: StagedFiles) -> Path:
        root = self.staging.root
        made = self.cache.make(Order("", root.name, f"{root}", f"{staged.folder}", staged.digest, staged.base))
        assert made is not None
        return made

    def close(self) -> None:
        self.cache.remove()
        self.staging.close()


def is_exact(folder: Path, weights: Weights) -> bool:
    found = dict(read_tensors(folder))
    return found.keys() == weights.keys() and all(found[name].tobytes() == x.tobytes() for name, x in weights.items())


def as_gaps(new: np.ndarray, old: np.ndarray) -> int:
    """Bytes of the positions that changed, as gaps of one byte or of four behind a 255, and of the differences."""
    at = np.flatnonzero(new != old)
    gaps = np.diff(at, prepend=-1).astype(np.uint32)
    difference = (new - old)[at]
    folded = (difference << 1) ^ (0 - (difference >> (8 * new.itemsize - 1)))
    places = np.minimum(gaps, 255).astype(np.uint8).tobytes() + gaps[gaps >= 255].tobytes()
    return sum(len(compressed(part)) for part in (places, *planes(folded)))


def as_exclusive_or(new: np.ndarray, old: np.ndarray) -> int:
    return sum(len(zlib.compress(plane, 6)) for plane in planes(new ^ old))


def planes(words: np.ndarray) -> Iterable[bytes]:
    return (plane.tobytes() for plane in words.view(np.uint8).reshape(len(words), words.itemsize).T)


def measure_bytes(rate: float, steps: int, scratch: Path) -> dict[str, dict[str, float]]:
    from areal_x.__main__ import run

    links = {kind: Link(scratch / kind) for kind in SERVED}
    before: dict[str, Weights] = {}
    rows: dict[str, dict[str, list[float]]] = {kind: defaultdict(list) for kind in SERVED}
    plain = EmbeddedEngine.stage

    def stage(self: EmbeddedEngine, trainer: Any, version: int | None = None) -> Any:
        trained = {name: np.array(x) for name, x in trainer.weights()}
        for kind, dtype in SERVED.items():
            weights = {name: x.astype(dtype) for name, x in trained.items()}
            staged = links[kind].publish(trainer.version, weights)
            rows[kind]["exact"].append(is_exact(links[kind].make(staged), weights))
            if kind in before:
                size = sum(x.nbytes for x in weights.values())
                pairs = [[words_of(x[name], x[name].itemsize) for x in (weights, before[kind])] for name in weights]
                rows[kind]["changed"].append(sum(np.count_nonzero(a != b) for a, b in pairs) / sum(len(a) for a, _ in pairs))
                rows[kind]["delta"].append(staged.bytes / size)
                rows[kind]["gaps"].append(sum(as_gaps(a, b) for a, b in pairs) / size)
                rows[kind]["xor"].append(sum(as_exclusive_or(a, b) for a, b in pairs) / size)
            before[kind] = weights
        return plain(self, trainer, version)

    bindings = {
        "optimizer.learning_rate": rate,
        "train.steps": steps,
        "train.runs": f"{scratch}",
        "train.name": "run",
        "train.checkpoint_every": 0,
        "train.evaluate_every": 0,
    }
    words = [word for name, value in bindings.items() for word in ("-b", f"{name} = {value!r}")]
    EmbeddedEngine.stage = stage  # type: ignore[method-assign, assignment]
    try:
        assert run(["train", "examples/arithmetic/grpo.gin", *words]) == 0
    finally:
        EmbeddedEngine.stage = plain  # type: ignore[method-assign]
        for link in links.values():
            link.close()
    found = {}
    for kind, lists in rows.items():
        exact = lists.pop("exact")
        assert len(exact) == steps + 1
        found[kind] = {"exact": sum(exact), "versions": len(exact), "largest delta": max(lists["delta"])}
        found[kind] |= {name: statistics.fmean(values) for name, values in lists.items()}
    return found


def measure_seconds(steps: int, scratch: Path) -> dict[str, dict[str, float]]:
    sys.path.insert(0, str(Path(__file__).parent))
    from update import CONFIG, draw_sequences, packed, write_random

    model = write_random(scratch / "model", CONFIG)
    batch = packed(draw_sequences(CONFIG["vocab_size"], 16, 250))
    config = TrainerConfig(ModelConfig(str(model)), optimizer=OptimizerConfig(learning_rate=1e-6), row_length=1024)
    trainer = create_trainer("torch", config)
    links = {kind: Link(scratch / kind) for kind in SERVED}
    seconds: dict[str, dict[str, list[float]]] = {kind: defaultdict(list) for kind in SERVED}

    @contextmanager
    def timed(kind: str, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        seconds[kind][name].append(time.perf_counter() - began)

    for version in range(steps + 1):
        for kind, dtype in SERVED.items():
            link = links[kind]
            weights = {name: np.array(x).astype(dtype) for name, x in trainer.weights()}
            base = link.staged
            link.history.take(version, weights.items(), base)
            if base is None:
                link.staged = link.history.stage(link.staging, version, None, lambda: None)
                link.make(link.staged)
                continue
            with timed(kind, "write"):
                plain = link.staging.stage(weights.items(), version, name="-plain")
            with timed(kind, "make"):
                staged = link.history.stage(link.staging, version, base, lambda: None)
            assert staged.base
            with timed(kind, "read"):
                sum(int(x.view(np.uint8).sum()) for _, x in read_tensors(plain.folder))
            with timed(kind, "apply"):
                made = link.make(staged)
            assert is_exact(made, weights)
            seconds[kind]["share"].append(staged.bytes / plain.bytes)
            link.cache.keep(None)
            whole = link.history.stage_whole(link.staging, staged)
            with timed(kind, "copy"):
                link.make(whole)
            link.staging.keep(staged)
            link.staged = staged
        trainer.update(batch, losses.sft)
    for link in links.values():
        link.close()
    found = {kind: {name: statistics.median(values) for name, values in x.items()} for kind, x in seconds.items()}
    for row in found.values():
        row["make / write"], row["apply / read"] = row["make"] / row["write"], row["apply"] / row["read"]
        row["apply / copy"] = row["apply"] / row["copy"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["bytes", "seconds"])
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--rates", nargs="+", type=float, default=[5e-5, 1e-5, 1e-6])
    given = parser.parse_args()
    results: dict[str, Any] = {}
    if given.part == "bytes":
        for rate in given.rates:
            with tempfile.TemporaryDirectory() as scratch:
                results[f"{rate:g}"] = measure_bytes(rate, given.steps or 50, Path(scratch))
            print(f"{rate:g}", json.dumps(results[f"{rate:g}"]), flush=True)
    else:
        with tempfile.TemporaryDirectory() as scratch:
            results = measure_seconds(given.steps or 6, Path(scratch))
    print(json.dumps({"benchmark": "delta", given.part: results}, indent=1))


if __name__ == "__main__":
    main()
