"""Throughput of our trainers' update on a CPU compared with transformers' and Tunix's, and its share of the machine's peak.

    python -m venv /tmp/tunix && /tmp/tunix/bin/pip install google-tunix==0.1.7
    python benchmarks/update.py --tunix-python /tmp/tunix/bin/python
    python benchmarks/update.py --families mixture latent gpt-oss hybrid hybrid-mixture

Claim: ours, with JAX and with torch, trains on more real tokens per second than either.

The work: supervised steps of a random model of each of `--families` in fp32 (benchmarks/shapes.py; by default a Qwen3 of 26M
parameters: hidden 384, 8 layers, 6 heads of 64 that share 2 key-value heads, intermediate 1,152, vocabulary 32,000, tied), each
with forward and backward pass, clipping of the gradient's norm and AdamW, on the same 16 sequences of long-tailed lengths: 250
tokens on average and at most 1,024, about 4,000 in all. The loss is the mean over all tokens except each sequence's first; all
implementations' losses before the first step are compared.

Ours packs the sequences into rows of 1,024 (`--jax`, `--torch`: rows at once on a device, each value in its own process;
`--devices`: number of devices into which XLA splits the CPU, each in its own process). transformers computes them one by one,
without padding, with the attention that it chooses (SDPA, or eager with sinks), and accumulates gradients. Tunix trains on our
rows with a mask within segments; it has the default family only.

Method: one process each (benchmarks/peers), compiled and warmed up, then alternating, `--rounds` times `--steps` steps; while
one works the others are stopped. A value is the mean of a round's steps; the table shows median, minimum and maximum of the
rounds, and the least processor seconds of all threads, which other work on the machine changes less (with OMP_NUM_THREADS=1 no
thread of torch spins). The machine's peak is the fastest of several products of two fp32 matrices by JAX, also alternating.
FLOPs are counted as benchmarks/shapes.py does.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from peers import wire
from peers.wire import Worker
from safetensors.numpy import save_file
from shapes import DENSE as CONFIG
from shapes import SMALL, flops_of, parameters_of

from areal_x.algorithms.weighting import token_mean
from areal_x.batching.packing import pack
from areal_x.types import Batch, Trajectory
from areal_x_jax.architecture import read_architecture
from areal_x_jax.parameters import parameter_shapes
from areal_x_jax.weights import to_tensors

PEERS = Path(__file__).parent / "peers"
ROW_LENGTH = 1024


def write_random(directory: Path, config: dict[str, Any], seed: int = 0) -> Path:
    """Writes the Hugging Face directory of a random model of this config, without a tokenizer."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    shape, rng = read_architecture(config), np.random.default_rng(seed)
    sizes_of = parameter_shapes(shape)
    params = jax.tree.map(lambda x: 0.02 * rng.standard_normal(x.shape, np.float32), sizes_of)
    named = {
        name: np.ones_like(x) if name.endswith(("norm.weight", "layer_scalar")) else x for name, x in to_tensors(shape, params)
    }
    save_file(named, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def packed(sequences: list[np.ndarray], row_length: int = ROW_LENGTH) -> Batch:
    """A batch whose loss is the mean over all tokens except each sequence's first."""
    made = []
    for sequence in sequences:
        tokens, zeros = np.asarray(sequence, np.int32), np.zeros(len(sequence) - 1)
        made.append(Trajectory.from_completion(tokens[:1], tokens[1:], zeros, zeros, 0.0))
    batch = pack(made, row_length).batch
    return batch.replace(weights=np.asarray(token_mean(batch.mask, batch.segment_ids), np.float32))


def draw_sequences(vocabulary: int, count: int, mean: int) -> list[list[int]]:
    """Random tokens. The lengths are the quantiles of a log-normal distribution (σ = 1), scaled to this mean."""
    normal, rng = statistics.NormalDist(), np.random.default_rng(0)
    lengths = np.exp([normal.inv_cdf((i + 0.5) / count) for i in range(count)])
    lengths = np.minimum(np.round(lengths * mean / lengths.mean()), ROW_LENGTH).astype(int)
    return [rng.integers(0, vocabulary, length).tolist() for length in rng.permutation(lengths)]


def peak_flops(size: int = 3072, tries: int = 5, dtype: Any = jnp.float32) -> float:
    """FLOPs per second of the fastest product of two matrices."""
    x = jnp.ones((size, size), dtype)
    product = jax.jit(jnp.matmul)
    jax.block_until_ready(product(x, x))
    least = np.inf
    for _ in range(tries):
        begun = time.perf_counter()
        jax.block_until_ready(product(x, x))
        least = min(least, time.perf_counter() - begun)
    return 2 * size**3 / least


def main() -> None:
    args = parse_arguments()
    for family in args.families:
        measure(args, family)


def measure(args: argparse.Namespace, family: str) -> None:
    """Prints the table of one family."""
    config = SMALL[family] | {"num_hidden_layers": args.layers, "vocab_size": args.vocabulary}
    shape = read_architecture(config)
    print(f"\n{family}: {config['model_type']}, {parameters_of(shape) / 1e6:.0f}M parameters")
    sequences = draw_sequences(args.vocabulary, args.sequences, args.mean_length)
    lengths = np.array([len(tokens) for tokens in sequences])
    print(f"{len(lengths)} sequences of {lengths.min()} to {lengths.max()} tokens, {lengths.sum():,} in all", file=sys.stderr)
    with tempfile.TemporaryDirectory() as directory, ExitStack() as running:
        workers = start(args, config, Path(directory), sequences, running)
        first = {worker.name: worker.ask(steps=1)["loss"] for worker in workers}
        print(f"losses before the first step: {first}", file=sys.stderr)
        np.testing.assert_allclose(list(first.values()), next(iter(first.values())), rtol=1e-4)
        for worker in workers:
            worker.ask(steps=args.warmup)
        rounds: dict[str, list[dict[str, Any]]] = {worker.name: [] for worker in workers}
        peak = 0.0
        for number in range(args.rounds):
            for worker in workers:
                rounds[worker.name].append(worker.ask(steps=args.steps))
            peak = max(peak, peak_flops())
            took = ", ".join(f"{name} {statistics.fmean(answers[-1]['seconds']):.2f} s" for name, answers in rounds.items())
            print(f"round {number + 1} of {args.rounds}: {took}", file=sys.stderr)
    show(rounds, int(lengths.sum()), flops_of(shape, lengths), peak)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=SMALL, default=["dense"])
    parser.add_argument("--no-peers", dest="peers", action="store_false", help="measures ours alone")
    parser.add_argument("--tunix-python", help="the python of an environment with Tunix; without it Tunix is left out")
    parser.add_argument("--jax", type=int, nargs="*", default=[1], metavar="ROWS", help="micro_batch_rows of ours with JAX")
    parser.add_argument("--torch", type=int, nargs="*", default=[1], metavar="ROWS", help="micro_batch_rows of ours with torch")
    parser.add_argument("--devices", type=int, nargs="*", default=[1, 2], help="into how many devices ours divides the CPU")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="steps a round")
    parser.add_argument("--warmup", type=int, default=2, help="steps before the first round")
    parser.add_argument("--layers", type=int, default=CONFIG["num_hidden_layers"])
    parser.add_argument("--vocabulary", type=int, default=CONFIG["vocab_size"])
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--mean-length", type=int, default=250)
    return parser.parse_args()


