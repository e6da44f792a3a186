"""Both backends on an accelerator: the share of peak FLOPs of a training step, the sampler's throughput, and a profile.

    python benchmarks/gpu.py                              # Qwen2.5's 0.5B and 1.5B shapes, random weights, bf16
    python benchmarks/gpu.py --models tiny --tokens 2048 --row-length 256 --slots 8 --drawn 32      # anywhere

Claim: a step of 16,384 tokens in bf16 has a model FLOP utilisation of at least 50 % with JAX and 45 % with torch.

Each backend has a process of its own, one after the other.

A step is a clipped policy update on packed rows (`--row-length`), full of sequences of long-tailed lengths, with AdamW in fp32;
`--rows` of them are computed at once. The best and the median of `--steps` steps after two that compile and warm up. FLOPs are
counted as in benchmarks/update.py: 6 per token and parameter in a product, and attention's causal half within sequences;
recomputation does not count. The peak is the device's own by name (dense bf16), or that of `--peak`; it is shown beside the
fastest of several products of two large matrices in the compute precision, measured in the same process.

The sampler fills `--slots` slots with prompts of 128 tokens and samples `--drawn` tokens in each.

The profile covers one step, by the backend's own profiler: the time of the device's operations by kind.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

if "torch" in sys.argv:  # otherwise JAX, used here for the model's sizes, would take the memory
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from update import flops_of, packed, peak_flops, write_random

from areal_x.algorithms import losses
from areal_x.protocols.engine import SamplingParams
from areal_x.protocols.sampler import SlotRequest
from areal_x.trainer import ModelConfig, OptimizerConfig, Trainer, TrainerConfig, create_trainer
from areal_x.types import Batch
from areal_x_jax.architecture import Architecture, read_architecture

QWEN = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "use_sliding_window": False,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
}
MODELS: dict[str, dict[str, Any]] = {
    "0.5B": QWEN | {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "1.5B": QWEN | {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
    "tiny": QWEN
    | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 512},
}
# Dense bf16 TFLOP/s from the vendors' data sheets, by a part of the device's name.
PEAKS = {"H200": 989, "H100": 989, "A100": 312, "L40S": 362, "L4": 121, "TPU v5 lite": 197, "TPU v5p": 459, "TPU v6": 918}
KINDS = {
    "attention": r"attention|fmha|flash|cudnn",
    "matrix products": r"gemm|dot|cublas|matmul|::mm|::addmm|::bmm|::linear|nvjet|cutlass|sm90_xmma|wgmma",
    "communication": r"all-|all_|reduce-scatter|nccl|collective",
    "copies": r"copy|memcpy|memset|transpose|convert",
}


class JaxDevice:
    """The measurements' JAX-specific parts, besides a trainer."""

    def __init__(self) -> None:
        self.device = jax.devices()[0]
        self.on_cpu = self.device.platform == "cpu"
        self.name = f"{self.device.device_kind} ({self.device.platform}), jax {jax.__version__}"

    def products(self, size: int) -> float:
        return peak_flops(size, 8, jnp.float32 if self.on_cpu else jnp.bfloat16)

    def settle(self, trainer: Any) -> None:
        jax.block_until_ready(trainer.params)

    def most_bytes(self) -> int:
        return int((self.device.memory_stats() or {}).get("peak_bytes_in_use", 0))

    def spent(self, trainer: Trainer, batch: Batch, directory: Path) -> dict[str, float]:
        """Microseconds of one step's operations by kind."""
        with jax.profiler.trace(str(directory / "profile"), create_perfetto_trace=True):
            trainer.update(batch, losses.ppo_clip)
            self.settle(trainer)
        (file,) = (directory / "profile").rglob("perfetto_trace.json.gz")
        with gzip.open(file) as opened:
            return by_kind(innermost(json.load(opened)["traceEvents"]))


