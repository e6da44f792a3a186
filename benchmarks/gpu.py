"""Both backends on an accelerator: the share of peak FLOPs of a training step, the sampler's throughput, and a profile.

    python benchmarks/gpu.py                              # Qwen2.5's 0.5B and 1.5B shapes, random weights, bf16
    python benchmarks/gpu.py --models --layers-of "Qwen3-30B-A3B, 4 layers" "gpt-oss-20b, 2 layers" --rows 8 --slots 0
    python benchmarks/gpu.py --points 0.6B-16k 0.6B-64k 4B-lora-64k --models    # whole sequences in Qwen3's shapes
    python benchmarks/gpu.py --models tiny --tokens 2048 --row-length 256 --slots 8 --drawn 32      # anywhere

Claims: a step of 16,384 tokens of packed rows in bf16 has a model FLOP utilisation of at least 50 % with JAX and 45 % with
torch; one of a whole sequence of at least 25 % for Qwen3-0.6B at 16k tokens, 35 % at 64k, and 45 % for Qwen3-4B with adapters
at 64k. The weights of 0.6B parameters are swapped in 50 ms.

Each backend has a process of its own, one after the other.

A step is a clipped policy update on packed rows (`--row-length`), full of sequences of long-tailed lengths, with AdamW in fp32;
`--rows` of them are computed at once. The best and the median of `--steps` steps after two that compile and warm up. FLOPs are
counted as benchmarks/shapes.py does (4 instead of 6 per token and parameter in a product if it is frozen, in a model with
adapters: it needs no gradient of its own, and adapters are too small to count). The column 6N counts 6 per token and parameter
in a product for all models, and no attention. The peak is the device's own by name (dense bf16), or that of `--peak`; beside it
is the fastest of several products of two large random matrices in the compute precision, measured in the same process.

Measured figures, and which of these claims are not reached or not measured: benchmarks/README.md, "On an accelerator".

The sampler fills `--slots` slots with prompts of 128 tokens and samples `--drawn` tokens in each. Its pause for new weights is
the time of a trainer's snapshot and of the sampler's load, both waited for.

Invariance: the same sequences' probabilities, read one sequence a row, in the packed rows and with another chunk of the head:
the share of tokens whose probability moves by more than a tenth of itself.

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
from dataclasses import fields
from pathlib import Path
from typing import Any

if "torch" in sys.argv:  # otherwise JAX, used here for the model's sizes, would take the memory
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file
from shapes import LARGE, flops_of, parameters_in_products
from update import packed

from areal_x.algorithms import losses
from areal_x.algorithms.weighting import token_mean
from areal_x.protocols.engine import SamplingParams
from areal_x.protocols.sampler import SlotRequest
from areal_x.trainer import LoRAConfig, ModelConfig, OptimizerConfig, Trainer, TrainerConfig, create_trainer
from areal_x.types import Batch
from areal_x_jax.architecture import Architecture, read_architecture
from areal_x_jax.parameters import parameter_shapes
from areal_x_jax.weights import to_arrays

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
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "attention_bias": False,
    "use_sliding_window": False,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
}
QWEN3_06B = QWEN3 | {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
}
QWEN3_4B = QWEN3 | {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
}
MODELS: dict[str, dict[str, Any]] = {
    "0.5B": QWEN | {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "0.6B": QWEN3_06B,
    "1.5B": QWEN | {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
    "tiny": QWEN
    | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 512},
}
# Rows of one whole sequence: a model, the length and the rank of adapters.
POINTS: dict[str, tuple[dict[str, Any], int, int]] = {
    "0.6B-16k": (QWEN3_06B, 16384, 0),
    "0.6B-64k": (QWEN3_06B, 65536, 0),
    "4B-lora-64k": (QWEN3_4B, 65536, 16),
    "tiny-whole": (MODELS["tiny"], 512, 0),
    "tiny-lora": (MODELS["tiny"], 512, 4),
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
        x = jax.random.normal(jax.random.key(0), (size, size), jnp.float32 if self.on_cpu else jnp.bfloat16)
        product, least = jax.jit(jnp.matmul), np.inf
        for _ in range(13):
            begun = time.perf_counter()
            jax.block_until_ready(product(x, x))
            least = min(least, time.perf_counter() - begun)
        return 2 * size**3 / least

    def settle(self, trainer: Any, *others: Any) -> None:
        jax.block_until_ready((trainer.params, *others))

    def most_bytes(self) -> int:
        return int((self.device.memory_stats() or {}).get("peak_bytes_in_use", 0))

    def spent(self, trainer: Trainer, batch: Batch, directory: Path) -> Iterable[tuple[str, float]]:
        """Names and microseconds of one step's operations."""
        with jax.profiler.trace(str(directory / "profile"), create_perfetto_trace=True):
            trainer.update(batch, losses.ppo_clip)
            self.settle(trainer)
        (file,) = (directory / "profile").rglob("perfetto_trace.json.gz")
        with gzip.open(file) as opened:
            return innermost(json.load(opened)["traceEvents"])


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
        x, least = self.torch.randn(size, size, dtype=dtype, device=self.device), np.inf
        for _ in range(13):
            begun = time.perf_counter()
            x @ x
            self.settle(None)
            least = min(least, time.perf_counter() - begun)
        return 2 * size**3 / least

    def settle(self, *_: Any) -> None:
        if not self.on_cpu:
            self.torch.accelerator.synchronize()

    def most_bytes(self) -> int:
        return 0 if self.on_cpu else int(self.torch.accelerator.max_memory_allocated())

    def spent(self, trainer: Trainer, batch: Batch, directory: Path) -> Iterable[tuple[str, float]]:
        with self.torch.profiler.profile() as found:
            trainer.update(batch, losses.ppo_clip)
            self.settle(trainer)
        # Kernels on an accelerator; on a CPU the self time of operators.
        kind = self.torch.autograd.DeviceType.CPU if self.on_cpu else self.torch.autograd.DeviceType.CUDA
        own = (event for event in found.events() if event.device_type == kind)
        return [(event.name, event.self_cpu_time_total if self.on_cpu else event.self_device_time_total) for event in own]


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
    lines = ["| model | tokens | s a step, best | median | tokens/s | of the peak | of measured products | 6N | peak memory |"]
    lines.append("|---" * 9 + "|")
    rest = []
    for name in [*args.points, *args.models, *args.layers_of]:
        with tempfile.TemporaryDirectory() as directory:
            trainer, batch, shape, flops, of_six = prepare(args, name, Path(directory))
            seconds = timed(trainer, of, batch, args)
            best, median, tokens = min(seconds), statistics.median(seconds), int((batch.segment_ids > 0).sum())
            shares = [f"{x / best / y:.1%}" if y else "unknown" for x, y in ((flops, peak), (flops, measured), (of_six, peak))]
            figures = f"{tokens:,} | {best:.3f} | {median:.3f} | {tokens / best:,.0f} | {' | '.join(shares)}"
            lines.append(f"| {name} | {figures} | {of.most_bytes() / 2**30:.1f} GiB |")
            print(lines[-1], flush=True)
            if args.profile:
                operations = list(of.spent(trainer, batch, Path(directory)))
                spent = by_kind(operations)
                total = sum(spent.values())
                kinds = ", ".join(f"{kind} {x / total:.0%}" for kind, x in sorted(spent.items(), key=lambda pair: -pair[1]))
                rest.append(f"{name}, one step's {total / 1e6:.3f} s of operations: {kinds}")
                rest += longest(operations, args.top)
            if args.invariance:
                rest.append(f"{name}: {moved(trainer, batch)}")
            if args.slots and not name.startswith("4B"):
                rest += [draw(trainer, shape, args, name), f"{name}: {swap(trainer, of)}"]
            del trainer
            print("\n".join(rest[-4:]), flush=True)
    print("\n".join(["", *lines, "", *rest]))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", nargs="+", choices=("jax", "torch"), default=["jax", "torch"])
    parser.add_argument("--in-process", choices=("jax", "torch"), help=argparse.SUPPRESS)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=["0.5B", "1.5B"])
    parser.add_argument("--layers-of", nargs="*", choices=LARGE, default=[], help="a few layers of other families' models")
    parser.add_argument("--points", nargs="*", choices=POINTS, default=[], help="whole sequences")
    parser.add_argument("--tokens", type=int, default=16384, help="tokens a step, about")
    parser.add_argument("--row-length", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=4, help="computed at once")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2, help="steps before, which compile")
    parser.add_argument("--attention", default="auto", help="model.attention")
    parser.add_argument("--remat", default="auto", help="trainer.remat")
    parser.add_argument("--compile", action="store_true", help="trainer.compile")
    parser.add_argument("--keep", type=Path, help="writes models here, and reads those that are there")
    parser.add_argument("--top", type=int, default=0, help="shows this many of the longest operations")
    parser.add_argument("--no-profile", dest="profile", action="store_false")
    parser.add_argument("--no-invariance", dest="invariance", action="store_false")
    parser.add_argument("--slots", type=int, default=256, help="of the sampler; 0 for none")
    parser.add_argument("--drawn", type=int, default=256, help="tokens that each slot draws")
    parser.add_argument("--peak", type=float, help="TFLOP/s of the device, where its name does not say it")
    return parser.parse_args()