def start(
    args: argparse.Namespace, config: dict[str, Any], directory: Path, sequences: list[list[int]], running: ExitStack
) -> list[Worker]:
    """Starts the selected workers."""
    model = str(write_random(directory / "model", config))
    data = directory / "sequences.json"
    data.write_text(json.dumps(sequences))
    rows = directory / "rows.npz"
    batch = packed([np.asarray(tokens) for tokens in sequences])
    np.savez(rows, tokens=batch.tokens, segment_ids=batch.segment_ids, positions=batch.positions, mask=batch.mask)
    ours = [("jax", rows, devices) for devices in args.devices for rows in args.jax] + [
        ("torch", rows, 1) for rows in args.torch
    ]
    commands = {
        f"ours with {backend}, {rows} at once on {devices} device(s)": [
            *(sys.executable, str(PEERS / "areal_x_sft.py"), model, str(data), backend, str(rows), str(devices))
        ]
        for backend, rows, devices in ours
    }
    if args.peers:
        commands["transformers"] = [sys.executable, str(PEERS / "hf_sft.py"), model, str(data)]
    if args.tunix_python and config["model_type"] == "qwen3":
        commands["tunix"] = [args.tunix_python, str(PEERS / "tunix_sft.py"), model, str(rows)]
    return wire.start(commands, directory, running)


def show(rounds: dict[str, list[dict[str, Any]]], tokens: int, flops: float, peak: float) -> None:
    clocks = "s a step | least | largest | real tokens/s | share of the peak | processor s, least"
    print(f"| {tokens:,} tokens, {flops / 1e9:,.0f} GFLOP | {clocks} |")
    print("|---|---|---|---|---|---|---|")
    for name, answers in rounds.items():
        means = [statistics.fmean(answer["seconds"]) for answer in answers]
        median = statistics.median(means)
        figures = f"{median:.3f} | {min(means):.3f} | {max(means):.3f} | {tokens / median:,.0f} | {flops / median / peak:.0%}"
        least = min(statistics.fmean(answer["processor"]) for answer in answers)
        print(f"| {name} | {figures} | {least:.2f} |")
    print(f"\nThe machine's peak: {peak / 1e9:,.0f} GFLOP/s")
    for name, answers in rounds.items():
        print(f"{name}: " + ", ".join(f"{package} {version}" for package, version in answers[0]["versions"].items()))


if __name__ == "__main__":
    main()