class TorchDevice:
    """The measurements' torch-specific parts."""

    def __init__(self) -> None:
        import torch

        from areal_x_torch.device import find_device

        self.torch, self.device = torch, find_device()
        self.on_cpu = self.device.type == "cpu"
        module = getattr(torch, self.device.type)
        kind = "cpu" if self.on_cpu else module.get_device_name(self.device)
        self.name = f"{kind} ({self.device.type}), torch {torch.__version__}"

    def products(self, size: int) -> float:
        dtype = self.torch.float32 if self.on_cpu else self.torch.bfloat16
        x, least = self.torch.ones(size, size, dtype=dtype, device=self.device), np.inf
        for _ in range(9):
            begun = time.perf_counter()
            x @ x
            self.settle(None)
            least = min(least, time.perf_counter() - begun)
        return 2 * size**3 / least

    def settle(self, _: Any) -> None:
        if not self.on_cpu:
            self.torch.accelerator.synchronize()

    def most_bytes(self) -> int:
        return 0 if self.on_cpu else int(self.torch.accelerator.max_memory_allocated())

    def spent(self, trainer: Trainer, batch: Batch, directory: Path) -> dict[str, float]:
        with self.torch.profiler.profile() as found:
            trainer.update(batch, losses.ppo_clip)
            self.settle(trainer)
        # Kernels on an accelerator; on a CPU the self time of operators.
        field = "self_cpu_time_total" if self.on_cpu else "self_device_time_total"
        return by_kind((row.key, getattr(row, field)) for row in found.key_averages())


def main() -> None:
    args = parse_arguments()
    if not args.in_process:
        for backend in args.backends:
            subprocess.run([sys.executable, __file__, *sys.argv[1:], "--in-process", backend], check=True)
        return
    of = {"jax": JaxDevice, "torch": TorchDevice}[args.in_process]()
    measured = of.products(2048 if of.on_cpu else 8192)
    known = next((x * 1e12 for name, x in PEAKS.items() if name in of.name), 0.0)
    peak = args.peak * 1e12 if args.peak else known
    print(f"{of.name}, {'fp32' if of.on_cpu else 'bf16'}")
    print(f"the data sheet says {peak / 1e12:.0f} TFLOP/s, products of two matrices reach {measured / 1e12:.3g}\n", flush=True)
    lines = ["| model | tokens | s a step, best | median | tokens/s | of the peak | of measured products | peak memory |"]
    lines.append("|---" * 8 + "|")
    rest = []
    for name in args.models:
        with tempfile.TemporaryDirectory() as directory:
            trainer, batch, shape, flops = prepare(args, name, Path(directory))
            seconds = timed(trainer, of, batch, args.steps)
            best, median, tokens = min(seconds), statistics.median(seconds), int((batch.segment_ids > 0).sum())
            shares = [f"{flops / best / x:.1%}" if x else "unknown" for x in (peak, measured)]
            figures = f"{tokens:,} | {best:.3f} | {median:.3f} | {tokens / best:,.0f} | {shares[0]} | {shares[1]}"
            lines.append(f"| {name} | {figures} | {of.most_bytes() / 2**30:.1f} GiB |")
            spent = of.spent(trainer, batch, Path(directory))
            total = sum(spent.values())
            kinds = ", ".join(f"{kind} {x / total:.0%}" for kind, x in sorted(spent.items(), key=lambda pair: -pair[1]))
            rest.append(f"{name}, one step's {total / 1e6:.3f} s of operations: {kinds}")
            rest.append(draw(trainer, shape, args, name))
            print(lines[-1], flush=True)
    print("\n".join(["", *lines, "", *rest]))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", nargs="+", choices=("jax", "torch"), default=["jax", "torch"])
    parser.add_argument("--in-process", choices=("jax", "torch"), help=argparse.SUPPRESS)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["0.5B", "1.5B"])
    parser.add_argument("--tokens", type=int, default=16384, help="tokens a step, about")
    parser.add_argument("--row-length", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=4, help="computed at once")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--attention", default="auto", help="model.attention")
    parser.add_argument("--remat", default="auto", help="trainer.remat")
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--drawn", type=int, default=256, help="tokens that each slot draws")
    parser.add_argument("--peak", type=float, help="TFLOP/s of the device, where its name does not say it")
    return parser.parse_args()