def prepare(args: argparse.Namespace, name: str, directory: Path) -> tuple[Trainer, Batch, Architecture, float, float]:
    """Returns a trainer of this model, the batch of each step, the model's sizes and the FLOPs of a step, ours and by 6N."""
    rng = np.random.default_rng(0)
    if name in POINTS:
        model, length, rank = POINTS[name]
        rows, lengths = 1, [length]
    else:
        model, length, rank = (MODELS | LARGE)[name], args.row_length, 0
        rows = args.rows
        lengths = [part for _ in range(max(args.tokens // length, 1)) for part in cut(length, rng)]
    config = TrainerConfig(
        model=ModelConfig(str(write_tiled((args.keep or directory) / name, model)), attention=args.attention),
        optimizer=OptimizerConfig(learning_rate=1e-5),
        lora=LoRAConfig(rank=rank),
        micro_batch_rows=rows,
        remat=args.remat,
        compile=args.compile,
    )
    trainer, shape = create_trainer(args.in_process, config), read_architecture(model)
    sequences = [rng.integers(0, shape.vocab, length) for length in lengths]
    batch = in_rows(sequences, length)
    proximal_logp = np.full(batch.shape, -np.log(shape.vocab), np.float32)  # about what a random model gives
    batch = batch.replace(advantages=np.ones(batch.shape, np.float32), proximal_logp=proximal_logp)
    tokens, of_step = sum(lengths), flops_of(shape, np.array(lengths))
    without_attention = 6 * parameters_in_products(shape) * tokens
    if rank:  # the frozen kernels' own gradients are not computed; an adapter's are too few to count
        of_step -= without_attention / 3
    return trainer, batch, shape, of_step, without_attention


def in_rows(sequences: list[np.ndarray], length: int) -> Batch:
    """Full rows of neighbours: packing would leave gaps."""
    ends = np.cumsum([len(sequence) for sequence in sequences])
    rows: list[list[np.ndarray]] = [[] for _ in range(-(-ends[-1] // length))]
    for end, sequence in zip(ends, sequences, strict=True):
        rows[(end - 1) // length].append(sequence)
    each = [packed(row, length) for row in rows]
    batch = each[0].replace(
        **{
            field.name: np.concatenate([getattr(row, field.name) for row in each])
            for field in fields(Batch)
            if getattr(each[0], field.name) is not None
        }
    )
    return batch.replace(weights=np.asarray(token_mean(batch.mask, batch.segment_ids), np.float32))


def write_tiled(directory: Path, config: dict[str, Any]) -> Path:
    """Writes a model whose kernels repeat a million random numbers: four billion would take minutes to draw."""
    if directory.exists():
        return directory
    shape, drawn = read_architecture(config), 0.02 * np.random.default_rng(0).standard_normal(2**20 + 7, np.float32)
    drawn, directory_of_config = drawn.astype(jnp.bfloat16), write_config(directory, config)
    sizes = jax.eval_shape(lambda p: dict(to_arrays(shape, p)), parameter_shapes(shape))
    tensors = {
        name: np.ones(of.shape, drawn.dtype) if name.endswith("norm.weight") else np.resize(drawn, of.shape)
        for name, of in sizes.items()
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory_of_config


def write_config(directory: Path, config: dict[str, Any]) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def cut(length: int, rng: np.random.Generator) -> list[int]:
    """Splits a row's length into one to five sequences of at least eight tokens."""
    cuts = np.sort(rng.choice(np.arange(8, length - 8, 8), int(rng.integers(0, 5)), replace=False))
    return np.diff([0, *cuts, length]).tolist()


def timed(trainer: Trainer, of: JaxDevice | TorchDevice, batch: Batch, args: argparse.Namespace) -> list[float]:
    seconds = []
    for _ in range(args.steps + args.warmup):
        begun = time.perf_counter()
        trainer.update(batch, losses.ppo_clip)
        of.settle(trainer)
        seconds.append(time.perf_counter() - begun)
    return seconds[args.warmup :]


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


def swap(trainer: Trainer, of: JaxDevice | TorchDevice) -> str:
    """The pause of a sampler for new weights, after a first one."""
    sampler, best = trainer.sampler(1, 128), [np.inf, np.inf]
    for _ in range(4):
        begun = time.perf_counter()
        snapshot = trainer.snapshot()
        of.settle(trainer, snapshot)
        copied = time.perf_counter()
        sampler.load(snapshot)
        of.settle(trainer, snapshot)
        best = [min(x) for x in zip(best, (copied - begun, time.perf_counter() - copied), strict=True)]
    return f"new weights take {1e3 * best[0]:.1f} ms for a snapshot and {1e3 * best[1]:.1f} ms to load"


def moved(trainer: Trainer, batch: Batch) -> str:
    """The share of tokens whose probability depends on how they are read."""
    sequences = [batch.tokens[row, at] for row, at in places_of(batch)]
    order = np.random.default_rng(1).permutation(len(sequences))
    again = packed([sequences[i] for i in order], 2 * batch.shape[1])
    read, otherwise = (
        {of.tokens[row, at].tobytes(): logp[row, at] for row, at in places_of(of)}
        for of, logp in ((batch, trainer.logprobs(batch)), (again, trainer.logprobs(again)))
    )
    change = np.abs(np.expm1(np.concatenate([otherwise[tokens] - logp for tokens, logp in read.items()])))
    return (
        f"{np.mean(change > 0.1):.2%} of tokens move by more than a tenth in another packing, the mean by {change.mean():.2%}"
    )


def places_of(batch: Batch) -> list[tuple[int, np.ndarray]]:
    """The row and the columns of each sequence."""
    rows = enumerate(batch.segment_ids)
    return [(row, np.flatnonzero(ids == own)) for row, ids in rows for own in np.unique(ids[ids > 0])]


def longest(operations: list[tuple[str, float]], count: int) -> list[str]:
    """Lines of the operations that take the most time together."""
    sums: dict[str, list[float]] = defaultdict(list)
    for name, microseconds in operations:
        sums[name].append(microseconds)
    most = sorted(sums.items(), key=lambda pair: -sum(pair[1]))[:count]
    return [f"  {sum(x) / 1e3:9.2f} ms {len(x):6} {name[:110]}" for name, x in most]


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
