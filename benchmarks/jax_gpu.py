"""The JAX backend on an accelerator: what share of its peak a training step reaches, how fast the sampler draws, and a profile.

    python benchmarks/jax_gpu.py                              # Qwen2.5's 0.5B and 1.5B shapes, random weights, bf16
    python benchmarks/jax_gpu.py --models tiny --tokens 2048 --row-length 256 --slots 8 --drawn 32      # anywhere

Claim: a step of 16,384 tokens in bf16 has a model FLOP utilisation of at least 50 %.

A step is a clipped policy update on packed rows (`--row-length`), full of sequences of long-tailed lengths, with AdamW in fp32;
`--rows` of them are computed at once. The best and the median of `--steps` steps after two that compile and warm up. FLOPs are
counted as in benchmarks/update.py: 6 a token and parameter in a product, and attention's causal half within sequences; what
is computed again counts nothing. The peak is the device's own by name (dense bf16), or with `--peak` any other; beside it
stands the fastest of several products of two large matrices in the compute precision, measured in the same process.

The sampler fills `--slots` slots with prompts of 128 tokens and draws `--drawn` tokens in each.

The profile is of one step, by JAX's own profiler: the time in the device's operations by their kind.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from update import flops_of, packed, peak_flops, write_random

from areal_x.algorithms import losses
from areal_x.rollout.engine import SamplingParams
from areal_x.rollout.sampler import SlotRequest
from areal_x.trainer import ModelConfig, OptimizerConfig, TrainerConfig
from areal_x.types import Batch
from areal_x_jax.trainer import Trainer

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
# Dense bf16, as the vendors' data sheets say: TFLOP/s by a part of the device's name.
PEAKS = {"H200": 989, "H100": 989, "A100": 312, "L40S": 362, "L4": 121, "TPU v5 lite": 197, "TPU v5p": 459, "TPU v6": 918}
KINDS = {
    "attention": r"attention|fmha|flash|cudnn",
    "matrix products": r"gemm|dot|cublas|matmul|nvjet|cutlass|sm90_xmma|wgmma",
    "communication": r"all-|all_|reduce-scatter|nccl|collective",
    "copies": r"copy|memcpy|memset|transpose|convert",
}


def main() -> None:
    args = parse_arguments()
    device = jax.devices()[0]
    dtype = jnp.float32 if device.platform == "cpu" else jnp.bfloat16
    measured = peak_flops(2048 if device.platform == "cpu" else 8192, 8, dtype)
    known = next((x * 1e12 for name, x in PEAKS.items() if name in device.device_kind), 0.0)
    peak = args.peak * 1e12 if args.peak else known
    print(f"{device.device_kind} ({device.platform}), jax {jax.__version__}, {jnp.dtype(dtype).name}")
    print(f"the data sheet says {peak / 1e12:.0f} TFLOP/s, products of two matrices reach {measured / 1e12:.3g}\n", flush=True)
    lines = ["| model | tokens | s a step, best | median | tokens/s | of the peak | of measured products | peak memory |"]
    lines.append("|---" * 8 + "|")
    rest = []
    for name in args.models:
        with tempfile.TemporaryDirectory() as directory:
            trainer, batch, flops = prepare(args, name, Path(directory))
            seconds = timed(trainer, batch, args.steps)
            best, median, tokens = min(seconds), statistics.median(seconds), int((batch.segment_ids > 0).sum())
            shares = [f"{flops / best / x:.1%}" if x else "unknown" for x in (peak, measured)]
            memory = (device.memory_stats() or {}).get("peak_bytes_in_use", 0) / 2**30
            figures = f"{tokens:,} | {best:.3f} | {median:.3f} | {tokens / best:,.0f} | {shares[0]} | {shares[1]}"
            lines.append(f"| {name} | {figures} | {memory:.1f} GiB |")
            rest.append(profile(trainer, batch, Path(directory), name))
            rest.append(draw(trainer, args, name))
            print(lines[-1], flush=True)
    print("\n".join(["", *lines, "", *rest]))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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


def prepare(args: argparse.Namespace, name: str, directory: Path) -> tuple[Trainer, Batch, float]:
    """A trainer of this model, the batch of each step and the FLOPs of one."""
    config = TrainerConfig(
        model=ModelConfig(str(write_random(directory / "model", MODELS[name])), attention=args.attention),
        optimizer=OptimizerConfig(learning_rate=1e-5),
        micro_batch_rows=args.rows,
        remat=args.remat,
    )
    trainer = Trainer(config)
    rng, rows = np.random.default_rng(0), max(args.tokens // args.row_length, 1)
    sequences = [rng.integers(0, trainer.shape.vocab, length) for _ in range(rows) for length in cut(args.row_length, rng)]
    batch = packed(sequences, args.row_length)
    batch = batch.replace(advantages=np.ones(batch.shape, np.float32), proximal_logp=trainer.logprobs(batch))
    return trainer, batch, flops_of(trainer.shape, np.array([len(x) for x in sequences]))


def cut(length: int, rng: np.random.Generator) -> list[int]:
    """A row's length as one to five sequences of at least eight tokens."""
    cuts = np.sort(rng.choice(np.arange(8, length - 8, 8), int(rng.integers(0, 5)), replace=False))
    return np.diff([0, *cuts, length]).tolist()