def prepare(args: argparse.Namespace, name: str, directory: Path) -> tuple[Trainer, Batch, Architecture, float]:
    """Returns a trainer of this model, the batch of each step, the model's sizes and the FLOPs of a step."""
    config = TrainerConfig(
        model=ModelConfig(str(write_random(directory / "model", MODELS[name])), attention=args.attention),
        optimizer=OptimizerConfig(learning_rate=1e-5),
        micro_batch_rows=args.rows,
        remat=args.remat,
    )
    trainer, shape = create_trainer(args.in_process, config), read_architecture(MODELS[name])
    rng, rows = np.random.default_rng(0), max(args.tokens // args.row_length, 1)
    sequences = [rng.integers(0, shape.vocab, length) for _ in range(rows) for length in cut(args.row_length, rng)]
    batch = packed(sequences, args.row_length)
    batch = batch.replace(advantages=np.ones(batch.shape, np.float32), proximal_logp=trainer.logprobs(batch))
    return trainer, batch, shape, flops_of(shape, np.array([len(x) for x in sequences]))


def cut(length: int, rng: np.random.Generator) -> list[int]:
    """Splits a row's length into one to five sequences of at least eight tokens."""
    cuts = np.sort(rng.choice(np.arange(8, length - 8, 8), int(rng.integers(0, 5)), replace=False))
    return np.diff([0, *cuts, length]).tolist()


def timed(trainer: Trainer, of: JaxDevice | TorchDevice, batch: Batch, steps: int) -> list[float]:
    seconds = []
    for _ in range(steps + 2):
        begun = time.perf_counter()
        trainer.update(batch, losses.ppo_clip)
        of.settle(trainer)
        seconds.append(time.perf_counter() - begun)
    return seconds[2:]


def draw(trainer: Trainer, shape: Architecture, args: argparse.Namespace, name: str) -> str:
    """Tokens per second of the sampler with all slots alive, after a first round that compiles."""
    context = 128 + args.drawn
    sampler = trainer.sampler(args.slots, context)
    sampler.load(trainer.snapshot())
    rng, sampling, rates = np.random.default_rng(1), SamplingParams(max_tokens=args.drawn), []
    for _ in range(3):
        prompts = rng.integers(0, shape.vocab, (args.slots, 128)).astype(np.int32)
        begun = time.perf_counter()
        sampler.fill([SlotRequest(slot, prompt, 0, sampling, slot) for slot, prompt in enumerate(prompts)])
        filled, drawn = time.perf_counter(), 0
        while drawn < args.slots * args.drawn:
            drawn += int(sampler.decode(args.drawn, args.slots).counts.sum())
        rates.append((drawn / (time.perf_counter() - filled), prompts.size / (filled - begun)))
    decoding, filling = rates[-1]
    return (
        f"{name}: the sampler draws {decoding:,.0f} tokens/s in {args.slots} slots and reads prompts at {filling:,.0f} tokens/s"
    )


def innermost(events: list[dict[str, Any]]) -> Iterator[tuple[str, float]]:
    """Names and microseconds of JAX's innermost device operations: on a GPU or TPU from the tracks of its streams and cores, on
    a CPU, which has no such tracks, from the events that XLA names after its instructions.
    """
    processes = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    on_device = {pid for pid, process in processes.items() if "/device:" in process}
    for event in events:
        thread = threads.get((event.get("pid"), event.get("tid")), "")
        of_device = event.get("pid") in on_device and (thread.startswith("Stream") or "XLA Ops" in thread)
        if event.get("ph") == "X" and (of_device if on_device else "hlo_op" in event.get("args", {})):
            yield str(event["name"]), event["dur"]


def by_kind(operations: Iterable[tuple[str, float]]) -> dict[str, float]:
    spent: dict[str, float] = defaultdict(float)
    for name, microseconds in operations:
        spent[next((kind for kind, of in KINDS.items() if re.search(of, name.lower())), "the rest")] += microseconds
    return dict(spent) or {"nothing that the profiler names": 1.0}


if __name__ == "__main__":
    main()