def timed(trainer: Trainer, batch: Batch, steps: int) -> list[float]:
    seconds = []
    for _ in range(steps + 2):
        begun = time.perf_counter()
        trainer.update(batch, losses.ppo_clip)
        jax.block_until_ready(trainer.params)
        seconds.append(time.perf_counter() - begun)
    return seconds[2:]


def draw(trainer: Trainer, args: argparse.Namespace, name: str) -> str:
    """Tokens a second of the sampler with all slots alive, after a first round that compiles."""
    context = 128 + args.drawn
    sampler = trainer.sampler(args.slots, context)
    sampler.load(trainer.snapshot())
    rng, sampling, rates = np.random.default_rng(1), SamplingParams(max_tokens=args.drawn), []
    for _ in range(3):
        prompts = rng.integers(0, trainer.shape.vocab, (args.slots, 128)).astype(np.int32)
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


def profile(trainer: Trainer, batch: Batch, directory: Path, name: str) -> str:
    """The share of each kind of operation in the time that the device computes in one step."""
    with jax.profiler.trace(str(directory / "profile"), create_perfetto_trace=True):
        trainer.update(batch, losses.ppo_clip)
        jax.block_until_ready(trainer.params)
    (file,) = (directory / "profile").rglob("perfetto_trace.json.gz")
    with gzip.open(file) as opened:
        spent = by_kind(json.load(opened)["traceEvents"])
    total = sum(spent.values())
    shares = ", ".join(f"{kind} {x / total:.0%}" for kind, x in sorted(spent.items(), key=lambda pair: -pair[1]))
    return f"{name}, one step's {total / 1e6:.3f} s of operations: {shares}"


def by_kind(events: list[dict[str, Any]]) -> dict[str, float]:
    """Microseconds of the innermost device operations by kind. On a GPU or TPU the tracks of its streams and cores; on a CPU,
    which has no such tracks, those that XLA names after its instructions."""
    processes = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    on_device = {pid for pid, process in processes.items() if "/device:" in process}

    def counts(event: dict[str, Any]) -> bool:
        if event.get("ph") != "X":
            return False
        if on_device:
            thread = threads.get((event["pid"], event.get("tid")), "")
            return event["pid"] in on_device and (thread.startswith("Stream") or "XLA Ops" in thread)
        return "hlo_op" in event.get("args", {})

    spent: dict[str, float] = defaultdict(float)
    for event in filter(counts, events):
        name = str(event["name"]).lower()
        spent[next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), "the rest")] += event["dur"]
    return dict(spent) or {"nothing that the profiler names": 1.0}


if __name__ == "__main__":
    main()
